"""The bundled pair as whole decode steps, and through the host's step loop, for `step_check.py`."""

from dataclasses import dataclass

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.megakernel.backend import KernelBackend
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.instance import row_cap_of
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.speculative.backend import Backend, StepBackend
from sgl_muse_mega.speculative.generate import Generation, StepEvent, generate
from sgl_muse_mega.speculative.sampling import SamplingParams

CONTEXT = 1024
NEW_TOKENS = 512  # what `sgl-muse-mega eval` allows a problem


@dataclass(frozen=True)
class Prompt:
    line: int  # of the problems' file
    ids: list[int]


class Pair:
    """Steps of up to 8 and of up to 16 rows over the bundled pair, and the same kernels under the host's step loop."""

    def __init__(self, machine: Machine, problems: int) -> None:
        self.machine = machine
        self.config = load_target_config(tiny.target_directory())
        self.draft_config = load_draft_config(tiny.draft_directory())
        self.weights = load_target(tiny.target_directory(), self.config)
        self.draft_weights = load_draft(tiny.draft_directory(), self.draft_config)
        self.loops = {cap: self._loop(machine, cap) for cap in (8, 16)}
        self.host = KernelBackend(
            self.config, self.weights, self.draft_config, self.draft_weights, machine=machine, max_context=CONTEXT
        )
        text = Text(tiny.target_directory())
        self.prompts = [
            Prompt(problem.line, text.encode(problem.question, raw=False))
            for problem in read_problems(tiny.problems_path(), problems)
        ]

    def _loop(self, machine: Machine, width: int) -> DecodeLoop:
        return decode_backend(
            self.config, self.weights, self.draft_config, self.draft_weights, machine=machine, width=width,
            max_context=CONTEXT,
        )  # fmt: skip

    def loop(self, width: int) -> DecodeLoop:
        """The steps that are compiled for this width."""
        return self.loops[row_cap_of(width)]

    def run(
        self, ids: list[int], params: SamplingParams, width: int, *, host: bool = False, limit: int = NEW_TOKENS,
        stop: bool = True,
    ) -> tuple[Generation, list[StepEvent]]:  # fmt: skip
        """One text; host: by the host's step loop with the reference draft instead of whole steps."""
        backend: Backend | StepBackend = self.host if host else self.loop(width)
        stops = self.config.eos_token_ids if stop else ()
        generation = generate(backend, ids, params, width=width, max_new_tokens=limit, stop_ids=stops)
        return generation, list(generation)


def shape(events: list[StepEvent]) -> list[tuple[int, int]]:
    """Drafts kept and tokens added per step."""
    return [(e.accepted, len(e.tokens)) for e in events]
