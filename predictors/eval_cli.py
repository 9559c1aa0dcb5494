"""`seqmoe eval`: recall, lead time and calibration of predictors on a trace, side by side."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from seqmoe.predictors.calibration import MODES, Calibration, fit_calibration, load_calibration
from seqmoe.predictors.calibration import save_calibration as write_calibration
from seqmoe.predictors.evaluate import Evaluation, LayerEvaluation, evaluate, evaluate_layers, plot_evaluations
from seqmoe.predictors.protocol import Predictor
from seqmoe.predictors.registry import LAYER_PREDICTORS, NAMES, make_predictor
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import parse_sequences, read_trace
from seqmoe.predictors.within_step import SOURCES, WithinStep, evaluate_within_step, load_within_step
from seqmoe.profiles.cliutil import Command, emit_json, json_option, progress_bar, require
from seqmoe.profiles.files import check_output

EXAMPLES = f"""\b
Examples:
  seqmoe eval --traces routing.npz --predictor predictor/ --sequences 288:321 --json
  seqmoe eval --traces routing.npz --predictor last,token,patterns,ridge --sequences 288:321 --fit-sequences 0:256
  seqmoe eval --traces routing.npz --predictor predictor/,token --sequences 288:321 --fit-sequences 0:256 \\
      --calibrate-sequences 256:288 --plot eval.png
  seqmoe eval --traces routing.npz --predictor predictor/ --sequences 288:321 --shuffle
  seqmoe eval --traces inputs.safetensors --predictor predictor/,next-router,specprefetch --sequences 190:220 \\
      --fit-sequences 0:160 --routers routers.safetensors

\b
A predictor is a folder that `seqmoe train` wrote, or one of
  {", ".join(NAMES[:6])},
  {", ".join(NAMES[6:])};
names joined by + are pooled (powers fitted on --calibrate-sequences), such as predictor/+nearest-token;
within the step, from router inputs: {", ".join(LAYER_PREDICTORS)}.

