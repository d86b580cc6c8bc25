// Kernel entry points of the control: the phases of a layer in the order of sgl_muse_mega.megakernel.separate.
#include "layer/separate.cuh"

KERNEL(attention_kernel, Params, cfg::THREADS) { separate::attention_splits(p); }
KERNEL(gate_kernel, Params, cfg::THREADS) {
    separate::run(p, [&](uint32_t) { output_gate::run(p, attention::Rows(p)); });
}
KERNEL(o_proj_kernel, Params, cfg::THREADS) { separate::o_proj(p); }
KERNEL(after_attention_kernel, Params, cfg::THREADS) { separate::after_attention(p); }
KERNEL(router_kernel, Params, cfg::THREADS) { separate::router_and_pre(p); }
KERNEL(routed_kernel, Params, cfg::THREADS) { separate::routed(p); }
KERNEL(gate_up_kernel, Params, cfg::THREADS) { separate::expert_product(p, experts::GATE_UP); }
KERNEL(down_kernel, Params, cfg::THREADS) { separate::expert_product(p, experts::DOWN); }
KERNEL(combine_kernel, Params, cfg::THREADS) { separate::combined(p); }
KERNEL(post_proj_kernel, Params, cfg::THREADS) { separate::post_proj(p); }
KERNEL(after_experts_kernel, Params, cfg::THREADS) { separate::after_experts(p); }
KERNEL(qkv_proj_kernel, Params, cfg::THREADS) { separate::qkv_proj(p); }
KERNEL(heads_kernel, Params, cfg::THREADS) {
    separate::run(p, [&](uint32_t epoch) { qkv::run(p, epoch); });
}
