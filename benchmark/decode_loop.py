"""Checks and times the NVFP4 decode loops of csrc/decode on this machine's GPU.

    python benchmark/decode_loop.py --rounds 15 --commit abc1234 --json out.json

Correctness: with one-hot tokens every output is one weight and must equal e2m1 * e4m3 bit for bit (all codes, all
non-negative scales); with random tokens the sums are compared with float64, and with each other bit for bit. Outputs
are poisoned before each run. Speed: packed bytes (codes and block scales) per second of a launch that streams 4.7 GB
from HBM, the same tasks over 28 MB in L2, or a ring that is filled once; all variants in turn, round after round.
"""

import argparse
import ctypes
import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint import marlin, nvfp4

ROOT = Path(__file__).parent.parent
NVCC = ("nvcc", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC",
        "-cudart", "static", "-t", "0")  # fmt: skip
TILES_N, STEPS_K = 96, 256  # 6144 outputs, 4096 inputs: whole tasks for blocks of 4, 8, 12 and 16 tiles
EXPERTS = 330  # a multiple of 132 tasks for each of those blocks
TOKEN_PERIOD = 256  # inputs after which the token rows repeat
SOURCES = ("shared", "l2", "hbm")
ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Variant:
    index: int
    order: str
    shape: str
    rows: int
    warps: int
    tiles: int
    parts: int
    prefetch: bool
    group: bool  # warpgroup products instead of mma.sync
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def name(self) -> str:
        return self.name_at(self.rows)

    def name_at(self, rows: int) -> str:
        """With fewer rows than the variant's product has columns."""
        engine = " wgmma" if self.group else ""
        return f"{self.order}{engine} {self.shape}{'' if self.prefetch else ' no prefetch'} rows {rows}"

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows that this variant would serve."""
        return tuple(rows for rows in ROWS if (rows > 8) == (self.rows > 8))


class Library:
    """The compiled benchmark; every call raises RuntimeError on a CUDA error."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.variants = self._variants()

    def _variants(self) -> list[Variant]:
        found: list[Variant] = []
        while True:
            numbers, order, shape = (
                (ctypes.c_int * 9)(),
                ctypes.create_string_buffer(32),
                ctypes.create_string_buffer(32),
            )
            if (status := self._library.decode_loop_variant(len(found), numbers, order, shape)) == -1:
                return found
            _check(status)
            rows, warps, tiles, parts, prefetch, group, registers, spilled, shared = numbers
            found.append(
                Variant(len(found), order.value.decode(), shape.value.decode(), rows, warps, tiles, parts,
                        bool(prefetch), bool(group), registers, spilled, shared)
            )  # fmt: skip

    def run(self, variant: Variant, weights: "Weights", tokens: Tensor, out: Tensor, *, experts: int,
            resident: bool = False, rows: int | None = None, ctas: int = 132) -> None:  # fmt: skip
        """out f32 [experts, parts, variant's rows, N] = tokens (b operands) times the weights of expert % stored.

        rows: how many are written, the first of the variant's.
        """
        words = weights.field if variant.order.startswith("field") else weights.marlin
        stored, k_steps, two_n = words.shape
        assert tokens.shape[1] * 8 == variant.rows
        assert tokens.dim() == 4 + variant.group
        assert out.numel() >= experts * variant.parts * variant.rows * two_n // 2
        _check(
            self._library.decode_loop_run(
                variant.index, int(resident), *map(_pointer, (words, weights.scales, tokens, out)), experts, stored,
                two_n // 128, k_steps, variant.rows if rows is None else rows, ctas,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
        )  # fmt: skip

    def reorder(self, source: Tensor, target: Tensor, *, back: bool) -> None:
        """Marlin's words to field order (or back); in place when both are the same tensor."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = ctypes.c_int64(source.numel() * source.element_size())
        _check(self._library.decode_loop_reorder(_pointer(source), _pointer(target), size, int(back), stream))


@dataclass(frozen=True, slots=True)
class Weights:
    """The same codes in both word orders, int32 [experts, K / 16, 2 N], and Marlin's scale bytes [.., K / 16, N]."""

    marlin: Tensor
    field: Tensor
    scales: Tensor


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")


def field_order(words: Tensor) -> Tensor:
    """Field order of Marlin's words int32, bit by bit from the table in csrc/decode/field_order.cuh."""
    table = ["s0", "m3", "s3", "s1", "e3", "e3", "s2", "e0", "e0", "m0", "e1", "e1", "m1", "e2", "e2", "m2"]
    out = torch.zeros_like(words)
    for bit, (field, pair) in zip(range(15, -1, -1), table, strict=True):
        offset = {"s": 3, "m": 0}.get(field)
        if offset is None:  # the higher exponent bit comes first
            offset = 2 if table.index(field + pair) == 15 - bit else 1
        for half in (0, 16):
            one = (words >> (half + 4 * int(pair) + offset)) & 1
            out |= one << (half + bit)
    return out


def random_packed(experts: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 [experts, n, k / 2] and e4m3 scales [experts, n, k / 16]: every code, every non-negative scale."""
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0, 127, (experts, n, k // 16), dtype=torch.uint8, device=device)
    assert len(codes.unique()) == 256
    assert len(scales.unique()) == 127
    return codes, scales.view(torch.float8_e4m3fn)


def packed_weights(library: Library, codes: Tensor, scales: Tensor) -> Weights:
    words = marlin.pack_weight(codes)
    field = torch.empty_like(words)
    library.reorder(words, field, back=False)
    assert torch.equal(field, field_order(words)), "the kernel's field order is not the table's"
    back = field.clone()
    library.reorder(back, back, back=True)
    assert torch.equal(back, words), "field order does not convert back"
    return Weights(words, field, marlin.pack_scales(scales))


def operands(rows: Tensor, group: bool) -> Tensor:
    """Token rows bf16 [8 NT, 256] -> b operands [8 step pairs, NT, 32 lanes, 8], or for warpgroup products core
    matrices [16 steps, NT, 2 halves, 8 rows, 8 inputs]."""
    if group:
        return rows.reshape(-1, 8, 16, 2, 8).permute(2, 0, 3, 1, 4).contiguous()
    # Inputs are (step pair, step, upper eight, lane % 4, two), columns (n8 tile, lane / 4).
    split = rows.reshape(-1, 8, 8, 2, 2, 4, 2)
    return split.permute(2, 0, 1, 5, 3, 4, 6).reshape(8, -1, 32, 8).contiguous()


def check_exact(library: Library, variants: list[Variant]) -> tuple[int, list[str]]:
    """One-hot tokens: outputs are single weights. How many were compared over all variants, and what was wrong."""
    experts, n, k = 3, TILES_N * 64, TOKEN_PERIOD
    codes, scales = random_packed(experts, n, k, "cuda")
    weights, expected = packed_weights(library, codes, scales), nvfp4.dequantize_codes(codes, scales).float()
    compared, failures = 0, []
    for variant in variants:
        wrong = 0
        for first in range(0, k, variant.rows):
            tokens = torch.zeros(variant.rows, k, dtype=torch.bfloat16, device="cuda")
            tokens[torch.arange(variant.rows), first + torch.arange(variant.rows)] = 1
            out = torch.full((experts, variant.parts, variant.rows, n), torch.nan, device="cuda")
            library.run(variant, weights, operands(tokens, variant.group), out, experts=experts)
            wrong += int((out.sum(1) != expected[:, :, first : first + variant.rows].mT).sum())
            compared += out[:, 0].numel()
        if wrong:
            failures.append(f"{variant.name}: {wrong} of {experts * n * k} weights are not exact")
    return compared, failures


def check_sums(library: Library, variants: list[Variant]) -> tuple[dict[str, float], list[str]]:
    """Random tokens over K = 4096. Largest error of each variant, and of cuBLAS in float32, in units of
    2^-24 sum |w x|; and what was wrong: an error above 64, or bits that differ where the order of sums does not."""
    experts, n, k = 5, TILES_N * 64, STEPS_K * 16
    codes, scales = random_packed(experts, n, k, "cuda")
    weights, exact = packed_weights(library, codes, scales), nvfp4.dequantize_codes(codes, scales).double()
    rows = torch.randn(16, TOKEN_PERIOD, device="cuda").to(torch.bfloat16)
    wide = rows.double().repeat(1, k // TOKEN_PERIOD)
    expected, size = torch.matmul(wide, exact.mT), torch.matmul(wide.abs(), exact.abs().mT)

    def error(got: Tensor) -> float:
        count = got.shape[1]
        return float(((got.double() - expected[:, :count]).abs() / size[:, :count]).max()) * 2**24

    errors = {"cuBLAS float32": error(torch.matmul(wide.float(), exact.float().mT))}
    same: dict[tuple[bool, str], Tensor] = {}
    failures = []
    for variant in variants:
        out = torch.full((experts, variant.parts, variant.rows, n), torch.nan, device="cuda")
        for ctas in (132, 7):
            out.fill_(torch.nan)
            b_operands = operands(rows[: variant.rows], variant.group)
            library.run(variant, weights, b_operands, out, experts=experts, ctas=ctas)
            got = out.sum(1)
            errors[variant.name] = error(got)
            if not errors[variant.name] <= 64:
                failures.append(f"{variant.name}, {ctas} CTAs: error {errors[variant.name]:.2f} * 2^-24 sum |w x|")
            order_of_sums = (variant.group, variant.shape if variant.parts > 1 else "")
            first = same.setdefault(order_of_sums, got[:, :8].clone())
            if not torch.equal(first, got[:, :8]):
                failures.append(f"{variant.name}, {ctas} CTAs: bits differ at the same order of sums")
        for count in variant.row_counts:
            part = torch.full_like(out, torch.nan)
            library.run(variant, weights, b_operands, part, experts=experts, rows=count)
            if not torch.equal(part[:, :, :count], out[:, :, :count]) or not bool(part[:, :, count:].isnan().all()):
                failures.append(f"{variant.name_at(count)}: not the first rows of {variant.rows}")
    return errors, failures


def timed(action: Any) -> float:
    """Milliseconds of one launch."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_variants(library: Library, rounds: int) -> dict[str, dict[str, list[float]]]:
    """GB/s of packed bytes per variant and source; every round runs all variants one after the other."""
    n, k_steps = TILES_N * 64, STEPS_K
    words = torch.randint(-(2**31), 2**31, (EXPERTS, k_steps, 2 * n), dtype=torch.int32, device="cuda")
    valid = marlin.pack_scales(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(64, 1))
    bytes_of = valid.view(torch.uint8)[:, 0].cuda()  # the stored byte of each non-negative scale
    scales = bytes_of[torch.randint(0, 127, (EXPERTS, k_steps, n), dtype=torch.int16, device="cuda").int()]
    # Random words are as random in either order.
    weights = Weights(words, words, scales)
    few = Weights(words[:2], words[:2], scales[:2])
    rows = torch.randn(16, TOKEN_PERIOD, device="cuda").to(torch.bfloat16)
    tokens = {(r, g): operands(rows[:r], g) for r in (8, 16) for g in (False, True)}
    out = torch.empty(EXPERTS * 2 * 16 * n, device="cuda")
    packed = EXPERTS * k_steps * TILES_N * 576
    cases = [(v, count) for v in library.variants for count in v.row_counts]
    result: dict[str, dict[str, list[float]]] = {v.name_at(count): {s: [] for s in SOURCES} for v, count in cases}
    for source in SOURCES:
        for turn in range(rounds + 2):
            for v, count in cases:
                if v.order == "none" and source == "shared":
                    continue
                ms = timed(
                    lambda v=v, count=count, source=source: library.run(
                        v, few if source == "l2" else weights, tokens[v.rows, v.group], out, experts=EXPERTS,
                        resident=source == "shared", rows=count,
                    )
                )  # fmt: skip
                if turn >= 2:
                    result[v.name_at(count)][source].append(packed / ms * 1e-6)
    target = torch.empty_like(words)
    result["reorder to a copy"] = {
        "hbm": [2 * words.numel() * 4 / timed(lambda: library.reorder(words, target, back=True)) * 1e-6
                for _ in range(rounds + 2)][2:]
    }  # fmt: skip
    return result


def print_table(library: Library, speed: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'variant':<38}{'regs':>5}" + "".join(f"{s:>16}" for s in SOURCES) + "   GB/s median (min-max)")
    registers = {v.name_at(count): v.registers for v in library.variants for count in v.row_counts}
    for name in speed:
        cells = []
        for source in SOURCES:
            values = speed[name].get(source) or []
            text = f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})" if values else "-"
            cells.append(f"{text:>17}")
        print(f"{name:<38}{registers.get(name, ''):>4}" + "".join(cells))


