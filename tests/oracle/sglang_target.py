"""SGLang's Muse Spark on a CPU, run by SGLang's own model runner, and the intermediate results of its layers."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import TARGET
from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from torch import Tensor, nn

Q_FACTOR = 1.0
"""SGLang folds the scale of q into the softmax (D-5)."""

ARGUMENTS = {
    "device": "cpu",
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "enable_multimodal": False,
    "skip_tokenizer_init": True,
    "max_total_tokens": 2048,
    "max_running_requests": 2,
    "context_length": 1024,
    "mem_fraction_static": 0.3,
}


def load(directory: Path) -> Any:
    """The model runner, with weights read by SGLang's loader. Once per process: it owns the process's groups."""
    arguments = ServerArgs(model_path=str(directory), **ARGUMENTS)
    arguments.resolve_once()
    rank = one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    one_batch.publish(arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    tokenizer, one_batch.get_tokenizer = one_batch.get_tokenizer, lambda *_args, **_kwargs: None
    try:
        runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    finally:
        one_batch.get_tokenizer = tokenizer
    return runner.torch_runner


@dataclass
class Run:
    logits: Tensor  # [1 + decoded, V]: of the last prompt row and of every decoded token
    streams: list[Tensor]  # prompt rows entering layer 0 and leaving every layer, [T, H] each
    stages: list[dict[str, Tensor]]  # of the prompt rows, per layer
    hidden: Tensor  # [T, H]: prompt rows after the final norm


def run(runner: Any, ids: Tensor, decode: Tensor | None = None) -> Run:
    """Prefill of ids int64 [T], every stage recorded, then one decode step per id of `decode` int64 [n]."""
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    new_tokens = 0 if decode is None else len(decode)
    request = Req(
        rid=0,
        origin_input_text="",
        origin_input_ids=array("q", ids.tolist()),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=new_tokens + 1),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.extend_end = len(ids)
    model = runner.model.model.language_model
    stages: list[dict[str, Tensor]] = [{} for _ in model.layers]
    hidden: list[Tensor] = []
    with _hooks(model, stages, hidden):
        _, logits, batch = one_batch.extend([request], runner)
    rows = [logits]
    for token in decode if decode is not None else ():
        _, logits = one_batch.decode(token[None], batch, runner)
        rows.append(logits)
    for record in stages:
        for name in ("F10", "F11"):
            record[name] = torch.cat(record.pop(name + ".parts"))  # type: ignore[arg-type]
        slots = torch.cat([(record["F4"] == e).nonzero() for e in range(TARGET.num_local_experts)])
        record["F10.token"], record["F10.expert"] = slots[:, 0], record["F4"][slots[:, 0], slots[:, 1]]
    return Run(torch.cat(rows), [stages[0]["stream"], *(record["F16"] for record in stages)], stages, hidden[0])


@contextmanager
def _hooks(model: Any, stages: list[dict[str, Tensor]], hidden: list[Tensor]) -> Iterator[None]:
    handles = [h for layer, record in zip(model.layers, stages, strict=True) for h in _watch(layer, record)]
    handles.append(model.norm.register_forward_hook(lambda _m, _args, out: hidden.append(out)))
    first = stages[0]
    handles.append(model.layers[0].input_layernorm.register_forward_hook(lambda _m, _args, out: first.update(A1=out)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(layer: Any, record: dict[str, Tensor]) -> list[Any]:
    attention, moe = layer.self_attn, layer.mlp
    sizes = [attention.q_size, attention.kv_size, attention.kv_size, attention.q_size]

    def keep(name: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            record[name] = out[0] if isinstance(out, tuple) else out

        return module.register_forward_hook(hook)

    def entering(_module: nn.Module, args: tuple[Any, ...]) -> None:
        record["stream"], record["A1"] = args[1], args[2].to(torch.bfloat16)

    def projections(_module: nn.Module, _args: Any, out: tuple[Tensor, Any]) -> None:
        q, k, record["A2.v"], record["A2.gate"] = out[0].split(sizes, dim=-1)
        record["A2.q"], record["A2.k"] = (_rotate_half_order(x).flatten(1) for x in (q, k))

    def attended(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        record["A4.q"], record["A4.k"] = (_rotate_half_order(x.flatten(1)) for x in args[:2])
        record["A6"] = out.unflatten(-1, (-1, TARGET.head_dim))

    def attention_boundary(_module: nn.Module, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        record["F1"], record["A10"], _ = out

    def routed(_module: nn.Module, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        record["F5"], record["F4"] = out[0], out[1].long()

    def expert(_module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        for name, value in (("F10.parts", args[0]), ("F11.parts", out)):
            record.setdefault(name, []).append(value)  # type: ignore[arg-type, attr-defined]

    def leaving(_module: nn.Module, _args: Any, out: tuple[Tensor, Tensor]) -> None:
        record["F16"] = out[0]

    return [
        layer.register_forward_pre_hook(entering),
        attention.qkv_proj.register_forward_hook(projections),
        attention.attn.register_forward_hook(attended),
        keep("A7", attention._fused_o_norm_gate),
        keep("A8", attention.o_proj),
        keep("A9", layer.post_attn_norm),
        layer._fused_attn_boundary.register_forward_hook(attention_boundary),
        keep("F2", moe.gate),
        moe._routing_op().register_forward_hook(routed),
        keep("F6", moe.pre_expert_proj),
        keep("F7", moe.pre_expert_norm),
        moe.experts.post_expert_norm.register_forward_hook(expert),
        keep("F12", moe.experts),
        keep("F14", moe.post_expert_proj),
        keep("F15", layer.post_feedforward_layernorm),
        layer.register_forward_hook(leaving),
    ]


def _rotate_half_order(x: Tensor) -> Tensor:
    """[T, heads * d] with pairs side by side, as SGLang permutes q and k at load -> [T, heads, d] with halves."""
    pairs = x.reshape(len(x), -1, TARGET.head_dim // 2, 2)
    return pairs.transpose(-1, -2).flatten(-2)
