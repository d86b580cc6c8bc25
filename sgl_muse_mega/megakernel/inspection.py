"""What the compiler made of the kernels: registers and memory from its report, instructions from the machine code.

The gates are the same for every architecture, so that a kernel compiled for a GPU that nobody has at hand is held to
the same things as one that runs: no local memory, weights by bulk copies, products on the tensor cores, 16-byte loads.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.toolchain import find_nvdisasm

# Of one SM, the same for sm_90 and sm_103.
SHARED_BYTES = 232448  # opt-in, of one CTA
REGISTERS_PER_QUARTER = 16384  # 32-bit registers of each of the four schedulers
MOST_REGISTERS = 255  # of one thread
_WARP = 32

BULK_COPY = re.compile(r"UBLKCP\b")
TENSOR_PRODUCT = re.compile(r"HMMA\.16816\.F32\.BF16|HGMMA\b")  # by a warp or, on sm_90, by a warpgroup
WIDE_SHARED_LOAD = re.compile(r"LDS\.128")
WIDE_GLOBAL_LOAD = re.compile(r"LDG\.E(\.\w+)*\.128")
WIDE_LOAD = re.compile(f"{WIDE_SHARED_LOAD.pattern}|{WIDE_GLOBAL_LOAD.pattern}")
TRANSACTION_BARRIER = re.compile(r"SYNCS\.PHASECHK")
WAIT_FOR_PREVIOUS_LAUNCH = re.compile(r"ACQBULK")
ALLOW_NEXT_LAUNCH = re.compile(r"PREEXIT")
RELEASING_ADD = re.compile(r"RED[G.].*ADD.*STRONG\.GPU")
ACQUIRING_LOAD = re.compile(r"LDG\.E(\.\w+)*\.STRONG\.GPU")
LOCAL_MEMORY = re.compile(r"(LDL|STL)\b")
LOOP_OVER_LANES = re.compile(r"BRA\.U\.ANY")
_LOOP_END = 4  # instructions from an access in a loop over the lanes to the end of the loop

_LAUNCH = {
    "griddepcontrol.wait": WAIT_FOR_PREVIOUS_LAUNCH,
    "griddepcontrol.launch_dependents": ALLOW_NEXT_LAUNCH,
}
_HAND_OFF = {
    **_LAUNCH,
    "releasing add": RELEASING_ADD,
    "acquiring load": ACQUIRING_LOAD,
}
_STREAMING = {
    **_HAND_OFF,
    "bulk copy": BULK_COPY,
    "transaction barrier": TRANSACTION_BARRIER,
    "tensor-core product": TENSOR_PRODUCT,
    "16-byte shared load": WIDE_SHARED_LOAD,
}
_WIDE = {"16-byte global load": WIDE_GLOBAL_LOAD}

LANES_COPY = frozenset({"draft_block_kernel"})
"""May issue copies in loops over the lanes: each lane fetches the keys and values whose place it looked up."""

# What each kernel's machine code must hold.
EXPECTED: Mapping[str, Mapping[str, re.Pattern[str]]] = {
    "embed_kernel": _STREAMING,  # its only 16-byte global accesses are stores
    "layer_kernel": {**_STREAMING, **_WIDE},  # attention reads the cache
    "head_kernel": {**_STREAMING, **_WIDE},
    "draft_block_kernel": {**_STREAMING, **_WIDE},
    "draft_head_kernel": _STREAMING,
    "verify_head_kernel": _STREAMING,
    "draft_context_kernel": _STREAMING,
    "accept_kernel": {**_HAND_OFF, **_WIDE},  # no weights
    "compact_kernel": _LAUNCH,  # its addresses come from memory, so its loads are generic
    "step_begin_kernel": _LAUNCH,
    "step_end_kernel": _LAUNCH,
    "forward_begin_kernel": _LAUNCH,
}


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What ptxas reports about one kernel; bytes."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # static; what a launch adds is not the compiler's


def read_report(report: str) -> list[KernelResources]:
    """Every kernel of `nvcc -Xptxas -v`, by name."""
    found = []
    for entry in re.split(r"Compiling entry function", report)[1:]:
        name = re.search(r"'(\w+)'", entry)
        used = re.search(r"Used (\d+) registers(.*)", entry)
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        if name and used and memory:
            shared = re.search(r"(\d+) bytes smem", used[2])
            numbers = (int(used[1]), *(int(n) for n in memory.groups()), int(shared[1]) if shared else 0)
            found.append(KernelResources(name[1], *numbers))
    return sorted(found, key=lambda r: r.name)


def register_limit(threads: int) -> int:
    """Most registers a thread may have for one CTA of `threads` threads to fit an SM.

    Each scheduler has its own registers and every fourth warp, and gives them to warps in portions of 8 per thread.
    """
    warps = -(-threads // _WARP)
    per_scheduler = -(-warps // 4)
    return min(MOST_REGISTERS, REGISTERS_PER_QUARTER // (per_scheduler * _WARP) // 8 * 8)


def resource_faults(instance: Compiled, resources: Sequence[KernelResources]) -> list[str]:
    """Every reason why these kernels must not be loaded, one clause each."""
    faults = [f"{name} is not in the compiler's report" for name in _missing(instance, [r.name for r in resources])]
    limit = register_limit(instance.threads)
    dynamic = instance.shared_offsets["SHARED_BYTES"]
    for r in resources:
        if r.stack or r.spill_stores or r.spill_loads:
            faults.append(f"{r.name} keeps registers in local memory ({r.spill_stores} B stored, {r.stack} B stack)")
        if r.registers > limit:
            faults.append(f"{r.name} has {r.registers} registers, {instance.threads} threads can have {limit}")
        if r.shared + dynamic > SHARED_BYTES:
            faults.append(f"{r.name} needs {r.shared + dynamic} bytes of shared memory, an SM has {SHARED_BYTES}")
    return faults


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A cubin's kernels as lists of mnemonics, in order and with their suffixes."""

    target: str
    kernels: Mapping[str, Sequence[str]]

    def count(self, kernel: str, pattern: re.Pattern[str]) -> int:
        """0 for a kernel that is not there."""
        counts = Counter(self.kernels.get(kernel, ()))
        return sum(n for mnemonic, n in counts.items() if pattern.match(mnemonic))

    def copies_in_loops_over_lanes(self, kernel: str) -> int:
        """Bulk copies that the compiler does not know to be issued by one thread, at 50 cycles a copy (core.cuh)."""
        code = self.kernels[kernel]
        ends = (i for i, mnemonic in enumerate(code) if LOOP_OVER_LANES.match(mnemonic))
        return sum(any(BULK_COPY.match(m) for m in code[max(0, i - _LOOP_END) : i]) for i in ends)


