"""What a run did, in numbers: counters that the layers add to, one `StepStats` per forward pass, one `RunReport` per request."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any


@dataclass(slots=True)
class Totals:
    """Running totals of one engine; only the thread that runs the model writes them."""

    lookups: int = 0  # distinct experts that a layer needed, summed over layers and passes
    hits: int = 0  # of those, resident before the on-demand load began
    needed_bytes: int = 0  # record bytes of the misses
    stall_s: float = 0.0  # time in which the model waited for the link with nothing left to compute
    experts_s: float = 0.0  # time in which experts were computed
    predictor_s: float = 0.0  # time of forecasts, on this thread
    management_s: float = 0.0  # the rest of the time in the experts' layers: tables, hand-over to the worker
    worker_s: float = 0.0  # time that the fetch worker took to decide, on its own thread

    def copy(self) -> "Totals":
        return Totals(*[getattr(self, name) for name in _TOTALS])


_TOTALS = tuple(f.name for f in fields(Totals))


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward pass: the prefill of a request, or one decode step."""

    tokens: int  # tokens fed, over the whole batch
    lookups: int
    hits: int
    needed_bytes: int
    stall_s: float
    elapsed_s: float
    experts_s: float = 0.0
    predictor_s: float = 0.0
    management_s: float = 0.0
    worker_s: float = 0.0

    @staticmethod
    def between(before: Totals, after: Totals, tokens: int, elapsed_s: float) -> "StepStats":
        spent = {name: getattr(after, name) - getattr(before, name) for name in _TOTALS}
        return StepStats(tokens=tokens, elapsed_s=elapsed_s, **spent)


@dataclass(frozen=True)
class RunReport:
    """One request (a batch of prompts): what came out, and how it went."""

    token_ids: list[list[int]]  # new tokens per prompt, without padding, with the end-of-sequence token where one came
    prompt_tokens: list[int]
    prefill: StepStats
    decode: list[StepStats] = field(repr=False)

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.prefill.elapsed_s

    @property
    def hit_rate(self) -> float:
        """Share of the needed experts that decode steps found resident (1.0 where nothing was looked up)."""
        lookups = sum(step.lookups for step in self.decode)
        return sum(step.hits for step in self.decode) / lookups if lookups else 1.0

    @property
    def decode_seconds(self) -> float:
        return sum(step.elapsed_s for step in self.decode)

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode tokens of the whole batch per second, without prefill; 0.0 where there was no decode step."""
        seconds = self.decode_seconds
        return sum(step.tokens for step in self.decode) / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures under the names that `--json` prints."""
        steps = [step.elapsed_s for step in self.decode]
        return {
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": sum(len(ids) for ids in self.token_ids),
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "median_step_s": median(steps) if steps else None,
            "ttft_s": self.ttft_s,
            "hit_rate": self.hit_rate,
            "needed_bytes": self.prefill.needed_bytes + sum(step.needed_bytes for step in self.decode),
            "decode_needed_bytes": sum(step.needed_bytes for step in self.decode),
            "stall_s": sum(step.stall_s for step in self.decode),
            "decode_s": self.decode_seconds,
            **breakdown(self.decode),
            "steps": len(self.decode),
        }


def breakdown(steps: Sequence[StepStats]) -> dict[str, float]:
    """Where decode time went, in seconds (paper Fig. 9): experts, predictor, management, and the model's other layers;
    waiting is `stall_s`. The worker's own time runs beside all this."""
    names = ("experts_s", "predictor_s", "management_s", "worker_s")
    sums = {name: sum(getattr(step, name) for step in steps) for name in names}
    inside = sums["experts_s"] + sums["predictor_s"] + sums["management_s"] + sum(step.stall_s for step in steps)
    return {**sums, "other_s": sum(step.elapsed_s for step in steps) - inside}
