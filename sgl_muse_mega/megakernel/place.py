"""One rank's place among the ranks that decode together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.mailbox import Mail
from sgl_muse_mega.megakernel.peers import Group


@dataclass(frozen=True, slots=True)
class Place:
    """mail: what its launches send packets through; group: the processes (or threads) of all ranks, for the host."""

    mail: Mail
    group: Group

    @property
    def rank(self) -> int:
        return self.mail.rank

    @property
    def ranks(self) -> int:
        return self.mail.ranks

    def meet(self) -> None:
        """Returns when all ranks are here, so that who is late to start is not taken for dead by kernels that wait."""
        self.group.gather(b"here")

    def first_problem(self, problem: str | None) -> str | None:
        """What the first rank that has a problem says, on all of them; None when none has. All ranks call it
        together."""
        told = self.group.gather((problem or "").encode())
        return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(told) if text), None)

    def join(self, part: Tensor) -> Tensor:
        """The ranks' parts one after the other along the first dimension, on the CPU; all ranks call it together."""
        own = part.detach().cpu().contiguous()
        parts = self.group.gather(own.view(torch.uint8).numpy().tobytes())
        held = [torch.frombuffer(bytearray(part), dtype=own.dtype) for part in parts if part]
        return torch.cat(held).view(-1, *own.shape[1:])

    def vocabulary_row(self, table: Tensor, token: int) -> Tensor:
        """Row `token` of a table whose rows the ranks share evenly, from the rank that has it; like `join`."""
        owner, row = divmod(token, len(table))
        chosen = table[row : row + 1] if owner == self.rank else table[:0]
        return self.join(chosen)[0].to(table.device)
