"""The search against a machine that is a formula (the fake worker's), on real Optuna storages."""

import functools
import importlib.util
import math
import random
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from seqmoe.autotune.measure import Failure, Measurement, Workload, measure
from seqmoe.autotune.search import Search, open_storage, study_names
from seqmoe.autotune.space import Space
from seqmoe.profiles.errors import BudgetError, SeqmoeError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.spec import ModelSpec
from seqmoe.runtime.jobs_process import run_job

HERE = Path(__file__).parent
WORKER = str(HERE / "fake_tune_worker.py")
_found = importlib.util.spec_from_file_location("fake_tune_worker", WORKER)
fake = importlib.util.module_from_spec(_found)
_found.loader.exec_module(fake)
MIB = 1 << 20
SPEC = ModelSpec(**fake.SPEC)
MEMORY = 320 * MIB
SPACE = Space(SPEC, MEMORY, 512, 100 * MIB, 2)
WORK = Workload("m", ("p", "q"), 4, 2, 512, MEMORY, "disk", 0)


def machine(kind="better", seed=0, log=None):
    """A measure function: speeds by the formula with 1% noise, all in this process."""
    draw = random.Random(seed)

    def run(knobs, workload, timeout_s):
        if log is not None:
            log.append(knobs)
        if kind == "fragile" and knobs.queue_depth > 16:
            return Failure("memory", "killed", 137, 0.01)
        if kind == "stuck" and knobs.policy == "static":
            return Failure("timeout", "took longer", 1, timeout_s)
        if kind == "broken" and knobs != SPACE.default():
            return Failure("error", "the disk is gone", 7, 0.01)
        seconds = fake.seconds_per_token(kind, knobs.to_dict(), draw.gauss(1.0, 0.01))
        peak = MEMORY + (5 * MIB if kind == "hog" and knobs.policy == "lfu" else -MIB)
        return Measurement(knobs, 1 / seconds, 0.1, 0.5, 1, peak, 0.0, knobs.slots, 0.5, 8, ((1, 2),), {}, 0.0)

    return run


def search(kind="better", storage=None, seed=0, log=None, name="s-1"):
    return Search(SPACE, WORK, machine(kind, seed, log), storage or optuna.storages.InMemoryStorage(), name, seed)


def quiet(report):
    pass


def test_the_space_comes_from_the_knobs():
    names = [d.name for d in SPACE.dimensions()]
    assert names == ["fill", "policy", "read_threads", "queue_depth", "read_chunk_bytes"]
    by_name = {d.name: d for d in SPACE.dimensions()}
    assert by_name["read_threads"].high == 16  # 8 a core
    assert max(by_name["read_chunk_bytes"].choices) < SPEC.slot_bytes
    assert SPACE.knobs({**SPACE.default_params(), "fill": by_name["fill"].low}).slots >= 2
    assert SPACE.knobs(SPACE.default_params()) == SPACE.default()
    assert SPACE.plan(SPACE.default()).total_bytes <= MEMORY


def test_a_cap_bounds_the_slots_and_tiny_records_leave_no_choice_of_pieces():
    capped = Space(SPEC, 600 * MIB, 512, 100 * MIB, 2, max_slots=20)
    assert capped.default().slots == 20
    tiny = Space(ModelSpec(**{**fake.SPEC, "slot_bytes": 4096 * 12}), MEMORY, 512, 100 * MIB, 2)
    assert "read_chunk_bytes" not in [d.name for d in tiny.dimensions()]
    with pytest.raises(BudgetError):
        Space(SPEC, 100 * MIB, 512, 100 * MIB, 2).default()


def test_it_finds_what_is_faster_and_starts_with_the_default():
    log = []
    found = search(log=log).run(60, quiet, max_trials=40)
    assert log[0] == log[1] == SPACE.default()
    value, knobs = found.best()
    assert (knobs.policy, knobs.read_threads >= 7) == ("lfu", True)
    default_s = fake.seconds_per_token("better", SPACE.default().to_dict(), 1.0)
    best_s = fake.seconds_per_token("better", knobs.to_dict(), 1.0)
    assert value == pytest.approx(math.log(best_s / default_s), abs=0.06)
    # the default again every 5 trials
    assert len(found.defaults) == 8 == sum(knobs == SPACE.default() for knobs in log[::6][:7]) + 1


def test_the_same_seed_proposes_the_same():
    first, second, other = [], [], []
    search(log=first).run(60, quiet, max_trials=12)
    search(log=second).run(60, quiet, max_trials=12)
    search(log=other, seed=1).run(60, quiet, max_trials=12)
    assert first == second != other


def test_out_of_memory_is_a_lesson():
    found = search("fragile").run(60, quiet, max_trials=30)
    assert found.memory_lessons > 0
    assert found.best()[1].queue_depth <= 16


def test_a_violated_memory_constraint_never_wins():
    running = search("hog")
    found = running.run(60, quiet, max_trials=30)
    assert all(knobs.policy != "lfu" for _, knobs in found.ranked)
    hogs = [t for t in running.study.trials if t.user_attrs["knobs"]["policy"] == "lfu"]
    assert hogs and all(t.state == TrialState.COMPLETE and t.constraints == {"memory_mib": 5.0} for t in hogs)
    assert running.study.best_trial.user_attrs["knobs"]["policy"] != "lfu"


def test_a_run_out_of_time_has_lost_and_is_no_error():
    running = search("stuck")
    found = running.run(60, quiet, max_trials=30)
    assert all(knobs.policy != "static" for _, knobs in found.ranked)
    assert any(t.value == pytest.approx(math.log(4.0)) for t in running.study.trials)


