"""Random operations on the whole of a policy's decisions (residency, eviction, scheduler, prefetcher), compiled against pure:
after each the same answers and the same state, to the last bit; and the tables agree with themselves."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from seqmoe.runtime.control import NO_JOBS, pack_jobs
from seqmoe.runtime.eviction_fallback import FallbackEviction, FastFallbackEviction
from seqmoe.runtime.eviction_fast import FastForecastEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction
from seqmoe.runtime.policy import Plan
from seqmoe.runtime.prefetch import Prefetcher, plan_eviction
from seqmoe.runtime.prefetch_fast import FastPrefetcher
from seqmoe.runtime.residency import Fetch, Residency
from seqmoe.runtime.schedule import ORDERS, FetchJob, Scheduler
from seqmoe.runtime.schedule_fast import FastScheduler

CHECK_EVERY = 50  # operations between two integrity checks


class Twins:
    """Two prefetchers, pure and compiled, to which the same is done."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.layers, self.experts = rng.choice([(3, 5), (1, 4), (4, 8), (2, 3)])
        self.top_k = rng.randint(1, 2)
        self.total = self.layers * self.experts
        eviction = rng.choice(["expected", "first-use", "hard", "expected", "lru", "lfu", "static"])
        forecast = eviction in ("expected", "first-use", "hard")
        self.plan = Plan(
            eviction=eviction,
            order=rng.choice(ORDERS),
            admission=forecast and rng.random() < 0.7,
            k_prime=rng.randint(1, self.experts),
            job_steps=rng.randint(1, 3),
            horizon=rng.randint(1, 3),
            discount=rng.choice([0.0, 0.5, 1.0]),
            by_position=rng.random() < 0.5,
            ema_alpha=rng.choice([0.1, 1.0]),
            lead=rng.randint(0, 2),
            m_max=rng.choice([0, 1, 3, 1 << 30, 1 << 30]),
            least=rng.choice([0.0, 0.3]),
            printed_form=rng.random() < 0.1,
            early_binding=rng.random() < 0.25,
        )
        self.restrained = forecast and rng.random() < 0.4
        slots = rng.randint(self.top_k, self.total + 1)
        popularity = [rng.randrange(4) for _ in range(self.total)]
        kinds: list[tuple[Any, Any, Any]] = [
            (FallbackEviction if self.restrained else ForecastEviction, Scheduler, Prefetcher),
            (FastFallbackEviction if self.restrained else FastForecastEviction, FastScheduler, FastPrefetcher),
        ]
        self.both: list[Prefetcher] = []
        for by_forecast, scheduler, prefetcher in kinds:
            order = plan_eviction(
                self.plan, self.layers, self.experts, self.top_k, popularity=popularity, forecast_eviction=by_forecast
            )
            residency = Residency(slots, self.layers, self.experts, order, reserve=self.top_k)
            queue = scheduler(
                self.layers, order=self.plan.order, budget=1.39, ema_alpha=self.plan.ema_alpha, lead=self.plan.lead,
                m_max=self.plan.m_max, printed_form=self.plan.printed_form,
            )  # fmt: skip
            one = prefetcher(self.plan, residency, queue)
            one.log = []
            self.both.append(one)
        self.step, self.layer = 0, -1
        self.working = False
        self.pending: list[int] = []  # flat ids that the layer at work has yet to load
        self.loaded: list[Fetch] = []  # on demand, by the layer at work
        self.sent: list[Fetch] = []  # prefetches under way, the orphans too
        self.done = Counter[str]()

    @property
    def pure(self) -> Prefetcher:
        return self.both[0]

    @property
    def position(self) -> int:
        return self.step * self.layers + self.layer

    def all(self, act: Any) -> Any:
        """Done to both: the answer, which must be the same."""
        first, second = [act(one) for one in self.both]
        assert first == second, (first, second)
        return first

    def scores(self) -> np.ndarray:
        """A forecast, half of them full of ties, now and then with rows missing or with nonsense in it."""
        rng = np.random.default_rng(self.rng.randrange(1 << 30))
        scores = rng.random((self.rng.choice([1, 2, 3, 4]), self.layers, self.experts), dtype=np.float32)
        if self.rng.random() < 0.5:
            scores = np.round(scores * 4) / 4
        if self.rng.random() < 0.02:
            scores[rng.random(scores.shape) < 0.1] = np.nan
        return scores

    # -- operations; each does nothing where it makes no sense ------------------------------------------------------

    def reach(self) -> None:
        if self.working:
            return
        self.layer += 1
        if self.layer == self.layers:
            self.layer, self.step = 0, self.step + 1
            self.all(lambda one: one.residency.begin_step(self.step))
        self.all(lambda one: one.reach(self.position))
        experts = self.rng.sample(range(self.experts), self.top_k)
        found = self.all(lambda one: one.lookup(self.layer, experts))
        self.pending, self.loaded, self.working = list(found.missing), [], True
        for fetch in found.in_flight:
            assert fetch in self.sent
            fate = self.rng.choice(["land", "orphan", "fail"])
            self.end(fetch, fate)
            if fate != "land":
                self.pending.append(fetch.expert)

    def load(self) -> None:
        if self.pending:
            expert = self.pending.pop()
            self.loaded.append(self.all(lambda one: one.load(expert)))

    def release(self) -> None:
        if self.working and not self.pending:
            self.all(lambda one: one.release(self.layer))
            self.loaded, self.working = [], False

    def release_part(self) -> None:
        if self.working and self.loaded:
            fetch = self.loaded.pop()
            self.all(lambda one: one.residency.release(self.layer, [fetch.expert]))

    def load_fails(self) -> None:
        if self.working and self.loaded:
            fetch = self.loaded.pop()
            assert self.all(lambda one: one.residency.fail(fetch))
            self.pending.append(fetch.expert)

    def send(self) -> None:
        if self.working and self.pending:
            return  # on-demand loads have the link
        fetch = self.all(lambda one: one.next())
        if fetch is not None:
            self.sent.append(fetch)
            self.done["sent"] += 1
            self.done["evicted"] += fetch.victim >= 0

    def end(self, fetch: Fetch, fate: str) -> None:
        """What the runtime does with a transfer; an orphan goes on."""
        orphan = fetch.tag in self.pure.residency._orphans
        if fate == "land":
            assert self.all(lambda one: one.residency.land(fetch.tag)) == (not orphan)
        elif fate == "orphan":
            assert self.all(lambda one: one.residency.orphan(fetch.tag)) == (not orphan)
            if not orphan:
                self.all(lambda one: one.lost(fetch))
        elif fate == "drop":
            assert self.all(lambda one: one.residency.drop(fetch.tag))
        else:
            assert self.all(lambda one: one.residency.fail(fetch))
            self.all(lambda one: one.lost(fetch))
        if fate != "orphan":
            self.sent.remove(fetch)
        self.done["orphan " * orphan + fate] += 1

    def ends(self) -> None:
        if self.sent:
            fetch, fate = (
                self.rng.choice(self.sent),
                self.rng.choice(["land", "land", "land", "drop", "fail", "orphan"]),
            )
            if fate != "orphan" or not self.working:  # whoever needs it has seen to it
                self.end(fetch, fate)

    def stale(self) -> None:
        if self.pure.log:
            tag = self.rng.randint(1, self.pure.residency._last_tag)
            if all(tag != fetch.tag for fetch in self.sent) and all(tag != f.tag for f in self.pure._bound.values()):
                assert not self.all(lambda one: one.residency.land(tag))
                assert not self.all(lambda one: one.residency.drop(tag))

    def forecast(self) -> None:
        """As the control region carries it, or directly. Not while a layer has yet to load: what it loads might be bound."""
        if self.working and self.pending:
            return
        scores, step, position = self.scores(), self.step + self.rng.randint(0, 1), self.position
        way = self.rng.random()
        if way < 0.2:
            self.all(lambda one: one.take(scores, step, position))
            return
        if way < 0.3 and self.layer + 1 < self.layers:
            row = scores[0, 0]
            jobs = self.all(lambda one: one.forecast_layer(row, self.layer + 1, self.step, position))
            block = pack_jobs(jobs)
        else:
            more = self.rng.choice([{}, {}, {"k_prime": self.experts, "steps": 1}])
            blocks = [one.forecast_block(scores, step, position, **more) for one in self.both]
            columns = slice(0, 4)
            assert np.array_equal(blocks[0][:, columns], blocks[1][:, columns])
            block = blocks[0].copy()
        if self.rng.random() < 0.1 and not self.plan.early_binding:
            block = block[: len(block) // 2]  # the ring was full
        if self.rng.random() < 0.9:
            self.all(lambda one: one.offer_block(block))
        else:
            self.all(lambda one: one.offer_block(NO_JOBS))
        self.done["jobs"] += len(block)

    def more_jobs(self) -> None:
        """Beside what is queued."""
        if not self.plan.early_binding:
            jobs = [
                FetchJob(
                    self.rng.randrange(self.total), self.position + self.rng.randint(0, 9), self.rng.randint(0, 4) / 4
                )
                for _ in range(self.rng.randint(1, 4))
            ]
            self.all(lambda one: one.offer(jobs, replace=False))

    def new_sequence(self) -> None:
        if not self.working:
            jump = self.rng.choice([None, None, self.rng.randint(0, self.step + 3)])
            if jump is None:
                self.all(lambda one: one.start_sequence())
                return
            self.step, self.layer = jump, -1
            self.all(lambda one: one.start_sequence(jump * self.layers))
            self.all(lambda one: one.residency.begin_step(jump))

    def change_reserve(self) -> None:
        """Prefill begins, or decode."""
        residency = self.pure.residency
        reserve = self.rng.choice([self.top_k, self.experts])
        if not self.working and reserve > residency.reserve:
            self.all(lambda one: one.residency.settle())
        if not self.working and (reserve <= residency.reserve or not residency._held()):
            for one in self.both:
                one.residency.reserve = reserve

    def settle(self) -> None:
        if not self.working:
            self.all(lambda one: one.residency.settle())

    def restrain(self) -> None:
        """Prefetch goes off or on; the cache goes by recency or by forecasts."""
        if self.restrained:
            recency, enabled = self.rng.random() < 0.4, self.rng.random() < 0.7
            for one in self.both:
                assert isinstance(one.eviction, FallbackEviction)
                one.eviction.by_recency, one.enabled = recency, enabled
            if not enabled:
                self.all(lambda one: one.offer([]))

    def cold(self) -> None:
        """Everything is emptied: a cold start, or an interruption."""
        if self.working or self.rng.random() > 0.1:
            return
        if self.rng.random() < 0.5:
            self.all(lambda one: one.residency.clear())
            return
        self.sent.clear()
        self.all(lambda one: one.residency.forget())
        self.all(lambda one: one.reset())

    # -- state --------------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        plain, fast = self.both
        for name in ("state", "slot_of_expert", "expert_of_slot"):
            assert np.array_equal(getattr(plain.residency, name), getattr(fast.residency, name)), name
        for name in (
            "in_flight",
            "counts",
            "step",
            "position",
            "_empty",
            "_num_used",
            "_computing",
            "_unclaimed",
            "_orphans",
        ):
            assert getattr(plain.residency, name) == getattr(fast.residency, name), name
        for name in ("counts", "_fresh", "_bound"):
            assert getattr(plain, name) == getattr(fast, name), name
        assert plain.log is not None and fast.log is not None
        assert len(plain.log) == len(fast.log) and plain.log[-1:] == fast.log[-1:]
        a, b = plain.scheduler, fast.scheduler
        assert a is not None and b is not None
        for name in ("position", "budget_avg", "budget_now", "sent", "_skip_layer"):
            assert getattr(a, name) == getattr(b, name), name
        assert len(a) == len(b)
        for one, other in zip(a.jobs, b.jobs, strict=True):
            assert (one.expert, one.deadline) == (other.expert, other.deadline)
            same = one.confidence == other.confidence or np.isnan([one.confidence, other.confidence]).all()
            assert same, (one, other)
        if plain.by_forecast is not None and fast.by_forecast is not None:
            assert np.array_equal(plain.by_forecast.worth, fast.by_forecast.worth, equal_nan=True)
            assert (
                len(plain.by_forecast) == len(fast.by_forecast) and plain.by_forecast.peek() == fast.by_forecast.peek()
            )


def operations(seed: int, count: int) -> Counter[str]:
    twins = Twins(random.Random(seed))
    usual = [
        twins.reach, twins.reach, twins.load, twins.load, twins.release, twins.release, twins.send, twins.send, twins.send,
        twins.ends, twins.ends, twins.forecast,
    ]  # fmt: skip
    rare = [
        twins.release_part, twins.load_fails, twins.stale, twins.more_jobs, twins.new_sequence, twins.change_reserve,
        twins.settle, twins.restrain, twins.cold,
    ]  # fmt: skip
    for number in range(count):
        twins.rng.choice(usual if twins.rng.random() < 0.85 else rare)()
        twins.compare()
        if number % CHECK_EVERY == 0:
            for one in twins.both:
                one.residency.check_integrity()
    counts = twins.pure.residency.counts
    twins.done.update({name: getattr(counts, name) for name in ("hits", "misses", "late", "on_demand", "evictions")})
    fates = twins.pure.counts
    twins.done.update({"useful": fates.useful, "wasted": fates.wasted})
    return twins.done


def many(first: int, policies: int, each: int) -> None:
    done = Counter[str]()
    for seed in range(first, first + policies):
        done += operations(seed, each)
    for name in ("hits", "misses", "late", "evictions", "useful", "wasted", "sent", "evicted", "land", "drop", "fail",
                 "orphan", "orphan land", "orphan drop", "orphan fail"):  # fmt: skip
        assert done[name] > policies * each / 20_000, (name, done)


def test_20_000_operations() -> None:
    many(0, policies=40, each=500)


@pytest.mark.slow
def test_200_000_operations() -> None:
    many(1000, policies=100, each=2000)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one bit in a confidence."""
    take = FastPrefetcher.offer_block

    def wrong(self: FastPrefetcher, block: Any, *, replace: bool = True) -> None:
        block = block.copy()
        block[-1:, 3] ^= 1
        take(self, block, replace=replace)

    monkeypatch.setattr(FastPrefetcher, "offer_block", wrong)
    with pytest.raises(AssertionError, match="FetchJob|confidence"):
        many(0, policies=10, each=500)
