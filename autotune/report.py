"""What a person sees of a tune: a progress line with an ETA while it runs, a table when it is over."""

import math
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seqmoe.autotune.measure import Failure, Measurement
from seqmoe.autotune.search import TrialReport
from seqmoe.autotune.tune import Plan, Request, Tuning
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.sizes import format_bytes, format_duration, format_rate


class Display:
    """Progress on stderr: a live bar on a terminal, one line for each run elsewhere. Also the `Events` of a tune."""

    def __init__(self, console: Console, budget_s: float) -> None:
        self.console, self.budget_s = console, budget_s
        self._live = console.is_terminal
        self._start = time.monotonic()
        self._stage, self._default_s = "probe", 0.0
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[eta]}"), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=True, disable=not self._live)
        self._task = self._progress.add_task("probe", total=budget_s, eta="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stop(self) -> None:
        """The bar goes, what follows is ordinary output."""
        self._progress.stop()

    def stage(self, name: str, seconds: float) -> None:
        """A new stage begins."""
        self._stage = name
        about = f" (about {format_duration(seconds)})" if seconds > 1 else ""
        self._show(name)
        if not self._live:
            self.console.print(
                f"[{format_duration(max(1, self._elapsed()))}] {name}{about}", markup=False, highlight=False
            )

    def written(self, done: int, total: int) -> None:
        """Progress of a model that is written on first use."""
        self._show(f"writing the model: {format_bytes(done)} of {format_bytes(total)}")

    def trial(self, report: TrialReport, done: int) -> None:
        """One run of the search."""
        what = "default" if report.is_default else f"trial {done}"
        self._run(what, report.outcome, report.value, report.knobs)

    def pair_run(self, done: int, total: int, outcome: Measurement | Failure) -> None:
        """One run of the verdict."""
        self._run(f"verdict {done}/{total}", outcome, None, None)

    def note(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _run(self, what: str, outcome: Measurement | Failure, value: float | None, knobs: Knobs | None) -> None:
        if isinstance(outcome, Failure):
            result = f"{outcome.kind}: {outcome.message}"
        else:
            result = f"{outcome.tokens_per_s:.1f} tokens/s, hit rate {outcome.hit_rate:.0%}"
        gain = f", {math.exp(-value):.2f}x the default" if value is not None and what != "default" else ""
        changed = f"  [{describe_knobs(knobs)}]" if knobs is not None and what != "default" else ""
        self._show(f"{self._stage}: {what}")
        line, style = f"  {what}: {result}{gain}{changed}", "dim" if self._live else ""
        self.console.print(line, markup=False, highlight=False, style=style, soft_wrap=True)

    def _show(self, description: str) -> None:
        left = self.budget_s - self._elapsed()
        eta = f"{format_duration(left)} left" if left > 1 else "finishing"
        self._progress.update(
            self._task, description=description, completed=min(self._elapsed(), self.budget_s), eta=eta
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._start


def describe_knobs(knobs: Knobs) -> str:
    """Slots, and what differs from the defaults, in one line."""
    defaults = Knobs().to_dict()
    changed = [
        f"{name.removesuffix('_bytes')} {format_bytes(value) if name.endswith('_bytes') else value}"
        for name, value in knobs.to_dict().items()
        if name != "slots" and value != defaults[name]
    ]
    return ", ".join([f"{knobs.slots} slots", *(changed or ["all else default"])])


def print_plan(console: Console, request: Request, plan: Plan) -> None:
    """The answer to --dry-run: the space, the time, the memory."""
    table = Table(title="What a tune would do", show_header=False, title_justify="left")
    table.add_row("model", _model_line(plan))
    table.add_row("memory", f"{format_bytes(plan.budget.budget_bytes)} ({plan.memory_note})")
    memory = plan.space.plan(plan.default).to_dict()
    names = ("interpreter", "dense", "pool", "kv", "activation", "read_buffer", "margin")
    table.add_row(
        "predicted memory", ", ".join(f"{n.replace('_', ' ')} {format_bytes(memory[f'{n}_bytes'])}" for n in names)
    )
    table.add_row("default", describe_knobs(plan.default))
    table.add_row("search space", "\n".join(str(dimension) for dimension in plan.space.dimensions()))
    table.add_row("time", f"{format_duration(request.budget_s)} (--budget), loading included")
    console.print(table)


def plan_summary(plan: Plan, request: Request) -> dict[str, Any]:
    """The JSON line of --dry-run."""
    return {
        "dry_run": True,
        "memory_bytes": plan.budget.budget_bytes,
        "memory_note": plan.memory_note,
        "memory_plan": plan.space.plan(plan.default).to_dict(),
        "default_knobs": plan.default.to_dict(),
        "space": [dimension.to_dict() for dimension in plan.space.dimensions()],
        "budget_s": request.budget_s,
    }


def print_report(console: Console, tuning: Tuning, profile_path: str) -> None:
    """The table at the end: machine, model, link, trials, default against tuned, verdict."""
    verdict, machine, probe = tuning.verdict, tuning.machine, tuning.probe
    assert verdict is not None and tuning.search is not None
    facts = Table(show_header=False, title="seqmoe-tune", title_justify="left")
    facts.add_row("machine", f"{machine.cpu_model}, {machine.cores} cores, {format_bytes(machine.ram_total_bytes)} RAM")
    facts.add_row("model", _model_line(tuning.plan))
    facts.add_row("memory", f"{format_bytes(tuning.plan.budget.budget_bytes)} ({tuning.plan.memory_note})")
    if probe.link:
        together = (
            f", {format_rate(probe.link.bytes_per_s_together)} at {probe.spec.top_k} at once"
            if probe.link.bytes_per_s_together
            else ""
        )
        facts.add_row(
            "link",
            f"{tuning.request.link}: {format_rate(probe.link.bytes_per_s_p50)} at {format_bytes(probe.link.record_bytes)}{together}",
        )
    result = tuning.search.result
    lessons = f", {result.memory_lessons} out of memory" if result.memory_lessons else ""
    facts.add_row("search", f"{result.trials} trials{lessons}, {len(result.defaults)} runs of the default")
    facts.add_row("verdict", f"{verdict.status.replace('_', ' ')}: {verdict.reason}")
    facts.add_row("profile", profile_path)
    console.print(facts)
    arms = Table("", "residency", "tokens/s", "settings")
    share = tuning.probe.spec.total_experts
    rows: list[tuple[str, Knobs, float | None]] = [
        ("default", tuning.plan.default, tuning.profile().evidence.default_tokens_per_s)
    ]
    if verdict.status == "tuned":
        rows.append(("tuned", tuning.chosen, verdict.tuned_tokens_per_s))
    for name, knobs, rate in rows:
        arms.add_row(
            name, f"{(knobs.slots or share) / share:.0%}", f"{rate:.1f}" if rate else "-", describe_knobs(knobs)
        )
    if tuning.full:
        arms.add_row("all in memory", "100%", f"{tuning.full.tokens_per_s:.1f}", "")
    console.print(arms)


def summary(tuning: Tuning, profile_path: str, exit_code: int) -> dict[str, Any]:
    """The JSON line."""
    profile = tuning.profile()
    return {
        "status": profile.evidence.status,
        "exit_code": exit_code,
        "profile": profile_path,
        "model": profile.target.model.id,
        "memory_bytes": profile.target.workload.memory_bytes,
        "residency": (tuning.chosen.slots or 0) / tuning.probe.spec.total_experts,
        "knobs": tuning.chosen.to_dict(),
        "default_knobs": tuning.plan.default.to_dict(),
        "full_tokens_per_s": profile.facts.full_tokens_per_s,
        "peak_rss_bytes": profile.facts.peak_rss_bytes,
        "link": profile.facts.link.model_dump() if profile.facts.link else None,
        "evidence": profile.evidence.model_dump(mode="json"),
        "elapsed_s": round(tuning.elapsed_s(), 3),
    }


def _model_line(plan: Plan) -> str:
    spec = plan.space.model
    experts = (
        f"{spec.num_layers} layers x {spec.num_experts} experts of {format_bytes(spec.record_bytes)}, top-{spec.top_k}"
    )
    return f"{spec.name} ({spec.model_type}): {experts}, {format_bytes(spec.dense_bytes)} besides"
