"""Eviction by forecast compiled: the victims and the very floats of `eviction_forecast.ForecastEviction`."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from seqmoe.runtime.eviction_forecast import (
    ForecastEviction,
    Rule,
    Scores,
    expected_worth,
    first_use_worth,
    hard_worth,
)
from seqmoe.runtime.schedule import Admission
from seqmoe.runtime.schedule_fast import best_of_row, plain_scores

EXPECTED, FIRST_USE, HARD, OTHER = range(4)


@njit(cache=True, nogil=True, error_model="numpy")
def _expected(
    scores: NDArray[np.floating], rows: int, powers: Scores, norms: Scores, soon: Scores, later: Scores
) -> None:
    """expected_worth from row 0 (`soon`) and from row 1 (`later`), in its order of additions; `norms[n]` is the sum of
    the first n `powers`."""
    layers, experts = soon.shape
    for first in range(2):
        out = later if first else soon
        used = max(0, min(rows, scores.shape[0] - first))
        norm = norms[used]
        for layer in range(layers):
            for e in range(experts):
                out[layer, e] = 0.0
            for j in range(used):
                power = powers[j]
                for e in range(experts):
                    out[layer, e] += power * np.float64(scores[first + j, layer, e])
            if norm != 0.0:
                for e in range(experts):
                    out[layer, e] /= norm


@njit(cache=True, nogil=True)
def _first_use(
    scores: NDArray[np.floating], rows: int, powers: Scores, unused: Scores, soon: Scores, later: Scores
) -> None:
    """first_use_worth, the same; `unused` [E] is scratch."""
    layers, experts = soon.shape
    for first in range(2):
        out = later if first else soon
        used = max(0, min(rows, scores.shape[0] - first))
        for layer in range(layers):
            for e in range(experts):
                out[layer, e] = 0.0
                unused[e] = 1.0
            for j in range(used):
                power = powers[j]
                for e in range(experts):
                    p = np.float64(scores[first + j, layer, e])
                    out[layer, e] += power * unused[e] * p
                    unused[e] *= 1.0 - p


@njit(cache=True, nogil=True)
def _hard(scores: NDArray[np.floating], rows: int, best: NDArray[np.int64], soon: Scores, later: Scores) -> None:
    """hard_worth, the same, where the expected worths are before; `best` [k] is scratch."""
    count, layers = scores.shape[0], scores.shape[1]
    for layer in range(layers):
        for e in range(soon.shape[1]):
            soon[layer, e] *= 0.5
            later[layer, e] *= 0.5
        for h in range(min(rows, count - 1), -1, -1):  # the sooner the later written
            found = best_of_row(scores[h, layer], len(best), best)
            for i in range(found):
                if h < rows:
                    soon[layer, best[i]] = 2.0 + rows - h
                if h >= 1:
                    later[layer, best[i]] = 2.0 + rows - (h - 1)


@njit(cache=True, nogil=True)
def _weigh(now: Scores, factor: Scores, position: int, worth: Scores) -> None:
    layers, experts = now.shape
    for layer in range(layers):
        ahead = factor[(layer - position - 1) % layers]
        for e in range(experts):
            worth[layer * experts + e] = now[layer, e] * ahead


@njit(cache=True, nogil=True)
def _settle(
    scores: NDArray[np.floating],
    soon: Scores,
    later: Scores,
    chance_later: Scores,
    now: Scores,
    chance: Scores,
    factor: Scores,
    step: int,
    position: int,
    worth: Scores,
) -> None:
    """A forecast is in `soon` and `later`: which of them holds now, layer by layer."""
    layers, experts = now.shape
    reached = position - step * layers + 1
    second = min(1, scores.shape[0] - 1)
    for layer in range(layers):
        for e in range(experts):
            chance_later[layer, e] = scores[second, layer, e]
        if layer < reached:
            for e in range(experts):
                now[layer, e] = later[layer, e]
                chance[layer, e] = scores[second, layer, e]
        else:
            for e in range(experts):
                now[layer, e] = soon[layer, e]
                chance[layer, e] = scores[0, layer, e]
    _weigh(now, factor, position, worth)


@njit(cache=True, nogil=True)
def _reach(
    now: Scores,
    chance: Scores,
    later: Scores,
    chance_later: Scores,
    layer: int,
    routed: bool,
    factor: Scores,
    position: int,
    worth: Scores,
) -> None:
    if routed:
        for e in range(now.shape[1]):
            now[layer, e] = later[layer, e]
            chance[layer, e] = chance_later[layer, e]
    _weigh(now, factor, position, worth)


@njit(cache=True, nogil=True)
def _peek(is_candidate: NDArray[np.bool_], worth: Scores) -> int:
    """The candidate with the least worth, of equals the lowest; as numpy's argmin, a NaN is less than all."""
    best = -1
    least = np.inf
    for e in range(len(worth)):
        if is_candidate[e]:
            value = worth[e]
            if value < least or best < 0:
                best = e
                least = value
            if np.isnan(value):
                return e
    return best


