"""How far the kernels' logits are from an unrounded float64 run, in units of the reference's own distance.

    python benchmark/distance_check.py --problems 50 --json distance.json     # on a GPU
    python benchmark/distance_check.py --machine emulator --problems 1

Both read bundled problems with their answers, in steps of eight rows. A ratio near 1 says that the kernels round like
the reference; rows that a near tie routes elsewhere are far off on either side, so the quartiles are what counts.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_target_config
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.backend import KernelBackend, to_device
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.speculative.backend import Backend

ROWS = 8


def logits_of(backend: Backend, ids: list[int]) -> Tensor:
    """Logits of all rows but the first, float64 [len(ids) - 1, V] on the CPU."""
    backend.prefill(ids[:1])
    parts = []
    for start in range(1, len(ids), ROWS):
        rows = ids[start : start + ROWS]
        parts.append(backend.verify(rows).double().cpu())
        backend.commit(len(rows))
    return torch.cat(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--bound", type=float, default=1.3, help="of the median ratio; decided before the first run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine: Machine = CudaMachine() if arguments.machine == "cuda" else Emulator(sms=4)
    config = load_target_config(tiny.target_directory())
    weights = load_target(tiny.target_directory(), config)
    kernels = KernelBackend(config, weights, machine=machine, max_context=512, kv_dtype=arguments.kv)
    local = to_device(weights, machine.device)
    reference = ReferenceBackend(config, local, max_context=512, kv_dtype=arguments.kv)
    exact = ReferenceBackend(config, local, max_context=512, numerics=Numerics(exact=True))
    text = Text(tiny.target_directory())
    ratios, ours, theirs = [], [], []
    for problem in read_problems(tiny.problems_path(), arguments.problems):
        answer = json.loads(tiny.problems_path().read_text(encoding="utf-8").splitlines()[problem.line - 1])["answer"]
        ids = [*text.encode(problem.question, raw=False), *text.encode(" " + answer, raw=True)]
        truth = logits_of(exact, ids)
        scale = truth.norm(dim=1)
        distances = [(logits_of(backend, ids) - truth).norm(dim=1) / scale for backend in (kernels, reference)]
        ours.append(distances[0])
        theirs.append(distances[1])
        ratios.append(distances[0] / distances[1])
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    summary = {
        name: torch.cat(values).quantile(quarters).tolist()
        for name, values in (("ratio", ratios), ("kernels", ours), ("reference", theirs))
    }
    for name, values in summary.items():
        print(f"{name:10s} quartiles {values[0]:.4g} {values[1]:.4g} {values[2]:.4g}")
    rows = sum(map(len, ratios))
    print(f"{arguments.problems} problems, {rows} rows of logits, {arguments.kv} cache")
    if arguments.json:
        content = {"problems": arguments.problems, "rows": rows, "kv": arguments.kv, "quartiles": summary}
        arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return int(summary["ratio"][1] > arguments.bound)


if __name__ == "__main__":
    sys.exit(main())