\b
JSON: recall_at (by m, one step ahead) and recall_at_step (by step, then m) of the first predictor; all of them, with
recall by layer, lead time, calibration, bytes and time of a forecast, under "predictors".
"""


@click.command("eval", cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.option(
    "--traces", type=click.Path(path_type=Path), required=True, help="Trace to judge on (.safetensors or .npz)."
)
@click.option("--predictor", "names", required=True, help="Folder or name; several with commas.")
@click.option("--sequences", help="Only these, such as 288:321 (321 not included). [default: all]")
@click.option("--horizon", type=click.IntRange(1, 64), default=8, help="Steps ahead.")
@click.option("--fit-traces", type=click.Path(path_type=Path), help="Trace to fit rivals on. [default: --traces]")
@click.option("--fit-sequences", help="Sequences to fit rivals on, such as 0:256.")
@click.option("--calibrate-sequences", help="Validation sequences to fit the calibration on, such as 256:288.")
@click.option("--save-calibration", is_flag=True, help="Keep that calibration in the predictors' folders.")
@click.option("--tokens/--no-tokens", default=True, help="Give the token about to be fed to predictors that use it.")
@click.option("--shuffle", is_flag=True, help="Shuffle the steps within each sequence: the control without order.")
@click.option("--seed", type=int, default=0, help="Of the shuffle, and of rivals that train.")
@click.option(
    "--routers", type=click.Path(path_type=Path), help="Router weights (safetensors), for predictors within the step."
)
@click.option("--depth", type=click.IntRange(1), default=3, help="Layers ahead, of predictors within the step.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot to this PNG file.")
@json_option
def eval_command(
    traces: Path,
    names: str,
    sequences: str | None,
    horizon: int,
    fit_traces: Path | None,
    fit_sequences: str | None,
    calibrate_sequences: str | None,
    save_calibration: bool,
    tokens: bool,
    shuffle: bool,
    seed: int,
    routers: Path | None,
    depth: int,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Judge predictors on a trace: recall at m = k to k + 8 for 1 to --horizon steps ahead, calibration, lead time."""
    chosen_names = [name.strip() for name in names.split(",") if name.strip()]
    require(bool(chosen_names), f"--predictor is empty; it takes a folder, or of {', '.join(NAMES)}")
    if plot:
        check_output(plot)
    require(not save_calibration or calibrate_sequences is not None, "--save-calibration needs --calibrate-sequences")
    judged = parse_sequences(sequences) if sequences else None
    trace = read_trace(traces, judged)
    fit_path = fit_traces or traces
    training = _apart(fit_path, fit_sequences, "--fit-sequences", traces, judged)
    if training is None and fit_traces is not None:
        training = read_trace(fit_traces)
    validation = _apart(traces, calibrate_sequences, "--calibrate-sequences", traces, judged)
    if shuffle:
        trace = trace.shuffled(seed)
    console = Console(stderr=True)
    within = [name for name in chosen_names if name in LAYER_PREDICTORS]
    whole = [name for name in chosen_names if name not in LAYER_PREDICTORS]
    found: list[Evaluation] = []
    fused: list[WithinStep] = []
    reference: Evaluation | None = None
    with progress_bar(console, left=True) as bar:
        runs = list(whole)
        standard = "token" if tokens and trace.tokens is not None else "popularity"
        if whole and training is not None and standard not in runs:
            runs.append(standard)  # only as the reference of the Brier skill
        for place, name in enumerate(runs):
            begin = time.perf_counter()
            task = bar.add_task(f"{name}: preparing", total=None)
            predictor = make_predictor(
                name,
                training,
                horizon,
                validation=validation,
                with_tokens=tokens,
                seed=seed,
                progress=_updates(bar, task),
            )
            with_tokens = tokens and predictor.uses_tokens and trace.tokens is not None
            calibration = _calibration(name, predictor, trace, validation, horizon, with_tokens, save_calibration)
            bar.update(task, description=f"{name}: judging", total=trace.num_sequences, completed=0)
            one = evaluate(
                predictor,
                trace,
                horizon,
                with_tokens=with_tokens,
                calibration=calibration,
                progress=_updates(bar, task),
            )
            if name not in NAMES:  # two folders, two names
                one = replace(one, name="+".join(Path(part).name for part in name.split("+")))
            if name == standard:
                reference = one
            if place < len(whole):
                found.append(one)
                if trace.router_inputs is not None and _is_folder(name):
                    fused += _fused(one.name, Path(name), predictor, trace, with_tokens, bar)
            bar.update(task, description=f"{name}: {time.perf_counter() - begin:.0f} s")
        layered = [_within(name, trace, training, routers, depth, seed, bar) for name in within]
    if reference is not None:
        found = [one.against(reference) for one in found]
    if plot and found:
        plot_evaluations(found, plot)
    printer = console if as_json else Console()
    if not printer.is_terminal:
        printer = Console(width=150, stderr=as_json)
    title = f"{traces.name}: {trace.num_sequences} sequences, {trace.num_steps} steps{', shuffled' if shuffle else ''}"
    if found:
        printer.print(recall_table(found, title))
        printer.print(forecast_table(found))
    if layered:
        printer.print(layers_table(layered, title))
    if fused:
        printer.print(fused_table(fused, title))
    if as_json:
        rows = [*(one.to_dict() for one in found), *(one.to_dict() for one in layered), *(one.to_dict() for one in fused)]
        first: dict[str, Any] = {key: rows[0][key] for key in ("recall_at", "recall_at_step") if key in rows[0]}
        settings: dict[str, Any] = {"traces": str(traces), "sequences": trace.num_sequences, "steps": trace.num_steps}
        settings |= {"k": trace.top_k, "experts": trace.num_experts, "horizon": horizon, "shuffled": shuffle}
        emit_json({**settings, **first, "predictors": rows})
    return 0


