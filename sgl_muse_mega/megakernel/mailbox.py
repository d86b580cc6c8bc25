"""Mailboxes of the ranks: whose memory a launch's packets go to (csrc/layer/mailbox.cuh)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 128
_HASH = 0x9E3779B1  # odd, so that neighbouring sessions' tags lie far apart


def session_word(session: int) -> int:
    """What launches of session number `session` count their tags from: odd, so that no tag is the 0 of fresh memory.

    The result is a signed 32-bit number, as a launch parameter takes it.
    """
    word = (session * _HASH << 1 | 1) % 2**32
    return word - 2**32 if word >= 2**31 else word


class Mail(Protocol):
    """One rank's place among the ranks."""

    @property
    def ranks(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def session(self) -> int: ...

    def take(self, source_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
        """A mailbox of two halves with room for `source_bytes` from every rank.

        Returns this rank's own, uint8 [2, ranks, source_bytes], zero, and where this rank reaches each rank's. All
        ranks take the same sizes in the same order.
        """


class NoMail:
    """A single rank: there is nothing to exchange."""

    ranks, rank, session = 1, 0, 0

    def take(self, source_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
        return torch.zeros(2, 1, 0, dtype=torch.uint8, device=device), []


class LoopBack:
    """One rank that plays all: what it sends to rank r arrives in its own mailbox as if r had sent it.

    So sums are `ranks` times its own part, and gathered rows are its own columns `ranks` times side by side. Stores,
    polls and sums are those of a real exchange.
    """

    def __init__(self, ranks: int, rank: int = 0, session: int = 1) -> None:
        self.ranks, self.rank, self.session = ranks, rank, session

    def take(self, source_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
        own = torch.zeros(2, self.ranks, source_bytes, dtype=torch.uint8, device=device)
        return own, [own.data_ptr() + (rank - self.rank) * source_bytes for rank in range(self.ranks)]


class SharedMail:
    """A rank whose mailboxes lie in an arena of its own that every rank can reach.

    arena: uint8, zero, of this rank; reached: where this rank reaches the arena of every rank, its own included.
    """

    def __init__(self, arena: Tensor, reached: Sequence[int], rank: int, session: int) -> None:
        self.ranks, self.rank, self.session = len(reached), rank, session
        self._arena, self._reached, self._used = arena, list(reached), 0

    def take(self, source_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
        start, size = self._used, 2 * self.ranks * source_bytes
        if start + size > self._arena.numel():
            raise ValueError(f"an arena of {self._arena.numel()} bytes has no room for {size} at {start}")
        self._used = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        own = self._arena[start : start + size].view(2, self.ranks, source_bytes)
        return own, [base + start for base in self._reached]


def read_mail(mailbox: Tensor, half: int, first_packet: int, rows: int, columns: int, tag: int) -> Tensor:
    """What the sources sent at one exchange point: float32 [ranks, rows, columns].

    mailbox: uint8 [2, ranks, packets]. Raises ValueError when a packet does not carry `tag`.
    """
    words = mailbox[half].view(torch.int32).unflatten(-1, (-1, 4))
    packets = words[:, first_packet : first_packet + rows * columns // 4]
    tags = packets[..., 1::2]
    if not bool((tags == tag).all()):
        raise ValueError(f"{int((tags != tag).any(-1).sum())} packets are not of the launch with tag {tag}")
    data = packets[..., 0::2].contiguous().view(torch.bfloat16)
    sent: Tensor = data.view(mailbox.shape[1], rows, columns).float()
    return sent