class FastForecastEviction(ForecastEviction):
    """`ForecastEviction` with compiled decisions. Rules other than those of eviction_forecast.py are called as they are.

    Forecasts as float32 or float64, [horizon, L, E]; others are converted to float32. `worth` is an array of its own for
    each forecast and each layer that is reached.
    """

    def __init__(self, num_layers: int, num_experts: int, **options: Any) -> None:
        super().__init__(num_layers, num_experts, **options)
        self._kind, top_k = _kind_of(self.rule)
        powers = [self.discount**j for j in range(self.horizon)]
        self._powers = np.array(powers, dtype=np.float64)
        self._norms = np.array(list(accumulate(powers, initial=0.0)), dtype=np.float64)
        self._scratch = np.zeros(num_experts)
        self._best = np.zeros(min(top_k, num_experts), dtype=np.int64)
        self._flags = bytearray(num_layers * num_experts)  # an item costs a fifth of what a numpy array's does
        self._is_candidate = np.frombuffer(self._flags, dtype=np.bool_)
        self._chance_flat = self._chance.reshape(-1)
        self._worth = np.zeros(num_layers * num_experts)

    def update(self, scores: NDArray[np.floating], step: int) -> None:
        """See ForecastEviction."""
        soon, later, rows = self._soon, self._later, self.horizon
        if self._kind == OTHER:
            soon[:] = self.rule(scores, 0, rows, self.discount)
            later[:] = self.rule(scores, 1, rows, self.discount)
        scores = plain_scores(scores)
        if self._kind == FIRST_USE:
            _first_use(scores, rows, self._powers, self._scratch, soon, later)
        elif self._kind != OTHER:
            _expected(scores, rows, self._powers, self._norms, soon, later)
        if self._kind == HARD:
            _hard(scores, rows, self._best, soon, later)
        self._step = step
        self._worth = worth = np.empty(len(self._flags))
        _settle(
            scores, soon, later, self._chance_later, self._now, self._chance, self._factor, step, self._position, worth
        )

    @property
    def worth(self) -> Scores:
        """[L * E] by expert, as of now."""
        assert self._worth is not None
        return self._worth

    def admission(self) -> Admission | None:
        """See ForecastEviction."""
        victim = self.peek()
        if victim < 0:
            return None
        worth = self.worth
        return Admission(worth, worth.item(victim), self.next_use(victim), self._chance_flat.item(victim))

    def peek(self) -> int:
        """Who would be the victim; -1 without candidates."""
        return _peek(self._is_candidate, self._worth) if self._count else -1

    def touch(self, experts: Sequence[int], position: int) -> None:
        """See Eviction."""
        if position != self._position:
            self._position = position
            layer = position % self.num_layers
            routed = position >= self._step * self.num_layers + layer
            self._worth = worth = np.empty(len(self._flags))
            _reach(
                self._now, self._chance, self._later, self._chance_later, layer, routed, self._factor, position, worth
            )  # fmt: skip
        flags = self._flags
        for expert in experts:
            if flags[expert]:
                flags[expert] = 0
                self._count -= 1

    def release(self, experts: Sequence[int], position: int) -> None:
        """See Eviction."""
        flags = self._flags
        for expert in experts:
            flags[expert] = 1
        self._count += len(experts)

    def victim(self) -> int:
        """See Eviction."""
        expert = self.peek()
        assert expert >= 0, "no candidate"
        self._flags[expert] = 0
        self._count -= 1
        return expert

    def warm_up(self, scores: NDArray[np.floating]) -> None:
        """Compiles what the first decisions would wait for, for forecasts like this one. Changes nothing here."""
        one = FastForecastEviction(self.num_layers, self.num_experts, horizon=self.horizon, rule=self.rule)
        one.update(scores, 0)
        one.touch([], 0)
        one.release([0], 0)
        one.peek()


def _kind_of(rule: Rule) -> tuple[int, int]:
    """Which rule it is, and the k of hard_worth."""
    if rule is expected_worth:
        return EXPECTED, 0
    if rule is first_use_worth:
        return FIRST_USE, 0
    if isinstance(rule, partial) and rule.func is hard_worth and not rule.args and list(rule.keywords) == ["k"]:
        return HARD, rule.keywords["k"]
    return OTHER, 0
