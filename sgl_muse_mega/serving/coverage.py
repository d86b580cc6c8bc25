"""Which steps ran in the kernels and which in SGLang, and why: counted, logged once each, summed up when quiet."""

import atexit
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from sgl_muse_mega.megakernel.protocol import FaultRecord

logger = logging.getLogger(__name__)

QUIET_SECONDS = 5.0


class Coverage:
    """Counters of one rank; written by the scheduler's thread, read by the monitor's."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.kernels: Counter[str] = Counter()  # steps by what ran
        self.sglang: Counter[str] = Counter()  # steps by why SGLang's own forward ran
        self.verified = self.emitted = 0

    def ran(self, what: str) -> None:
        """One step in the kernels."""
        self.kernels[what] += 1

    def declined(self, reason: str) -> None:
        """One step in SGLang's own code; the first for a reason is logged."""
        self.sglang[reason] += 1
        if self.sglang[reason] == 1 and self.rank == 0:
            logger.info("Muse megakernel: %s: SGLang's own forward runs these steps.", reason)

    def accepted(self, drafts: Iterable[int]) -> None:
        """Drafts accepted by verify steps, one number per request."""
        for count in drafts:
            self.verified += 1
            self.emitted += count + 1

    @property
    def steps(self) -> int:
        return self.kernels.total() + self.sglang.total()

    def summary(self) -> str:
        """One line."""

        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "none"

        text = f"steps in the kernels: {listed(self.kernels)}; in SGLang's own code: {listed(self.sglang)}"
        if self.verified:
            text += f"; accept length {self.emitted / self.verified:.3f} over {self.verified} verify steps"
        return text


class Monitor(threading.Thread):
    """Writes the summary whenever the server has been quiet for a while, and the sentence of a kernel that gave up.

    Servers end their ranks by signals that nothing can catch, so a summary at exit alone would often be lost; and a
    kernel's fault record lies in host memory, where it can be read while the CUDA context is already broken.
    """

    def __init__(self, coverage: Coverage, fault_record: Tensor, interval: float = 0.5) -> None:
        super().__init__(name="muse-megakernel-monitor", daemon=True)
        self._coverage = coverage
        self._fault_record = fault_record
        self._interval = interval
        self._reported = self._seen = coverage.steps
        self._changed = time.monotonic()
        self._faulted = False

    def run(self) -> None:
        atexit.register(self.close)
        while True:
            time.sleep(self._interval)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """One round at time `now` in seconds."""
        record = FaultRecord.read(self._fault_record.tolist())
        if record is not None and not self._faulted:
            self._faulted = True
            logger.error(record.sentence())
        steps = self._coverage.steps
        if steps != self._seen:
            self._seen, self._changed = steps, now
        elif steps != self._reported and now - self._changed >= QUIET_SECONDS:
            self._reported = steps
            self.report()

    def close(self) -> None:
        """The summary of a process that ends by itself, if there are steps that none has told of."""
        if self._coverage.steps != self._reported:
            self._reported = self._coverage.steps
            self.report()

    def report(self) -> None:
        if self._coverage.rank == 0:
            logger.info("Muse megakernel summary: %s.", self._coverage.summary())
