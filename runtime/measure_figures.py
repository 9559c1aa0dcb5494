"""What a measured run did, from the engine's counters: of its decode steps only, prefill and warm-up left out."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from seqmoe.runtime.bench import PARTS
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.report import RunReport, breakdown


@dataclass(frozen=True)
class Counters:
    """What an engine has done so far, in records; or the difference of two such."""

    on_demand: int = 0
    prefetched: int = 0  # sent ahead of need
    useful: int = 0
    late: int = 0
    wasted: int = 0
    link_busy_s: float = 0.0

    @classmethod
    def of(cls, engine: Engine) -> "Counters":
        """As they stand now. The fetch worker may be at work meanwhile, so that their sum may be one off."""
        busy = engine.store.link.stats.busy_s
        if engine.residency is None:
            return cls(link_busy_s=busy)
        counts = engine.residency.counts
        sent = counts.prefetched - counts.dropped  # what early binding gave up was never on the link
        fate = None if engine.fetching is None else engine.fetching.prefetcher.counts
        known = (0, 0, 0) if fate is None else (fate.useful, fate.late, fate.wasted)
        return cls(counts.on_demand, sent, *known, busy)

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*[getattr(self, f.name) + getattr(other, f.name) for f in fields(self)])

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*[getattr(self, f.name) - getattr(other, f.name) for f in fields(self)])


class DecodeCounters:
    """Counters of decode steps, summed over requests: a streamer for `Engine.generate`, to know where prefill ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._puts = 0
        self._begun = Counters()
        self.total = Counters()

    def put(self, value: object) -> None:
        """Transformers hands over the prompt first, then each token: the first of them is prefill's."""
        self._puts += 1
        if self._puts == 2:
            self._begun = Counters.of(self._engine)

    def end(self) -> None:
        """The request is over."""
        self._puts = 0
        self.total += Counters.of(self._engine) - self._begun


def run_figures(engine: Engine, reports: Sequence[RunReport], counters: Counters) -> dict[str, Any]:
    """The figures of `reports`' decode steps, over all of them; `counters` of the same steps."""
    steps = [step for report in reports for step in report.decode]
    number, seconds = max(1, len(steps)), sum(step.elapsed_s for step in steps)
    stall_s = sum(step.stall_s for step in steps)
    lookups, hits = sum(step.lookups for step in steps), sum(step.hits for step in steps)
    spent = {**breakdown(steps), "stall_s": stall_s}
    scheduler = None if engine.fetching is None else engine.fetching.prefetcher.scheduler
    record = engine.store.record_bytes
    return {
        "decode_tokens_per_s": sum(step.tokens for step in steps) / seconds if seconds else 0.0,
        "ttft_s": sum(report.ttft_s for report in reports) / len(reports),
        "hit_rate": hits / lookups if lookups else 1.0,
        "stall_s": stall_s,
        "steps": len(steps),
        "decode_tokens": sum(step.tokens for step in steps),
        "decode_s": seconds,
        "per_step_s": [step.elapsed_s for step in steps],
        **{f"{part}_s_per_step": spent[f"{part}_s"] / number for part in PARTS},
        **{
            f"{name}_share": spent[f"{name}_s"] / seconds if seconds else 0.0
            for name in ("management", "predictor", "stall")
        },
        "decode_needed_bytes": sum(step.needed_bytes for step in steps),
        "decode_moved_bytes": record * (counters.on_demand + counters.prefetched),
        "transfers_per_step": (counters.on_demand + counters.prefetched) / number,
        "prefetched_bytes": record * counters.prefetched,
        "useful_bytes": record * counters.useful,
        "late_bytes": record * counters.late,
        "wasted_bytes": record * counters.wasted,
        "link_busy_share": min(1.0, counters.link_busy_s / seconds) if seconds else 0.0,
        "budget_avg": None if scheduler is None else float(scheduler.budget_avg),
        "notices": [] if engine.fetching is None else list(engine.fetching.notices),
    }
