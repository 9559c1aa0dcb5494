"""What is known before the search: the model's sizes, the link at the record's own size, what a process takes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seqmoe.profiles.budget import PROCESS_JITTER_BYTES, EffectiveBudget, effective_budget
from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import memory_facts
from seqmoe.profiles.schema import LinkFacts
from seqmoe.profiles.spec import ModelSpec
from seqmoe.runtime.jobs_process import run_job

PROBE_COMMAND = (sys.executable, "-m", "seqmoe.autotune.probe_worker")


@dataclass(frozen=True)
class Probe:
    """Answers of the probing process."""

    spec: ModelSpec
    process_bytes: int  # resident set after all imports and the checkpoint's headers, before any weight
    packages: dict[str, str]
    link: LinkFacts | None

    @property
    def planned_process_bytes(self) -> int:
        """What a run's process is planned to take: what this one took, and by how much starts differ."""
        return self.process_bytes + PROCESS_JITTER_BYTES


def budget_of_runs(asked_bytes: int | None) -> EffectiveBudget:
    """The budget of runs that are started from this process: it stays beside them, in the same RAM and the same group."""
    budget = effective_budget(asked_bytes, memory_facts())
    if budget.bound_by == "asked":
        return budget
    return replace(budget, budget_bytes=max(0, budget.budget_bytes - memory_facts().rss_bytes))


def probe_model(
    folder: Path,
    link: str,
    knobs: Knobs,
    *,
    link_seconds: float,
    timeout_s: float = 600,
    command: Sequence[str] = PROBE_COMMAND,
) -> Probe:
    """Open the checkpoint and, if `link_seconds` is more than 0, read records for that long, in a process of its own.

    Raises SeqmoeError with the worker's line and exit code.
    """
    job = {"model": str(folder), "link": link, "knobs": knobs.to_dict(), "link_seconds": link_seconds}
    answer = run_job(job, timeout_s, command)
    if "error" in answer:
        error = SeqmoeError(str(answer["error"]["message"]))
        error.exit_code = int(answer["error"].get("exit_code") or 1)
        raise error
    facts = LinkFacts(**answer["link"]) if answer["link"] else None
    return Probe(ModelSpec(**answer["spec"]), int(answer["process_bytes"]), dict(answer["packages"]), facts)
