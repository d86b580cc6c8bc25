"""When the warps of one launch pass the points of their program: median and last CTA, in microseconds from the start.

python benchmark/trace_layer.py --rows 8 --layer 2
"""

import argparse
import sys

import torch

from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, spark_config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv", default="fp8")
    arguments = parser.parse_args()
    machine = CudaMachine()
    config = spark_config(arguments.layers)
    weights = random_weights(config, 1, machine.device, first_expert=64, local_experts=64)
    case = RandomStep.create(
        config, weights, machine, row_cap=8 if arguments.rows <= 8 else 16, max_context=arguments.context,
        kv_dtype=arguments.kv, trace=True,
    )  # fmt: skip
    case.fill(arguments.context, 1)
    step = case.step
    for _ in range(3):  # the last launch that writes the trace is the last layer's; it has no next layer
        step.launch_embed(arguments.rows)
        for index in range(arguments.layers - 1):
            step.launch_layer(index, arguments.rows)
        machine.synchronize()
    trace = step.trace.cpu()
    warps = step.instance.math_warps
    start = trace[:, warps, 0].min()
    for name, warp in (("math", 0), ("weights", warps), ("tokens", warps + 1)):
        print(name)
        for point, label in enumerate(protocol.POINTS):
            times = (trace[:, warp, point] - start).double()
            times = times[trace[:, warp, point] > 0] / 1e3
            if len(times):
                print(f"  {label:16s} first {times.min():7.1f} median {times.median():7.1f} last {times.max():7.1f}")
    return 0


if __name__ == "__main__":
    assert torch.cuda.is_available()
    sys.exit(main())
