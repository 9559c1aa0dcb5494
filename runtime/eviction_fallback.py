"""Eviction by forecast that can do without forecasts: then the least recently used goes."""

from collections.abc import Sequence
from typing import Any

from seqmoe.runtime.eviction import LRU
from seqmoe.runtime.eviction_fast import FastForecastEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction, Scores


class FallbackEviction(ForecastEviction):
    """`ForecastEviction`, and LRU while `by_recency` is True: what self-restraint needs where forecasts do not pay."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.by_recency = False
        self._lru = LRU()

    @property
    def worths(self) -> tuple[Scores, Scores]:
        """Both [L, E], by the latest forecast and without a discount for position: of experts whose layer the step has yet
        to reach, and has reached."""
        return self._soon, self._later

    @property
    def factor(self) -> Scores:
        """[L] the discount by how many layers ahead."""
        return self._factor

    def touch(self, experts: Sequence[int], position: int) -> None:
        """See Eviction."""
        super().touch(experts, position)
        self._lru.touch(experts, position)

    def release(self, experts: Sequence[int], position: int) -> None:
        """See Eviction."""
        super().release(experts, position)
        self._lru.release(experts, position)

    def victim(self) -> int:
        """See Eviction."""
        if self.by_recency:
            expert = self._lru.victim()
            super().touch([expert], self._position)
        else:
            expert = super().victim()
            self._lru.touch([expert], self._position)
        return expert


class FastFallbackEviction(FallbackEviction, FastForecastEviction):
    """The same, compiled."""
