"""One run of seqmoe on the checkpoint itself. Job on stdin, see `peer_common.py`."""

from typing import Any

from peer_common import Meter, PeerJob, TokenStream, serve

from seqmoe.profiles.knobs import Knobs
from seqmoe.runtime.engine import Engine


def run(job: PeerJob) -> dict[str, Any]:
    """Greedy tokens within the same budget as the cgroup's limit. `extra`: `mode`, `knobs`."""
    knobs = Knobs.from_mapping({"compute_threads": job.threads, **job.extra.get("knobs", {})})
    mode = job.extra.get("mode", "lru")
    with Engine.open(job.path, mode=mode, knobs=knobs, memory_bytes=job.memory_bytes, context=job.context) as engine:

        def generate(prompt: list[int], count: int, meter: Meter) -> Any:
            meter.start()
            return engine.generate([prompt], max_new_tokens=count, ignore_eos=True, streamer=TokenStream(meter))

        if job.warmup_tokens:
            generate(job.prompts[0], job.warmup_tokens, Meter())
        meter = Meter()
        reports = [generate(prompt, job.max_new_tokens, meter) for prompt in job.prompts]
        facts = engine.describe()
        hits = sum(step.hits for report in reports for step in report.decode)
        lookups = sum(step.lookups for report in reports for step in report.decode)
    more = {name: facts.get(name) for name in ("slots", "residency", "link", "graph")}
    return meter.result() | more | {"hit_rate": hits / lookups if lookups else 1.0}


if __name__ == "__main__":
    serve(run)
