"""The search: Optuna proposes knobs, a fresh process runs them, and what it says is compared with the default of that hour.

The objective is log(seconds per token / the default's), so less than 0 is faster. The default is measured first and again
every few trials, since a machine drifts. TPE and not the Gaussian-process sampler: that one imports torch, and the tuner has
to stay small beside the process it measures, in the same memory group.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from seqmoe.autotune.interrupts import shielded
from seqmoe.autotune.measure import Failure, Measure, Measurement, Workload
from seqmoe.autotune.space import Space
from seqmoe.profiles.budget import MIB
from seqmoe.profiles.errors import BudgetError, SeqmoeError
from seqmoe.profiles.knobs import Knobs

DRIFT_EVERY = 5  # trials between two measurements of the default
MAX_FAILURES = 3  # in a row, of a kind that is no lesson: then something is wrong with the machine or the model
MAX_TRIALS = 200
STARTUP_TRIALS = 6
SUSPICIOUS = 2.0  # slower than the default by more than this: the default is measured again at once
SLOWEST = 4.0  # a run that takes this many times the default's time is ended: it has lost


@dataclass(frozen=True)
class TrialReport:
    """One finished trial, for the progress line and the report."""

    number: int
    knobs: Knobs | None
    outcome: Measurement | Failure
    value: float | None  # log ratio of time per token to the default's
    is_default: bool


@dataclass
class SearchResult:
    """What a search has found so far; it grows as trials end, so that an interrupted search has its best."""

    defaults: list[Measurement] = field(default_factory=list)
    ranked: list[tuple[float, Knobs]] = field(default_factory=list)  # (log ratio, knobs), best first, repeats averaged
    trials: int = 0
    memory_lessons: int = 0

    def best(self) -> tuple[float, Knobs] | None:
        """The fastest that stayed within its memory, None before there is one."""
        return self.ranked[0] if self.ranked else None


class Search:
    """One study on one storage. `run` may be called again on the same storage: it goes on where the last one stopped."""

    def __init__(
        self, space: Space, workload: Workload, measure: Measure, storage: BaseStorage, study_name: str, seed: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.workload, self.measure = space, workload, measure
        with shielded():
            self.study = optuna.create_study(
                study_name=study_name, storage=storage, direction="minimize", load_if_exists=True
            )
            _requeue_stale(self.study)
        # A sampler that starts again with the same seed would repeat its first proposals.
        seed += len(self.study.get_trials(deepcopy=False))
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        self.result = SearchResult()
        self._failures = 0
        self._since = 0  # trials since the default was measured
        self._refresh()

    def run(
        self, seconds: float, on_trial: Callable[[TrialReport], None], *, max_trials: int = MAX_TRIALS
    ) -> SearchResult:
        """Trials until `seconds` are used up. The default is measured in any case, and its error, if it fails, is raised."""
        deadline = time.monotonic() + seconds
        with shielded():
            self.study.enqueue_trial(
                self._params(self.space.default_params()), user_attrs={"origin": "default"}, skip_if_exists=True
            )
        self._since = DRIFT_EVERY
        while not self.result.defaults or (
            self.result.trials < max_trials and time.monotonic() + self.run_s() <= deadline
        ):
            if self._since >= DRIFT_EVERY:
                self._measure_default(on_trial)
            else:
                self._one(on_trial)
                self._since += 1
        return self.result

    def confirm(self, top: int, seconds: float, on_trial: Callable[[TrialReport], None]) -> SearchResult:
        """Measure the best few once more: of many noisy figures the best is too good to be true."""
        deadline = time.monotonic() + seconds
        for _, knobs in list(self.result.ranked[:top]):
            if knobs == self.space.default() or time.monotonic() + self.run_s() > deadline:
                continue
            trial = next(t for t in self.study.trials if t.state == TrialState.COMPLETE and _knobs_of(t) == knobs)
            with shielded():
                self.study.enqueue_trial(trial.params, user_attrs={"origin": "confirm"})
            self._one(on_trial)
        return self.result

    def timeout_s(self) -> float:
        """Time after which a run has lost, from how long the default took; generous before that is known."""
        return max(20.0, SLOWEST * self.run_s()) if self.result.defaults else 900.0

    # -- one run --------------------------------------------------------------------------------------------------------

    def _measure_default(self, on_trial: Callable[[TrialReport], None]) -> None:
        """The default outside of the study's trials: the reference for those that follow."""
        # Longer than a trial gets: a machine that has become slow is to be seen, not to end the search.
        outcome = self.measure(self.space.default(), self.workload, 4 * self.timeout_s())
        self._since = 0
        if isinstance(outcome, Failure):
            raise outcome.error()
        with shielded():
            self.result.defaults.append(outcome)
            seen = [*self.study.user_attrs.get("defaults", []), _summary(outcome)]
            self.study.set_user_attr("defaults", seen)
        on_trial(TrialReport(-1, outcome.knobs, outcome, 0.0, True))

    def _one(self, on_trial: Callable[[TrialReport], None]) -> None:
        """Ask, run, tell. Only the run may be interrupted: it is then queued again for whoever goes on."""
        knobs: Knobs | None = None
        outcome: Measurement | Failure | None = None
        planned = 0
        with shielded():
            trial = self.study.ask()
            params = self.space.suggest(trial)
            try:
                knobs = self.space.knobs(params)
                planned = self.space.plan(knobs).total_bytes
            except BudgetError as error:  # the read buffers alone are too much: a lesson without a run
                outcome = Failure("memory", str(error), error.exit_code, 0.0)
        try:
            if outcome is None:
                assert knobs is not None
                outcome = self.measure(knobs, self.workload, self.timeout_s())
            reference_s = self._default_s()
            if self._is_slow(outcome, reference_s):
                # Bad settings, or a machine that has something else to do now? The default tells.
                self._measure_default(on_trial)
                reference_s = self.result.defaults[-1].seconds_per_token
        except BaseException:
            with shielded():
                _give_up(self.study, trial.number, trial.params)
            raise
        with shielded():
            value = self._tell(trial, knobs, outcome, planned, reference_s)
            self._refresh()
        on_trial(TrialReport(trial.number, knobs, outcome, value, False))
        failed = isinstance(outcome, Failure) and outcome.kind == "error"
        self._failures = self._failures + 1 if failed else 0
        if isinstance(outcome, Failure) and self._failures >= MAX_FAILURES:
            raise SeqmoeError(f"{MAX_FAILURES} trials in a row failed, the last one with: {outcome.message}")

    def _tell(
        self, trial: optuna.Trial, knobs: Knobs | None, outcome: Measurement | Failure, planned: int, reference_s: float
    ) -> float | None:
        """Record an outcome. A run out of memory or of time is COMPLETE, with a violated constraint or a bad value: the sampler
        learns nothing from FAIL."""
        trial.set_user_attr("elapsed_s", outcome.elapsed_s)
        if knobs is not None:
            trial.set_user_attr("knobs", knobs.to_dict())
        budget = self.workload.memory_bytes
        if isinstance(outcome, Measurement):
            trial.set_user_attr("measurement", _summary(outcome))
            trial.set_constraint("memory_mib", (outcome.peak_rss_bytes - budget) / MIB)
            value = math.log(outcome.seconds_per_token / reference_s)
        else:
            trial.set_user_attr("failure", {"kind": outcome.kind, "message": outcome.message})
            slow_machine = outcome.kind == "timeout" and self.result.defaults[-1].elapsed_s > outcome.elapsed_s / 2
            if outcome.kind == "error" or slow_machine:
                self.study.tell(trial, state=TrialState.FAIL)
                return None
            over = max(1.0, (planned - budget) / MIB)
            trial.set_constraint("memory_mib", over if outcome.kind == "memory" else 0.0)
            value = math.log(SLOWEST) if outcome.kind == "timeout" else 0.0
        self.study.tell(trial, value)
        return value

    @staticmethod
    def _is_slow(outcome: Measurement | Failure, default_s: float) -> bool:
        if isinstance(outcome, Failure):
            return outcome.kind == "timeout"
        return outcome.seconds_per_token > SUSPICIOUS * default_s

    # -- what is known ----------------------------------------------------------------------------------------------------

    def _default_s(self) -> float:
        """Seconds per token of the default about now: geometric mean of its last two measurements."""
        recent = self.result.defaults[-2:]
        return math.exp(sum(math.log(m.seconds_per_token) for m in recent) / len(recent))

    def run_s(self) -> float:
        """How long one run takes: the median of the default's."""
        times = sorted(m.elapsed_s for m in self.result.defaults)
        return times[len(times) // 2] if times else 0.0

    def stored_run_s(self) -> float:
        """The same from what earlier sessions of this study stored, 0 where there is nothing."""
        times = sorted(float(d["elapsed_s"]) for d in self.study.user_attrs.get("defaults", []))
        return times[len(times) // 2] if times else 0.0

    def spent_s(self) -> float:
        """Seconds that all runs of this study took, earlier sessions included."""
        trials = sum(t.user_attrs.get("elapsed_s", 0.0) for t in self.study.trials)
        return float(trials + sum(d["elapsed_s"] for d in self.study.user_attrs.get("defaults", [])))

    def _refresh(self) -> None:
        """Rank the settings: those that kept their memory, repeated measurements averaged, ties to the fewer slots."""
        values: dict[Knobs, list[float]] = {}
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state == TrialState.COMPLETE and "measurement" in trial.user_attrs and _feasible(trial):
                values.setdefault(_knobs_of(trial), []).append(trial.value or 0.0)
        means = [(sum(v) / len(v), knobs) for knobs, v in values.items()]
        self.result.ranked = sorted(means, key=lambda pair: (pair[0], pair[1].slots or 0))
        self.result.trials = sum(
            t.state in (TrialState.COMPLETE, TrialState.FAIL) and "elapsed_s" in t.user_attrs for t in trials
        )
        self.result.memory_lessons = sum(t.user_attrs.get("failure", {}).get("kind") == "memory" for t in trials)

    def _params(self, params: dict[str, Any]) -> dict[str, Any]:
        names = {dimension.name for dimension in self.space.dimensions()}
        return {name: value for name, value in params.items() if name in names}


def open_storage(path_or_url: str) -> BaseStorage:
    """A journal file for a path, otherwise whatever Optuna makes of the URL. Raises SeqmoeError in one line.

    Whoever opens a journal holds its folder (`state.locked`), so a lock that lies there is left from a process that was killed.
    """
    try:
        if "://" in path_or_url:
            return optuna.storages.get_storage(path_or_url)
        Path(f"{path_or_url}.lock").unlink(missing_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(path_or_url)
        return optuna.storages.JournalStorage(backend)
    except Exception as error:  # noqa: BLE001 (every database driver has its own)
        raise SeqmoeError(f"cannot open the storage {path_or_url}: {str(error).splitlines()[0]}") from None


def study_names(storage: BaseStorage, prefix: str) -> list[str]:
    """Names of the studies that begin with `prefix`, oldest first."""
    return sorted(
        (name for name in optuna.get_all_study_names(storage) if name.startswith(prefix)),
        key=lambda name: int(name.rpartition("-")[2]),
    )


def _requeue_stale(study: optuna.Study) -> None:
    """Trials of a process that was killed: fail them (journal storage has no heartbeat) and put them in the queue again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        _give_up(study, trial.number, trial.params)


def _give_up(study: optuna.Study, number: int, params: dict[str, Any]) -> None:
    """Fail a trial that was not finished, and queue it for whoever goes on."""
    with contextlib.suppress(ValueError):  # it was finished after all
        study.tell(number, state=TrialState.FAIL)
        if params:
            study.enqueue_trial(params, user_attrs={"origin": f"repeats {number}"})


def _feasible(trial: FrozenTrial) -> bool:
    return all(value <= 0 for value in trial.constraints.values())


def _knobs_of(trial: FrozenTrial) -> Knobs:
    return Knobs.from_mapping(trial.user_attrs["knobs"])


def _summary(found: Measurement) -> dict[str, Any]:
    names = ("tokens_per_s", "ttft_s", "hit_rate", "bytes_read", "peak_rss_bytes", "slots", "elapsed_s")
    return {name: getattr(found, name) for name in names}
