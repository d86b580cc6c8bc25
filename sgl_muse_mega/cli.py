"""The command line: options and exit codes. What the commands do is in `commands`."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sgl_muse_mega.errors import UserError

if TYPE_CHECKING:
    from sgl_muse_mega.commands.pair import PairOptions

# torch takes seconds to import, so the commands are imported when one is run: --help is immediate.

BAD_INPUT = 2

app = typer.Typer(
    help="Muse Spark Open with its DFlash2 draft: generate, evaluate, build kernels, and look at this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[Path | None, typer.Option("--model", help="Target folder.", show_default="bundled tiny target")]
Draft = Annotated[Path | None, typer.Option("--draft", help="Draft folder.", show_default="bundled tiny draft")]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Decode one token a step, through the same verify.")]
Backend = Annotated[
    str, typer.Option("--backend", help="What runs the models: auto (reference), reference, cuda or emulator.")
]
KVCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="Target's KV cache: bf16 or fp8.")]
Width = Annotated[
    str | None,
    typer.Option(
        "--width",
        help="Verify width: rows a step, one more than drafts; auto chooses it in every step.",
        show_default="8, 1 without draft",
    ),
]
Tree = Annotated[bool, typer.Option("--tree", help="Verify the best branches of the draft's lattice, not one chain.")]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", help="Most rows of a tree.", show_default="the width, the draft's block with --width auto"),
]
CostTable = Annotated[
    Path | None,
    typer.Option(
        "--cost-table",
        help='For --width auto: JSON {"1": ms, "8": ms, ...}, a step\'s by rows, or a file of bench step --costs.',
        show_default="steps of one H200 of four",
    ),
]
Ranks = Annotated[int, typer.Option("--ranks", help="GPUs that share the models, 1, 2, 4 or 8; with --backend cuda.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Nucleus mass, above 0; 1 is off.")]
TopK = Annotated[int, typer.Option("--top-k", help="Most likely ids to keep; 0 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Least probability relative to the largest; 0 is off.")]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same text.")]
Save = Annotated[bool, typer.Option("--save", help="Write the results and the named figures.")]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.", show_default=False)] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="UTF-8 file with the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest output.")] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind stop tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: text, ids, stats.")] = False,
    model: Model = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    width: Width = None,
    tree: Tree = False,
    nodes: Nodes = None,
    cost_table: CostTable = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    backend: Backend = "auto",
    kv_cache_dtype: KVCacheDtype = "bf16",
    ranks: Ranks = 1,
) -> None:
    """Continue a prompt and stream the text; the last line tells tokens, steps, accept length and speed."""
    from sgl_muse_mega.commands import generate as command
    from sgl_muse_mega.speculative.sampling import SamplingParams

    code = command.run(
        prompt,
        prompt_file,
        _pair_options(model, draft, no_draft, backend, kv_cache_dtype, width, tree, nodes, cost_table, ranks),
        SamplingParams(temperature, top_p, top_k, min_p, seed),
        max_new_tokens=max_new_tokens,
        raw=raw,
        ignore_eos=ignore_eos,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command(name="eval")
def evaluate(
    file: Annotated[Path | None, typer.Argument(help="Problems in GSM8K's form.", show_default="bundled")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first N.", show_default="all")] = None,
    save: Save = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest output of a problem.")] = 512,
    model: Model = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    width: Width = None,
    tree: Tree = False,
    nodes: Nodes = None,
    cost_table: CostTable = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the first problem; the others count up.")] = 0,
    backend: Backend = "auto",
    kv_cache_dtype: KVCacheDtype = "bf16",
    ranks: Ranks = 1,
) -> None:
    """Measure exact answers and accept length on JSON lines with "question" and "answer"."""
    from sgl_muse_mega.commands import evaluate as command
    from sgl_muse_mega.speculative.sampling import SamplingParams

    code = command.run(
        file,
        _pair_options(model, draft, no_draft, backend, kv_cache_dtype, width, tree, nodes, cost_table, ranks),
        SamplingParams(temperature, top_p, top_k, min_p, seed),
        limit=limit,
        max_new_tokens=max_new_tokens,
        save=save,
    )
    raise typer.Exit(code)


bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command(name="layer")
def bench_layer(
    rows: Annotated[str, typer.Option("--rows", help="Rows of a launch, with commas.")] = "1,4,8,16",
    layers: Annotated[int, typer.Option("--layers", help="Layers of the chain, all different.")] = 8,
    context: Annotated[int, typer.Option("--context", help="Committed positions.")] = 2048,
    bf16_experts: Annotated[bool, typer.Option("--bf16-experts", help="Instead of NVFP4 ones.")] = False,
    kv_cache_dtype: KVCacheDtype = "fp8",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            help="Another arm, taken in turn: NAME:ITEM,ITEM@CHECKOUT. An item is a field of the kernels' instance "
            "(math_warps=12) or a macro (DEPTH=3); items and checkout may be left out.",
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Another arm: the same phases as separate kernels with PDL.")
    ] = False,
    stock: Annotated[
        Path | None, typer.Option("--stock", help="What benchmark/stock_layer.py wrote, to stand beside.")
    ] = None,
    turns: Annotated[int, typer.Option("--turns", help="Turns of each arm.")] = 6,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed replays of the chain a turn.")] = 8,
    draws: Annotated[int, typer.Option("--draws", help="Different rows, and so routings, taken in turn.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, context and rows.")] = 1,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks",
            help="One rank of 2, 4 or 8 with split projections, which exchanges with itself; 1: the heads and experts "
            "of one rank of four, whole projections, no exchange.",
        ),
    ] = 4,
    check: Annotated[bool, typer.Option(help="Compare stages with the reference, and bits between arms.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="A small model on the emulator; its times say nothing.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a timeline for Perfetto (.json or .json.gz).")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw one layer's timeline (.png, .svg).")] = None,
    trace_arm: Annotated[str, typer.Option("--trace-arm", help="Which arm these show, by its name.")] = "this",
    save: Save = False,
) -> None:
    """Time layers of one rank at full size against the memory roof."""
    from sgl_muse_mega.commands import bench_layer as command

    options = command.Options(
        command.numbers(rows), layers, context, bf16_experts, kv_cache_dtype, tuple(variant or ()), turns, repeats,
        draws, seed, check, dry_run, save, control, stock, trace, picture, ranks, trace_arm,
    )  # fmt: skip
    raise typer.Exit(command.run(options))


@bench.command(name="step")
def bench_step(
    layers: Annotated[int, typer.Option("--layers", help="Layers of the target.")] = 14,
    rank_of: Annotated[int, typer.Option("--rank-of", help="Ranks that share heads and experts.")] = 4,
    width: Annotated[str, typer.Option("--width", help="Verify width; auto: times by the rows that count.")] = "8",
    tree: Annotated[bool, typer.Option("--tree", help="Times of token trees, not of parts.")] = False,
    nodes: Nodes = None,
    costs: Annotated[Path | None, typer.Option("--costs", help="--width auto: a file for --cost-table.")] = None,
    context: Annotated[int, typer.Option("--context", help="Committed positions at the start.")] = 2048,
    accept_length: Annotated[float, typer.Option("--accept-length", help="Tokens per step, for tokens/s.")] = 4.0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed replays of every part.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Of the random weights.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --tree or --width auto: the bundled pair on the emulator.")
    ] = False,
    save: Save = False,
) -> None:
    """Time a whole decode step and its parts on random weights of Muse Spark's sizes."""
    from sgl_muse_mega.commands import bench_rows
    from sgl_muse_mega.commands import bench_step as command

    rows = 8 if width == "auto" else _whole_width(width)
    options = command.Options(layers, rank_of, rows, context, accept_length, temperature, top_p, repeats, seed, save)
    if tree or width == "auto":
        chosen = bench_rows.options_of(options, width, tree=tree, nodes=nodes, costs=costs, dry_run=dry_run)
        raise typer.Exit(bench_rows.run(chosen))
    if dry_run or nodes is not None or costs is not None:
        raise UserError("--dry-run, --nodes and --costs are for --tree and --width auto; add one of them.")
    raise typer.Exit(command.run(options))


