"""The simulated benchmarks: paired differences, the ladder's rungs, and that their figures are the simulator's."""

import itertools
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from support.toy_traces import walking_trace

from seqmoe.autotune.simulate_plan import Outcome, Timing
from seqmoe.autotune.stats import bootstrap_interval
from seqmoe.predictors.trace_file import write_trace
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.policy import POLICIES

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # its scripts import one another by name

import bench_orders
import bench_policies
import sim_common


def outcome_of(hits: list[int], times: list[float]) -> Outcome:
    """Sequences of 10 steps with 100 experts needed; the link is idle but for the misses."""
    number = np.array(hits)
    zero = np.zeros_like(number)
    steps, full = np.full(len(hits), 10), np.full(len(hits), 50.0)
    return Outcome(steps, number, 100 - number, *(zero,) * 7, np.array(times), full)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # for forecasts


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.safetensors"
    write_trace(path, walking_trace(sequences=12, steps=40, layers=4))
    return path


def run(command: click.Command, traces: Path, *options: str) -> tuple[str, dict]:
    given = ["--traces", str(traces), "--predictor", "within", "--sequences", "8:12", "--residency", "0.5", "--json"]
    result = CliRunner().invoke(command, [*given, *options])
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(result.stdout.splitlines()[-1])


def test_gains_are_paired_by_sequence():
    # sequences differ by far more than the two do within each
    one, other = outcome_of([90, 50, 70], [60.0, 100.0, 75.0]), outcome_of([88, 48, 68], [60.0, 100.0, 75.0])
    found = sim_common.gains(one, other)
    assert found["hit_rate"] == pytest.approx({"mean": 0.02, "low": 0.02, "high": 0.02})
    assert found["speed_of_full"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert [sim_common.side(found[name]) for name in found] == ["above", "even"]
    assert sim_common.side(sim_common.gains(other, one)["hit_rate"]) == "below"
    assert sim_common.points(found["hit_rate"]) == "+2.00 [+2.00, +2.00]"


def test_a_late_prefetch_is_one_transfer():
    outcome = replace(outcome_of([60], [80.0]), prefetched=np.array([30]), late=np.array([5]))
    assert sim_common.figures(outcome)["transfers"] == (40 - 5 + 30) / 10


def test_the_bootstrap_agrees_with_the_normal_law_however_many_values():
    for n in (40, 3000):
        values = np.random.default_rng(n).normal(size=n)
        low, high = bootstrap_interval(values.tolist(), seed=0)
        half = 1.96 * values.std() / math.sqrt(n)
        assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
        assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_no_sequence_serves_two_purposes(traces):
    lab = sim_common.open_lab(traces, "last", "9:12", None, None)
    parts = [lab.bench.trace, lab.bench.training, lab.bench.validation]
    assert [part.num_sequences for part in parts if part] == [3, 8, 1]
    with pytest.raises(UsageError, match="sequence 9 is among --sequences"):
        sim_common.open_lab(traces, "last", "9:12", "0:10", None)
    assert lab.blind(None).trace.tokens is None


def test_orders_are_the_simulators_figures(traces, tmp_path):
    plot = tmp_path / "orders.png"
    text, report = run(bench_orders.main, traces, "--link-ratios", "0.4,2", "--plot", str(plot))
    assert [(row["setting"], row["link_ratio"]) for row in report["rows"]] == [
        ("ours", 0.4), ("ours", 2.0), ("paper", 0.4), ("paper", 2.0),
    ]  # fmt: skip
    lab = sim_common.open_lab(traces, "within", "8:12", None, None)
    joint, infinity = (
        lab.bench.run(name, bench_orders.plan_of(lab, name, "paper", False), Timing.of_ratio(2.0, 4), 16)
        for name in ("seqmoe", "seqmoe-infinity-order")
    )
    last = report["rows"][-1]
    assert last["orders"]["seqmoe"]["hit_rate"] == joint.hit_rate
    assert last["against"]["seqmoe-infinity-order"] == sim_common.gains(joint, infinity)
    places = report["verdict"]["seqmoe-promoe-order"]
    assert sum(len(found) for found in places.values()) == 4 * 2  # cells x measures
    assert "joint against infinity" in text and plot.read_bytes().startswith(b"\x89PNG")


def test_each_rung_adds_one_part():
    rungs = bench_policies.ladder(4, 32)
    for below, rung in itertools.pairwise(rungs[1:]):
        old, new = asdict(below.plan), asdict(rung.plan)
        changed = [name for name in old if old[name] != new[name]] + ["token"] * (below.token != rung.token)
        # early binding comes with the prefetch that it is about
        assert len(changed) == 1 or changed == ["order", "early_binding"], rung.name
    own = POLICIES["seqmoe"].plan
    assert own is not None and replace(own, restraint=False) in [rung.plan for rung in rungs]


def test_policies_ladder_and_grid(traces, tmp_path):
    plot = tmp_path / "policies.png"
    options = [
        "--k-primes",
        "2,4",
        "--horizons",
        "2",
        "--lambdas",
        "0.5",
        "--early-sequences",
        "2",
        "--plot",
        str(plot),
    ]
    text, report = run(bench_policies.main, traces, *options)
    assert {row["policy"] for row in report["policies"]} == set(POLICIES) - {"specprefetch", "seqmoe-early-binding"}
    assert list(report["left_out"]) == ["specprefetch"] and "router_inputs" in report["left_out"]["specprefetch"]
    rate = {row["policy"]: row["hit_rate"] for row in report["policies"]}
    assert rate["full"] == 1 and rate["eager"] == 0 and rate["lru"] <= rate["belady"] <= rate["foresight"]
    assert [row["policy"] for row in report["early_binding"]] == ["seqmoe", "seqmoe-early-binding"]
    assert report["ladder"][0]["hit_rate"] == rate["lru"]
    assert len(report["ladder"]) == len(bench_policies.ladder(2, 8)) - 1 and len(report["binding"]) == 4
    best = bench_policies.best_settings(report["grid"], 1)[0]
    assert best[1][0]["hit_rate"] == max(row["hit_rate"] for row in report["grid"])
    assert "`seqmoe`" in text and plot.read_bytes().startswith(b"\x89PNG")
