// Kernel entry points of the control: the phases of a layer in the order of sgl_muse_mega.megakernel.separate.
#include "layer/separate.cuh"

using protocol::Counter;

KERNEL(attention_kernel, Params, cfg::THREADS) {
    separate::run(separate::nothing, separate::nothing, [&] { attention::run(p); },
                  [&] { boundary::prefetch_layer_vectors(p); });
}
KERNEL(gate_kernel, Params, cfg::THREADS) {
    separate::run([&] { output_gate::run(p, separate::NO_EPOCH); });
}
KERNEL(o_proj_kernel, Params, cfg::THREADS) {
    separate::product<OProj>(p, p.o_proj, p.gated, p.o_partial, Counter::O_PROJ);
}
KERNEL(after_attention_kernel, Params, cfg::THREADS) { separate::after_attention(p); }
KERNEL(router_kernel, Params, cfg::THREADS) { separate::router_and_pre(p); }
KERNEL(routed_kernel, Params, cfg::THREADS) {
    separate::run(separate::nothing, separate::nothing, [&] { routing::run(p, separate::NO_EPOCH); },
                  [&] { routing::route_rows(p, separate::NO_EPOCH); });
}
KERNEL(gate_up_kernel, Params, cfg::THREADS) { separate::gate_up(p); }
KERNEL(down_kernel, Params, cfg::THREADS) { separate::down(p); }
KERNEL(combine_kernel, Params, cfg::THREADS) { separate::combined(p); }
KERNEL(post_proj_kernel, Params, cfg::THREADS) {
    separate::product<PostProj>(p, p.post_expert_proj, p.combined, p.post_partial, Counter::POST_PROJ);
}
KERNEL(after_experts_kernel, Params, cfg::THREADS) { separate::after_experts(p); }
KERNEL(qkv_proj_kernel, Params, cfg::THREADS) {
    separate::product<QkvProj>(p, p.next_qkv, p.next_input, p.qkv_partial, Counter::QKV_PROJ);
}
KERNEL(heads_kernel, Params, cfg::THREADS) {
    separate::run([&] { qkv::run(p, separate::NO_EPOCH); });
}
