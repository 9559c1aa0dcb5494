"""`seqmoe train`: options, progress, and what is printed. The training is in `train.py`."""

import dataclasses
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from seqmoe.predictors.batches import Vocabulary
from seqmoe.predictors.seq2seq import Seq2SeqConfig, check_split, hidden_for_budget
from seqmoe.predictors.seq2seq_file import PredictorInfo, check_fits
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import parse_sequences, read_trace
from seqmoe.predictors.train import Trainer, TrainResult, joined
from seqmoe.predictors.train_options import TrainOptions
from seqmoe.predictors.train_state import CHECKPOINT
from seqmoe.predictors.train_state import Progress as TrainProgress
from seqmoe.profiles.cliutil import DURATION, SIZE, Command, emit_json, json_option, progress_bar, require
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import check_writable
from seqmoe.profiles.sizes import parse_bytes

DEFAULT_HIDDEN = 512
VALIDATION_SHARE = 9  # without --validation, one sequence in so many is held out
EXAMPLES = """\b
Examples:
  seqmoe train --traces trace.safetensors --out predictor
  seqmoe train --traces routing.npz --train 0:256 --validation 256:288 --tokens --budget 20m --out predictor
  seqmoe train --traces routing.npz --trigger-layers 12,24 --expert-bytes 11GiB --byte-budget 1% --out two
  seqmoe train --traces routing.npz --out predictor --resume
  torchrun --nproc-per-node 2 --no-python seqmoe train --traces routing.npz --out predictor
"""


