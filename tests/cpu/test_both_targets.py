"""All kernels at the sizes of one rank of four, compiled for both GPUs from the same sources and held to the gates of
`megakernel.inspection`. For sm_103a this is all that is ever done here: compiled and inspected, never run.

The tiny pair's kernels go through the same gates in tests/run.sh, by `sgl-muse-mega build`.
"""

import pytest

from sgl_muse_mega.commands.bench_step import spark_draft
from sgl_muse_mega.commands.build import instances
from sgl_muse_mega.megakernel.build import ARCHITECTURES, build
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.inspection import code_faults, disassemble, resource_faults
from sgl_muse_mega.megakernel.random_step import spark_config

RANKS, HEADS, VOCAB = 4, 128, 202048
SMS = {"sm_90a": 132, "sm_103a": 148}


def rank_of_four(sms: int) -> dict[str, Compiled]:
    """NVFP4 and BF16 experts, both row capacities, draft and accept rule; fp8 caches (the tiny pair's are bf16)."""
    found: dict[str, Compiled] = {}
    for nvfp4 in (True, False):
        target = spark_config(7, nvfp4=nvfp4, heads=HEADS, vocab_size=VOCAB)
        found |= instances(target, spark_draft(target), sms=sms, ranks=RANKS, kv_dtypes=("fp8",))
    return found


INSTANCES = {
    f"{target} {name}": (target, instance)
    for target in ARCHITECTURES
    for name, instance in rank_of_four(SMS[target]).items()
}


@pytest.mark.parametrize("name", INSTANCES)
def test_compiles_and_passes_the_gates(name: str) -> None:
    target, instance = INSTANCES[name]
    artifact = build(instance, target)
    assert resource_faults(instance, artifact.resources()) == []
    assert code_faults(instance, disassemble(artifact.path), target) == []
