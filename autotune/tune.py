"""One tune from start to end: probe, calibrate, search, confirm, verdict, memory peak, profile. No terminal in here."""

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from seqmoe.autotune.interrupts import shielded
from seqmoe.autotune.measure import Failure, Measure, Measurement, Workload
from seqmoe.autotune.probe import Probe, budget_of_runs
from seqmoe.autotune.prompts import prompts_digest
from seqmoe.autotune.search import MAX_TRIALS, Search, TrialReport, study_names
from seqmoe.autotune.space import Space
from seqmoe.autotune.validate import Verdict, compare, pairs_that_fit
from seqmoe.profiles import schema
from seqmoe.profiles.budget import EffectiveBudget, budget_for_slots
from seqmoe.profiles.fingerprint import fingerprint_of
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import MemoryFacts, memory_facts
from seqmoe.profiles.sizes import format_bytes, format_duration
from seqmoe.profiles.spec import LinkSpec, MachineSpec

# The demo fits in any memory, so a share of its experts is kept out of it, or there would be nothing to see.
DEMOS = ("demo", "demo-xl")
DEMO_RESIDENCY = 0.35
# Of the time that is left after probing: for the search, and for measuring its best few once more. The rest is the verdict's.
SEARCH_SHARE = 0.45
CONFIRM_SHARE = 0.10
CONFIRM_TOP = 3
# Kept for the verdict before the search gets any: three pairs, and one run at full context that may take longer.
VERDICT_RUNS = 7.5
FULL_RUNS = 20  # with everything in memory it is measured only where there is time for this many runs
LONGEST_RUN_S = 900.0  # nobody waits longer for one short run of the default
RUNS_WANTED = 24  # runs that the time should suffice for; it decides how many tokens one run decodes
LEAST_DECODE_SHARE = 0.3
MIN_TOKENS, MAX_TOKENS, WARMUP_TOKENS, CALIBRATION_TOKENS = 16, 512, 16, 32
CLEAR_GAIN = 0.02  # below it an interrupted search's best is not worth more trust than the default
FULL_SHARE_OF_RAM = 0.6  # everything in memory is measured only where it takes less than this of what is free


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    model_id: str
    folder: Path
    memory_bytes: int | None
    budget_s: float
    context: int
    link: LinkSpec
    seed: int
    search_prompts: tuple[str, ...]
    held_out_prompts: tuple[str, ...]
    max_trials: int | None = None


@dataclass(frozen=True)
class Plan:
    """What follows from the request, the probe and the machine, before anything is run."""

    budget: EffectiveBudget
    space: Space
    default: Knobs
    memory_note: str
    question: str  # what was asked about memory: stays the same while the free RAM goes up and down


class Events(Protocol):
    """Who watches a tune: a progress display, or a test."""

    def stage(self, name: str, seconds: float) -> None:
        """A new stage begins; it is expected to take `seconds`."""

    def trial(self, report: TrialReport, done: int) -> None:
        """A run of the search has ended."""

    def pair_run(self, done: int, total: int, outcome: Measurement | Failure) -> None:
        """A run of the verdict has ended."""

    def note(self, text: str) -> None:
        """Something that the user should know."""


def plan_tune(request: Request, probe: Probe) -> Plan:
    """The memory budget, where it comes from, and the search space. Raises BudgetError."""
    spec, process = probe.spec, probe.planned_process_bytes
    asked, cap, note = request.memory_bytes, None, ""
    if asked is None and request.model_id in DEMOS:
        cap = max(spec.top_k, round(DEMO_RESIDENCY * spec.total_experts))
        asked = budget_for_slots(spec, cap, request.context, 1, Knobs(), process)
        note = f"chosen so that {DEMO_RESIDENCY:.0%} of the {request.model_id} model's experts fit; --memory changes it"
    budget = budget_of_runs(asked)
    space = Space(spec, budget.budget_bytes, request.context, process, usable_threads(), cap)
    question = f"{cap} experts" if cap else f"{asked} bytes" if asked else "all there is"
    return Plan(budget, space, space.default(), note or budget.explanation, question)


def room_beside(plan: Plan, memory: MemoryFacts) -> int:
    """Bytes that this machine leaves beside the budget of the runs, 0 if the budget is all there is."""
    rooms = [memory.ram_room_bytes, *([memory.cgroup_room_bytes] if memory.cgroup_room_bytes is not None else [])]
    return max(0, min(rooms) - plan.budget.budget_bytes)


