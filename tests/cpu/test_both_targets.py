"""All kernels of the tiny pair and of one rank of four, compiled for both GPUs from the same sources and held to the
gates of `megakernel.inspection`. For sm_103a this is all that is ever done here: compiled and inspected, never run.
"""

import pytest

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.commands.bench_step import spark_draft
from sgl_muse_mega.commands.build import instances
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.megakernel.build import ARCHITECTURES, build
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.inspection import code_faults, disassemble, resource_faults
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.random_step import spark_config

RANKS, HEADS, VOCAB = 4, 128, 202048
SMS = {"sm_90a": 132, "sm_103a": 148}


def tiny_pair(sms: int) -> dict[str, Compiled]:
    """Both kinds of experts and both row capacities, bf16 caches."""
    target, draft = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    return instances(target, draft, sms=sms, ranks=1, kv_dtypes=("bf16",))


def rank_of_four(sms: int) -> dict[str, Compiled]:
    """The same at Muse Spark's sizes with the expected draft, fp8 caches."""
    found: dict[str, Compiled] = {}
    for nvfp4 in (True, False):
        target = spark_config(7, nvfp4=nvfp4, heads=HEADS, vocab_size=VOCAB)
        found |= instances(target, spark_draft(target), sms=sms, ranks=RANKS, kv_dtypes=("fp8",))
    return found


def other_ranks(sms: int) -> dict[str, Compiled]:
    """The layer kernel at Muse Spark's sizes for one rank, two and eight: sums and packets take other registers."""
    target = spark_config(7, nvfp4=True, heads=HEADS, vocab_size=VOCAB)
    return {
        f"{ranks} ranks {name}": instance
        for ranks in (1, 2, 8)
        for name, instance in instances(target, spark_draft(target), sms=sms, ranks=ranks, kv_dtypes=("fp8",)).items()
        if isinstance(instance, Instance)
    }


INSTANCES = {
    f"{target} {size} {name}": (target, instance)
    for target in ARCHITECTURES
    for size, made in (("tiny", tiny_pair), ("full", rank_of_four))
    for name, instance in made(SMS[target]).items()
} | {f"sm_90a full {name}": ("sm_90a", instance) for name, instance in other_ranks(SMS["sm_90a"]).items()}


@pytest.mark.parametrize("name", INSTANCES)
def test_compiles_and_passes_the_gates(name: str) -> None:
    target, instance = INSTANCES[name]
    artifact = build(instance, target)
    faults = resource_faults(instance, artifact.resources())
    faults += code_faults(instance, disassemble(artifact.path), target)
    assert faults == []
