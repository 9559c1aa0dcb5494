"""`seqmoe bench`: options, and where the results go. The measuring is in `bench.py`, the table in `bench_table.py`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

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
from seqmoe.profiles.files import check_output, check_writable, read_lines, write_atomic, write_error
from seqmoe.runtime.bench import MODES, BenchResult, plan_arms, run_bench
from seqmoe.runtime.bench_options import MODES_HELP, Given, changes_from_options, check_given, policy_options
from seqmoe.runtime.bench_table import bench_table
from seqmoe.runtime.jobs_process import run_job
from seqmoe.runtime.models import resolve_model

DEFAULT_PROMPTS = (
    "Once upon a time there was a machine that",
    "def read_lines(path):\n",
    "It was a dark morning, and the road to the harbour",
)
FOURTH_PROMPT = "The main reasons why rivers change their course are"  # for batches of more than three
FIGURE_NAMES = ("hit-rate", "evictions", "speed-of-full", "first-token", "breakdown", "stall-of-lru")


EPILOG = f"""\b
Examples:
  seqmoe bench --model demo
  seqmoe bench --model demo-xl --modes full,lru,seqmoe --residency 0.25,0.45 --predictor predictor/ --plot bench.png
  seqmoe bench --model ~/models/M --modes lru,lfu --memory 12GiB --repeats 5 --out bench.json
  seqmoe bench --model synthetic/ --modes full,lru,belady,moe-infinity,seqmoe --residency 0.15,0.25,0.45 \\
      --replay routing.npz --sequences 288:321 --predictor predictor/ --fit routing.npz --fit-sequences 0:256 \\
      --link dma:7GB/s,20us --figures figures/
  seqmoe bench --model demo-xl --modes full,lru,seqmoe --batch 1,2,4 --predictor predictor/ --k-prime 16 --no-restraint

\b
Modes:
{MODES_HELP}

