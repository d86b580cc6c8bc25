"""What the kernels take of a GPU beyond SGLang's weights, at full size: counted on tensors without memory."""

from dataclasses import fields

import pytest
import torch

from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.peers import ARENA_BYTES
from sgl_muse_mega.megakernel.random_step import spark_config
from sgl_muse_mega.megakernel.scratch import Activations, StepInputs
from sgl_muse_mega.megakernel.weights import rope_table

META, GIB = torch.device("meta"), 2**30


def held(part: object) -> int:
    tensors = [getattr(part, field.name) for field in fields(part)]  # type: ignore[arg-type]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize(("context", "limit"), [(65536, 0.15), (1 << 20, 0.5)])
def test_the_target_takes_little(ranks: int, context: int, limit: float) -> None:
    """Inputs, activations of 16 rows, rotations, mailboxes of layers with NVFP4 and with BF16 experts."""
    config, positions = spark_config(62, heads=128, vocab_size=202048), context + 3 * 16
    instances = [
        Instance.for_config(config, nvfp4=nvfp4, fp8_cache=True, row_cap=16, sms=132, ranks=ranks)
        for nvfp4 in (True, False)
    ]
    mailboxes = sum(2 * ranks * instance.mail_bytes for instance in instances)
    assert mailboxes <= ARENA_BYTES
    parts = (StepInputs.allocate(16, positions, META), Activations.allocate(instances[0], META))
    rotations = rope_table(5e5, positions, config.head_dim, META).nbytes
    assert sum(map(held, parts)) + rotations + (ARENA_BYTES if ranks > 1 else 0) < limit * GIB