def recall_table(found: list[Evaluation], title: str) -> Table:
    """Recall by m one step ahead, and at k + 3 by steps ahead."""
    table = Table(
        title=title, caption="share of the chosen experts among the m best, one step ahead; +h: h steps ahead"
    )
    table.add_column("predictor", no_wrap=True)
    k, count, horizon = found[0].k, *found[0].recall.shape[:2]
    ms = [i for i in (0, 1, 3, 4, 8) if i < count]
    at = min(3, count - 1)
    steps = sorted({h for h in (1, 2, 3, 5, horizon - 1) if 0 < h < horizon})
    for i in ms:
        table.add_column(f"at {k + i}", justify="right")
    for h in steps:
        table.add_column(f"{k + at}, +{h + 1}", justify="right")
    best = np.max(
        [one.recall.mean(axis=2) for one in found if one.name != "oracle"] or [np.ones((count, horizon))], axis=0
    )
    for one in found:
        means = one.recall.mean(axis=2)
        cells = [(means[i, 0], best[i, 0]) for i in ms] + [(means[at, h], best[at, h]) for h in steps]
        table.add_row(one.label, *(f"[bold]{v:.3f}[/bold]" if v == top else f"{v:.3f}" for v, top in cells))
    return table


def forecast_table(found: list[Evaluation]) -> Table:
    """Calibration, lead time, bytes and time."""
    k = found[0].k
    reference = next((one.reference for one in found if one.reference), "")
    caption = (
        "probabilities one step ahead; skill: Brier skill over that predictor; error: expected calibration error among forecasts above 0.1; "
        f"ahead: recall at {k + 3}, known so many layers before use"
    )
    table = Table(title="forecast", caption=caption)
    for name in ("predictor", "Brier", f"skill, {reference}" if reference else "skill", "error", "sum off"):
        first = name == "predictor"
        table.add_column(name, justify="left" if first else "right", no_wrap=first)
    layers = found[0].recall.shape[2]
    marks = sorted({1, layers // 2, layers, 2 * layers, 4 * layers})
    for mark in marks:
        table.add_column(f"{mark} ahead", justify="right")
    for name in ("MiB", "ms", "ms, horizon"):
        table.add_column(name, justify="right")
    for one in found:
        known = dict(one.leads)
        table.add_row(
            f"{one.label}{'' if one.calibrated else ' *'}",
            f"{one.brier[0]:.4f}",
            "" if one.skill is None else f"{one.skill[0]:+.3f}",
            f"{one.calibration_error[0]:.3f}",
            f"{one.worst_sum:.1%}",
            *(f"{known[mark]:.3f}" if mark in known else "" for mark in marks),
            f"{one.nbytes / 2**20:.1f}",
            f"{one.ms:.2f}",
            f"{one.ms_horizon:.2f}",
        )
    if any(not one.calibrated for one in found):
        table.caption = f"{caption}; * not calibrated"
    return table


def layers_table(found: list[LayerEvaluation], title: str) -> Table:
    """Recall by layers ahead, within the step."""
    table = Table(title=f"{title}, within the step")
    table.add_column("predictor", no_wrap=True)
    k, count, depth = found[0].k, *found[0].recall.shape[:2]
    for d in range(depth):
        for i in sorted({0, min(3, count - 1)}):
            table.add_column(f"at {k + i}, {d + 1} ahead", justify="right")
    table.add_column("MiB", justify="right")
    table.add_column("ms", justify="right")
    for one in found:
        own = one.recall.shape[1]
        cells = [
            f"{one.recall_ahead(k + i)[d]:.3f}" if d < own else ""
            for d in range(depth)
            for i in sorted({0, min(3, count - 1)})
        ]
        table.add_row(one.name, *cells, f"{one.nbytes / 2**20:.2f}", f"{one.ms:.3f}")
    return table


def fused_table(found: list[WithinStep], title: str) -> Table:
    """Recall at k + 3 by layers ahead: of the sequence predictor, of its adapters, and of the two fused."""
    table = Table(title=f"{title}, within the step: the fused forecast and its halves, recall at {found[0].k + 3}")
    table.add_column("predictor", no_wrap=True)
    depth = max(one.recall.shape[1] for one in found)
    for d in range(1, depth + 1):
        table.add_column(f"{d} ahead", justify="right")
    table.add_column("calibration error", justify="right")
    for one in found:
        for source in SOURCES:
            cells = [f"{one.at(source, d, one.k + 3):.3f}" for d in range(1, one.recall.shape[1] + 1)]
            error = f"{one.error.max():.3f}" if source == "fused" else ""
            table.add_row(f"{one.name}, {source}", *cells, *[""] * (depth - len(cells)), error)
    return table


def _is_folder(name: str) -> bool:
    return name not in NAMES and ("+" not in name or Path(name).is_dir())


def _fused(
    name: str, folder: Path, predictor: Predictor, trace: Trace, with_tokens: bool, bar: Progress
) -> list[WithinStep]:
    """The judgement of a folder's adapters and fusion; none where it has none."""
    parts = load_within_step(folder, trace.num_layers, trace.num_experts, trace.top_k)
    if parts is None:
        return []
    task = bar.add_task(f"{name}: judging within the step", total=trace.num_sequences)
    one = evaluate_within_step(predictor, *parts, trace, with_tokens, _updates(bar, task))
    return [replace(one, name=name)]


def _apart(path: Path, text: str | None, option: str, judged_path: Path, judged: list[int] | None) -> Trace | None:
    """The sequences of an option, none of which may be judged on."""
    if text is None:
        return None
    chosen = parse_sequences(text, option)
    if path == judged_path:
        require(judged is not None, f"{option} needs --sequences, so that none is both learned from and judged on")
        both = sorted(set(chosen) & set(judged or []))
        require(not both, f"{option}: sequence {both[0] if both else ''} is among --sequences too; keep them apart")
    return read_trace(path, chosen)


def _calibration(
    name: str,
    predictor: Predictor,
    trace: Trace,
    validation: Trace | None,
    horizon: int,
    with_tokens: bool,
    save: bool,
) -> Calibration | None:
    folder = Path(name) if _is_folder(name) else None
    if validation is None:
        return load_calibration(folder, trace.top_k).get(MODES[with_tokens]) if folder else None
    fitted = fit_calibration(predictor, validation, horizon, with_tokens)
    if folder and save:
        modes = load_calibration(folder, trace.top_k)
        modes[MODES[with_tokens]] = fitted
        if with_tokens and MODES[False] not in modes:
            modes[MODES[False]] = fit_calibration(predictor, validation, horizon, False)
        write_calibration(folder, modes)
    return fitted


def _within(
    name: str, trace: Trace, training: Trace | None, routers: Path | None, depth: int, seed: int, bar: Progress
) -> LayerEvaluation:
    from seqmoe.predictors.routers import NextRouters, SpecPrefetch, load_routers

    require(trace.router_inputs is not None, f"predictor {name} needs a trace with router inputs, this one has none")
    task = bar.add_task(f"{name}: preparing", total=None)
    loaded = load_routers(routers) if routers else None
    if loaded is not None:
        loaded.check_trace(trace)
    if name == "next-router":
        require(loaded is not None, "predictor next-router needs --routers, a safetensors file with their weights")
        assert loaded is not None
        return evaluate_layers(NextRouters(loaded, depth), trace, _updates(bar, task))
    require(training is not None, "predictor specprefetch must be fitted: give --fit-sequences")
    assert training is not None
    adapters = SpecPrefetch.fit(
        training,
        loaded,
        depth=depth,
        seed=seed,
        progress=_updates(bar, task),
    )
    bar.update(task, description=f"{name}: judging")
    return evaluate_layers(adapters, trace, _updates(bar, task))


def _updates(bar: Progress, task: TaskID) -> Callable[..., None]:
    def update(done: int, total: int, loss: float = 0.0) -> None:
        bar.update(task, completed=done, total=total)

    return update