\b
Those that forecast need --predictor, rivals a trace to --fit, those that know the future --replay.
"""


@click.command("bench", cls=Command, epilog=EPILOG, context_settings={"show_default": True})
@click.option("--model", default="demo", help="Name (demo, demo-xl) or checkpoint folder.")
@click.option("--modes", default="full,lru", help="Of those below, with commas.")
@click.option("--residency", default="0.25,0.45", help="Shares of the experts that are kept in memory.")
@click.option("--batch", default="1", help="Numbers of sequences that run together, such as 1,2,4.")
@click.option(
    "--memory", type=SIZE, help="Budget of each process, such as 2GiB; without --residency it sets the residency."
)
@click.option("--repeats", type=click.IntRange(1, 100), default=3, help="Runs of each arm.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line. [default: three or four built in]"
)
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, help="Per prompt.")
@click.option("--warmup-tokens", type=click.IntRange(0), default=16, help="Decoded before the clock starts.")
@click.option("--context", type=click.IntRange(1), default=2048, help="Tokens that the KV cache must hold.")
@click.option("--link", type=LINK, default="disk", help="disk, buffered, throttled:1.5GB/s,80us or dma:7GB/s,20us.")
@click.option("--predictor", help="Folder of `seqmoe train`, or with --fit a rival's name such as nearest-token.")
@click.option("--fit", type=click.Path(path_type=Path), help="Trace that rivals and popularity are fitted to.")
@click.option("--fit-sequences", help="Only these sequences of it, such as 0:256.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    help="Routing trace (.safetensors, .npz) that takes the router's place.",
)
@click.option("--sequences", help="Only these sequences of it, such as 288:321: one for each prompt, from its start.")
@policy_options
@click.option("--timeout", type=DURATION, default="20m", help="For one run.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON to this file too.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot to this PNG file.")
@click.option(
    "--figures",
    is_flag=False,
    flag_value="",
    metavar="[FOLDER]",
    help="Write the paper's figures as PNG files to this folder, or beside --plot's file.",
)
@knob_options(without=("policy", "slots"))  # --modes and --residency say these
@json_option
@click.pass_context
def bench_command(
    context_: click.Context,
    model: str,
    modes: str,
    residency: str,
    batch: str,
    memory: int | None,
    repeats: int,
    prompts: Path | None,
    max_new_tokens: int,
    warmup_tokens: int,
    context: int,
    link: Any,
    predictor: str | None,
    fit: Path | None,
    fit_sequences: str | None,
    replay: Path | None,
    sequences: str | None,
    timeout: float,
    out: Path | None,
    plot: Path | None,
    figures: str | None,
    as_json: bool,
    **others: Any,
) -> int:
    """Compare modes at several residencies and batch sizes in one run: interleaved, each run in a fresh process.

    Exits with 1 when an arm failed (the table says why) or when arms gave different tokens.
    """
    residency_given = context_.get_parameter_source("residency") != click.core.ParameterSource.DEFAULT
    shares = [] if memory is not None and not residency_given else _numbers(residency, "--residency")
    batches = [int(number) for number in _numbers(batch, "--batch")]
    names = [mode.strip() for mode in modes.split(",") if mode.strip()]
    require(bool(names), f"--modes is empty; it takes {', '.join(MODES)}")
    require(bool(batches), "--batch is empty; it takes numbers such as 1,2,4")
    arms = plan_arms(names, shares, batches)
    given = Given(predictor, fit, fit_sequences, replay, sequences)
    replayed = check_given(given, arms)
    for target in (out, plot):  # found out before an hour of measuring, not after
        if target is not None:
            check_output(target)
    targets = _figure_files(figures, plot)
    texts = read_prompts(prompts) if prompts else list(DEFAULT_PROMPTS)
    if not prompts and max(batches) > len(texts):
        texts.append(FOURTH_PROMPT)
    if sequences:  # each of them has its prompt
        texts = [texts[i % len(texts)] for i in range(max(len(texts), replayed))]
    console = Console(stderr=True)
    job: dict[str, Any] = {
        "model": _written(model, console),
        "knobs": knobs_from_options(others).to_dict(),
        "memory_bytes": memory,
        "context": context,
        "prompts": texts,
        "max_new_tokens": max_new_tokens,
        "warmup_tokens": warmup_tokens,
        "link": str(link),
        "policy": changes_from_options(others).to_dict(),
        **given.job(),
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
    _write(result, out, plot, targets)
    printer = console if as_json else Console()
    if not printer.is_terminal:
        printer = Console(width=220, stderr=as_json)  # for a file or a pipe: a table's rows on one line each
    printer.print(bench_table(result))
    for arm in result.arms:
        for text in arm.notices:
            console.print(f"{arm.arm.label}: {text}", markup=False)
    if differ := result.tokens_differ():
        console.print(f"error: other tokens than the first arm's: {', '.join(differ)}", style="red", markup=False)
    if as_json:
        emit_json(result.to_dict())
    return result.exit_code


def _figure_files(figures: str | None, plot: Path | None) -> dict[str, Path] | None:
    """Where each of the figures goes; checked, and the folder made. UsageError for a place that cannot be."""
    if figures is None:
        return None
    if figures == "":
        require(
            plot is not None, "--figures takes a folder, or stands beside --plot, whose name its files then begin with"
        )
        assert plot is not None
        files = {name: plot.with_name(f"{plot.stem}-{name}.png") for name in FIGURE_NAMES}
    else:
        folder = Path(figures)
        require(folder.is_dir() or not folder.exists(), f"--figures {folder}: a file has that name; give a folder")
        if not folder.parent.is_dir():
            raise UsageError(f"--figures {folder}: {folder.parent} does not exist: make that folder first")
        files = {name: folder / f"{name}.png" for name in FIGURE_NAMES}
    for path in files.values():
        check_writable(path)
    return files


def _write(result: BenchResult, out: Path | None, plot: Path | None, targets: dict[str, Path] | None) -> None:
    if out:
        write_atomic(out, json.dumps(result.to_dict(), indent=1) + "\n")
    if not plot and not targets:
        return
    from seqmoe.runtime.bench_plot import plot_bench, plot_figures  # matplotlib takes a second to import

    try:
        if plot:
            plot_bench(result, plot)
        if targets:
            plot_figures(result, targets)
    except OSError as error:
        raise write_error(Path(error.filename or plot or "--figures"), error) from None


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises UsageError."""
    prompts = read_lines(path, "--prompts")
    require(bool(prompts), f"--prompts {path}: no prompt in it; it takes one a line")
    return prompts


def _numbers(text: str, option: str) -> list[float]:
    kind, example = (int, "numbers such as 1,2,4") if option == "--batch" else (float, "shares such as 0.25,0.45")
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option} takes {example}; got {text!r}") from None


def _written(model: str, console: Console) -> str:
    """The model as it was named, known to be there: demo-xl is written here, once, not within the first run's time."""
    columns = (TextColumn("writing the model"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        resolve_model(model, progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True))
    return model
