"""Self-restraint: whether forecasts and prefetch are worth what they cost, decided after every step. Pure.

Prefetch can lose (SpecPrefetch's notes; design section 4, e). On a slow link (one transfer takes many layers) a transfer that
turns out wasted holds up the loads that cannot wait, and what it evicts has to come back over the same link. On a fast one
the forecast takes longer than the loads that it saves. So there are three levels, each dearer than the one below and able
to save more:

    OFF        no forecasts; the cache goes by recency
    CACHE      a forecast at the start of each step tells the cache what to keep
    PREFETCH   and transfers begin ahead of need

What a step costs beside its compute is seen for the level at work, and has to be known for the others. Adding up single
transfers (useful ones x what a load costs, less waits, less misses of what prefetch evicted) does not give it: a useful
fetch may have brought back what another one drove out, and an eviction would have come later anyway. But what caches without
prefetch would have missed needs no bytes: two shadows (shadow.py) count it step by step. The three accounts, in time:

    OFF        (misses of the shadow by recency) x load
    CACHE      (misses of the shadow by forecast) x load + forecast
    PREFETCH   time stood still for transfers, waits behind prefetches included + forecast + everything else prefetch takes

All three concern the same steps, so that their differences are far less noisy than step times. They are averaged over some
`memory` steps, and over eight times as many. A level is left for a cheaper one when that is better by `margin` of a step's
time and by three standard errors over the short time, or two over the long one (it is looked at after every step, which makes
chance likely). It is left for OFF at once where forecasts take more than all loads together would: no trial could tell more,
and none is made as long as it is so. What is better by a percent or two only may go unseen for long.

What a level above the present one would bring is not known, so it is tried from time to time: for `settle` steps that do not
count (the cache is still that of the level before) and `window` that do; then the best level stays. After a trial that failed
the pause to the next one doubles, up to `longest_pause`, and is at least as long as it takes for a trial as bad as that one
to cost no more than `price` of the time. When a load's or the layers' time has moved by more than `change`, what was found
holds no more: the pause is the shortest again and the next trial due. So it is where a level was left for OFF, or OFF holds
now, and the loads of a cache by recency cost twice as much as then: the text has changed, and OFF sees nothing of what
forecasts would bring. A level that was left for CACHE is tried from CACHE.

What the accounts do not see: a compute that is slower because transfers share its memory or processor. Whoever measures that
adds it to the step's `prefetch`.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.eviction_fallback import FallbackEviction
from seqmoe.runtime.prefetch import Prefetcher
from seqmoe.runtime.shadow import Shadow


class Level(IntEnum):
    """How much is done about the future."""

    OFF = 0
    CACHE = 1
    PREFETCH = 2


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that has ended; times in any one unit."""

    compute: float  # of the layers
    stall: float  # that compute stood still for transfers: loads on demand, what they waited for, late prefetches
    forecast: float  # of the forecast at the step's start, with what follows from it for the cache
    prefetch: float  # what else there is for prefetch's sake: further forecasts, jobs, scheduling
    load: float  # one load on demand with the link free; 0 where none was made
    lru_misses: int  # of the shadow by recency
    cache_misses: int  # of the shadow by forecast; not looked at in OFF


@dataclass(frozen=True, slots=True)
class Restraints:
    """How cautious restraint is. Steps, or shares of a step's time."""

    memory: int = 32
    settle: int = 8
    window: int = 32
    pause: int = 128
    longest_pause: int = 1024
    margin: float = 0.005
    price: float = 0.0025
    change: float = 1.25

    def __post_init__(self) -> None:
        if min(self.memory, self.window, self.pause) < 1 or self.settle < 0 or self.longest_pause < self.pause:
            raise UsageError(f"memory, window and pause must be at least 1, settle 0, longest_pause pause; got {self}")
        if self.margin < 0 or self.price <= 0 or self.change <= 1:
            raise UsageError(f"margin must not be negative, price above 0, change above 1; got {self}")


