"""Several modes at several residencies side by side: interleaved repeats in fresh processes, medians and spread.

What is compared runs in turns, and in another order each time, so that a machine that slows down or warms up meanwhile
does so for every arm alike. All arms must give the same tokens: what they do differs in speed only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.jobs_process import job_error
from seqmoe.runtime.policy import POLICIES

SCHEMA_VERSION = 1
MODES = tuple(POLICIES)
MODES_WITHOUT_RESIDENCY = ("full", "eager")  # everything, or nothing beyond the layer at work

Runner = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Runs one measurement job and returns its figures, or {"error": ...}."""


@dataclass(frozen=True)
class Arm:
    """One thing to be measured. `residency` is a share of all experts, or None where the mode or a budget decides."""

    mode: str
    residency: float | None = None

    @property
    def label(self) -> str:
        return self.mode if self.residency is None else f"{self.mode} {self.residency:.0%}"


@dataclass(frozen=True)
class Spread:
    """Median, extremes and quartiles of the repeats."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def to_dict(self) -> dict[str, Any]:
        """Median, min, max, interquartile range (None below four values) and the values themselves."""
        q1, _, q3 = quantiles(self.values, n=4, method="inclusive") if len(self.values) >= 4 else (0.0, 0.0, 0.0)
        iqr = q3 - q1 if len(self.values) >= 4 else None
        values = list(self.values)
        return {"median": self.median, "min": self.low, "max": self.high, "iqr": iqr, "values": values}


@dataclass
class ArmResult:
    """The repeats of one arm so far. The first failure ends an arm; `error` says why in one line."""

    arm: Arm
    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    exit_code: int = 0

    def spread(self, figure: Callable[[Mapping[str, Any]], float]) -> Spread:
        """Of one figure over the repeats that went well; there must be one."""
        return Spread(tuple(figure(run) for run in self.runs))

    def to_dict(self) -> dict[str, Any]:
        """The arm as it stands in the JSON."""
        head: dict[str, Any] = {"label": self.arm.label, "mode": self.arm.mode, "error": self.error}
        if not self.runs:
            return head | {"residency": self.arm.residency, "repeats": 0}
        last = self.runs[-1]
        return head | {
            "residency": last.get("residency"),
            "slots": last.get("slots"),
            "repeats": len(self.runs),
            **{name: self.spread(figure).to_dict() for name, figure in FIGURES.items()},
            "link": last.get("link"),
            "knobs": last.get("knobs"),
            "memory_plan": last.get("memory_plan"),
        }


def _decode_mib_per_token(run: Mapping[str, Any]) -> float:
    return float(run.get("decode_needed_bytes", 0)) / 2**20 / max(1, int(run["steps"]))


def _stall_share(run: Mapping[str, Any]) -> float:
    seconds = sum(run.get("per_step_s", ()))
    return float(run["stall_s"]) / seconds if seconds else 0.0


FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "decode_tokens_per_s": lambda run: float(run["decode_tokens_per_s"]),
    "ttft_s": lambda run: float(run["ttft_s"]),
    "hit_rate": lambda run: float(run["hit_rate"]),
    "read_mib_per_token": _decode_mib_per_token,  # experts that decode steps had to load
    "stall_share": _stall_share,  # of decode time, waiting for the link with nothing to compute
    "peak_rss_mib": lambda run: float(run["peak_rss_bytes"]) / 2**20,
}


@dataclass
class BenchResult:
    """All arms of one run, in the order asked for."""

    job: dict[str, Any]  # what all arms have in common
    repeats: int
    arms: list[ArmResult]

    def tokens_differ(self) -> list[str]:
        """Labels of the arms whose tokens are not those of the first run of all: a bug, whatever their speed."""
        runs = [(result.arm.label, run["token_ids"]) for result in self.arms for run in result.runs]
        return sorted({label for label, ids in runs if ids != runs[0][1]})

    @property
    def exit_code(self) -> int:
        """0 when every arm ran and all gave the same tokens, else 1."""
        return int(bool(self.tokens_differ()) or any(result.error for result in self.arms))

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `--json` and `--out`."""
        first = next((run for result in self.arms for run in result.runs), {})
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "bench",
            "job": self.job,
            "model_digest": first.get("model_digest"),
            "repeats": self.repeats,
            "tokens_differ": self.tokens_differ(),
            "arms": [result.to_dict() for result in self.arms],
        }


def plan_arms(modes: Sequence[str], residencies: Sequence[float]) -> list[Arm]:
    """Each mode at each residency; a mode without one, or any when none is given, once. Raises UsageError."""
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UsageError(f"--modes takes {', '.join(MODES)}, got {unknown[0]!r}")
    if bad := [share for share in residencies if not 0 < share <= 1]:
        raise UsageError(f"--residency takes shares above 0 and up to 1, such as 0.25,0.45; got {bad[0]:g}")
    arms = [
        Arm(mode, share)
        for mode in modes
        for share in ((None,) if mode in MODES_WITHOUT_RESIDENCY else tuple(residencies) or (None,))
    ]
    return list(dict.fromkeys(arms))


def order(arms: int, repeats: int) -> Iterator[int]:
    """Which arm to run next: every arm once a round; each round starts one further on, and every other goes backwards."""
    for repeat in range(repeats):
        round_of = [(repeat // 2 + place) % arms for place in range(arms)]
        yield from reversed(round_of) if repeat % 2 else round_of


def arm_job(job: Mapping[str, Any], arm: Arm) -> dict[str, Any]:
    """The measurement job of one arm: what is common, and its mode and residency."""
    return {**job, "mode": arm.mode} | ({} if arm.residency is None else {"residency": arm.residency})


def run_bench(
    job: Mapping[str, Any],
    arms: Sequence[Arm],
    repeats: int,
    run: Runner,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> BenchResult:
    """Measures every arm `repeats` times. An arm that fails is not tried again; the others go on.

    `on_progress` is called with (runs done, runs in all, label of the next or "") around every run.
    """
    result = BenchResult(dict(job), repeats, [ArmResult(arm) for arm in arms])
    total = len(arms) * repeats
    for done, index in enumerate(order(len(arms), repeats)):
        arm = result.arms[index]
        if on_progress:
            on_progress(done, total, arm.arm.label)
        if arm.error:
            continue
        figures = run(arm_job(job, arm.arm))
        if error := job_error(figures):
            arm.error, arm.exit_code = error, int(figures["error"]["exit_code"])
        else:
            arm.runs.append(figures)
    if on_progress:
        on_progress(total, total, "")
    return result
