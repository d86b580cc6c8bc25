"""The gates on compiled kernels, each shown to fail: on listings, and on small kernels that are compiled for both
targets and lack one thing each."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_muse_mega.megakernel import build as building
from sgl_muse_mega.megakernel import inspection
from sgl_muse_mega.megakernel.build import ARCHITECTURES, Artifact, build
from sgl_muse_mega.megakernel.inspection import MachineCode, code_faults, disassemble, register_limit, resource_faults

WHOLE = inspection.EXPECTED["layer_kernel"]  # every expectation there is

# Each kernel lacks what its name says. Loads at odd strides cannot be merged into wide ones.
SOURCE = """
#include "instr/atomic.cuh"
#include "instr/bulk.cuh"
#include "instr/mbarrier.cuh"
#include "instr/memory.cuh"
#include "instr/mma.cuh"
#include "instr/pdl.cuh"

struct Params {
    const uint4* rows;
    uint32_t* counters;
    float* sums;
};
enum Lacks { NOTHING, WAIT, ALLOW, ADD, LOAD, COPY, ELECT, BARRIER, PRODUCT, WIDE_SHARED, WIDE_GLOBAL };

template <int LACKS>
DEVICE void work(const Params& p) {
    if (thread_index() == 0) mbarrier_init(0, 1);
    barrier_sync(0, 256);
    if (LACKS != WAIT) wait_for_previous_launch();
    if (LACKS != ALLOW) allow_next_launch();
    if (warp_index() == 0 && (LACKS == ELECT ? lane_index() == 0 : elect_one())) {
        mbarrier_arrive_expect(0, 512);
        if (LACKS != COPY) bulk_load(1024, p.rows, 512, 0, eviction_policy(Keep::first_out));
    }
    if (LACKS != BARRIER) {
        while (!mbarrier_try_wait(0, 0)) {
        }
    }
    uint4 w, x;
    if (LACKS == WIDE_SHARED) {
        const uint32_t at = 1024 + lane_index() * 20;
        w = uint4{shared_load<uint32_t>(at), shared_load<uint32_t>(at + 4), shared_load<uint32_t>(at + 8), 0u};
    } else {
        w = shared_load<uint4>(1024 + lane_index() * 16);
    }
    if (LACKS == WIDE_GLOBAL) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(p.rows) + lane_index() * 5;
        x = uint4{global_load(at), global_load(at + 1), 0u, 0u};
    } else {
        x = global_load(p.rows + lane_index());
    }
    float c[4] = {};
    if (LACKS == PRODUCT) {
        c[0] = static_cast<float>(w.x ^ w.y ^ w.z ^ w.w ^ x.x ^ x.y ^ x.z ^ x.w);
    } else {
        mma_bf16(c, w.x, w.y, w.z, w.w, x.x ^ x.z, x.y ^ x.w);
    }
    global_store(p.sums + thread_index(), c[0] + c[1] + c[2] + c[3]);
    if (LACKS != ADD) add_release(p.counters, 1);
    if (LACKS != LOAD) {
        while (load_acquire(p.counters) == 0) {
        }
    }
}

// A hundred values that must all be kept across a barrier.
DEVICE void keep(const Params& p) {
    uint32_t value[100];
#pragma unroll
    for (int i = 0; i < 100; ++i) value[i] = load_acquire(p.counters + i * 1024 + thread_index());
    barrier_sync(0, 256);
#pragma unroll
    for (int i = 0; i < 100; ++i) add_release(p.counters + thread_index(), value[i]);
}

