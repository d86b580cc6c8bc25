"""One layer's timeline as a picture: the flow of weights under the roof, and what every CTA did."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_muse_mega.commands.layer.timeline import LaunchLog, Slice, WarpLog
from sgl_muse_mega.commands.layer.trace_events import label
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BIN_US = 2.0


def draw(path: Path, launch: LaunchLog, title: str) -> None:
    """Raises UserError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise UserError(
            "The picture needs matplotlib, which is not installed; run `pip install 'sgl-muse-mega[plot]'`."
        ) from error
    figure, (flow, math, loader) = pyplot.subplots(
        3, 1, figsize=(12, 9), sharex=True, height_ratios=(2, 4, 2), layout="constrained"
    )
    figure.suptitle(title)
    _draw_flow(flow, launch)
    names = list(
        dict.fromkeys(p.name for warp in (0, launch.math_warps) for w in launch.of_warp(warp) for p in w.phases)
    )
    colours = {name: pyplot.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    _draw_warps(math, launch, 0, colours)
    math.set_ylabel("CTA, math warp 0")
    _draw_warps(loader, launch, launch.math_warps, colours)
    loader.set_ylabel("CTA, weight loader")
    loader.set_xlabel("us from the first CTA's start; white: waiting")
    handles = [Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(handles, [label(name) for name in names], loc="outside lower center", ncols=7, fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_flow(axes: "Axes", launch: LaunchLog) -> None:
    """Weights taken up by the math warps, in GB/s."""
    us = (launch.end - launch.start) / 1e3
    bins = [0.0] * (int(us / _BIN_US) + 1)
    total = 0
    for ns, size, _ in launch.taken_up():
        bins[int((ns - launch.start) / 1e3 / _BIN_US)] += size / _BIN_US / 1e3
        total += size
    edges = [i * _BIN_US for i in range(len(bins) + 1)]
    axes.stairs(bins, edges, fill=True, color="tab:blue", alpha=0.7)
    axes.axhline(ROOF_GB_S, color="black", linestyle="--", linewidth=1)
    mean = total / us / 1e3
    axes.axhline(mean, color="tab:blue", linewidth=1)
    axes.set_ylabel("weights, GB/s")
    axes.set_title(
        f"{total / 1e6:.0f} MB in {us:.1f} us: {mean:.0f} GB/s, {mean / ROOF_GB_S:.2f} of the measured roof "
        f"({ROOF_GB_S:.0f}, dashed)", fontsize="medium",
    )  # fmt: skip


def _draw_warps(axes: "Axes", launch: LaunchLog, warp: int, colours: dict[str, Any]) -> None:
    """A line for each CTA; waits are white over the phase's colour."""
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    boxes: list[list[tuple[float, float]]] = []
    faces: list[Any] = []

    def add(log: WarpLog, stretch: Slice, face: Any) -> None:
        start, end = (stretch.start - launch.start) / 1e3, (stretch.end - launch.start) / 1e3
        boxes.append([(start, log.cta), (end, log.cta), (end, log.cta + 1), (start, log.cta + 1)])
        faces.append(face)

    for log in launch.of_warp(warp):
        for phase in log.phases:
            add(log, phase, colours[phase.name])
        for wait in log.waits:
            add(log, wait, (1, 1, 1, 0.75))
    axes.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="none"))
    axes.set_xlim(0, (launch.end - launch.start) / 1e3)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(max(log.cta for log in launch.warps) + 1, 0)
