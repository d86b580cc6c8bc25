"""One instantiation of the accept kernel: vocabulary, rows and candidates."""

from dataclasses import dataclass, fields
from typing import ClassVar

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import draft_protocol
from sgl_muse_mega.megakernel.tiling import PACKET_BYTES, WARP

MAX_VOCAB = 1 << 19  # integer weights up to 2^44 must sum to less than 2^63 (csrc/step/mass.cuh)
_SEGMENT = 256


@dataclass(frozen=True, slots=True)
class AcceptInstance:
    """`shares` CTAs per row. `vocab` is that of all `ranks` ranks, each of which has the logits of as many ids."""

    source: ClassVar[str] = "accept.cu"
    kernels: ClassVar[tuple[str, ...]] = ("accept_kernel", "compact_kernel")

    vocab: int
    selector_k: int  # 1 without a draft
    softcap: float
    row_cap: int
    shares: int
    threads: int
    list_cap: int = 512  # ids a warp puts aside while a filter is applied
    ranks: int = 1

    @classmethod
    def for_sms(
        cls,
        sms: int,
        *,
        vocab: int,
        selector_k: int,
        softcap: float,
        row_cap: int,
        threads: int = 384,
        ranks: int = 1,
    ) -> "AcceptInstance":
        """All `sms` SMs share the rows evenly. Raises UserError for a vocabulary that the kernel cannot take."""
        return cls(vocab, selector_k, softcap, row_cap, max(1, sms // row_cap), threads, ranks=ranks)

    def __post_init__(self) -> None:
        """Raises UserError for a vocabulary that the kernel cannot take."""
        if self.vocab % 4 or self.vocab > MAX_VOCAB:
            raise UserError(
                f"The accept kernel takes vocabularies of up to {MAX_VOCAB} ids in multiples of 4, this one has "
                f"{self.vocab}; use --backend reference."
            )
        if self.vocab % (2 * self.ranks):
            raise UserError(f"{self.vocab} ids do not divide among {self.ranks} ranks in pairs; use another number.")

    @property
    def sms(self) -> int:
        """CTAs of a launch."""
        return self.row_cap * self.shares

    @property
    def segments(self) -> int:
        """Stretches of a row whose sums are kept."""
        return -(-self.vocab // _SEGMENT)

    @property
    def mail_packets(self) -> int:
        """What one source fills of a half of a mailbox: two logits to a packet (csrc/step/whole_rows.cuh)."""
        return self.row_cap * self.vocab // self.ranks // 2

    @property
    def mail_bytes(self) -> int:
        """The same in bytes; 0 without other ranks."""
        return self.mail_packets * PACKET_BYTES if self.ranks > 1 else 0

    @property
    def shared_offsets(self) -> dict[str, int]:
        warps = self.threads // WARP
        sums = 32
        cuts = sums + warps * 32  # four values per warp
        segments = cuts + 16 * self.selector_k
        lists = segments + self.segments * 8
        return {
            "EPOCH_AT": 0,
            "FOUND_AT": 8,  # an id, then a sum
            "SUMS_AT": sums,
            "CUTS_AT": cuts,
            "SEGMENTS_AT": segments,
            "LISTS_AT": lists,
            "SHARED_BYTES": lists + warps * self.list_cap * 4,
        }

    def header(self) -> str:
        """Text of instance.h."""
        integers = {
            "SMS": self.sms, "ROW_CAP": self.row_cap, "SHARES": self.shares, "THREADS": self.threads,
            "MATH_THREADS": self.threads, "VOCAB": self.vocab, "SELECTOR_K": self.selector_k, "LIST_CAP": self.list_cap,
            "RANKS": self.ranks, "LOCAL_VOCAB": self.vocab // self.ranks, "MAIL_PACKETS": self.mail_packets,
        }  # fmt: skip
        floats = {"SOFTCAP": self.softcap}
        offsets = self.shared_offsets | {"TRACE_AT": 0}
        return draft_protocol.header(
            draft_protocol.ACCEPT_COUNTERS,
            {"int": integers, "uint32_t": offsets, "float": floats, "bool": {"TRACE": False}},
        )

    def describe(self) -> str:
        """One line for logs and cache entries."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