def disassemble(cubin: Path) -> MachineCode:
    """Raises UserError without NVIDIA's disassembler, or when it cannot read the file."""
    tool = find_nvdisasm()
    if tool.path is None:
        raise UserError(
            f"Machine code is inspected with nvdisasm, which was not found ({tool.source}); install the CUDA toolkit "
            "or `pip install 'sgl-muse-mega[compile]'`."
        )
    done = subprocess.run([str(tool.path), "-c", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{tool.path} cannot read {cubin}: {done.stderr.strip()[:500]}.")
    return read_machine_code(done.stdout)


def read_machine_code(listing: str) -> MachineCode:
    """Parses the output of `nvdisasm -c`: sections named .text.KERNEL, one instruction a line behind its address."""
    target = re.search(r"^\s*\.target\s+(\w+)", listing, re.MULTILINE)
    kernels: dict[str, list[str]] = {}
    here: list[str] = []
    for line in listing.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.(\w+)", line)
        if section:
            here = kernels.setdefault(section[1], [])
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
        if instruction:
            here.append(instruction[1])
    return MachineCode(target[1] if target else "unknown", kernels)


def code_faults(instance: Compiled, code: MachineCode, target: str) -> list[str]:
    """Every instruction that is missing or must not be there, one clause each."""
    faults = [f"{name} is not in the machine code" for name in _missing(instance, code.kernels)]
    if code.target != target:
        faults.append(f"the machine code is for {code.target}, not for {target}")
    for kernel in code.kernels:
        missing = [what for what, pattern in EXPECTED.get(kernel, {}).items() if not code.count(kernel, pattern)]
        if missing:
            faults.append(f"{kernel} holds no {', no '.join(missing)}")
        local = code.count(kernel, LOCAL_MEMORY)
        if local:
            faults.append(f"{kernel} holds {local} accesses to local memory (LDL, STL)")
        looped = code.copies_in_loops_over_lanes(kernel)
        if looped and kernel not in LANES_COPY:
            faults.append(f"{kernel} issues {looped} bulk copies in a loop over the lanes; issue them under elect_one")
    return faults


def _missing(instance: Compiled, found: Sequence[str] | Mapping[str, object]) -> list[str]:
    return [name for name in instance.kernels if name not in found]
