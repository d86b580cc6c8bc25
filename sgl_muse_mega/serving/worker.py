"""The whole step in place of SGLang's under DFLASH: wrapped methods of its worker, in the rank's process only."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftWeights
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.decode_step import DecodeStep
from sgl_muse_mega.megakernel.draft_instance import TargetEnds
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.draft_weights import prepare_draft
from sgl_muse_mega.megakernel.mailbox import NoMail
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.serving import hooks, switches
from sgl_muse_mega.serving.draft import draft_weights
from sgl_muse_mega.serving.full_step import FullStep, Timer
from sgl_muse_mega.serving.model_config import draft_config
from sgl_muse_mega.serving.target import TargetMegakernel
from sgl_muse_mega.speculative.philox import SEED_LIMIT
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams
from sgl_muse_mega.speculative.width import default_cost, interpolated, read_cost_table

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


def install(built: TargetMegakernel) -> None:
    """Wraps the worker's class before SGLang makes its worker; the step is built once SGLang's own graphs are."""
    steps: list[FullStep] = []
    used = [SamplingParams()]

    def graphs(original: Any, worker: Any) -> None:
        original(worker)
        before = torch.cuda.memory_allocated()
        problem = None
        try:
            steps.append(build_step(built, worker))
        except UserError as error:  # the server is half up and serves without: the target's forward is in the kernels
            problem = str(error)
        torch.cuda.empty_cache()  # SGLang sizes the KV cache next, by what is free
        if problem is not None:
            logger.warning("Muse megakernel: no step runs whole, as SGLANG_MUSE_MEGA_STEP=target. %s", problem)
            return
        used = (torch.cuda.memory_allocated() - before) / 2**20
        logger.info("Muse megakernel: %.0f MiB for the whole step: the draft and the head in the kernels' order.", used)
        logger.info(
            "Muse megakernel: steps of one request, greedy or sampled, run whole (draft, verify, accept, cache) as one "
            "graph; with grammar, log-probabilities, penalties, bias or several requests SGLang's own step runs."
        )

    def step(original: Any, worker: Any, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any) -> Any:
        if steps and not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            reason = declines(worker, batch)
            if reason is None:
                built.coverage.ran("whole steps")
                params = sampling_params(batch.reqs[0], built.step.config.vocab_size)
                if params != used[-1]:
                    steps[0].use(params)
                    used[:] = [params]
                return run(steps[0], worker, batch, on_publish)
            built.coverage.declined(f"whole steps: {reason}")
        return original(worker, batch, on_publish, *args, **kwargs)

    hooks.wrap(hooks.GRAPHS, graphs)
    hooks.wrap(hooks.STEP, step)


def build_step(built: TargetMegakernel, worker: Any) -> FullStep:
    """Over the caches of SGLang's two pools. Raises UserError, on every rank when there is a reason on any, when the
    draft is not one that the kernels can run, they cannot be compiled, or the memory does not suffice."""
    config, weights = _together(built.place, lambda: served_draft(built, worker))
    mask = built.place.vocabulary_row(built.step.weights.embedding, config.mask_token_id) if built.place else None
    full = _together(built.place, lambda: assemble(built, worker, config, weights, mask))
    if built.place:
        built.place.meet()  # the first steps run as they are captured, and a rank may have compiled the kernels before
    full.capture()
    return full


def _together(place: Place | None, make: Callable[[], Made]) -> Made:
    """What `make` makes. Raises UserError on all ranks when it raises one on any, so that all go on alike."""
    made, problem = None, None
    try:
        made = make()
    except UserError as error:
        problem = str(error)
    except torch.OutOfMemoryError as error:
        problem = f"The GPU's memory does not suffice for it ({str(error).splitlines()[0]}); give SGLang less."
    if place:
        problem = place.first_problem(problem)
    if problem is not None:
        raise UserError(problem)
    return cast(Made, made)


def served_draft(built: TargetMegakernel, worker: Any) -> tuple[DraftConfig, DraftWeights]:
    """The draft that SGLang has loaded. Raises UserError when it is not one that the kernels can run."""
    target, draft_runner = worker.target_worker.model_runner, worker.draft_model_runner
    built.bind(target.token_to_kv_pool)
    config = draft_config(draft_runner.model_config.hf_config, layers_to_capture=built.step.taps_after)
    if worker._noise_embed_scale != 1.0:
        raise UserError(
            f"The target scales the draft's embedding by {worker._noise_embed_scale}, which the kernels do not; "
            "set SGLANG_MUSE_MEGA_STEP=target."
        )
    mail = built.place.mail if built.place else NoMail()
    try:
        return config, draft_weights(worker.draft_model, mail.rank, mail.ranks)
    except AttributeError as error:
        raise UserError(
            f"The draft is not a DFlash2 draft as SGLang 0.5.23 builds it ({error}); set SGLANG_MUSE_MEGA_STEP=target."
        ) from error


def assemble(
    built: TargetMegakernel, worker: Any, config: DraftConfig, weights: DraftWeights, mask: Tensor | None
) -> FullStep:
    """The parts of a step, compiled and bound. mask: as in `prepare_draft`."""
    step, target, pool = built.step, worker.target_worker.model_runner, worker.draft_model_runner.token_to_kv_pool
    mail = built.place.mail if built.place else NoMail()
    held = step.weights
    kernel_draft = prepare_draft(config, weights, held.embedding, held.lm_head, mask)
    state = DecodeState.allocate(step.instance.row_cap, step.machine.device)
    draft = DraftStep(
        config, kernel_draft, step.machine, step.inputs, step.taps, state, target=TargetEnds.of(step.config),
        mail=mail, progress=logger.info,
    )  # fmt: skip
    draft.use_caches([(pool.get_key_buffer(i), pool.get_value_buffer(i)) for i in range(config.num_hidden_layers)])
    accept = AcceptStep(
        step.machine, step.inputs, step.activations.logits, step.activations.greedy_ids, state, draft.activations,
        softcap=step.config.final_logit_softcapping, progress=logger.info, mail=mail,
        greedy_logits=step.activations.greedy_logits,
    )  # fmt: skip
    accept.use_caches(built.caches, [step.config.is_full(index) for index in range(len(built.caches))])
    decode = DecodeStep(step, draft, accept, state)
    decode.declare(built.caches)
    return FullStep(
        decode,
        width=built.rows,
        plan=row_plan(built.rows),
        timer=cost_timer(),
        req_to_token=target.req_to_token_pool.req_to_token,
        full_to_sliding=getattr(target.token_to_kv_pool, "full_to_swa_index_mapping", None),
        progress=logger.info,
    )


def row_plan(width: int) -> RowPlan:
    """What the switches ask for. Raises UserError for a cost table that cannot be read."""
    table = switches.cost_table()
    cost = interpolated(read_cost_table(Path(table)), width) if table else default_cost(width)
    return RowPlan(width if switches.tree() else None, cost if switches.automatic_width() else None)


def cost_timer() -> Timer | None:
    """What the first step times itself with, when widths are chosen and no table says by which costs."""
    return gpu_ms if switches.automatic_width() and not switches.cost_table() else None


def gpu_ms(enqueue: Callable[[], None]) -> float:
    """ms on the stream that runs what `enqueue` enqueues."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    enqueue()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


