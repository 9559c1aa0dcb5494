"""Self-restraint: levels on worlds of known costs, what the shadows would have missed, the simulator with it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.toy_traces import random_trace, trace_of, walking_trace

from seqmoe.autotune.simulate_cli import simulate_command
from seqmoe.autotune.simulate_fast import simulate_fast
from seqmoe.autotune.simulate_plan import Inputs, Timing
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.trace_file import write_trace
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.eviction import LRU
from seqmoe.runtime.eviction_fallback import FallbackEviction, FastFallbackEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction, expected_worth, position_factors
from seqmoe.runtime.policy import Plan
from seqmoe.runtime.replay_counts import replay
from seqmoe.runtime.restraint import Level, Restraint, Restraints, StepRecord
from seqmoe.runtime.shadow import Shadow

SEQMOE = Plan("expected", "joint", admission=True, k_prime=6, job_steps=2, horizon=2, after=False, restraint=True)


@dataclass
class World:
    """What a step costs at each level: misses of the two caches, most of them the same, and stalls of prefetch."""

    load: float
    lru: float = 20.0
    cache: float = 14.0
    stall: float = 3.0  # of prefetch, in loads
    forecast: float = 1.2
    prefetch: float = 0.3
    compute: float = 24.0

    def run(self, restraint: Restraint, steps: int, seed: int = 0) -> tuple[float, dict[Level, float], list[Level]]:
        """Time of it all, time that it would have been with one level throughout, the levels."""
        rng = np.random.default_rng(seed)
        spent, fixed, levels = 0.0, dict.fromkeys(Level, 0.0), []
        for _ in range(steps):
            hard = rng.gamma(10.0) / 10.0  # how hard a step is
            common = rng.poisson(0.9 * min(self.lru, self.cache) * hard)
            lru = common + rng.poisson((self.lru - 0.9 * min(self.lru, self.cache)) * hard)
            cache = common + rng.poisson((self.cache - 0.9 * min(self.lru, self.cache)) * hard)
            stall = self.load * self.stall * hard * rng.gamma(4.0) / 4.0
            level = restraint.level
            costs = {
                Level.OFF: lru * self.load,
                Level.CACHE: cache * self.load + self.forecast,
                Level.PREFETCH: stall + self.forecast + self.prefetch,
            }
            levels.append(level)
            spent += self.compute + costs[level]
            for each in Level:
                fixed[each] += self.compute + costs[each]
            restraint.step(
                StepRecord(
                    compute=self.compute,
                    stall=costs[level] if level == Level.OFF else costs[level] - self.forecast
                    - (self.prefetch if level == Level.PREFETCH else 0.0),
                    forecast=self.forecast if level > Level.OFF else 0.0,
                    prefetch=self.prefetch if level == Level.PREFETCH else 0.0,
                    load=self.load,
                    lru_misses=int(lru),
                    cache_misses=int(cache),
                )
            )  # fmt: skip
        return spent, fixed, levels


WORLDS = {
    "fast link": (World(0.01), Level.OFF),
    "middle": (World(0.72), Level.PREFETCH),
    "slow link": (World(30.0, stall=17.0), Level.CACHE),
    "useless forecasts": (World(0.72, cache=20.0, stall=25.0), Level.OFF),
    "slightly in vain": (World(3.0, cache=20.0, stall=20.0), None),  # 1 to 2% of noisy steps are hardly seen
    "no difference": (World(1.0, lru=5.0, cache=5.0, stall=5.0, forecast=0.0, prefetch=0.0), None),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WORLDS)
def test_the_best_level_is_found_and_the_search_is_cheap(name: str, seed: int):
    world, best = WORLDS[name]
    spent, fixed, levels = world.run(Restraint(), 6000, seed)
    assert spent <= (1.02 if name == "slightly in vain" else 1.01) * min(fixed.values())
    if best is not None:
        assert min(fixed, key=lambda level: fixed[level]) == best
        assert levels.count(best) > 0.95 * len(levels)


def test_what_cannot_pay_is_stopped_at_once():
    _, _, levels = World(0.01).run(Restraint(), 3000)
    assert levels.count(Level.PREFETCH) <= 8 and levels.count(Level.CACHE) == 0, "no trial could change it"


def test_a_link_that_changes():
    restraint = Restraint()
    world = World(0.01)
    world.run(restraint, 400)
    assert restraint.level == Level.OFF
    world.load = 0.72
    _, _, levels = world.run(restraint, 200, seed=1)
    assert Level.PREFETCH in levels[:60] and levels[-1] == Level.PREFETCH
    world.load, world.stall = 20.0, 17.0
    _, _, levels = world.run(restraint, 1000, seed=2)
    assert levels[-1] == Level.CACHE and levels.count(Level.PREFETCH) < 100
    world.load, world.stall = 0.72, 3.0
    _, _, levels = world.run(restraint, 200, seed=3)
    assert levels[-1] == Level.PREFETCH


def test_layers_that_take_longer():
    """A link that was too slow is not any more when there is more to hide it behind."""
    restraint = Restraint()
    world = World(8.0, stall=16.0)
    world.run(restraint, 600)
    assert restraint.level == Level.CACHE
    world.compute, world.stall = 120.0, 4.0
    _, _, levels = world.run(restraint, 120, seed=1)
    assert Level.PREFETCH in levels[:40] and levels[-1] == Level.PREFETCH


def test_a_text_that_changes_in_the_middle_of_a_pause():
    """All loads fall away and come back: forecasts are tried again long before a pause is over."""
    restraint = Restraint(Restraints(pause=5000, longest_pause=5000))
    world = World(0.72)
    world.run(restraint, 300)
    world.lru = world.cache = world.stall = 0.0
    world.run(restraint, 300, seed=1)
    assert restraint.level == Level.OFF
    world.lru, world.cache, world.stall = 20.0, 14.0, 3.0
    _, _, levels = world.run(restraint, 300, seed=2)
    assert Level.PREFETCH in levels[:60] and levels[-1] == Level.PREFETCH


def test_pauses_double_up_to_a_bound():
    settings = Restraints(pause=100, longest_pause=800, price=1.0)
    _, _, levels = World(8.0, stall=20.0).run(Restraint(settings), 8000)
    starts = [i for i in range(1, len(levels)) if levels[i] == Level.PREFETCH and levels[i - 1] == Level.CACHE]
    ends = [i for i in range(1, len(levels)) if levels[i] == Level.CACHE and levels[i - 1] == Level.PREFETCH]
    pauses = [start - end for start, end in zip(starts, ends, strict=False)]
    assert pauses[:4] == [100, 200, 400, 800] and set(pauses[4:]) == {800}
    assert all(8 < end - start <= 40 for start, end in zip(starts, ends[1:], strict=False))


def test_dear_trials_are_rare():
    _, fixed, levels = World(30.0, stall=28.0).run(Restraint(), 20_000)
    loss = (fixed[Level.PREFETCH] - fixed[Level.CACHE]) / fixed[Level.CACHE]
    assert loss > 0.5 and levels.count(Level.PREFETCH) * loss < 0.005 * len(levels)


def test_the_same_records_the_same_levels():
    runs = [World(3.0, stall=14.0).run(Restraint(), 3000, seed=5) for _ in range(2)]
    assert runs[0] == runs[1]


def test_impossible_records_change_nothing():
    a, b = Restraint(), Restraint()
    good = StepRecord(24.0, 3.0, 1.2, 0.3, 0.7, 20, 14)
    for i in range(300):
        a.step(good)
        b.step(good)
        bad = {0: {"stall": float("nan")}, 1: {"compute": -1.0}, 2: {"load": float("inf")}}[i % 3]
        assert b.step(replace(good, **bad)) == b.level
    assert a.level == b.level == Level.PREFETCH
    silent = Restraint()
    for _ in range(100):
        assert silent.step(StepRecord(24.0, 0.0, 1.2, 0.3, 0.0, 0, 0)) == Level.PREFETCH, "no load was seen yet"


@pytest.mark.parametrize(
    "wrong", [{"memory": 0}, {"pause": 0}, {"pause": 9, "longest_pause": 8}, {"change": 1.0}, {"price": 0.0}]
)
def test_settings_that_cannot_be(wrong: dict):
    with pytest.raises(UsageError, match="must"):
        Restraints(**wrong)


# -- the shadows ----------------------------------------------------------------------------------------------------


def noisy_inputs(seed: int, steps: int, layers: int, experts: int, k: int, quality: float = 1.0) -> Inputs:
    """A trace in which experts come again, and forecasts that are about right."""
    rng = np.random.default_rng(seed)
    liking = rng.random((layers, experts))
    ids = np.empty((steps, layers, k), dtype=np.int16)
    for step in range(steps):
        liking = 0.8 * liking + 0.2 * rng.random((layers, experts))
        ids[step] = np.argsort(-(liking + 0.2 * rng.random((layers, experts))), axis=1)[:, :k]
    trace = trace_of([steps // 2, steps - steps // 2], ids, experts)
    truth = perfect_forecasts(trace, 4).start.astype(np.float32)
    mixed = quality * truth + 0.8 * rng.random(truth.shape, dtype=np.float32)
    scores = to_inclusion(mixed / mixed.sum(-1, keepdims=True), k).astype(np.float16)
    return Inputs(trace, TraceForecasts(scores, scores))


@pytest.mark.parametrize("seed", range(12))
def test_shadows_miss_what_the_policies_miss(seed: int):
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(1, 6)), int(rng.integers(4, 12))
    k = int(rng.integers(1, 4))
    inputs = noisy_inputs(seed, 60, layers, experts, k)
    trace, forecasts = inputs.trace, inputs.forecasts
    assert forecasts is not None
    ids = trace.flat_ids().astype(np.int32)
    for slots in {k, k + 1, int(rng.integers(k, layers * experts + 1))}:
        plan = Plan("expected", horizon=int(rng.integers(1, 4)), by_position=bool(seed % 2), after=False)
        factor = position_factors(layers, plan.discount if plan.by_position else 1.0)
        shadow = Shadow(slots, layers, experts, factor)
        total = np.zeros(2, dtype=np.int64)
        for step, needed in enumerate(ids):
            scores = forecasts.at_start(step, step * layers).scores
            shadow.forecast(*(expected_worth(scores, first, plan.horizon, plan.discount) for first in (0, 1)))
            total += shadow.step(needed)
        cache_only = simulate_fast(inputs, plan, Timing.of_ratio(0.7, layers), slots)
        assert total.tolist() == [replay(trace, slots, "lru").misses, int(cache_only.misses.sum())]


def test_without_forecasts_both_go_by_recency():
    trace = random_trace([50], 3, 8, 2, seed=4)
    shadow = Shadow(10, 3, 8)
    for needed in trace.flat_ids().astype(np.int32):
        recent, worthy = shadow.step(needed)
        assert recent == worthy


def test_shadows_start_with_what_is_resident():
    shadow = Shadow(4, 2, 4)
    for _ in range(2):
        shadow.start(np.array([7, 0, 1, 4, 5]))  # 7 is the oldest, there is no room for it
        assert shadow.step(np.array([[0, 1], [4, 7]], dtype=np.int32)) == (1, 1)


def test_a_batch_may_need_more_than_there_are_slots():
    shadow = Shadow(3, 2, 6)
    ids = np.array([[0, 1, 2, 3, 4], [6, 7, -1, -1, -1]], dtype=np.int32)
    for _ in range(3):
        recent, worthy = shadow.step(ids)
        assert 4 <= recent <= 7 and 4 <= worthy <= 7


@pytest.mark.parametrize("kind", [FallbackEviction, FastFallbackEviction])
def test_fallback_is_the_one_or_the_other(kind: type[FallbackEviction]):
    """Victims of random operations equal those of both evictions by themselves, whichever holds at the time."""
    rng = np.random.default_rng(3)
    layers, experts = 4, 6
    both, worth, recent = kind(layers, experts), ForecastEviction(layers, experts), LRU()
    resident: set[int] = set()
    switched = 0
    for position in range(2000):
        layer = position % layers
        if layer == 0 and rng.random() < 0.8:
            scores = np.round(rng.random((3, layers, experts)), 1).astype(np.float32)
            both.update(scores, position // layers)
            worth.update(scores, position // layers)
        used = (layer * experts + rng.permutation(experts)[:2]).tolist()
        for each in (both, worth, recent):
            each.touch(used, position)
        resident -= set(used)
        if rng.random() < 0.2:
            both.by_recency = not both.by_recency
            switched += 1
        for _ in range(int(rng.integers(0, 3))):
            if len(resident) < 4:
                break
            expert = both.victim()
            assert expert == (recent if both.by_recency else worth).victim()
            (worth if both.by_recency else recent).touch([expert], position)
            resident.discard(expert)
            assert len(both) == len(worth) == len(recent) == len(resident)
        for each in (both, worth, recent):
            each.release(used, position)
        resident |= set(used)
    assert switched > 100


# -- in the simulator -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return noisy_inputs(0, 3000, 6, 16, 2, quality=2.0)


@pytest.mark.parametrize(
    ("ratio", "level"),
    [(0.01, Level.OFF), (0.36, Level.PREFETCH), (0.72, Level.PREFETCH), (1.67, Level.PREFETCH), (30.0, Level.CACHE)],
)
def test_never_much_worse_than_the_best(inputs: Inputs, ratio: float, level: Level):
    timing = Timing.of_ratio(ratio, 6, forecast=0.3)  # 5% of a step
    for slots in (24, 40):
        plans = [Plan("lru"), replace(SEQMOE, order=None, admission=False, restraint=False)]
        plans.append(replace(SEQMOE, restraint=False))
        best = max(simulate_fast(inputs, plan, timing, slots).speed_of_full for plan in plans)
        outcome = simulate_fast(inputs, SEQMOE, timing, slots)
        assert outcome.speed_of_full > 0.99 * best
        share = int(outcome.ahead.sum()) / int(outcome.steps.sum())
        assert share > 0.95 if level == Level.PREFETCH else share < 0.2
        if level != Level.PREFETCH:
            assert outcome.levels[-1][1] == level or len(outcome.levels) > 1


def test_what_was_on_is_said(inputs: Inputs):
    fast = simulate_fast(inputs, SEQMOE, Timing.of_ratio(0.01, 6, forecast=0.3), 24)
    said = fast.to_dict(1)
    assert said["prefetch_on"] < 0.01 and said["levels"][0] == [int(fast.ahead.sum()), 0]
    assert 0 < said["named_rate"] < 0.01, "no forecast names anything while there is none"
    kept = simulate_fast(inputs, replace(SEQMOE, restraint=False), Timing.of_ratio(0.5, 6), 24)
    assert kept.to_dict(1)["prefetch_on"] == 1.0 and not kept.levels
    assert 0.5 < kept.named_rate <= 1.0 and 0.5 < kept.ready_recall <= 1.0
    assert kept.ready_recall * kept.named_rate <= kept.hit_rate


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_trace(tmp_path / "toy.safetensors", walking_trace(20, 12))
    return ["--traces", str(tmp_path / "toy.safetensors"), "--sequences", "0:4", "--residency", "0.4"]


def run_cli(*arguments: str) -> dict:
    result = CliRunner().invoke(simulate_command, [*arguments, "--json"])
    return {"code": result.exit_code, "table": result.stderr, **json.loads(result.stdout.strip().splitlines()[-1])}


def test_the_command_over_links_and_budgets(toy: list[str]):
    said = run_cli(
        *toy, "--policy", "lru,previous-token,forecasts-without-transfers,seqmoe,seqmoe-no-restraint", "--link-ratio",
        "0.01,0.5", "--m-max", "1,3", "--predictor", "nearest-token", "--predictor-us", "150", "--against", "lru",
    )  # fmt: skip
    assert said["code"] == 0 and {"link", "M_max", "ready", "on"} <= set(said["table"].split())
    rows = {(row["policy"], row["link_ratio"], row["m_max"]): row for row in said["rows"]}
    assert len(rows) == len(said["rows"]) == 2 * (2 + 3 * 2) and len(said["paired"]) == 4 * 4
    for ratio in (0.01, 0.5):
        lru, control = rows["lru", ratio, None], rows["forecasts-without-transfers", ratio, None]
        assert control["hit_rate"] == lru["hit_rate"] and control["transfers_per_step"] == lru["transfers_per_step"]
        assert control["speed_of_full"] < lru["speed_of_full"], "it pays for forecasts"
        before = rows["previous-token", ratio, 3]
        assert 0.2 < before["named_rate"] < 0.9 and before["hit_rate"] >= lru["hit_rate"] - 0.05
    assert rows["seqmoe", 0.01, 3]["prefetch_on"] < 0.2 < rows["seqmoe-no-restraint", 0.01, 3]["prefetch_on"] == 1.0
    assert rows["seqmoe", 0.01, 3]["levels"][0][1] == 0
    kept = run_cli(
        *toy, "--policy", "seqmoe", "--link-ratio", "0.01", "--m-max", "3", "--predictor", "nearest-token",
        "--predictor-us", "150", "--no-restraint",
    )  # fmt: skip
    same = rows["seqmoe-no-restraint", 0.01, 3]
    assert {**kept["rows"][0], "policy": ""} == {**same, "policy": ""}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--link-ratio", "1,x"], "--link-ratio takes numbers such as 0.36,0.72; got '1,x'"),
        (["--link-ratio", "1", "--m-max", "2,0"], "--m-max takes whole numbers from 1 up, got '2,0'"),
        (["--link-ratio", "1", "--m-max", "1.5"], "--m-max takes whole numbers from 1 up"),
    ],
)
def test_lists_that_cannot_be(toy: list[str], arguments: list[str], match: str):
    said = run_cli(*toy, "--policy", "lru", *arguments)
    assert said["code"] != 0 and match in said["error"]["message"]