def test_a_machine_that_becomes_slow_is_not_held_against_the_settings():
    calls, steady = [], machine("flat")

    def run(knobs, workload, timeout_s):
        calls.append(knobs)
        found = steady(knobs, workload, timeout_s)
        slower = 20 if len(calls) > 5 else 1
        return Measurement(**{**found.__dict__, "tokens_per_s": found.tokens_per_s / slower})

    found = Search(SPACE, WORK, run, optuna.storages.InMemoryStorage(), "s-1", 0).run(60, quiet, max_trials=9)
    assert found.trials == 9
    assert all(abs(value) < 0.1 for value, _ in found.ranked)


def test_three_errors_in_a_row_end_it():
    with pytest.raises(SeqmoeError, match="3 trials in a row failed, the last one with: the disk is gone"):
        search("broken").run(60, quiet, max_trials=30)


def test_a_failing_default_is_its_own_error():
    def fails(knobs, workload, timeout_s):
        return Failure("memory", "too small", 4, 0.1)

    with pytest.raises(SeqmoeError, match="too small") as caught:
        Search(SPACE, WORK, fails, optuna.storages.InMemoryStorage(), "s-1", 0).run(60, quiet)
    assert caught.value.exit_code == 4


def test_time_is_kept():
    slow = machine()

    def run(knobs, workload, timeout_s):
        time.sleep(0.05)
        found = slow(knobs, workload, timeout_s)
        return Measurement(**{**found.__dict__, "elapsed_s": 0.05})

    started = time.monotonic()
    found = Search(SPACE, WORK, run, optuna.storages.InMemoryStorage(), "s-1", 0).run(0.6, quiet)
    assert time.monotonic() - started < 1.5
    assert 1 <= found.trials <= 11
    nothing = Search(SPACE, WORK, run, optuna.storages.InMemoryStorage(), "s-1", 0).run(0.0, quiet)
    assert (nothing.trials, len(nothing.defaults)) == (0, 1)


def test_the_best_few_are_measured_once_more():
    log = []
    running = search(log=log)
    running.run(60, quiet, max_trials=15)
    best = [knobs for _, knobs in running.result.ranked[:3] if knobs != SPACE.default()]
    del log[:]
    running.confirm(3, 60, quiet)
    assert log == best


def test_a_killed_search_is_resumed_and_repeats_what_was_under_way(tmp_path):
    path = str(tmp_path / "trials.journal")
    first = search(storage=open_storage(path))
    first.run(60, quiet, max_trials=6)
    half = first.study.ask()  # a process that dies here leaves the trial RUNNING
    params = SPACE.suggest(half)
    log = []
    storage = open_storage(path)
    assert study_names(storage, "s-") == ["s-1"]
    again = search(storage=storage, log=log)
    assert again.study.trials[half.number].state == TrialState.FAIL
    assert again.result.trials == 6 and again.result.best() == first.result.best()
    again.run(60, quiet, max_trials=9)
    assert log[0] == SPACE.default() and log[1] == SPACE.knobs(params)
    assert again.result.trials == 9
    assert (
        len({tuple(sorted(t.params.items())) for t in again.study.trials}) >= 8
    )  # it does not propose the first ones again


def test_an_interrupted_trial_is_queued_again():
    calls = []

    def run(knobs, workload, timeout_s):
        calls.append(knobs)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return machine()(knobs, workload, timeout_s)

    storage = optuna.storages.InMemoryStorage()
    running = Search(SPACE, WORK, run, storage, "s-1", 0)
    with pytest.raises(KeyboardInterrupt):
        running.run(60, quiet)
    assert running.result.trials == 3
    log = []
    search(storage=storage, log=log).run(60, quiet, max_trials=4)
    assert log[1] == calls[4]


def test_storage_that_cannot_be_opened():
    with pytest.raises(SeqmoeError, match="cannot open the storage nonsense://"):
        open_storage("nonsense://x")


def command(kind):
    return (sys.executable, WORKER, kind)


def test_one_run_in_a_process_of_its_own():
    found = measure(Knobs(slots=30), WORK, 60, functools.partial(run_job, command=command("flat")))
    assert isinstance(found, Measurement)
    assert (found.slots, found.steps, len(found.token_ids), found.knobs) == (30, 8, 2, Knobs(slots=30))
    assert found.seconds_per_token == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("args", "kind", "message", "exit_code"),
    [
        (command("failing"), "error", "the disk is gone", 7),
        (command("fragile"), "memory", "SIGKILL", 137),
        ((sys.executable, "-c", "print('hello')"), "error", "", 1),
        ((sys.executable, "-c", "print('{}')"), "error", "without 'decode_tokens_per_s'", 1),
        ((sys.executable, "-c", "raise SystemExit(3)"), "error", "", 3),
        ((sys.executable, "-c", "import json; print(json.dumps({'error': {'type': 'BudgetError', 'message': 'm', 'exit_code': 4}}))"), "memory", "m", 4),
        (("/no/such/program",), "error", "cannot start", 1),
    ],
)  # fmt: skip
def test_a_run_that_fails_says_how(args, kind, message, exit_code):
    found = measure(Knobs(slots=30, queue_depth=32), WORK, 60, functools.partial(run_job, command=args))
    assert isinstance(found, Failure)
    assert found.kind == kind and message in found.message
    assert found.error().exit_code == exit_code or exit_code == 1


def test_a_run_that_hangs_is_ended():
    started = time.monotonic()
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    found = measure(Knobs(slots=30), WORK, 0.5, functools.partial(run_job, command=sleeper))
    assert isinstance(found, Failure) and found.kind == "timeout"
    assert time.monotonic() - started < 10
