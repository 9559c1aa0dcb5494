"""The search space, derived from the knobs that say `tune`, and cut to what this machine and this budget can do."""

import math
from dataclasses import dataclass
from typing import Any

from seqmoe.profiles.budget import MemoryPlan, min_slots, plan_memory
from seqmoe.profiles.knobs import Knobs, knob_infos
from seqmoe.profiles.sizes import format_bytes
from seqmoe.profiles.spec import ModelSpec

# More reading threads than this for each core only wait for one another.
THREADS_PER_CORE = 8
MAX_QUEUE_DEPTH = 64
FILL_STEP = 0.05


@dataclass(frozen=True)
class Dimension:
    """One thing to choose: out of `choices`, or from `low` to `high` (both included).

    `fill` is the share of the slots that fit which is used; it stands for the knob `slots`. The others are knobs.
    """

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `choices`, or `low` and `high`; the others are null."""
        if self.choices:
            return {"name": self.name, "choices": list(self.choices), "low": None, "high": None}
        return {"name": self.name, "choices": None, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        """For people: `policy: lru, lfu, static` or `read_threads: 1 to 16`."""
        if self.choices:
            text = ", ".join(format_bytes(c) if self.name.endswith("_bytes") else str(c) for c in self.choices)
        else:
            text = f"{self.low:g} to {self.high:g}" + (" (logarithmic)" if self.log else "")
            text += " of the slots that fit" if self.name == "fill" else ""
        return f"{self.name}: {text}"


@dataclass(frozen=True)
class Space:
    """Everything that decides what a proposal means. `max_slots` caps the experts in memory below what the budget holds."""

    model: ModelSpec
    memory_bytes: int
    context: int
    process_bytes: int
    cores: int
    max_slots: int | None = None

    def plan(self, knobs: Knobs) -> MemoryPlan:
        """The memory plan of `knobs` as the tuner expects it. Raises BudgetError."""
        return plan_memory(self.memory_bytes, self.model, self.context, 1, knobs, self.process_bytes)

    def most_slots(self, knobs: Knobs) -> int:
        """Experts that fit with these knobs' read buffers. Raises BudgetError when not even the fewest do."""
        fit = self.plan(knobs.replace(slots=None)).slots
        return max(min_slots(self.model), min(fit, self.max_slots or fit))

    def default(self) -> Knobs:
        """What an untuned run would take, its number of slots made explicit so that both arms hold the same."""
        return Knobs(slots=self.most_slots(Knobs()))

    def knobs(self, params: dict[str, Any]) -> Knobs:
        """The knobs that a proposal stands for. `fill` is the share of the slots that fit. Raises BudgetError."""
        values = {name: value for name, value in params.items() if name != "fill"}
        bare = Knobs(**values)
        most = self.most_slots(bare)
        return bare.replace(slots=max(min_slots(self.model), round(params["fill"] * most)))

    def default_params(self) -> dict[str, Any]:
        """The proposal that stands for the default."""
        return {"fill": 1.0, **{info.name: info.default for info in knob_infos() if info.tune and info.name != "slots"}}

    def dimensions(self) -> tuple[Dimension, ...]:
        """What there is to choose, in a fixed order; a dimension with one choice is left out."""
        found = [Dimension("fill", low=self._lowest_fill(), high=1.0)]
        for info in knob_infos():
            if not info.tune or info.name == "slots":
                continue
            if info.name == "read_chunk_bytes":
                # Pieces as large as a record all mean: read it whole, as the default does or the next larger one.
                useful = tuple(c for c in info.choices if c < self.model.slot_bytes or c == info.default)
                found.append(Dimension(info.name, choices=useful))
            elif info.choices:
                found.append(Dimension(info.name, choices=info.choices))
            else:
                cap = (
                    MAX_QUEUE_DEPTH if info.name == "queue_depth" else max(info.default, THREADS_PER_CORE * self.cores)
                )
                found.append(Dimension(info.name, low=info.low or 1, high=min(info.high or cap, cap), log=info.log))
        return tuple(d for d in found if len(d.choices) > 1 or d.low < d.high)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """A whole proposal from an Optuna trial; what is not a dimension keeps its default."""
        params = self.default_params()
        for d in self.dimensions():
            if d.choices:
                params[d.name] = trial.suggest_categorical(d.name, d.choices)
            elif d.name == "fill":
                params[d.name] = trial.suggest_float(d.name, d.low, d.high, step=FILL_STEP)
            else:
                params[d.name] = trial.suggest_int(d.name, int(d.low), int(d.high), log=d.log)
        return params

    def _lowest_fill(self) -> float:
        """The share that still holds the fewest slots that work, rounded up to the grid."""
        steps = math.ceil(min_slots(self.model) / self.most_slots(Knobs()) / FILL_STEP)
        return min(1.0, round(max(1, steps) * FILL_STEP, 10))
