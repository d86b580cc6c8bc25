"""Makes a kernel wait for arrivals that cannot come, and prints the sentence the host makes of the record.

Run by test_layer_kernel.py in a process of its own: a trap ends the CUDA context.
"""

import sys

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config


def main() -> int:
    machine = CudaMachine(deadline_seconds=0.2)
    config = tiny_config()
    case = RandomStep.create(
        config, random_weights(config, 1, machine.device), machine, row_cap=8, max_context=64, kv_dtype="bf16"
    )
    case.fill(20, 1)
    index = [c.name for c in protocol.COUNTERS].index("O_PROJ")
    control = case.step.variants[True].control["layer"]
    control.counters[index * protocol.COUNTER_STRIDE] = -1000
    case.step.launch(3)
    try:
        machine.synchronize()
    except UserError as error:
        print(error)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