class _AsGreedy:
    """A batch's sampling as SGLang's own question sees it when sampling itself is no obstacle."""

    is_all_greedy = True

    def __init__(self, sampling_info: Any) -> None:
        self._sampling_info = sampling_info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampling_info, name)


def declines(worker: Any, batch: Any) -> str | None:
    """Why SGLang's own step must run this batch, or None; from host state alone."""
    from sglang.srt.speculative import spec_utils
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    if not batch.forward_mode.is_decode():
        return f"{batch.forward_mode.name.lower()} batches"
    if len(batch.seq_lens) != 1:
        return "more than one request"
    if spec_utils.SIMULATE_ACC_LEN > 0:
        return "SGLANG_SIMULATE_ACC_LEN is set"
    if not isinstance(batch.spec_info, DFlashDraftInputV2):
        return "no draft state"
    sampling = batch.sampling_info
    worker._selector_sample = None  # as SGLang's own step begins
    if not worker._can_skip_verify_logits(batch, None if sampling is None else _AsGreedy(sampling)):
        return "grammar, log-probabilities, penalties or bias"
    if worker._block_verification and sampling is not None and not sampling.is_all_greedy:
        return "sampling with --speculative-use-block-verification"
    return None


def sampling_params(request: Any, vocab: int) -> SamplingParams:
    """How a request of SGLang chooses its tokens. Without a seed of its own it gets one from its id, on every rank the
    same."""
    asked = request.sampling_params
    seed = getattr(asked, "sampling_seed", None)
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(str(request.rid).encode()).digest()[:8], "little")
    return SamplingParams(
        temperature=float(asked.temperature),
        top_p=float(asked.top_p),
        top_k=0 if asked.top_k >= vocab else max(0, int(asked.top_k)),
        min_p=float(asked.min_p),
        seed=int(seed) % SEED_LIMIT,
    )


def run(full: FullStep, worker: Any, batch: Any, on_publish: Any) -> Any:
    """One step with SGLang's bookkeeping round it; a GenerationBatchResult."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    runner = worker.target_worker.model_runner
    batch.seq_lens.record_stream(torch.cuda.current_stream())

    def tables_read() -> None:
        event = torch.cuda.Event()
        event.record()
        runner.shared_read_done_event = event

    result = full(batch.req_pool_indices, batch.seq_lens, batch.spec_info.bonus_tokens, tables_read)
    if on_publish is not None:
        on_publish(result.length)
    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=result.tokens,
        accept_lens=result.committed,
        can_run_cuda_graph=True,
        next_draft_input=worker._make_next_draft_input_decode(bonus_tokens=result.anchor, new_seq_lens=result.length),
        speculative_num_draft_tokens=int(worker.block_size),
        new_seq_lens=result.length,
    )