@click.command("train", cls=Command, context_settings={"show_default": True}, epilog=EXAMPLES)
@click.option("--traces", required=True, type=click.Path(path_type=Path), help="Trace file (.safetensors, .npz).")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for predictor and checkpoint.")
@click.option("--trigger-layers", help="Ends of the layer groups, such as 12,24 for two. [default: one group]")
@click.option("--hidden", type=click.IntRange(32, 8192), help="Hidden size. [default: from --byte-budget, else 512]")
@click.option("--byte-budget", help="For all groups, in bytes or % of --expert-bytes, such as 8MiB. [default: 1%]")
@click.option("--expert-bytes", type=SIZE, help="Of all the model's experts, which % is taken of.")
@click.option("--blocks", type=click.IntRange(1, 8), default=1, help="Mamba2 blocks of each group.")
@click.option("--tokens/--no-tokens", default=False, help="Use the token about to be fed as an input.")
@click.option("--train", "train_part", help="Sequences to learn from, such as 0:256. [default: the others]")
@click.option("--validation", help="Sequences held out to choose by, such as 256:288. [default: one in nine]")
@click.option("--epochs", type=click.IntRange(1), default=TrainOptions.epochs, help="Passes, without --budget.")
@click.option("--budget", type=DURATION, help="Time for it, such as 20m; replaces --epochs.")
@click.option("--no-sampling", is_flag=True, help="Teacher forcing only, no scheduled sampling after it.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=TrainOptions.learning_rate)
@click.option("--routers", type=click.Path(path_type=Path), help="Routers' weights, from which adapters begin.")
@click.option("--adapters/--no-adapters", default=True, help="Train adapters too, where traces have router inputs.")
@click.option("--adapters-only", is_flag=True, help="Only the adapters of the predictor in --out.")
@click.option("--depth", type=click.IntRange(1), default=3, help="Layers ahead that an adapter looks.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--threads", type=click.IntRange(1), help="[default: all cores]")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in --out.")
@json_option
def train_command(
    traces: Path,
    out: Path,
    trigger_layers: str | None,
    hidden: int | None,
    byte_budget: str | None,
    expert_bytes: int | None,
    blocks: int,
    tokens: bool,
    train_part: str | None,
    validation: str | None,
    epochs: int,
    budget: float | None,
    no_sampling: bool,
    learning_rate: float,
    routers: Path | None,
    adapters: bool,
    adapters_only: bool,
    depth: int,
    seed: int,
    threads: int | None,
    resume: bool,
    as_json: bool,
) -> int:
    """Train a sequence predictor on routing traces. The best weights by validation recall are saved.

    Where the traces have router inputs, adapters for the step that is running are trained after it, and fused with it.
    """
    require(adapters_only or resume or not (out / CHECKPOINT).exists(), f"{out} has a checkpoint: add --resume, or choose another --out")
    check_writable(out / CHECKPOINT)
    trace = read_trace(traces)
    learn, check = split_sequences(trace, train_part, validation)
    if threads:
        torch.set_num_threads(threads)
    if adapters_only:
        require(trace.router_inputs is not None, f"{traces}: router_inputs are missing, which adapters need")
        wanted = _trigger_layers(trigger_layers, trace.num_layers) if trigger_layers else None
        _train_adapters(out, learn, check, routers, depth, seed, wanted)
        return 0
    split = _trigger_layers(trigger_layers, trace.num_layers)
    if tokens:
        require(trace.tokens is not None, f"{traces}: tokens are missing, which --tokens needs")
    vocabulary = Vocabulary.of(learn.tokens) if tokens and learn.tokens is not None else None
    config = Seq2SeqConfig(
        trace.num_layers,
        trace.num_experts,
        trace.top_k,
        split,
        hidden=DEFAULT_HIDDEN,
        blocks=blocks,
        token_rows=vocabulary.rows if vocabulary else 0,
    )
    config = config.replace(hidden=hidden or _hidden(config, byte_budget, expert_bytes))
    options = dataclasses.replace(
        TrainOptions(),
        epochs=epochs,
        budget_s=budget,
        learning_rate=learning_rate,
        seed=seed,
        teacher_share=1.0 if no_sampling else TrainOptions.teacher_share,
    )
    info = PredictorInfo(trace.meta.model_digest or None, {"traces": traces.name})
    with joined() as place:
        trainer = Trainer(config, learn, check, options, out, vocabulary, place, info, resume)
        result = _run(trainer, quiet=place.rank > 0)
        if place.rank > 0:
            return 0
    from seqmoe.predictors.train_plot import plot_history  # matplotlib takes a second to import

    plot_history(result.progress.history, out / "learning-curve.png")
    _print(result, as_json)
    if adapters and trace.router_inputs is not None:
        _train_adapters(out, learn, check, routers, depth, seed)
    if as_json:
        emit_json(result.to_dict())
    return 0


def _train_adapters(
    folder: Path,
    learn: Trace,
    check: Trace | None,
    routers: Path | None,
    depth: int,
    seed: int,
    split: tuple[int, ...] | None = None,
) -> None:
    """Trains adapters and fits the fusion into the predictor's folder, with a progress bar. UsageError where the
    predictor there is for another model than the traces, or another `split` than the one given."""
    from seqmoe.predictors.routers import load_routers
    from seqmoe.predictors.seq2seq_predictor import Seq2SeqPredictor
    from seqmoe.predictors.within_step import fit_within_step

    require(check is not None, "adapters need validation sequences, to be fused on: give --validation")
    assert check is not None
    loaded = load_routers(routers) if routers else None
    predictor = Seq2SeqPredictor.load(folder)
    check_fits(
        predictor.config,
        folder,
        num_layers=learn.num_layers,
        num_experts=learn.num_experts,
        top_k=learn.top_k,
        split=split,
        model_digest=learn.meta.model_digest or None,
        made_for=predictor.info.model_digest,
    )
    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task("adapters")
        fit_within_step(
            folder,
            predictor,
            learn,
            check,
            loaded,
            depth=depth,
            seed=seed,
            progress=lambda done, total, loss: bar.update(task, completed=done, total=total),
        )


def split_sequences(trace: Trace, train: str | None, validation: str | None) -> tuple[Trace, Trace | None]:
    """The sequences to learn from and those to choose by; never the same. UsageError naming the option."""
    everything = range(trace.num_sequences)
    chosen = parse_sequences(train, "--train") if train else None
    held = parse_sequences(validation, "--validation") if validation else None
    if held is None:  # of what may be learned from: the others may be meant for tests
        named = list(everything) if chosen is None else chosen
        held = named[VALIDATION_SHARE - 1 :: VALIDATION_SHARE] or named[1:][-1:]  # of a few, the last
        chosen = [i for i in named if i not in set(held)]
    if chosen is None:
        chosen = [i for i in everything if i not in set(held)]
    both = sorted(set(chosen) & set(held))
    require(not both, f"--train and --validation both name sequence {both[0] if both else ''}")
    require(bool(chosen), "--train leaves no sequence to learn from")
    return trace.select(chosen), trace.select(held) if held else None


def _trigger_layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    if text is None:
        return (num_layers,)
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--trigger-layers takes layers such as {num_layers // 2},{num_layers}; got {text!r}"
        ) from None
    check_split(layers, num_layers)
    return layers


def _hidden(config: Seq2SeqConfig, budget: str | None, expert_bytes: int | None) -> int:
    if budget is None and expert_bytes is None:
        return DEFAULT_HIDDEN
    budget = budget or "1%"
    if not budget.endswith("%"):
        return hidden_for_budget(config, parse_bytes(budget, "--byte-budget"))
    require(expert_bytes is not None, "--byte-budget in % needs --expert-bytes, such as 11GiB; or give it in bytes")
    try:
        share = float(budget[:-1]) / 100
    except ValueError:
        raise UsageError(f"--byte-budget must be a size or a share such as 1%, got {budget!r}") from None
    require(0 < share <= 1, f"--byte-budget must be more than 0% and at most 100%, got {budget}")
    return hidden_for_budget(config, int((expert_bytes or 0) * share))


def _run(trainer: Trainer, quiet: bool) -> TrainResult:
    console = Console(stderr=True)
    with progress_bar(console, left=True, quiet=quiet) as bar:
        task = bar.add_task("training", total=None)

        def report(progress: TrainProgress, row: dict[str, Any] | None) -> None:
            bar.update(task, completed=progress.step, total=progress.total - progress.skipped)
            if row is None or quiet:
                return
            line = _line(row)
            bar.update(task, description=f"recall {row.get('score', 0):.3f}")
            bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

        return trainer.run(report)


def _line(row: dict[str, Any]) -> str:
    parts = [f"step {row['step']}", f"{row['seconds']:.0f} s"]
    if row["train_kl"] is not None:
        parts.append(f"KL {row['train_kl']:.3f}")
    if "kl" in row:
        ahead = " ".join(f"{value:.3f}" for value in row["recall_at_step"].values())
        parts.append(f"validation KL {row['kl']:.3f}, recall at k+3 for 1, 2, .. steps ahead {ahead}")
    return ", ".join(parts)


def _print(result: TrainResult, as_json: bool) -> None:
    printer = Console(stderr=as_json)
    if not printer.is_terminal:
        printer = Console(width=140, stderr=as_json)
    printer.print(
        f"{result.folder}: {result.parameters / 1e6:.2f} M weights, {result.progress.step} steps in "
        f"{result.progress.seconds:.0f} s ({result.progress.finished})",
        highlight=False,
    )
    if result.recall is None:
        return
    table = Table(title="validation recall")
    for m in result.recall.at:
        table.add_column(f"at {m}")
    table.add_row(*(f"{value:.3f}" for value in result.recall.at.values()))
    printer.print(table)
