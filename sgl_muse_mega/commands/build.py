"""`sgl-muse-mega build`: compile a pair's kernels ahead of time, look at what the compiler made of them, and refuse it
where it is not what they were written for."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair, load_draft_config, load_target_config
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import inspection
from sgl_muse_mega.megakernel.accept_instance import AcceptInstance
from sgl_muse_mega.megakernel.build import ARCHITECTURES, HOPPER, Artifact, build
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.inspection import MachineCode
from sgl_muse_mega.megakernel.instance import HOPPER_SMS, ROW_CAPS, Instance
from sgl_muse_mega.megakernel.server_instance import ServerInstance
from sgl_muse_mega.toolchain import cache_directory, find_nvdisasm

MOST_SMS = 1024  # of any GPU; from here on a typing error


def instances(
    config: TargetConfig, draft: DraftConfig | None, *, sms: int, ranks: int, kv_dtypes: tuple[str, ...]
) -> dict[str, Compiled]:
    """Every instance that a server of this pair may load on one of `ranks` ranks, by a name for tables.

    Raises UserError when the experts do not divide or a size does not fit the kernels.
    """
    if ranks < 1 or config.num_local_experts % ranks:
        raise UserError(f"{config.num_local_experts} experts do not divide among {ranks} ranks; change --ranks.")
    kinds = sorted({config.nvfp4_experts(layer) for layer in range(config.num_hidden_layers)})
    found: dict[str, Compiled] = {
        f"{'NVFP4' if nvfp4 else 'BF16'} {kv_dtype} {row_cap}": Instance.for_config(
            config, nvfp4=nvfp4, fp8_cache=kv_dtype == "fp8", row_cap=row_cap, sms=sms,
            ranks=ranks,
        )
        for nvfp4 in kinds
        for kv_dtype in kv_dtypes
        for row_cap in ROW_CAPS
    }  # fmt: skip
    for row_cap in ROW_CAPS:
        if draft:
            found[f"draft {row_cap}"] = DraftInstance.for_config(
                draft, TargetEnds.of(config), row_cap=row_cap, sms=sms, ranks=ranks
            )
        found[f"accept {row_cap}"] = AcceptInstance.for_sms(
            sms, vocab=config.vocab_size, selector_k=draft.selector_top_k if draft else 1,
            softcap=config.final_logit_softcapping, row_cap=row_cap, ranks=ranks,
        )  # fmt: skip
        found[f"server {row_cap}"] = ServerInstance(row_cap, sms)
    return found


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled instance with its machine code (None without a disassembler), and why it is refused."""

    instance: Compiled
    artifact: Artifact
    code: MachineCode | None
    faults: list[str]


def build_and_inspect(instance: Compiled, target: str, console: Console) -> Built:
    """Compile unless it is in the cache; all gates that this machine has the tools for."""
    artifact = build(instance, target, lambda message: console.print(message, style="dim", soft_wrap=True))
    faults = inspection.resource_faults(instance, artifact.resources())
    code = inspection.disassemble(artifact.path) if find_nvdisasm().path else None
    if code:
        faults += inspection.code_faults(instance, code, target)
    return Built(instance, artifact, code, faults)


def run(
    model: Path | None,
    draft: Path | None = None,
    *,
    target: str = HOPPER,
    sms: int = HOPPER_SMS,
    ranks: int = 1,
    kv_cache_dtype: str = "both",
) -> int:
    """Build what is missing, print what each kernel takes and holds; 0, or 1 when a kernel is refused.

    draft: None is the bundled draft for the bundled target, and none for another.
    """
    choices = {"both": ("bf16", "fp8"), "bf16": ("bf16",), "fp8": ("fp8",)}
    if kv_cache_dtype not in choices:
        raise UserError(f"There is no KV cache type {kv_cache_dtype!r}; use bf16, fp8 or both.")
    if target not in ARCHITECTURES:
        raise UserError(f"The kernels are not written for {target!r}; --arch can be {' or '.join(ARCHITECTURES)}.")
    if not 1 <= sms <= MOST_SMS:
        raise UserError(f"A GPU has 1 to {MOST_SMS} SMs, {sms} were asked for; change --sms.")
    config = load_target_config(model or tiny.target_directory())
    draft_directory = draft or (None if model else tiny.draft_directory())
    draft_config = load_draft_config(draft_directory) if draft_directory else None
    if draft_config:
        check_pair(config, draft_config)
    wanted = instances(config, draft_config, sms=sms, ranks=ranks, kv_dtypes=choices[kv_cache_dtype])
    console = Console()
    with ThreadPoolExecutor(max_workers=4) as pool:
        built = list(pool.map(lambda instance: build_and_inspect(instance, target, console), wanted.values()))
    console.print(_table(dict(zip(wanted, built, strict=True)), target))
    return _verdict(console, built, target)


def _table(built: dict[str, Built], target: str) -> Table:
    title = f"{len(built)} instances for {target} in {cache_directory()}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("up to rows", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    for heading in ("regs", "shared", "local", "bulk", "mma", "16 B", "time"):
        table.add_column(heading, no_wrap=True, justify="right")
    counted = (inspection.BULK_COPY, inspection.TENSOR_PRODUCT, inspection.WIDE_LOAD)
    for name, one in built.items():
        shared = one.instance.shared_offsets["SHARED_BYTES"]
        for kernel in one.artifact.resources():
            lost = kernel.spill_stores + kernel.stack
            table.add_row(
                name,
                kernel.name.removesuffix("_kernel"),
                str(kernel.registers),
                f"{(shared + kernel.shared) / 1024:.0f} KiB",
                f"{lost} B" if lost else "none",
                *(str(one.code.count(kernel.name, pattern)) if one.code else "?" for pattern in counted),
                f"{one.artifact.seconds:.1f} s" if one.artifact.seconds else "cache",
            )
    return table


def _verdict(console: Console, built: list[Built], target: str) -> int:
    faults = [fault for one in built for fault in one.faults]
    for fault in faults:
        console.print(f"Refused: {fault}.", style="bold red", soft_wrap=True, highlight=False)
    if any(one.code is None for one in built):
        console.print(f"The instructions were not inspected: nvdisasm: {find_nvdisasm().source}.", style="yellow")
    elif not faults:
        console.print("All gates hold: no local memory, registers and shared memory fit, expected instructions there.")
    if target != HOPPER:
        console.print(f"{target}: compiled and inspected only; these kernels have never run on such a GPU.")
    return 1 if faults else 0
