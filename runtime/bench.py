"""Several modes, residencies and batch sizes side by side: interleaved repeats in fresh processes, medians and spread.

What is compared runs in turns, and in another order each time, so that a machine that slows down or warms up meanwhile
does so for every arm alike. All arms of a batch size must give the same tokens: what they do differs in speed only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.jobs_process import job_error
from seqmoe.runtime.policy import POLICIES

SCHEMA_VERSION = (
    2  # 2: arms have a batch; read_mib_per_token counts what is fetched ahead too, a token of each sequence
)
MODES = tuple(POLICIES)
MODES_WITHOUT_RESIDENCY = ("full", "eager")  # everything, or nothing beyond the layer at work

# where a decode step's time goes; the worker's runs beside the others'
PARTS = ("experts", "predictor", "management", "worker", "stall", "other")

Runner = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Runs one measurement job and returns its figures, or {"error": ...}."""


@dataclass(frozen=True)
class Arm:
    """One thing to be measured. `residency` is a share of all experts, or None where the mode or a budget decides."""

    mode: str
    residency: float | None = None
    batch: int = 1  # sequences at once

    @property
    def label(self) -> str:
        share = "" if self.residency is None else f" {self.residency:.0%}"
        return f"{self.mode}{share}" + (f" batch {self.batch}" if self.batch != 1 else "")


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

    def spread(self, name: str) -> Spread | None:
        """Of one of FIGURES over the repeats that went well; None without one, or where the mode has no such figure."""
        values = [FIGURES[name](run) for run in self.runs]
        known = [value for value in values if value is not None]
        return Spread(tuple(known)) if known and len(known) == len(values) else None

    def median(self, name: str) -> float | None:
        """Of one of FIGURES."""
        spread = self.spread(name)
        return None if spread is None else spread.median

    @property
    def residency(self) -> float | None:
        """As it ran, else as it was asked for."""
        return float(self.runs[-1]["residency"]) if self.runs else self.arm.residency

    @property
    def notices(self) -> list[str]:
        """What the runs had to say, each once."""
        return list(dict.fromkeys(text for run in self.runs for text in run.get("notices", ())))

    def to_dict(self) -> dict[str, Any]:
        """The arm as it stands in the JSON."""
        arm = self.arm
        head: dict[str, Any] = {"label": arm.label, "mode": arm.mode, "batch": arm.batch, "error": self.error}
        if not self.runs:
            return head | {"residency": arm.residency, "repeats": 0}
        last = self.runs[-1]
        return head | {
            "residency": last.get("residency"),
            "slots": last.get("slots"),
            "repeats": len(self.runs),
            **{name: _to_dict(self.spread(name)) for name in FIGURES},
            "notices": self.notices,
            **{key: last.get(key) for key in ("link", "knobs", "memory_plan", "prefetch", "optimal_hit_rate")},
        }


def _to_dict(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else spread.to_dict()


Figure = Callable[[Mapping[str, Any]], float | None]


def _key(name: str, scale: float = 1.0) -> Figure:
    def figure(run: Mapping[str, Any]) -> float | None:
        value = run[name]
        return None if value is None else float(value) * scale

    return figure


def _moved_mib_per_token(run: Mapping[str, Any]) -> float:
    return float(run["decode_moved_bytes"]) / 2**20 / max(1, int(run["decode_tokens"]))


# of decode steps, but for the first and the last
FIGURES: dict[str, Figure] = {
    "ttft_s": _key("ttft_s"),
    "decode_tokens_per_s": _key("decode_tokens_per_s"),
    "hit_rate": _key("hit_rate"),
    "transfers_per_step": _key("transfers_per_step"),  # experts loaded on demand and fetched ahead
    "read_mib_per_token": _moved_mib_per_token,  # their bytes
    **{name: _key(name) for name in ("prefetched_bytes", "useful_bytes", "late_bytes", "wasted_bytes")},
    **{f"{part}_s_per_step": _key(f"{part}_s_per_step") for part in PARTS},
    "stall_share": _key("stall_share"),  # of decode time, waiting for the link with nothing to compute
    "management_share": _key("management_share"),
    "predictor_share": _key("predictor_share"),
    "link_busy_share": _key("link_busy_share"),
    "budget_avg": _key("budget_avg"),  # transfers a layer that the link was last seen to do
    "peak_rss_mib": _key("peak_rss_bytes", 2**-20),
}


@dataclass
class BenchResult:
    """All arms of one run, in the order asked for."""

    job: dict[str, Any]  # what all arms have in common
    repeats: int
    arms: list[ArmResult]

    def tokens_differ(self) -> list[str]:
        """Labels of the arms whose tokens are not those of their batch size's first run: a bug, whatever their speed."""
        first: dict[int, Any] = {}
        found = set()
        for result in self.arms:
            for run in result.runs:
                if run["token_ids"] != first.setdefault(result.arm.batch, run["token_ids"]):
                    found.add(result.arm.label)
        return sorted(found)

    @property
    def batches(self) -> list[int]:
        """Batch sizes, ascending."""
        return sorted({result.arm.batch for result in self.arms})

    def of_full(self, result: ArmResult) -> Spread | None:
        """Decode speed as a share of that of mode `full` with the same batch in the same round; None without one."""
        full = self._find("full", None, result.arm.batch)
        return _ratios(result, full, "decode_tokens_per_s")

    def stall_of_lru(self, result: ArmResult) -> Spread | None:
        """Time that a decode step waits for the link as a share of what it is in mode `lru` at the same residency and
        batch, in the same round; None without one, or where that does not wait."""
        lru = self._find("lru", result.arm.residency, result.arm.batch)
        return _ratios(result, lru, "stall_s_per_step")

    def _find(self, mode: str, residency: float | None, batch: int) -> ArmResult | None:
        arm = Arm(mode, residency, batch)
        return next((result for result in self.arms if result.arm == arm), None)

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
            "arms": [
                result.to_dict()
                | {"of_full": _to_dict(self.of_full(result)), "stall_of_lru": _to_dict(self.stall_of_lru(result))}
                for result in self.arms
            ],
        }


def _ratios(result: ArmResult, reference: ArmResult | None, name: str) -> Spread | None:
    """Of the runs that both arms made in the same round. An arm's first failure is its end: run i is of round i."""
    own, other = result.spread(name), None if reference is None else reference.spread(name)
    if own is None or other is None or not all(other.values):
        return None
    return Spread(tuple(mine / its for mine, its in zip(own.values, other.values, strict=False)))


def plan_arms(modes: Sequence[str], residencies: Sequence[float], batches: Sequence[int] = (1,)) -> list[Arm]:
    """For each batch size each mode at each residency; a mode without one, or any if none is given, once. UsageError."""
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UsageError(f"--modes takes {', '.join(MODES)}, got {unknown[0]!r}")
    if bad := [share for share in residencies if not 0 < share <= 1]:
        raise UsageError(f"--residency takes shares above 0 and up to 1, such as 0.25,0.45; got {bad[0]:g}")
    if few := [batch for batch in batches if batch < 1]:
        raise UsageError(f"--batch takes numbers of sequences from 1 on, such as 1,2,4; got {few[0]}")
    arms = [
        Arm(mode, share, batch)
        for batch in batches
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
    """The measurement job of one arm: what is common, and its mode, residency and batch size."""
    own: dict[str, Any] = {} if arm.residency is None else {"residency": arm.residency}
    return {**job, "mode": arm.mode} | own | ({} if arm.batch == 1 else {"batch": arm.batch})


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
