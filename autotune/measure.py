"""One choice of knobs, run in a fresh process that can be killed: a `Measurement`, or a `Failure` that says of what kind."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.knobs import Knobs
from seqmoe.runtime.jobs_process import run_job

FailureKind = Literal["memory", "timeout", "error"]


@dataclass(frozen=True)
class Workload:
    """What every arm of a comparison has in common. `tokens` are decoded for each prompt after `warmup_tokens` untimed ones."""

    model: str  # folder
    prompts: tuple[str | list[int], ...]  # text, or token ids
    tokens: int
    warmup_tokens: int
    context: int
    memory_bytes: int
    link: str
    seed: int
    mode: str | None = None  # None: what the knobs' policy says

    def job(self, knobs: Knobs) -> dict[str, Any]:
        """The job that `python -m seqmoe.runtime.measure` reads."""
        return {
            "model": self.model,
            "mode": self.mode or knobs.policy,
            "knobs": knobs.to_dict(),
            "memory_bytes": self.memory_bytes,
            "context": self.context,
            "prompts": list(self.prompts),
            "max_new_tokens": self.tokens,
            "warmup_tokens": self.warmup_tokens,
            "seed": self.seed,
            "link": self.link,
        }

    def with_prompts(self, prompts: Sequence[str]) -> "Workload":
        """The same on other prompts."""
        return replace(self, prompts=tuple(prompts))


@dataclass(frozen=True)
class Measurement:
    """One observed run. `elapsed_s` is that of the whole process, start-up and loading included."""

    knobs: Knobs
    tokens_per_s: float
    ttft_s: float
    hit_rate: float
    bytes_read: int
    peak_rss_bytes: int
    stall_s: float
    slots: int
    residency: float
    steps: int
    token_ids: tuple[tuple[int, ...], ...]
    memory_plan: dict[str, int]
    elapsed_s: float

    @property
    def seconds_per_token(self) -> float:
        """Decode time of one token, the quantity that is compared."""
        return 1.0 / self.tokens_per_s


@dataclass(frozen=True)
class Failure:
    """A run that gave no figures. "memory": it was refused or killed for memory, a lesson for the search."""

    kind: FailureKind
    message: str
    exit_code: int
    elapsed_s: float

    def error(self) -> SeqmoeError:
        """The user's error for it."""
        error = SeqmoeError(self.message)
        error.exit_code = self.exit_code
        return error


# (knobs, workload, timeout in seconds) -> outcome; the search and the verdict know no more than this of how a run is made
Measure = Callable[[Knobs, Workload, float], Measurement | Failure]
# (job, timeout in seconds) -> what the job's process answered
RunJob = Callable[[Mapping[str, Any], float], dict[str, Any]]


def measure(knobs: Knobs, workload: Workload, timeout_s: float, run: RunJob = run_job) -> Measurement | Failure:
    """Run `workload` with `knobs` in a fresh process: one that `run_job` starts, or `JobServer.run` forks.

    The process and all its children are gone when this returns or is interrupted.
    """
    start = time.monotonic()
    result = run(workload.job(knobs), timeout_s)
    return outcome_of(result, knobs, time.monotonic() - start)


def outcome_of(result: Mapping[str, Any], knobs: Knobs, elapsed: float) -> Measurement | Failure:
    """What the worker's answer says."""
    if "error" in result:
        return _failure(result["error"], elapsed)
    try:
        found = Measurement(
            knobs=knobs,
            tokens_per_s=float(result["decode_tokens_per_s"]),
            ttft_s=float(result["ttft_s"]),
            hit_rate=float(result["hit_rate"]),
            bytes_read=int(result["bytes_read"]),
            peak_rss_bytes=int(result["peak_rss_bytes"]),
            stall_s=float(result["stall_s"]),
            slots=int(result["slots"]),
            residency=float(result["residency"]),
            steps=int(result["steps"]),
            token_ids=tuple(tuple(int(token) for token in row) for row in result["token_ids"]),
            memory_plan={name: int(value) for name, value in result["memory_plan"].items()},
            elapsed_s=elapsed,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Failure("error", f"the measuring process gave an answer without {error}", 1, elapsed)
    if not (math.isfinite(found.tokens_per_s) and found.tokens_per_s > 0):
        return Failure("error", "the measuring process decoded no token; ask for more tokens", 1, elapsed)
    return found


def _failure(error: dict[str, Any], elapsed: float) -> Failure:
    kind, message = str(error.get("type")), str(error.get("message"))
    # The kernel's out-of-memory killer sends SIGKILL; nothing of ours does while the run is within its time.
    for_memory = kind in ("BudgetError", "MemoryError", "Killed") or "out of memory" in message.lower()
    which: FailureKind = "timeout" if kind == "Timeout" else "memory" if for_memory else "error"
    return Failure(which, message, int(error.get("exit_code") or 1), elapsed)