@app.command()
def build(
    model: Model = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", help="Draft folder.", show_default="bundled with the bundled target")
    ] = None,
    target: Annotated[str, typer.Option("--arch", help="GPU architecture: sm_90a or sm_103a.")] = "sm_90a",
    sms: Annotated[int, typer.Option("--sms", help="SMs of the GPU; the kernels run one CTA on each.")] = 132,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks that share the experts.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="bf16, fp8 or both.")] = "both",
) -> None:
    """Compile a pair's kernels ahead of time; print and check what each takes and which instructions it holds."""
    from sgl_muse_mega.commands import build as command

    raise typer.Exit(command.run(model, draft, target=target, sms=sms, ranks=ranks, kv_cache_dtype=kv_cache_dtype))


@app.command()
def doctor() -> None:
    """Tell what this machine has for building and running the kernels, one line each."""
    from sgl_muse_mega.commands import doctor as command

    raise typer.Exit(command.run())


def main() -> None:
    """Entry point.

    Exit codes: 0; 1 when the reader of a pipe has gone; 2 for input that cannot be served or output that cannot be
    written, with one sentence on stderr; 130 after Ctrl-C.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        print("Error: Standard output is closed; redirect it to /dev/null instead.", file=sys.stderr)
        sys.exit(BAD_INPUT)
    for stream in (sys.stdout, sys.stderr):
        # a terminal that cannot show a character gets an escape, not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="sgl-muse-mega")
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except OSError as error:
        print(f"Error: {error.filename or 'The output'} cannot be used: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered cannot be written either
        sys.exit(BAD_INPUT)
    except Exception:
        if interrupted:  # extension modules turn an interrupt in the middle of an import or a read into other errors
            sys.exit(130)
        raise


def _pair_options(
    model: Path | None,
    draft: Path | None,
    no_draft: bool,
    backend: str,
    kv_cache_dtype: str,
    width: str | None,
    tree: bool,
    nodes: int | None,
    cost_table: Path | None,
    ranks: int,
) -> "PairOptions":
    from sgl_muse_mega.commands.pair import PairOptions

    automatic = width == "auto"
    rows = None if width is None or automatic else _whole_width(width)
    return PairOptions(model, draft, no_draft, backend, kv_cache_dtype, rows, automatic, tree, nodes, cost_table, ranks)


def _whole_width(width: str) -> int:
    try:
        return int(width)
    except ValueError:
        raise UserError(f"The verify width is a number or auto, found {width!r}; change --width.") from None


if __name__ == "__main__":
    main()
