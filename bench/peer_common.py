"""What the processes of `peers.py` share: one job in, one JSON line out, and a meter that brackets the decode steps."""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqmoe.profiles.errors import SeqmoeError
from seqmoe.runtime.jobs_process import die_with_parent


@dataclass(frozen=True)
class PeerJob:
    """One run: the same for every peer but for `path` (folder or file) and what only one of them takes (`extra`)."""

    path: str
    prompts: list[list[int]]  # token ids
    warmup_tokens: int  # decoded for the first prompt before anything is counted
    max_new_tokens: int
    threads: int
    context: int
    memory_bytes: int | None
    extra: dict[str, Any] = field(default_factory=dict)


def model_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json with the names that hub repositories use, which Transformers 5 saves otherwise."""
    config = dict(json.loads((folder / "config.json").read_text()))
    if "num_experts" not in config and "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    if not config.get("head_dim"):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def storage_read_bytes() -> int:
    """Bytes that this process has had fetched from storage so far, page faults and read-ahead included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes in /proc/self/io")


class Meter:
    """Times and bytes from a prompt's first new token to its last: decode steps, without the prefill."""

    def __init__(self) -> None:
        self.token_ids: list[list[int]] = []
        self.seconds = 0.0
        self.read_bytes = 0
        self.ttft_s: list[float] = []
        self.step_s: list[float] = []
        self._start = self._last = 0.0
        self._read = 0

    def start(self) -> None:
        """A prompt goes in."""
        self.token_ids.append([])
        self._start = time.perf_counter()

    def token(self, *ids: int) -> None:
        """New tokens came out (one, as a rule)."""
        now, read = time.perf_counter(), storage_read_bytes()
        if self.token_ids[-1]:
            self.seconds += now - self._last
            self.read_bytes += read - self._read
            self.step_s.append(now - self._last)
        else:
            self.ttft_s.append(now - self._start)
        self._last, self._read = now, read
        self.token_ids[-1] += ids

    def result(self) -> dict[str, Any]:
        """The figures, under the names of the report."""
        steps = sum(len(ids) - 1 for ids in self.token_ids)
        return {
            "decode_tokens_per_s": steps / self.seconds if self.seconds else 0.0,
            "read_mib_per_token": self.read_bytes / 2**20 / max(1, steps),
            "ttft_s": sum(self.ttft_s) / max(1, len(self.ttft_s)),
            "steps": steps,
            "per_step_s": self.step_s,
            "token_ids": self.token_ids,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


class TokenStream:
    """A streamer as Transformers' `generate` takes one: the prompt comes first, then each token."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Called by `generate` with token ids."""
        if self._prompt_seen:
            self._meter.token(*value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Called by `generate` when it is done."""


def serve(run: Callable[[PeerJob], dict[str, Any]], packages: tuple[str, ...] = ()) -> None:
    """The peer's main: reads the job, runs it, prints the result or the error as the last line; exits."""
    die_with_parent()
    job = PeerJob(**json.load(sys.stdin))
    try:
        print(json.dumps(run(job)), flush=True)
        return
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        failure = ("Missing", f"needs the package {error.name}: pip install 'seqmoe[peers]'", 1)
    except (SeqmoeError, RuntimeError, OSError, ValueError, MemoryError) as error:
        failure = (type(error).__name__, " ".join(str(error).split()), getattr(error, "exit_code", 1))
    print(json.dumps({"error": dict(zip(("type", "message", "exit_code"), failure, strict=True))}), flush=True)
    sys.exit(failure[2])