KERNEL(complete, Params, 256) { work<NOTHING>(p); }
KERNEL(no_wait, Params, 256) { work<WAIT>(p); }
KERNEL(no_allow, Params, 256) { work<ALLOW>(p); }
KERNEL(no_add, Params, 256) { work<ADD>(p); }
KERNEL(no_load, Params, 256) { work<LOAD>(p); }
KERNEL(no_copy, Params, 256) { work<COPY>(p); }
KERNEL(no_elect, Params, 256) { work<ELECT>(p); }
KERNEL(no_barrier, Params, 256) { work<BARRIER>(p); }
KERNEL(no_product, Params, 256) { work<PRODUCT>(p); }
KERNEL(narrow_shared, Params, 256) { work<WIDE_SHARED>(p); }
KERNEL(narrow_global, Params, 256) { work<WIDE_GLOBAL>(p); }
KERNEL(spilling, Params, 1024) {
    work<NOTHING>(p);
    keep(p);
}
KERNEL(many_registers, Params, 256) {
    work<NOTHING>(p);
    keep(p);
}
KERNEL(local_array, Params, 256) {
    work<NOTHING>(p);
    uint32_t table[64];
    for (int i = 0; i < 64; ++i) table[i] = load_acquire(p.counters + i);
    add_release(p.counters + 64, table[load_acquire(p.counters + 65) % 64]);
}
KERNEL(static_shared, Params, 256) {
    work<NOTHING>(p);
    __shared__ uint32_t table[10240];
    table[thread_index()] = load_acquire(p.counters);
    barrier_sync(0, 256);
    add_release(p.counters, table[load_acquire(p.counters + 1) % 10240]);
}
"""

CODE_FAULTS = {
    "complete": None,
    "no_wait": "no griddepcontrol.wait",
    "no_allow": "no griddepcontrol.launch_dependents",
    "no_add": "no releasing add",
    "no_load": "no acquiring load",
    "no_copy": "no bulk copy",
    "no_elect": "issues 1 bulk copies in a loop over the lanes",
    "no_barrier": "no transaction barrier",
    "no_product": "no tensor-core product",
    "narrow_shared": "no 16-byte shared load",
    "narrow_global": "no 16-byte global load",
    "spilling": "accesses to local memory",
    "many_registers": None,
    "local_array": "accesses to local memory",
    "static_shared": None,
}


@dataclass(frozen=True)
class Small:
    """Stands for an instance."""

    threads: int = 256
    shared: int = 2048
    source: str = "small.cu"
    kernels: tuple[str, ...] = tuple(CODE_FAULTS)
    sms: int = 1

    @property
    def shared_offsets(self) -> dict[str, int]:
        return {"SHARED_BYTES": self.shared}

    def header(self) -> str:
        return ""

    def describe(self) -> str:
        return "small kernels"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Artifact]]:
    """The small kernels, compiled for a target."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(building.source_directory() / "instr", folder / "instr")
    (folder / "small.cu").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "source_directory", lambda: folder)
        patch.setenv("SGL_MUSE_MEGA_CACHE", str(folder / "cache"))
        yield request.param, build(Small(), request.param)


