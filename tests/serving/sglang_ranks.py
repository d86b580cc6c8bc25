"""Two ranks of SGLang load a target and a draft on a CPU; each says how its tensors differ from the kernels' shares.

    sglang_ranks.py CHECKPOINT

A program of its own, because a process of SGLang is one rank. Prints a JSON object per rank.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import socket
import sys
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

RANKS = 2


def load(rank: int, checkpoint: str, port: int) -> Any:
    """SGLang's model runner as rank `rank`."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs
    from sglang_target import ARGUMENTS

    arguments = ServerArgs(model_path=checkpoint, tp_size=RANKS, ep_size=RANKS, **ARGUMENTS)
    arguments.resolve_once()
    world_rank = one_batch.spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
    one_batch.publish(arguments, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=world_rank, gpu_id=rank))
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_args, **_kwargs: None
    ports = PortArgs.init_new(arguments)
    ports.nccl_port = port
    runner, _ = one_batch.load_model(arguments, ports, rank, rank)
    return runner.torch_runner


def differences(ours: Any, expected: Any) -> list[str]:
    """Names of fields that are not the same."""
    import torch

    found = []
    for name in (field.name for field in fields(expected)):
        mine, wanted = getattr(ours, name), getattr(expected, name)
        if isinstance(wanted, torch.Tensor):
            gate = name.endswith(("alpha", "beta"))  # SGLang keeps the stored gate in bf16
            same = torch.allclose(mine, wanted, atol=5e-3, rtol=5e-3) if gate else torch.equal(mine, wanted)
        elif is_dataclass(wanted):
            same = not differences(mine, wanted)
        else:
            same = name == "layers" or mine == wanted
        found += [] if same else [name]
    return found


def draft_differences(target: Any, rank: int) -> list[str]:
    """The same of a random draft, which SGLang's own module loads as this rank."""
    import models
    import sglang_draft

    from sgl_muse_mega.checkpoint.draft import save_draft
    from sgl_muse_mega.checkpoint.draft_share import share_draft
    from sgl_muse_mega.serving.draft import draft_weights

    whole = models.draft_weights(3)
    with tempfile.TemporaryDirectory() as folder:
        save_draft(Path(folder) / "draft", models.DRAFT, whole)
        made = draft_weights(sglang_draft.load(Path(folder) / "draft", target), rank, RANKS)
    expected = share_draft(models.DRAFT, whole, rank=rank, ranks=RANKS)
    found = [name for name in differences(made, expected) if name != "mask_embedding"]
    for ours, theirs in zip(made.layers, expected.layers, strict=True):
        found += differences(ours, theirs)
    return found


def work(rank: int, checkpoint: str, port: int, answers: Any) -> None:
    runner = load(rank, checkpoint, port)
    from sglang.srt.runtime_context import get_parallel

    from sgl_muse_mega.checkpoint.target import load_target
    from sgl_muse_mega.config import load_target_config
    from sgl_muse_mega.megakernel.weights import prepare
    from sgl_muse_mega.serving import ranks
    from sgl_muse_mega.serving.model_config import target_config
    from sgl_muse_mega.serving.weights import kernel_weights, weight_problems

    config, place = target_config(runner.model_config.hf_config), ranks.place()
    made = kernel_weights(runner.model, config, *place)
    stored = load_target_config(Path(checkpoint))
    expected = prepare(stored, load_target(Path(checkpoint), stored, rank=rank, ranks=RANKS))
    different = differences(made, expected)
    for ours, theirs in zip(made.layers, expected.layers, strict=True):
        different += differences(ours, theirs)
    different += draft_differences(runner.model, rank)
    group = ranks.ServerGroup(*place, get_parallel().tp_group.cpu_group)
    gathered = [text.decode() for text in group.gather(f"rank {rank}".encode())]
    problems = weight_problems(config, made, RANKS)
    answers.put({"place": place, "problems": problems, "different": different, "gathered": gathered})


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    processes = [spawn.Process(target=work, args=(rank, sys.argv[1], port, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        said = 0
        while said < RANKS and not any(process.exitcode for process in processes):
            with contextlib.suppress(queue.Empty):
                print(json.dumps(answers.get(timeout=1)), flush=True)
                said += 1
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