class _Mean:
    """Running mean and variance: of all so far, then exponential with a memory of so many."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.count = 0
        self.mean = self.variance = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        share = 1.0 / min(self.count, self.memory)
        change = value - self.mean
        self.mean += share * change
        self.variance = (1.0 - share) * (self.variance + share * change * change)

    @property
    def error(self) -> float:
        """Standard error of the mean, for values that are independent of each other."""
        if self.count < 2:
            return 0.0
        return sqrt(self.variance / min(self.count, 2 * self.memory))

    def is_above(self, value: float, errors: float) -> bool:
        """By so many standard errors."""
        return self.mean > value + errors * self.error


_FEW = 4  # steps before anything is decided


@dataclass(slots=True)
class _Rest:
    """A level that was left for a lower one."""

    to: Level
    pause: int  # steps to the next trial
    since: int = 0
    load: float = 0.0  # how things stood
    compute: float = 0.0
    recency: float = 0.0


class Restraint:
    """The level for the next step, from the record of each step. Begins with PREFETCH."""

    def __init__(self, settings: Restraints | None = None) -> None:
        self.settings = settings or Restraints()
        self.level = Level.PREFETCH
        memory = self.settings.memory
        brief = max(1, memory // 4)
        self._load, self._compute = _Mean(brief), _Mean(brief)
        self._forecast, self._prefetch = _Mean(brief), _Mean(brief)  # as last seen
        self._recency = _Mean(max(1, memory // 2))  # cost of OFF
        self._rests = {level: _Rest(Level.OFF, self.settings.pause) for level in (Level.PREFETCH, Level.CACHE)}
        self._excess = _Mean(8 * memory)  # cost of CACHE less that of OFF
        self._begin(Level.PREFETCH, trial=False)

    def _begin(self, level: Level, trial: bool) -> None:
        memory = self.settings.memory
        if level == Level.OFF:  # what comes after it counts as much as what was before
            self._excess.count = min(self._excess.count, self.settings.window)
        self.level = level
        self._age = 0  # steps at this level
        self._trial = trial
        self._cost = _Mean(memory)  # of this level
        # this level's cost less that one's, over a short and a long time
        self._gain = {lower: _Mean(memory) for lower in Level if lower < level}
        self._long_gain = {lower: _Mean(8 * memory) for lower in self._gain}
        self._time = _Mean(memory)

    def step(self, record: StepRecord) -> Level:
        """The level for the next step. A record with an impossible time changes nothing."""
        times = (record.compute, record.stall, record.forecast, record.prefetch, record.load)
        if not all(isfinite(time) and time >= 0 for time in times):
            return self.level
        self._age += 1
        for rest in self._rests.values():
            rest.since += 1
        self._compute.add(record.compute)
        if record.load > 0:
            self._load.add(record.load)
        if not self._load.count:
            return self.level  # nothing had to be loaded yet
        costs = self._costs(record)
        self._recency.add(costs[Level.OFF])
        if not self._trial or self._age > self.settings.settle:
            self._cost.add(costs[self.level])
            self._time.add(record.compute + costs[self.level])
            for lower, gain in self._gain.items():
                gain.add(costs[self.level] - costs[lower])
                self._long_gain[lower].add(costs[self.level] - costs[lower])
            if self.level > Level.OFF:
                self._excess.add(costs[Level.CACHE] - costs[Level.OFF])
        if self._time.count >= _FEW:
            self._decide(self.settings.margin * self._time.mean)
        return self.level

    def _costs(self, record: StepRecord) -> dict[Level, float]:
        load = self._load.mean
        costs = {Level.OFF: record.lru_misses * load}
        if self.level > Level.OFF:
            self._forecast.add(record.forecast)
            costs[Level.CACHE] = record.cache_misses * load + record.forecast
        if self.level == Level.PREFETCH:
            self._prefetch.add(record.prefetch)
            costs[Level.PREFETCH] = record.stall + record.forecast + record.prefetch
        return costs

    def _decide(self, margin: float) -> None:
        settings = self.settings
        off_is_better = self._is_off_better(margin)
        ends_trial = self._trial and self._age >= settings.settle + settings.window
        if self.level > Level.OFF and self._recency.mean + margin < self._overhead(self.level):
            self._fall(Level.OFF)  # a forecast takes longer than all loads of a cache by recency
            return
        if self.level == Level.PREFETCH:
            lower = Level.OFF if off_is_better else Level.CACHE
            gain = self._gain[lower]
            is_sure = gain.is_above(margin, 3.0) or self._long_gain[lower].is_above(margin, 2.0)
            if (is_sure and self._time.count >= settings.window // 4) or (ends_trial and gain.mean > -margin):
                self._fall(lower)
                return
        elif self.level == Level.CACHE and (off_is_better or (ends_trial and self._gain[Level.OFF].mean > -margin)):
            self._fall(Level.OFF)
            return
        self._trial = self._trial and not ends_trial
        for level, rest in self._rests.items():
            # what was left for CACHE is tried from there
            if rest.to <= self.level < level and self._is_due(rest) and self._could_gain(level) > margin:
                self._begin(level, trial=True)
                return

    def _is_off_better(self, margin: float) -> bool:
        """Than CACHE. Not lightly said: from OFF, nothing is seen of what forecasts would bring."""
        return self._excess.count >= self.settings.window and self._excess.is_above(margin, 3.0)

    def _fall(self, to: Level) -> None:
        settings = self.settings
        trial = settings.settle + settings.window
        for level in Level:
            if not to < level <= self.level:
                continue
            rest = self._rests[level]
            gain = self._excess if level == Level.CACHE else self._gain[to]
            loss = (gain.mean - gain.error) / self._time.mean
            failed = rest.load > 0 and self._age <= rest.pause
            pause = min(2 * rest.pause, settings.longest_pause) if failed else settings.pause
            pause = max(pause, round(trial * loss / settings.price))
            self._rests[level] = _Rest(to, pause, 0, self._load.mean, self._compute.mean, self._recency.mean)
        self._begin(to, trial=False)

    def _overhead(self, level: Level) -> float:
        """What forecasts and prefetch take at a level, as last seen."""
        parts = (0.0, self._forecast.mean, self._forecast.mean + self._prefetch.mean)
        return parts[level]

    def _is_due(self, rest: _Rest) -> bool:
        if self._has_moved(self._load.mean, rest.load) or self._has_moved(self._compute.mean, rest.compute):
            rest.pause = self.settings.pause
            return True
        pause = rest.pause
        if Level.OFF in (self.level, rest.to) and self._recency.mean > 2 * rest.recency:
            pause = 0
        return rest.since >= max(pause, self.settings.settle + self.settings.window)

    def _has_moved(self, now: float, then: float) -> bool:
        return max(now, then) > self.settings.change * min(now, then)

    def _could_gain(self, level: Level) -> float:
        """The most that a higher level could save a step: all stalls; prefetch no more than the time that can hide them."""
        stall = self._cost.mean - self._overhead(self.level)
        if level == Level.PREFETCH:
            stall = min(stall, self._compute.mean + self._overhead(level))
        return stall - (self._overhead(level) - self._overhead(self.level))


class SelfRestraint:
    """Restraint at work on a prefetcher: it keeps the shadows, and carries out what is decided.

    The prefetcher's driver asks for a forecast while `wants_forecast`, for any further one while `prefetcher.enabled`, says
    `reach` after the prefetcher's own, `forecast` when the step's first forecast was taken, `end_step` when it has ended.
    """

    def __init__(self, prefetcher: Prefetcher, settings: Restraints | None = None) -> None:
        """The prefetcher's eviction must be a FallbackEviction."""
        eviction, residency = prefetcher.eviction, prefetcher.residency
        assert isinstance(eviction, FallbackEviction), type(eviction)
        self.prefetcher = prefetcher
        self.restraint = Restraint(settings)
        self.shadow = Shadow(residency.num_slots, residency.num_layers, residency.num_experts, eviction.factor)
        self.changes = 0  # of the level
        self._eviction = eviction

    @property
    def level(self) -> Level:
        """Of the step that runs, or of the next one between steps."""
        return self.restraint.level

    @property
    def wants_forecast(self) -> bool:
        """Whether a step's first forecast is of use."""
        return self.level > Level.OFF

    def reach(self) -> None:
        """A layer was reached: while nothing is sent, the link says nothing of the budget."""
        if self.level < Level.PREFETCH and self.prefetcher.scheduler is not None:
            self.prefetcher.scheduler.pause()

    def forecast(self) -> None:
        """The prefetcher has taken the forecast that the step begins with."""
        self.shadow.forecast(*self._eviction.worths)

    def end_step(
        self, ids: NDArray[np.int32], *, compute: float, stall: float, forecast: float, prefetch: float, load: float
    ) -> Level:
        """The level for the next step. `ids` [L, width]: flat ids of what each layer needed, -1 where it needed fewer; the
        times as in StepRecord."""
        before = self.level
        lru_misses, cache_misses = self.shadow.step(ids)
        level = self.restraint.step(StepRecord(compute, stall, forecast, prefetch, load, lru_misses, cache_misses))
        if level != before:
            self.changes += 1
            self._eviction.by_recency = level == Level.OFF
            self.prefetcher.enabled = level == Level.PREFETCH
            if not self.prefetcher.enabled:
                self.prefetcher.offer([])
        return level
