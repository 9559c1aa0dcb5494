"""What the simulated benchmarks share: a trace to simulate on, paired differences, tables in Markdown, one JSON report."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from seqmoe.autotune.simulate_plan import Outcome, Timing
from seqmoe.autotune.simulate_policies import Workbench
from seqmoe.autotune.stats import interval
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import parse_sequences, read_trace
from seqmoe.profiles.cliutil import emit_json, json_option, require
from seqmoe.profiles.files import check_output, write_atomic
from seqmoe.runtime.policy import Plan

_CALIBRATE = 9  # one in so many of the sequences that are not simulated is for the calibration, as in `seqmoe simulate`
MEASURES: dict[str, Callable[[Outcome], NDArray[np.float64]]] = {  # of each sequence
    "hit_rate": lambda outcome: outcome.hits / (outcome.hits + outcome.misses),
    "speed_of_full": lambda outcome: outcome.full_time / outcome.time,
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def simulation_options(function: _Function) -> _Function:
    """The options of every simulated benchmark."""
    path = click.Path(path_type=Path)
    for option in (
        json_option,
        click.option("--plot", type=path, help="Write a plot to this PNG file."),
        click.option("--out", type=path, help="Write the report to this JSON file."),
        click.option("--residency", default="0.15,0.25,0.45", show_default=True, help="Shares of resident experts."),
        click.option("--calibrate-sequences", help="Sequences that calibrate. [default: the last ninth of the others]"),
        click.option("--fit-sequences", help="Sequences that rivals are fitted on. [default: the others]"),
        click.option("--sequences", required=True, help="Sequences to simulate, such as 288:321 (321 not included)."),
        click.option("--predictor", required=True, help="Folder of `seqmoe train`, or a rival's name."),
        click.option("--traces", type=path, required=True, help="Trace to replay (.safetensors or .npz)."),
    ):
        function = option(function)
    return function


@dataclass(eq=False)
class Lab:
    """Runs plans on a trace, and says on standard error which one."""

    bench: Workbench
    console: Console = field(default_factory=lambda: Console(stderr=True))
    runs: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def trace(self) -> Trace:
        return self.bench.trace

    @property
    def total(self) -> int:
        """Experts of the model."""
        return self.trace.num_layers * self.trace.num_experts

    def first(self, sequences: int) -> "Lab":
        """The same on the first few sequences."""
        part = self.trace.select(range(min(sequences, self.trace.num_sequences)))
        return Lab(replace(self.bench, trace=part, _forecasts={}), self.console)

    def blind(self, predictor: str | None) -> "Lab":
        """The same without the tokens that are fed, and with another predictor if one is named."""
        trace = replace(self.trace, tokens=None)
        other = replace(self.bench, trace=trace, predictor=predictor or self.bench.predictor, _forecasts={})
        return Lab(other, self.console)

    def run(self, name: str, plan: Plan | None, ratio: float, share: float) -> Outcome:
        """Simulates `plan`, with the forecasts of the policy `name`."""
        self.runs += 1
        took = time.monotonic() - self.began
        self.console.print(f"{took:5.0f} s  {name} at {share:.0%}, ratio {ratio:g}", highlight=False)
        timing = Timing.of_ratio(ratio, self.trace.num_layers)
        return self.bench.run(name, plan, timing, round(share * self.total))


def open_lab(traces: Path, predictor: str, sequences: str, fit: str | None, calibrate: str | None) -> Lab:
    """The sequences to simulate, and others to fit and calibrate on. UsageError where one is in two of these."""
    whole = read_trace(traces)
    judged = parse_sequences(sequences)
    rest = [i for i in range(whole.num_sequences) if i not in set(judged)]
    cut = len(rest) - len(rest) // _CALIBRATE
    parts = {
        "--fit-sequences": parse_sequences(fit, "--fit-sequences") if fit else rest[:cut],
        "--calibrate-sequences": parse_sequences(calibrate, "--calibrate-sequences") if calibrate else rest[cut:],
    }
    owner = dict.fromkeys(judged, "--sequences")
    for option, numbers in parts.items():
        for number in numbers:
            taken = owner.setdefault(number, option)
            require(taken == option, f"{option}: sequence {number} is among {taken} too; keep them apart")
    training, validation = (whole.select(numbers) if numbers else None for numbers in parts.values())
    return Lab(Workbench(whole.select(judged), training, validation, predictor))


def shares_of(text: str, lab: Lab) -> list[float]:
    """What --residency says. UsageError for what is no share, or too small for a layer."""
    shares = numbers_of(text, "--residency")
    for share in shares:
        slots = round(share * lab.total)
        need = lab.trace.top_k
        require(
            share <= 1 and slots >= need, f"--residency {share:g} is {slots} slots; it must be {need} to {lab.total}"
        )
    return shares


def numbers_of(text: str, option: str) -> list[float]:
    """Positive numbers with commas between."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    require(
        bool(numbers) and all(0 < n < 1e6 for n in numbers), f"{option} takes numbers such as 0.25,0.45; got {text!r}"
    )
    return numbers


def figures(outcome: Outcome) -> dict[str, float]:
    """Of all sequences together; transfers in records a step."""
    steps = int(outcome.steps.sum())
    moved = outcome.prefetched.sum() + outcome.misses.sum() - outcome.late.sum()
    counts = {
        "transfers": moved,
        "useful": outcome.useful.sum(),
        "late": outcome.late.sum(),
        "wasted": outcome.wasted.sum(),
    }
    return {
        "hit_rate": outcome.hit_rate,
        "speed_of_full": outcome.speed_of_full,
        **{name: float(count) / steps for name, count in counts.items()},
        "prefetch_on": float(outcome.ahead.sum()) / steps,
    }


def gains(one: Outcome, other: Outcome) -> dict[str, dict[str, float]]:
    """By how much `one` is above `other`: mean over the sequences of both measures' differences, with the 95% interval
    (bootstrap or Student's t, whichever is wider). The same sequences in the same order."""
    found = {}
    for name, measure in MEASURES.items():
        differences = (measure(one) - measure(other)).tolist()
        low, high = interval(differences, seed=0) if len(differences) > 1 else (float("nan"),) * 2
        found[name] = {"mean": float(np.mean(differences)), "low": low, "high": high}
    return found


def side(gain: dict[str, float]) -> str:
    """ "above", "below" or "even": where the interval lies."""
    return "above" if gain["low"] > 0 else "below" if gain["high"] < 0 else "even"


def points(gain: dict[str, float]) -> str:
    """A difference and its interval in points of a hundred."""
    return f"{100 * gain['mean']:+.2f} [{100 * gain['low']:+.2f}, {100 * gain['high']:+.2f}]"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every column but the first ones that hold words is flushed right."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|")
    return "\n".join(lines)


def check_outputs(*paths: Path | None) -> None:
    """That the files can be written, before anything is computed."""
    for path in paths:
        if path:
            check_output(path)


def finish(report: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Writes the report where it is wanted."""
    report = _without_nan(report)
    if out:
        write_atomic(out, json.dumps(report, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(report)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
