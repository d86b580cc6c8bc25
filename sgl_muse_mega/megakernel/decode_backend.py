"""A pair of models as whole decode steps: what `speculative.generate` runs with `--backend cuda`."""

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.draft_share import share_draft
from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.backend import to_device
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.decode_step import DecodeStep
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.draft_weights import KernelDraft, prepare_draft
from sgl_muse_mega.megakernel.instance import Instance, row_cap_of
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.step import CACHE_DTYPES, Step
from sgl_muse_mega.megakernel.weights import KernelWeights, prepare


def decode_backend(
    target_config: TargetConfig,
    target_weights: TargetWeights,
    draft_config: DraftConfig | None = None,
    draft_weights: DraftWeights | None = None,
    *,
    machine: Machine,
    width: int,
    max_context: int | None = None,
    kv_dtype: str = "bf16",
    place: Place | None = None,
    progress: Progress = quiet,
) -> DecodeLoop:
    """A backend for steps of up to `width` rows; moves the weights to the machine.

    place: this rank's among several. Its target weights are then its share (`checkpoint.target`), the draft's are
    whole, and all ranks make the same calls with the same arguments.
    Raises UserError when the models do not fit each other or the kernels.
    """
    limit = target_config.max_position_embeddings
    target_weights = to_device(target_weights, machine.device)
    kernel_draft = None
    if draft_config is not None and draft_weights is not None:
        check_pair(target_config, draft_config)
        mask = None
        if place:
            draft_weights = share_draft(draft_config, draft_weights, rank=place.rank, ranks=place.ranks)
            mask = place.vocabulary_row(target_weights.embed_tokens, draft_config.mask_token_id)
        moved = to_device(draft_weights, machine.device)
        kernel_draft = prepare_draft(draft_config, moved, target_weights.embed_tokens, target_weights.lm_head, mask)
    return assemble(
        target_config,
        prepare(target_config, target_weights),
        draft_config,
        kernel_draft,
        machine=machine,
        width=width,
        max_context=limit if max_context is None else min(max_context, limit),
        kv_dtype=kv_dtype,
        place=place,
        progress=progress,
    )


def assemble(
    target_config: TargetConfig,
    weights: KernelWeights,
    draft_config: DraftConfig | None,
    draft_weights: KernelDraft | None,
    *,
    machine: Machine,
    width: int,
    max_context: int,
    kv_dtype: str,
    place: Place | None = None,
    progress: Progress = quiet,
) -> DecodeLoop:
    """The same from weights in kernel order, the rank's share. Position i lives in slot i + 1 of every cache."""
    device = machine.device
    row_cap = row_cap_of(width)
    mail = place.mail if place else None
    taps = tuple(draft_config.target_layer_ids) if draft_config else ()
    step = Step(
        target_config, weights, machine, row_cap=row_cap, max_context=max_context, kv_dtype=kv_dtype, taps=taps,
        mail=mail, progress=progress,
    )  # fmt: skip
    pages = torch.arange(1, len(step.inputs.full_pages) + 1, dtype=torch.int32)
    step.inputs.full_pages.copy_(pages)
    step.inputs.sliding_pages.copy_(pages)

    def caches(layers: int, instance: Instance | DraftInstance, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        shape = (len(pages) + 1, instance.kv_heads, instance.head_dim)
        each = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * layers)]
        return list(zip(each[::2], each[1::2], strict=True))

    target_caches = caches(len(weights.layers), step.instance, CACHE_DTYPES[kv_dtype])
    step.use_caches(target_caches)
    state = DecodeState.allocate(row_cap, device)
    draft = None
    if draft_config is not None and draft_weights is not None:
        draft = DraftStep(
            draft_config, draft_weights, machine, step.inputs, step.taps, state,
            target=TargetEnds.of(target_config), mail=mail, progress=progress,
        )  # fmt: skip
        draft.use_caches(caches(len(draft_weights.layers), draft.instance, torch.bfloat16))
        draft.pages.copy_(pages)
    accept = AcceptStep(
        machine, step.inputs, step.activations.logits, step.activations.greedy_ids, state,
        draft.activations if draft else None, softcap=target_config.final_logit_softcapping, progress=progress,
        mail=mail, greedy_logits=step.activations.greedy_logits,
    )  # fmt: skip
    accept.use_caches(target_caches, [target_config.is_full(index) for index in range(len(weights.layers))])
    return DecodeLoop(DecodeStep(step, draft, accept, state), target_caches, max_context, place)