def smi(query: str) -> str:
    return subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=ROOT / "build" / "decode_loop.so", help="built when missing")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if not arguments.library.is_file():
        arguments.library.parent.mkdir(exist_ok=True)
        source = str(Path(__file__).with_suffix(".cu"))
        subprocess.run([*NVCC, "-I", str(ROOT / "csrc"), "-o", str(arguments.library), source], check=True)
    torch.manual_seed(arguments.seed)
    library = Library(arguments.library)
    decoding = [v for v in library.variants if v.order != "none"]
    compared, failures = check_exact(library, decoding)
    print(f"exact: {compared} weights, every code and non-negative scale, {len(decoding)} variants", flush=True)
    errors, more = check_sums(library, decoding)
    failures += more
    print(f"sums: largest error {max(errors.values()):.2f} * 2^-24 sum |w x|", flush=True)
    torch.cuda.empty_cache()
    clocks = subprocess.Popen(
        ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader", "-lms", "200"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        speed = time_variants(library, arguments.rounds)
    finally:
        clocks.terminate()
    seen = clocks.communicate()[0].splitlines()
    print_table(library, speed)
    print("failures:", failures or "none")
    print("clocks and power while timing:", seen[len(seen) // 2 :: max(1, len(seen) // 6)])
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "gpu": smi("name"), "driver": smi("driver_version"),
        "torch": torch.__version__, "commit": arguments.commit, "command": shlex.join(["python", *sys.argv]),
        "seed": arguments.seed, "bytes_per_launch": EXPERTS * STEPS_K * TILES_N * 576, "unit": "GB/s of packed bytes",
        "weights_compared": compared, "failures": failures, "error_in_2^-24_sum_abs": errors, "clocks": seen,
        "variants": [dataclasses.asdict(v) | {"name": v.name} for v in library.variants],
        "repeats": speed,
    }  # fmt: skip
    arguments.json.write_text(json.dumps(content, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
