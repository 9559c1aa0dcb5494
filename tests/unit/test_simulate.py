"""The simulator: worked timings, tokens that are not known yet, agreement with demand caching, the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.toy_traces import random_trace, trace_of, walking_trace

from seqmoe.autotune.forecasts import trace_forecasts
from seqmoe.autotune.simulate import simulate_reference
from seqmoe.autotune.simulate_cli import simulate_command
from seqmoe.autotune.simulate_fast import simulate_fast
from seqmoe.autotune.simulate_plan import Inputs, Outcome, Timing, full_outcome
from seqmoe.autotune.simulate_policies import Workbench
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import write_trace
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.runtime.policy import POLICIES, Plan
from seqmoe.runtime.replay_counts import replay

SEQMOE = Plan("expected", "joint", admission=True, k_prime=4, job_steps=2, horizon=3)


def totals(outcome: Outcome) -> tuple[int, ...]:
    return tuple(int(getattr(outcome, n).sum()) for n in ("hits", "misses", "late", "prefetched", "useful", "wasted"))


def alternating() -> Trace:
    """4 layers of 2 experts, k = 1: expert 0 and 1 in turns."""
    ids = np.array([[[step % 2]] * 4 for step in range(6)])
    return trace_of([6], ids, 2)


def test_eager_pays_for_every_expert():
    outcome = simulate_reference(Inputs(alternating()), Plan("none"), Timing.of_ratio(0.5, 4), 3)
    assert totals(outcome) == (0, 24, 0, 0, 0, 0)
    assert outcome.time[0] == 24 * 1.5 and outcome.speed_of_full == pytest.approx(1 / 1.5)


def test_a_prefetch_in_time_costs_nothing():
    trace = alternating()
    inputs = Inputs(trace, perfect_forecasts(trace, 4))
    # Step 0: layer 0 is loaded until 0.8 and computes until 1.8; the link sends layer 2's from 0.8 to 1.6 and begins with
    # layer 3's. Layer 1 is missing: it waits for the link until 2.4 and loads until 3.2. From then on the link is ahead
    outcome = simulate_reference(inputs, replace(SEQMOE, k_prime=1), Timing.of_ratio(0.8, 4), 6)
    assert outcome.log[:4] == ((0, 0, -1, 0), (0, 4, -1, 1), (0, 6, -1, 1), (1, 2, -1, 0))
    assert totals(outcome)[:3] == (22, 2, 0)
    assert outcome.time[0] == pytest.approx(24 + 0.8 + 1.4)


def test_a_late_prefetch_is_awaited():
    trace = alternating()
    inputs = Inputs(trace, perfect_forecasts(trace, 1))
    plan = replace(SEQMOE, k_prime=1, job_steps=1, horizon=1, after=False)
    outcome = simulate_reference(inputs, plan, Timing.of_ratio(2.5, 4), 4)
    # step 0: load (2.5), compute layer 0 to 3.5 with the fetch for layer 2 on the link until 5.0; layer 1 is missing: it
    # waits until 5.0, loads until 7.5
    assert outcome.log[:3] == ((0, 0, -1, 0), (0, 4, -1, 1), (1, 2, -1, 0))
    one = Trace(trace.expert_ids[:1], None, None, np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), 2)
    first = simulate_reference(Inputs(one, perfect_forecasts(one, 1)), plan, Timing.of_ratio(2.5, 4), 4)
    # layers 0, 1 as above, to 8.5 with the fetch for layer 3; layer 2 has arrived, to 9.5; layer 3 comes at 10.0
    assert totals(first) == (1, 3, 1, 2, 1, 0)
    assert first.time[0] == pytest.approx(11.0)


def test_the_predictor_takes_its_time():
    trace = alternating()
    inputs = Inputs(trace, perfect_forecasts(trace, 2))
    plans = [Plan("expected", horizon=1, after=after) for after in (False, True)]
    times = [simulate_reference(inputs, plan, Timing((1.0,) * 4, 0.5, 0.25), 8).time[0] for plan in plans]
    assert times == [pytest.approx(24 + 8 * 0.5 + 6 * 0.25), pytest.approx(24 + 8 * 0.5 + 11 * 0.25)]


def test_the_token_is_not_known_before_its_step():
    trace = random_trace([8, 6])
    forecasts = perfect_forecasts(trace, 3)
    for step in (1, 7):
        with pytest.raises(ValueError, match=f"token of step {step} is known from position {3 * step} on"):
            forecasts.at_start(step, 3 * step - 1)
        with pytest.raises(ValueError, match=f"from position {3 * step - 1} on"):
            forecasts.after_last(step, 3 * step - 2)
        assert forecasts.at_start(step, 3 * step).position == 3 * step
    with pytest.raises(ValueError, match="start of a step only"):
        TraceForecasts(forecasts.start).after_last(1, 5)


@pytest.mark.parametrize("simulate", [simulate_reference, lambda *a: simulate_fast(*a, log_size=4096)])
def test_nothing_is_decided_by_what_is_not_known_yet(simulate):
    """Other forecasts and other choices from a step on change nothing before it."""
    layers, step = 4, 9
    trace = random_trace([20], layers, 6, 2)
    forecasts = perfect_forecasts(random_trace([20], layers, 6, 2, seed=5), 5)
    later = forecasts.start.copy()
    later[step:] = later[step:, :, :, ::-1]
    ids = trace.expert_ids.copy()
    ids[step:] = (ids[step:] + 1) % 6
    other = Trace(ids, trace.expert_weights, trace.tokens, trace.seq_start, trace.seq_len, 6)
    timing = Timing.of_ratio(0.6, layers)
    logs = [
        simulate(Inputs(trace, forecasts), SEQMOE, timing, 12).log,
        simulate(Inputs(other, TraceForecasts(later, forecasts.after)), SEQMOE, timing, 12).log,
    ]
    before = [[entry for entry in log if entry[0] < step * layers] for log in logs]
    assert before[0] == before[1] and len(before[0]) > 20
    assert logs[0] != logs[1]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "belady", "belady-8"])
def test_without_prefetch_it_is_demand_caching(eviction: str):
    trace = random_trace([50, 30], 4, 8, 2, seed=3)
    for slots in (2, 7, 20):
        counts = replay(trace, slots, eviction)
        for simulate in (simulate_reference, simulate_fast):
            outcome = simulate(Inputs(trace), Plan(eviction), Timing.of_ratio(0.7, 4), slots)
            assert totals(outcome)[:2] == (counts.hits, counts.misses)
            assert outcome.time.sum() == pytest.approx(80 * 4 + counts.misses * 0.7)


def test_foresight_beats_belady_and_a_dead_link_does_no_harm():
    trace = random_trace([60, 40], 6, 8, 2, seed=1)
    inputs = Inputs(trace, perfect_forecasts(trace, 4))
    run = {
        name: simulate_fast(inputs, plan, Timing.of_ratio(ratio, 6), 16)
        for name, plan, ratio in (
            ("belady", Plan("belady"), 0.5), ("foresight", SEQMOE, 0.5), ("slow", SEQMOE, 40.0), ("cache", Plan("expected", horizon=3), 40.0),
        )
    }  # fmt: skip
    assert run["foresight"].hit_rate > 0.9 > run["belady"].hit_rate
    assert run["foresight"].speed_of_full > run["belady"].speed_of_full
    assert run["slow"].speed_of_full > 0.9 * run["cache"].speed_of_full
    assert run["slow"].budget < 1.1


def test_full_is_full():
    outcome = full_outcome(random_trace([5, 7]), Timing.of_ratio(0.72, 3))
    assert (outcome.hit_rate, outcome.speed_of_full) == (1.0, 1.0)
    assert outcome.to_dict(9)["transfers_per_step"] == 0


def test_a_plan_without_what_it_needs_is_refused():
    trace = random_trace([5])
    timing = Timing.of_ratio(1.0, 3)
    for plan, match in (
        (Plan("nothing"), "unknown eviction 'nothing'"),
        (Plan("expected"), "needs forecasts"),
        (Plan("static"), "popularity"),
        (Plan("lru", "window"), "layer_scores"),
        (Plan("lru", admission=True), "admission needs"),
    ):
        for simulate in (simulate_reference, simulate_fast):
            with pytest.raises(ValueError, match=match):
                simulate(Inputs(trace), plan, timing, 6)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "toy.safetensors"
    write_trace(path, walking_trace(20, 12))
    return path


def run_cli(*arguments: str) -> dict:
    result = CliRunner().invoke(simulate_command, [*arguments, "--json"])
    return {"code": result.exit_code, **json.loads(result.stdout.strip().splitlines()[-1])}


def test_the_command(files: Path, tmp_path: Path):
    names = [name for name in POLICIES if name != "specprefetch"]
    said = run_cli(
        "--traces", str(files), "--policy", ",".join(names), "--residency", "0.3,0.5", "--link-ratio", "0.5",
        "--predictor", "nearest-token", "--sequences", "0:4", "--horizon", "3", "--against", "lru",
        "--plot", str(tmp_path / "p.png"),
    )  # fmt: skip
    assert said["code"] == 0 and said["steps"] == 48 and said["sequences"] == 4
    rows = {(row["policy"], row["residency"]): row for row in said["rows"]}
    assert set(rows) == {(name, share) for name in names for share in (0.3, 0.5)}
    for row in rows.values():
        assert 0 <= row["hit_rate"] <= 1 and 0 < row["speed_of_full"] <= 1
        assert {"transfers_per_step", "useful_bytes", "wasted_bytes", "late_bytes"} <= set(row)
    assert rows["full", 0.5]["speed_of_full"] == 1 and rows["eager", 0.5]["hit_rate"] == 0
    assert rows["belady", 0.5]["hit_rate"] > rows["lru", 0.5]["hit_rate"]
    assert rows["seqmoe", 0.5]["hit_rate"] != rows["lru", 0.5]["hit_rate"]
    assert said["hit_rate"] == said["rows"][0]["hit_rate"]
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert len(said["paired"]) == 2 * (len(names) - 1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--policy", "seqmo", "--link-ratio", "1"], "did you mean 'seqmoe'"),
        (["--policy", "seqmoe", "--link-ratio", "1"], "policy seqmoe needs --predictor"),
        (["--policy", "lru"], "give --link-ratio, or --link"),
        (["--policy", "lru", "--link", "disk"], "no rate"),
        (["--policy", "lru", "--link-ratio", "-1"], "--link-ratio must be above 0"),
        (["--policy", "lru", "--link-ratio", "1", "--residency", "2"], "--residency must be above 0 and at most 1"),
        (["--policy", "lru", "--link-ratio", "1", "--residency", "0.01"], "a layer needs 2"),
        (["--policy", "specprefetch", "--link-ratio", "1"], "router_inputs"),
        (["--policy", "static", "--link-ratio", "1"], "popularity"),
        (["--policy", "lru", "--link-ratio", "1", "--against", "lfu"], "--against lfu is not among --policy"),
        (
            ["--policy", "lru", "--link-ratio", "1", "--sequences", "0:4", "--fit-sequences", "3:9"],
            "sequence 3 is among --sequences too",
        ),
    ],
)
def test_wrong_arguments(files: Path, arguments: list[str], match: str):
    residency = [] if "--residency" in arguments else ["--residency", "0.5"]
    said = run_cli("--traces", str(files), *residency, *arguments)
    assert said["code"] != 0 and match in said["error"]["message"], said


def test_link_in_place_of_ratio(files: Path):
    common = ["--traces", str(files), "--policy", "lru", "--residency", "0.5"]
    said = run_cli(*common, "--link", "dma:9MiB/ms,100us".replace("MiB/ms", "GB/s"), "--record-bytes", "9MB")
    assert said["link_ratio"] == pytest.approx(1.1)


def test_forecasts_are_made_once(tmp_path: Path):
    trace = walking_trace(20, 12)
    test, training, validation = trace.select(range(4)), trace.select(range(4, 16)), trace.select(range(16, 20))

    def make(**changes) -> TraceForecasts:
        given = {"training": training, "validation": validation, "folder": tmp_path} | changes
        return trace_forecasts("nearest-token", test, 3, **given)

    made = make()
    assert made.start.shape == (48, 3, 3, 8) and made.start.dtype == np.float16
    assert np.abs(made.start.astype(np.float32).sum(-1) - 2).max() < 0.04
    assert not np.array_equal(made.start, made.after), "the token says something"
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert np.array_equal(make().start, made.start)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before and len(before) == 2
    assert not np.array_equal(make(training=trace.select(range(5, 16))).start, made.start)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="delete it"):
        make()


def test_the_workbench_names_what_is_missing():
    with pytest.raises(SeqmoeError, match="--predictor"):
        Workbench(random_trace([5])).predictor_of("seqmoe")
