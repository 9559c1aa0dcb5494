"""`seqmoe trace`: import routing recorded elsewhere, show what a trace says, collect one."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from seqmoe.predictors.trace import TraceMeta
from seqmoe.predictors.trace_file import open_trace, parse_sequences, read_trace, write_trace
from seqmoe.predictors.trace_import import import_trace
from seqmoe.predictors.trace_stats import TraceStats, plot_stats, trace_stats
from seqmoe.profiles.cliutil import Command, Group, emit_json, json_option, progress_bar, require
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import check_output

# name -> (module:attribute, short help), for subcommands that need the engine
LAZY: dict[str, tuple[str, str]] = {
    # The name only: it is in the runtime, which has the engine.
    "collect": ("seqmoe.runtime.collect_cli:collect_command", "Run a model and record what its routers choose."),
}
GROUP_EXAMPLES = """\b
Examples:
  seqmoe trace import routing.npz gpt-oss-20b.safetensors --experts 32
  seqmoe trace stats gpt-oss-20b.safetensors --plot stats.png
"""
IMPORT_EXAMPLES = """\b
Examples:
  seqmoe trace import routing.npz trace.safetensors --experts 32 --model-name gpt-oss-20b
  seqmoe trace import routing.jsonl trace.safetensors

\b
JSON lines, one sequence a line; weights and tokens may be left out, of all lines alike:
  {"experts": [[[3, 17], [0, 5]], [[3, 9], [5, 2]]],
   "weights": [[[0.7, 0.3], [0.6, 0.4]], [[0.9, 0.1], [0.5, 0.5]]],
   "tokens": [1212, 11]}
that is experts[step][layer] = the k chosen, best first. An npz has the arrays expert_ids [steps, layers, k],
seq_start and seq_len [sequences], and where known expert_probs and token.
"""
STATS_EXAMPLES = """\b
Examples:
  seqmoe trace stats trace.safetensors
  seqmoe trace stats routing.npz --sequences 0:256 --residency 0.25,0.4375 --json
"""


@click.group("trace", cls=Group, lazy=LAZY, epilog=GROUP_EXAMPLES)
def trace_group() -> None:
    """Routing traces: which experts a router chose, step by step and layer by layer."""


@trace_group.command("import", cls=Command, epilog=IMPORT_EXAMPLES)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--experts", type=click.IntRange(1), help="Experts a layer. [default: as the file says, or highest id + 1]"
)
@click.option("--model-name", default="", help="Name of the model, kept in the file.")
@click.option("--digest", default="", help="The model's digest, which other commands then check.")
@json_option
def import_command(source: Path, out: Path, experts: int | None, model_name: str, digest: str, as_json: bool) -> int:
    """Turn SOURCE (.npz or .jsonl) into a trace file OUT (.safetensors). An OUT that is there is replaced."""
    require(out.suffix == ".safetensors", f"{out}: a trace file's name must end in .safetensors")
    check_output(out)
    replaces = out.exists()
    trace = import_trace(source, experts, TraceMeta(digest, model_name, source.name))
    write_trace(out, trace)
    open_trace(out)
    known = {"weights": trace.expert_weights is not None, "tokens": trace.tokens is not None}
    if as_json:
        sizes = {"sequences": trace.num_sequences, "steps": trace.num_steps, "layers": trace.num_layers}
        more = {"experts": trace.num_experts, "k": trace.top_k, "bytes": out.stat().st_size}
        emit_json({"path": str(out), "replaced": replaces, **sizes, **more, **known})
    else:
        extras = ", ".join(name if there else f"no {name}" for name, there in known.items())
        click.echo(
            f"{out}{' (replaced)' if replaces else ''}: {trace.num_sequences} sequences, {trace.num_steps} steps, {trace.num_layers} layers, "
            f"{trace.top_k} of {trace.num_experts} experts, {extras}, {out.stat().st_size / 2**20:.1f} MiB"
        )
    return 0


@trace_group.command("stats", cls=Command, epilog=STATS_EXAMPLES)
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--sequences", help="Only these, such as 0:256 (256 not included). [default: all]")
@click.option("--residency", help="Shares of the experts for the hit rates. [default: 16 steps from 0 to 1]")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot to this PNG file.")
@json_option
def stats_command(
    trace_path: Path, sequences: str | None, residency: str | None, plot: Path | None, as_json: bool
) -> int:
    """Overlap of consecutive steps, popularity and entropy per layer, and what LRU, Belady's optimum and a fixed choice would hit."""
    if plot:
        check_output(plot)
    chosen = parse_sequences(sequences) if sequences else None
    try:
        shares = [float(part) for part in residency.split(",")] if residency else None
    except ValueError:
        raise UsageError(f"--residency takes shares such as 0.25,0.44; got {residency!r}") from None
    trace = read_trace(trace_path, chosen)
    console = Console(stderr=True)
    with progress_bar(console, "replaying caches") as bar:
        task = bar.add_task("", total=trace.num_sequences)
        stats = trace_stats(trace, shares, lambda done, total: bar.update(task, completed=done))
    if plot:
        plot_stats(stats, plot)
    printer = console if as_json else Console()
    if not printer.is_terminal:
        printer = Console(width=140, stderr=as_json)
    printer.print(_layers_table(stats, trace_path))
    printer.print(_curves_table(stats))
    if as_json:
        emit_json(stats.to_dict())
    return 0


def _layers_table(stats: TraceStats, path: Path) -> Table:
    title = (
        f"{path.name}: {stats.sequences} sequences, {stats.steps} steps, {stats.layers} layers, "
        f"{stats.top_k} of {stats.experts} experts"
    )
    caption = (
        f"mean overlap {stats.overlap:.3f} (at random {stats.top_k / stats.experts:.3f}); "
        f"{stats.unused_experts} experts never chosen"
    )
    table = Table(title=title, caption=caption)
    for name in ("layer", "overlap", "entropy, bits", "most popular", "least popular"):
        table.add_column(name, justify="right")
    rows = zip(stats.overlap_by_layer, stats.entropy_bits_by_layer, stats.popularity, strict=True)
    for layer, (overlap, entropy, shares) in enumerate(rows):
        table.add_row(f"{layer}", f"{overlap:.3f}", f"{entropy:.2f}", f"{max(shares):.1%}", f"{min(shares):.2%}")
    return table


def _curves_table(stats: TraceStats) -> Table:
    caption = (
        "lru and belady (the optimum of such caches) start empty at every sequence; static: this very trace's most popular, "
        "known beforehand and loaded before the start, so it can be above belady"
    )
    table = Table(title="hit rate by residency", caption=caption)
    table.add_column("residency", justify="right")
    table.add_column("slots a layer", justify="right")
    for curve in stats.curves:
        table.add_column(f"{curve.policy}, {'pool' if curve.pool else 'per layer'}", justify="right")
    for i, slots in enumerate(stats.curves[0].slots):
        rates = [f"{curve.hit_rate[i]:.3f}" for curve in stats.curves]
        table.add_row(f"{stats.curves[0].residency[i]:.1%}", f"{slots}", *rates)
    return table
