"""Looks at a model and its link in a process of its own: the tuner itself stays without torch, small beside what it measures.

    echo '{"model": FOLDER, "link": "disk", "knobs": {}, "link_seconds": 2}' | python -m seqmoe.autotune.probe_worker

prints one JSON object: {"spec", "process_bytes", "packages", "link" or null}, or {"error": ...} as the measuring worker does.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import rss_bytes
from seqmoe.profiles.spec import LinkSpec
from seqmoe.profiles.startup import leave, quick_imports

PACKAGES = ("seqmoe", "torch", "transformers", "numpy", "numba", "safetensors", "optuna")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The facts about `job["model"]`; reads records for `job["link_seconds"]` if that is more than 0."""
    # All that a run imports, so that the resident set is that of a run at the moment it plans its memory.
    with quick_imports():
        import seqmoe.runtime.engine  # noqa: F401
    from seqmoe.runtime.checkpoint import Checkpoint
    from seqmoe.runtime.extents import plan_records

    checkpoint = Checkpoint.open(Path(job["model"]))
    plan = plan_records(checkpoint.layout, checkpoint.sources, [path.stat().st_size for path in checkpoint.files])
    spec = checkpoint.spec(plan.slot_bytes)
    process = rss_bytes()
    link_facts = None
    if job.get("link_seconds"):
        link = LinkSpec.parse(job.get("link") or "disk")
        knobs = Knobs.from_mapping(job.get("knobs") or {})
        link_facts = probe_rates(
            checkpoint.files, plan.record_bytes, spec.top_k, link, knobs, float(job["link_seconds"])
        )
    packages = {name: _version(name) for name in PACKAGES}
    return {"spec": dataclasses.asdict(spec), "process_bytes": process, "packages": packages, "link": link_facts}


def probe_rates(
    files: Sequence[Path], record_bytes: int, top_k: int, spec: LinkSpec, knobs: Knobs, seconds: float
) -> dict[str, Any]:
    """Rates at the record's own size: one record at a time, and `top_k` at once as a layer with that many misses asks.

    `latency_us` is the median time of one 4 KiB read, `bytes_per_s_p10` the rate that nine of ten loads reach.
    """
    from seqmoe.runtime.probe_link import probe_link

    small = probe_link(files, 4096, spec, knobs, seconds=seconds * 0.1)
    single = probe_link(files, record_bytes, spec, knobs, samples=256, seconds=seconds * 0.45)
    group = probe_link(files, record_bytes, spec, knobs, records_at_once=top_k, samples=256, seconds=seconds * 0.45)
    return {
        "kind": spec.kind,
        "record_bytes": record_bytes,
        "bytes_per_s_p10": record_bytes / single.p90_s,
        "bytes_per_s_p50": record_bytes / single.p50_s,
        "bytes_per_s_together": group.bytes_per_s,
        "latency_us": small.p50_s * 1e6,
        "samples": single.samples,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> int:
    """One job from standard input; returns the exit code."""
    try:
        print(json.dumps(run(json.loads(sys.stdin.read()))))
        return 0
    except SeqmoeError as error:
        answer = {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
        print(json.dumps({"error": answer}))
        return error.exit_code


if __name__ == "__main__":
    leave(main())
