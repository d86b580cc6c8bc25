"""Runs the kernels' own sources on the CPU: a GPU thread is a fiber, a seed decides the schedule (csrc/emulator)."""

import ctypes
from pathlib import Path

import torch

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.build import EMULATOR, Progress, build, quiet
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.protocol import RECORD_WORDS, FaultRecord, Params

_REPORT_BYTES = 1024


class EmulatedModule:
    """One compiled instance."""

    def __init__(self, path: Path, seed: int, fault_record: torch.Tensor) -> None:
        self._library = ctypes.CDLL(str(path))
        self._seed = seed
        self._fault_record = fault_record

    def launch(self, kernel: str, params: Params) -> None:
        """Runs one launch to its end. Raises UserError with the scheduler's reason when it cannot finish."""
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        function = getattr(self._library, kernel)
        function.argtypes = [ctypes.POINTER(Params), ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
        self._seed += 1
        if function(ctypes.byref(params), self._seed, report, _REPORT_BYTES):
            record = FaultRecord.read(self._fault_record.tolist())
            why = f"The emulated {kernel} stopped: {report.value.decode()}."
            raise UserError(why if record is None else f"{why} {record.sentence()}")


class Emulator:
    """A machine of `sms` SMs in this process; memory is ordinary CPU tensors."""

    device = torch.device("cpu")
    deadline_ns = 200_000_000  # turns of the scheduler

    def __init__(self, sms: int = 4, seed: int = 0) -> None:
        self.sms = sms
        self.fault_record = torch.zeros(RECORD_WORDS, dtype=torch.int64)
        self._seed = seed

    def load(self, instance: Instance, progress: Progress = quiet) -> EmulatedModule:
        return EmulatedModule(build(instance, EMULATOR, progress).path, self._seed, self.fault_record)

    def synchronize(self) -> None:
        """Nothing is ever in flight."""