def usable_threads() -> int:
    """Cores that reading threads may count on."""
    from seqmoe.profiles.machine import usable_cores

    return usable_cores()


class Tuning:
    """The state of one tune. `profile()` gives a valid profile at any moment after construction."""

    def __init__(
        self,
        request: Request,
        plan: Plan,
        probe: Probe,
        machine: MachineSpec,
        measure: Measure,
        events: Events,
        version: str,
        started: float | None = None,
    ) -> None:
        """`started`: `time.monotonic()` when the command began, so that what came before counts too. [now]"""
        self.request, self.plan, self.probe, self.machine = request, plan, probe, machine
        self.measure, self.events, self.version = measure, events, version
        self.search: Search | None = None
        self.verdict: Verdict | None = None
        self.chosen = plan.default
        self.first: Measurement | None = None  # of the default, short
        self.full: Measurement | None = None
        self.peak_rss_bytes: int | None = None
        self.memory_plan: dict[str, int] | None = None
        self._start = time.monotonic() if started is None else started

    def run(self, storage: Any, study_prefix: str, resume: bool) -> Verdict:
        """All stages. Raises the default's own error when the default cannot run."""
        workload, name, run_s = self._workload(storage, study_prefix, resume)
        self.search = search = Search(self.plan.space, workload, self.measure, storage, name, self.request.seed)
        space = self.plan.space
        kept = {"memory_bytes": space.memory_bytes, "process_bytes": space.process_bytes, "max_slots": space.max_slots}
        with shielded():
            search.study.set_user_attr("workload", {"tokens": workload.tokens, **kept})
        spent = search.spent_s()  # of an earlier session
        left = max(0.0, self.request.budget_s - self.elapsed_s() - spent)
        run_s = run_s or search.stored_run_s()
        if left > FULL_RUNS * run_s:
            self._measure_full(workload, run_s)
            left = max(0.0, self.request.budget_s - self.elapsed_s() - spent)
        search_s = min(left * SEARCH_SHARE, left - VERDICT_RUNS * run_s)
        if search_s < 2 * run_s and not search.result.trials:
            need = format_duration(self.elapsed_s() + (VERDICT_RUNS + 6) * run_s)
            reason = (
                f"no time for a trial: one run takes {format_duration(run_s)} here, so --budget {need} is the least"
            )
            self.verdict = Verdict("default_kept", reason)
            return self.verdict
        self.events.stage("search", search_s)
        report = self._on_trial(search)
        search.run(search_s, report, max_trials=self.request.max_trials or MAX_TRIALS)
        if left * CONFIRM_SHARE > run_s:
            self.events.stage("confirm", left * CONFIRM_SHARE)
            search.confirm(CONFIRM_TOP, left * CONFIRM_SHARE, report)
        self.verdict = self._judge(search, workload)
        self._soak(workload, search.run_s())
        return self.verdict

    def elapsed_s(self) -> float:
        """Seconds since this session's command began, probe and opening included."""
        return time.monotonic() - self._start

    def profile(self, interrupted: bool = False) -> schema.Profile:
        """The profile as things stand: the verdict's, or the best so far as `untested`."""
        verdict = self.verdict or self._unfinished(interrupted)
        seen = self.search.result.defaults[-1:] if self.search and self.search.result.defaults else [self.first]
        default_rate = seen[0].tokens_per_s if seen[0] else None
        request, spec, layer_ms = self.request, self.probe.spec, None
        if self.full:
            layer_ms = self.full.seconds_per_token * 1e3 / spec.num_layers
        return schema.Profile(
            metadata=schema.Metadata(
                name=f"{request.model_id} in {format_bytes(self.plan.budget.budget_bytes)}",
                created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                tuner_version=self.version,
            ),
            target=schema.Target(
                model=schema.ModelTarget(
                    id=request.model_id,
                    model_type=spec.model_type,
                    digest=spec.digest,
                    num_layers=spec.num_layers,
                    num_experts=spec.num_experts,
                    top_k=spec.top_k,
                    record_bytes=spec.record_bytes,
                    dtype=spec.dtype,
                ),
                runtime=schema.RuntimeTarget(version=self.version, backend="cpu"),
                workload=schema.Workload(
                    context_max=request.context, memory_bytes=self.plan.budget.budget_bytes, link=str(request.link)
                ),
            ),
            fingerprint=fingerprint_of(self.machine, self.probe.packages),
            facts=schema.Facts(
                link=self.probe.link,
                full_tokens_per_s=self.full.tokens_per_s if self.full else None,
                layer_ms=layer_ms,
                process_bytes=self.probe.process_bytes,
                peak_rss_bytes=self.peak_rss_bytes,
                memory_plan=self.memory_plan,
            ),
            knobs=schema.knob_values(self.chosen),
            evidence=schema.Evidence(
                status=verdict.status,
                reason=verdict.reason,
                ratio=verdict.ratio,
                ratio_ci95=verdict.ratio_ci95,
                aa_band=verdict.aa_band,
                n_pairs=verdict.n_pairs,
                trials=self.search.result.trials if self.search else 0,
                seed=request.seed,
                default_tokens_per_s=verdict.default_tokens_per_s or default_rate,
                tuned_tokens_per_s=verdict.tuned_tokens_per_s,
                prompts_digest=prompts_digest(request.search_prompts, request.held_out_prompts),
            ),
        )

    # -- stages -----------------------------------------------------------------------------------------------------------

    def _workload(self, storage: Any, prefix: str, resume: bool) -> tuple[Workload, str, float]:
        """What every run decodes, the study's name, and how long a run will take (0 = the study knows).

        A resumed study keeps the workload that it began with.
        """
        request = self.request
        names = study_names(storage, prefix)
        kept = _study_attrs(storage, names[-1]).get("workload") if resume and names else None
        if kept:
            self._keep_plan(kept)
        workload = Workload(
            model=str(request.folder),
            prompts=request.search_prompts,
            tokens=min(CALIBRATION_TOKENS, max(1, request.context // 4)),
            warmup_tokens=min(WARMUP_TOKENS, max(1, request.context // 8)),
            context=request.context,
            memory_bytes=self.plan.budget.budget_bytes,
            link=str(request.link),
            seed=request.seed,
        )
        if kept:
            self.events.note(f"resuming study {names[-1]}")
            return replace(workload, tokens=int(kept["tokens"])), names[-1], 0.0
        if resume:
            self.events.note("nothing to resume: starting a new study")
        self.events.stage("calibrate", 0)
        first = self.measure(self.plan.default, workload, max(LONGEST_RUN_S, self.request.budget_s))
        if isinstance(first, Failure):
            raise first.error()
        self.memory_plan, self.first = first.memory_plan, first
        tokens = self._tokens(first, workload)
        more = (tokens - workload.tokens) * len(workload.prompts) * first.seconds_per_token
        return replace(workload, tokens=tokens), f"{prefix}{len(names) + 1}", first.elapsed_s + more

    def _keep_plan(self, kept: dict[str, Any]) -> None:
        """The memory that a resumed study began with: free RAM and the size of a process differ a little each time."""
        budget = replace(self.plan.budget, budget_bytes=int(kept["memory_bytes"]))
        space = replace(
            self.plan.space,
            memory_bytes=budget.budget_bytes,
            process_bytes=int(kept["process_bytes"]),
            max_slots=kept["max_slots"],
        )
        self.plan = replace(self.plan, budget=budget, space=space, default=space.default())
        self.chosen = self.plan.default

    def _measure_full(self, workload: Workload, run_s: float) -> None:
        """With every expert in memory, where there is room: what the layers cost by themselves, and the upper end."""
        spec, memory = self.probe.spec, memory_facts()
        need = budget_for_slots(spec, spec.total_experts, workload.context, 1, Knobs(), self.plan.space.process_bytes)
        room = min(memory.ram_room_bytes * FULL_SHARE_OF_RAM, memory.cgroup_room_bytes or need)
        if need > room:
            self.events.note(f"all experts in memory would take {format_bytes(need)}: not measured")
            return
        self.events.stage("all in memory", run_s)
        outcome = self.measure(Knobs(), replace(workload, memory_bytes=need, mode="full"), max(60.0, 4 * run_s))
        if isinstance(outcome, Measurement):
            self.full = outcome
        else:
            self.events.note(f"all experts in memory could not be measured: {outcome.message}")

    def _tokens(self, first: Measurement, workload: Workload) -> int:
        """Tokens a prompt, so that the time there is suffices for RUNS_WANTED runs, if starting them leaves any."""
        decode_s = first.steps * first.seconds_per_token
        fixed_s = max(0.0, first.elapsed_s - decode_s)
        run_s = (self.request.budget_s - self.elapsed_s()) / RUNS_WANTED
        # Starting a process takes seconds: decoding for less than a third of that would measure little for much.
        decode_s = max(run_s - fixed_s, fixed_s * LEAST_DECODE_SHARE)
        tokens = int(decode_s / (first.seconds_per_token * len(workload.prompts)))
        return max(min(MIN_TOKENS, workload.context // 4), min(MAX_TOKENS, workload.context // 2, tokens))

    def _judge(self, search: Search, workload: Workload) -> Verdict:
        best = search.result.best()
        default = self.plan.default
        if best is None or best[1] == default or best[0] >= 0:
            return Verdict("default_kept", f"none of {search.result.trials} trials was faster than the default")
        held_out = workload.with_prompts(self.request.held_out_prompts)
        run_s = search.run_s()
        n_pairs = pairs_that_fit(self.request.budget_s - self.elapsed_s() - 1.5 * run_s, run_s)
        self.events.stage("verdict", 2 * n_pairs * run_s)
        verdict = compare(
            default, best[1], held_out, self.measure,
            n_pairs=n_pairs, timeout_s=max(60.0, 3 * search.timeout_s()), seed=self.request.seed, on_run=self.events.pair_run,
        )  # fmt: skip
        if verdict.status == "tuned":
            self.chosen = best[1]
        return verdict

    def _soak(self, workload: Workload, run_s: float) -> None:
        """The memory peak of the chosen settings with the whole context in use; tuned settings that exceed the budget lose."""
        timeout_s = max(60.0, 4 * run_s, self.request.budget_s - self.elapsed_s())
        self.events.stage("memory peak at full context", run_s)
        tokens = min(8, max(1, workload.context // 4))
        # Token ids, not text: exactly as many as the context holds, all over the vocabulary so that many experts are asked for.
        span = max(2, min(self.probe.spec.vocab_size or 256, 30_000))
        long = [i * 7919 % span for i in range(workload.context - tokens)]
        full_context = replace(workload, prompts=(long,), tokens=tokens, warmup_tokens=0)
        outcome = self.measure(self.chosen, full_context, timeout_s)
        if isinstance(outcome, Failure):
            self.events.note(f"the run at full context failed: {outcome.message}")
            over = outcome.message if outcome.kind == "memory" else ""
        else:
            self.peak_rss_bytes, self.memory_plan = outcome.peak_rss_bytes, outcome.memory_plan
            budget = self.plan.budget.budget_bytes
            took = f"took {format_bytes(outcome.peak_rss_bytes)} of {format_bytes(budget)}"
            over = took if outcome.peak_rss_bytes > budget else ""
        if over and self.verdict and self.verdict.status == "tuned":
            self.verdict = replace(
                self.verdict, status="default_kept", reason=f"too much memory at full context: {over}"
            )
            self.chosen = self.plan.default
        elif over:
            self.events.note(
                f"the default takes too much memory at full context: {over}; use a smaller --context or a larger --memory"
            )

    def _unfinished(self, interrupted: bool) -> Verdict:
        """Before the verdict: the search's best if it was clearly faster there, else the default; untested either way."""
        why = "interrupted before the verdict" if interrupted else "not measured"
        best = self.search.result.best() if self.search else None
        if best is None or best[0] > -CLEAR_GAIN or best[1] == self.plan.default:
            self.chosen = self.plan.default
            return Verdict("untested", f"{why}: the default settings")
        self.chosen = best[1]
        gain = -math.expm1(best[0])
        trials = self.search.result.trials if self.search else 0
        return Verdict("untested", f"{why}: best of {trials} trials, {gain:.0%} less time a token there")

    def _on_trial(self, search: Search) -> Callable[[TrialReport], None]:
        return lambda report: self.events.trial(report, search.result.trials)


def _study_attrs(storage: Any, name: str) -> dict[str, Any]:
    return dict(storage.get_study_user_attrs(storage.get_study_id_from_name(name)))
