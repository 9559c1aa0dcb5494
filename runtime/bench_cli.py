"""`seqmoe bench`: options, the table, and where the results go. The measuring is in `bench.py`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seqmoe.profiles.cliutil import (
    DURATION,
    LINK,
    SIZE,
    Command,
    emit_json,
    json_option,
    knob_options,
    knobs_from_options,
    progress_bar,
    require,
)
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import check_output, read_lines, write_atomic, write_error
from seqmoe.runtime.bench import FIGURES, MODES, ArmResult, BenchResult, Spread, plan_arms, run_bench
from seqmoe.runtime.jobs_process import run_job
from seqmoe.runtime.models import model_id, resolve_model

DEFAULT_PROMPTS = (
    "Once upon a time there was a machine that",
    "def read_lines(path):\n",
    "It was a dark morning, and the road to the harbour",
)


EPILOG = """\b
Examples:
  seqmoe bench --model demo
  seqmoe bench --model demo-xl --modes full,lru,static --residency 0.25,0.45 --plot bench.png
  seqmoe bench --model ~/models/M --modes lru,lfu --memory 12GiB --repeats 5 --out bench.json
  seqmoe bench --model synthetic/ --modes lru,belady --residency 0.25 --replay trace.safetensors
"""


@click.command("bench", cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@click.option("--model", default="demo", help="Name (demo, demo-xl) or checkpoint folder.")
@click.option("--modes", default="full,lru", help=f"Of {','.join(MODES)}.")
@click.option("--residency", default="0.25,0.45", help="Shares of the experts that are kept in memory.")
@click.option(
    "--memory", type=SIZE, help="Budget of each process, such as 2GiB; without --residency it sets the residency."
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, help="Runs of each arm.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line. [default: three built in]"
)
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, help="Per prompt.")
@click.option("--warmup-tokens", type=click.IntRange(0), default=16, help="Decoded before the clock starts.")
@click.option("--context", type=click.IntRange(1), default=2048, help="Tokens that the KV cache must hold.")
@click.option("--link", type=LINK, default="disk", help="disk, buffered, throttled:1.5GB/s,80us or dma:7GB/s,20us.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    help="Routing trace (.safetensors, .npz) that takes the router's place.",
)
@click.option("--timeout", type=DURATION, default="20m", help="For one run.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON to this file too.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot to this PNG file.")
@knob_options(without=("policy", "slots"))  # --modes and --residency say these
@json_option
@click.pass_context
def bench_command(
    context_: click.Context,
    model: str,
    modes: str,
    residency: str,
    memory: int | None,
    repeats: int,
    prompts: Path | None,
    max_new_tokens: int,
    warmup_tokens: int,
    context: int,
    link: Any,
    replay: Path | None,
    timeout: float,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    **knobs: Any,
) -> int:
    """Compare modes at several residencies in one run: interleaved, each run in a fresh process.

    Exits with 1 when an arm failed (the table says why) or when arms gave different tokens.
    """
    require(replay is None or replay.is_file(), f"--replay {replay}: no such file")
    for target in (out, plot):  # found out before an hour of measuring, not after
        if target is not None:
            check_output(target)
    given = context_.get_parameter_source("residency") != click.core.ParameterSource.DEFAULT
    shares = [] if memory is not None and not given else _numbers(residency)
    arms = plan_arms([mode.strip() for mode in modes.split(",") if mode.strip()], shares)
    require(bool(arms), f"--modes is empty; it takes {', '.join(MODES)}")
    require(replay is not None or all(arm.mode != "belady" for arm in arms), "mode belady needs --replay: it knows the future")
    texts = read_prompts(prompts) if prompts else list(DEFAULT_PROMPTS)
    console = Console(stderr=True)
    job: dict[str, Any] = {
        "model": _written(model, console),
        "knobs": knobs_from_options(knobs).to_dict(),
        "memory_bytes": memory,
        "context": context,
        "prompts": texts,
        "max_new_tokens": max_new_tokens,
        "warmup_tokens": warmup_tokens,
        "link": str(link),
        "replay": str(replay) if replay else None,
    }
    with progress_bar(console) as bar:
        task = bar.add_task("measuring")
        result = run_bench(
            job,
            arms,
            repeats,
            partial(run_job, timeout_s=timeout),
            lambda done, total, label: bar.update(task, completed=done, total=total, description=label or "done"),
        )
    if out:
        write_atomic(out, json.dumps(result.to_dict(), indent=1) + "\n")
    if plot:
        from seqmoe.runtime.bench_plot import plot_bench  # matplotlib takes a second to import

        try:
            plot_bench(result, plot)
        except OSError as error:
            raise write_error(plot, error) from None
    printer = console if as_json else Console()
    if not printer.is_terminal:
        printer = Console(width=140, stderr=as_json)  # for a file or a pipe: a table's rows on one line each
    printer.print(bench_table(result))
    if differ := result.tokens_differ():
        console.print(f"error: other tokens than the first arm's: {', '.join(differ)}", style="red", markup=False)
    if as_json:
        emit_json(result.to_dict())
    return result.exit_code


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises UsageError."""
    prompts = read_lines(path, "--prompts")
    require(bool(prompts), f"--prompts {path}: no prompt in it; it takes one a line")
    return prompts


def bench_table(result: BenchResult) -> Table:
    """One row an arm: medians, and the extremes where there are several repeats."""
    best = max((arm.spread(FIGURES["decode_tokens_per_s"]).median for arm in result.arms if arm.runs), default=0.0)
    caption = f"medians of {result.repeats}, \\[least - most]; MiB/token: experts loaded while decoding"
    table = Table(title=f"{escape(model_id(result.job['model']))}, link {result.job['link']}", caption=caption)
    for name in (
        "mode",
        "residency",
        "tokens/s",
        "of best",
        "hit rate",
        "MiB/token",
        "waiting",
        "first token",
        "peak RSS",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    if any(arm.error for arm in result.arms):
        table.add_column("failed", style="red", overflow="fold")
    for arm in result.arms:
        table.add_row(*_row(arm, best))
    return table


def _row(arm: ArmResult, best: float) -> list[str]:
    if not arm.runs:
        share = "" if arm.arm.residency is None else f"{arm.arm.residency:.0%}"
        return [arm.arm.mode, share, *[""] * 7, escape(arm.error or "")]
    speed, ttft = arm.spread(FIGURES["decode_tokens_per_s"]), arm.spread(FIGURES["ttft_s"])
    return [
        arm.arm.mode,
        f"{float(arm.runs[-1]['residency']):.1%}",
        _with_range(speed),
        f"{speed.median / best:.0%}" if best else "",
        f"{arm.spread(FIGURES['hit_rate']).median:.3f}",
        f"{arm.spread(FIGURES['read_mib_per_token']).median:.1f}",
        f"{arm.spread(FIGURES['stall_share']).median:.0%}",
        f"{ttft.median:.2f} s",
        f"{arm.spread(FIGURES['peak_rss_mib']).high:.0f} MiB",
        *([escape(arm.error)] if arm.error else []),
    ]


def _with_range(spread: Spread) -> str:
    text = f"{spread.median:.2f}"
    return text if len(spread.values) < 2 else escape(f"{text} [{spread.low:.2f} - {spread.high:.2f}]")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--residency takes shares such as 0.25,0.45; got {text!r}") from None


def _written(model: str, console: Console) -> str:
    """The model as it was named, known to be there: demo-xl is written here, once, not within the first run's time."""
    columns = (TextColumn("writing the model"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        resolve_model(model, progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True))
    return model