def test_what_a_kernel_lacks_is_found_in_its_machine_code(
    small: tuple[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, artifact = small
    monkeypatch.setattr(inspection, "EXPECTED", dict.fromkeys(CODE_FAULTS, WHOLE))
    code = disassemble(artifact.path)
    faults = code_faults(Small(), code, target)
    for kernel, words in CODE_FAULTS.items():
        found = [fault for fault in faults if fault.startswith(f"{kernel} ")]
        assert len(found) == (words is not None), (kernel, found)
        assert words is None or words in found[0]
        assert words is None or found[0].count("no ") == words.count("no ")  # nothing else is missing
    other = next(name for name in ARCHITECTURES if name != target)
    assert code_faults(Small(), code, other)[0] == f"the machine code is for {target}, not for {other}"
    assert code_faults(replace(Small(), kernels=("absent",)), code, target)[0] == "absent is not in the machine code"


def test_spills_stack_registers_and_shared_memory_are_found_in_the_report(small: tuple[str, Artifact]) -> None:
    resources = {r.name: r for r in small[1].resources()}
    assert set(resources) == set(CODE_FAULTS)
    assert resources["spilling"].spill_stores > 0
    assert resources["local_array"].stack >= 64 * 4
    assert resources["local_array"].spill_stores == 0
    assert resources["many_registers"].registers > register_limit(1024)
    assert resources["static_shared"].shared >= 40960

    def faulty(instance: Small) -> set[str]:
        return {fault.split()[0] for fault in resource_faults(instance, list(resources.values()))}

    always = {"spilling", "local_array"}
    assert faulty(Small()) == always
    assert faulty(replace(Small(), shared=200 * 1024)) == always | {"static_shared"}
    assert faulty(replace(Small(), threads=1024)) == always | {"many_registers"}
    assert faulty(replace(Small(), kernels=("absent",))) == always | {"absent"}


@pytest.mark.parametrize(("threads", "limit"), [(256, 255), (257, 168), (352, 168), (384, 168), (512, 128), (1024, 64)])
def test_register_limit(threads: int, limit: int) -> None:
    """What ptxas itself keeps to under __launch_bounds__(threads, 1)."""
    assert register_limit(threads) == limit


LINES = {
    "ACQBULK": "griddepcontrol.wait",
    "PREEXIT": "griddepcontrol.launch_dependents",
    "REDG.E.ADD.STRONG.GPU desc[UR8][R2.64], R5": "releasing add",
    "LDG.E.STRONG.GPU R4, desc[UR4][R2.64]": "acquiring load",
    "UBLKCP.S.G [UR4], [UR6], UR8, desc[UR10]": "bulk copy",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3": "transaction barrier",
    "HMMA.16816.F32.BF16 R4, R8, R2, R4": "tensor-core product",
    "LDS.128 R8, [R3+0x400]": "16-byte shared load",
    "LDG.E.128.CONSTANT R8, desc[UR4][R2.64]": "16-byte global load",
}
NEAR_MISSES = (
    "UBLKPF.L2 [UR4], UR6", "LDS.64 R8, [R3]", "LDG.E.64 R8, desc[UR4][R2.64]", "STS.128 [R3], R8",
    "HMMA.16816.F32 R4, R8, R2, R4", "LDGSTS.E.128 [R3], desc[UR4][R2.64]", "LDC R1, c[0x0][0x28]",
)  # fmt: skip


def listing(instructions: list[str], target: str = "sm_90a") -> str:
    lines = [f"\t.target\t{target}", '\t.section\t.text.layer_kernel,"ax",@progbits', "layer_kernel:"]
    return "\n".join(
        lines + [f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(instructions)]
    )


def read(instructions: list[str]) -> MachineCode:
    return inspection.read_machine_code(listing(instructions))


LAYER = replace(Small(), kernels=("layer_kernel",))


@given(st.sets(st.sampled_from(sorted(LINES))), st.lists(st.sampled_from(NEAR_MISSES)), st.randoms())
def test_exactly_the_missing_instructions_are_named(present: set[str], others: list[str], random: object) -> None:
    instructions = [*present, *others]
    random.shuffle(instructions)  # type: ignore[attr-defined]
    absent = [words for text, words in LINES.items() if text not in present]
    expected = [f"layer_kernel holds no {', no '.join(absent)}"] if absent else []
    assert code_faults(LAYER, read(instructions), "sm_90a") == expected


@given(
    st.sampled_from(["LDL R3, [R1]", "STL [R1+0x8], R0", "LDL.LU.64 R8, [R1]", "STL.128 [R1], R4"]),
    st.sampled_from(["", "@P0 ", "@!PT ", "@!UP3 "]),
)
def test_local_memory_is_seen_behind_every_predicate(access: str, predicate: str) -> None:
    faults = code_faults(LAYER, read([*LINES, predicate + access]), "sm_90a")
    assert faults == ["layer_kernel holds 1 accesses to local memory (LDL, STL)"]


def test_every_kernel_has_expectations() -> None:
    from sgl_muse_mega.megakernel.accept_instance import AcceptInstance
    from sgl_muse_mega.megakernel.draft_instance import DraftInstance
    from sgl_muse_mega.megakernel.instance import Instance
    from sgl_muse_mega.megakernel.server_instance import ServerInstance

    instances = (Instance, DraftInstance, AcceptInstance, ServerInstance)
    assert set(inspection.EXPECTED) == {name for instance in instances for name in instance.kernels}
