"""Made-up runs for the tests of `seqmoe bench`, and traces of the demo model's shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqmoe.predictors.trace import Trace, starts_of
from seqmoe.predictors.trace_file import write_trace
from seqmoe.runtime.policy import find_policy

PARTS = ("experts", "predictor", "management", "worker", "stall", "other")


def figures(job: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """What a run says, made up; by mode and residency a little different."""
    full = job["mode"] == "full"
    ahead = find_policy(job["mode"]).plan is not None and find_policy(job["mode"]).plan.order is not None
    return {
        "decode_tokens_per_s": 20.0 if full else 12.0, "ttft_s": 0.5, "hit_rate": 1.0 if full else 0.5,
        "peak_rss_bytes": 2**30, "steps": 8, "decode_tokens": 8 * job.get("batch", 1), "decode_moved_bytes": 16 * 2**20,
        **{f"{part}_s_per_step": 0.01 for part in PARTS}, "stall_s_per_step": 0.02 / (1 + ahead),
        "experts_s_per_step": 0.0 if full else 0.01, "management_share": 0.02, "predictor_share": 0.031,
        "stall_share": 0.3, "transfers_per_step": 7.5, "link_busy_share": 0.4, "budget_avg": 1.5 if ahead else None,
        **{f"{name}_bytes": 2**20 for name in ("prefetched", "useful", "late", "wasted")}, "notices": [],
        "token_ids": [[1, 2]] * job.get("batch", 1), "residency": job.get("residency", 1.0), "slots": 8, "link": "disk",
        **changed,
    }  # fmt: skip


def random_trace(lengths: tuple[int, ...], seed: int = 0, *, inputs: bool = False) -> Trace:
    """Random routing of the demo model's shape, with tokens."""
    rng = np.random.default_rng(seed)
    steps, layers, experts, k = sum(lengths), 8, 64, 4
    ids = np.argsort(rng.random((steps, layers, experts)), axis=2)[:, :, :k].astype(np.int16)
    weights = rng.random((steps, layers, k)).astype(np.float32)
    tokens = rng.integers(0, 400, steps).astype(np.int32)
    length = np.array(lengths, dtype=np.int64)
    hidden = rng.random((steps, layers, 8)).astype(np.float16) if inputs else None
    return Trace(ids, weights, tokens, starts_of(length), length, experts, hidden)


def write_traces(folder: Path) -> None:
    """fit.safetensors, inputs.safetensors (with router inputs) and replay.safetensors."""
    write_trace(folder / "fit.safetensors", random_trace((20, 30, 25)))
    write_trace(folder / "inputs.safetensors", random_trace((4,), inputs=True))
    write_trace(folder / "replay.safetensors", random_trace((60, 50, 70, 40), seed=1))
