"""`sgl-muse-mega build`: compile the target's kernels ahead of time and report what the compiler made of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.config import TargetConfig, load_target_config
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.backend import ROW_CAPS
from sgl_muse_mega.megakernel.build import HOPPER, Artifact, build
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.toolchain import cache_directory

HOPPER_SMS = 132


def instances(config: TargetConfig, *, sms: int, ranks: int, kv_dtypes: tuple[str, ...]) -> list[Instance]:
    """Every instance that a server of this model may load on one of `ranks` ranks.

    Raises UserError when the experts do not divide or a size does not fit the kernels.
    """
    if ranks < 1 or config.num_local_experts % ranks:
        raise UserError(f"{config.num_local_experts} experts do not divide among {ranks} ranks; change --ranks.")
    kinds = sorted({config.nvfp4_experts(layer) for layer in range(config.num_hidden_layers)})
    return [
        Instance.for_config(
            config, nvfp4=nvfp4, fp8_cache=kv_dtype == "fp8", row_cap=row_cap, sms=sms,
            ranks=ranks,
        )
        for nvfp4 in kinds
        for kv_dtype in kv_dtypes
        for row_cap in ROW_CAPS
    ]  # fmt: skip


def run(
    model: Path | None, *, target: str = HOPPER, sms: int = HOPPER_SMS, ranks: int = 1, kv_cache_dtype: str = "both"
) -> int:
    """Build what is missing, print registers, shared memory and spills per kernel; 0, or 1 when a kernel spills."""
    choices = {"both": ("bf16", "fp8"), "bf16": ("bf16",), "fp8": ("fp8",)}
    if kv_cache_dtype not in choices:
        raise UserError(f"There is no KV cache type {kv_cache_dtype!r}; use bf16, fp8 or both.")
    config = load_target_config(model or tiny.target_directory())
    wanted = instances(config, sms=sms, ranks=ranks, kv_dtypes=choices[kv_cache_dtype])
    console = Console()

    def one(instance: Instance) -> Artifact:
        return build(instance, target, lambda message: console.print(message, style="dim", soft_wrap=True))

    with ThreadPoolExecutor(max_workers=4) as pool:
        artifacts = list(pool.map(one, wanted))
    spilled = 0
    table = Table(title=f"{len(wanted)} instances for {target} in {cache_directory()}")
    for heading in ("experts", "cache", "rows", "kernel", "registers", "shared", "spills", "time"):
        table.add_column(heading, no_wrap=True)
    for instance, artifact in zip(wanted, artifacts, strict=True):
        for kernel in artifact.resources():
            lost = kernel.spill_stores + kernel.stack
            spilled += lost > 0
            table.add_row(
                "NVFP4" if instance.nvfp4 else "BF16",
                "fp8" if instance.fp8_cache else "bf16",
                f"1-{instance.row_cap}",
                kernel.name,
                str(kernel.registers),
                f"{instance.shared_offsets['SHARED_BYTES'] / 1024:.0f} KiB",
                f"{lost} B" if lost else "none",
                f"{artifact.seconds:.1f} s" if artifact.seconds else "cache",
            )
    console.print(table)
    if spilled:
        console.print(f"{spilled} kernels keep registers in memory; they are refused at load.", style="bold red")
    return 1 if spilled else 0
