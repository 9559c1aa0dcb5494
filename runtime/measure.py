"""One measurement in one process: reads a JSON job on standard input, prints one JSON object as the last line of output.

    echo '{"model": "demo", "mode": "lru", "residency": 0.25, "prompts": ["Once"], "max_new_tokens": 32}' \
        | python -m seqmoe.runtime.measure

Keys of a job: `model` (name or folder), `mode`, `knobs` (object), `memory_bytes`, `slots`, `residency`, `context`,
`prompts`, `max_new_tokens`, `warmup_tokens` (decoded before the clock starts), `seed`, `link`, `replay` (a
trace, .safetensors or .npz), `batched` (all prompts as one batch instead of one after the other). Tokens/s are over all decode steps of all
prompts. An error a user can meet becomes `{"error": {"type", "message", "exit_code"}}` and that exit code.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.profiles.startup import leave, quick_imports
from seqmoe.runtime.jobs_process import die_with_parent

_KEYS: dict[str, type] = {
    "model": str,
    "mode": str,
    "knobs": dict,
    "memory_bytes": int,
    "slots": int,
    "residency": float,
    "context": int,
    "prompts": list,
    "max_new_tokens": int,
    "warmup_tokens": int,
    "seed": int,
    "link": str,
    "replay": str,
    "batched": bool,
}

_NAMES = {str: "a text", dict: "an object", int: "a whole number", float: "a number", list: "a list", bool: "true or false"}


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one job in this process and returns its figures. Raises SeqmoeError for what a user can mend."""
    unknown = sorted(set(job) - set(_KEYS))
    if unknown:
        raise UsageError(f"unknown key in the measurement job: {unknown[0]!r} (known: {', '.join(_KEYS)})")
    for key, value in job.items():
        _check(key, value)
    from seqmoe.profiles.knobs import Knobs

    with quick_imports():  # after the job is known to be well-formed
        from seqmoe.runtime.engine import Engine

    prompts = list(job.get("prompts") or ["Once upon a time"])
    new_tokens = int(job.get("max_new_tokens") or 32)
    knobs = Knobs.from_mapping(dict(job.get("knobs") or {}))
    batched = bool(job.get("batched", False))
    with Engine.open(
        job["model"],
        mode=job.get("mode") or knobs.policy,
        knobs=knobs,
        memory_bytes=job.get("memory_bytes"),
        slots=job.get("slots"),
        residency=job.get("residency"),
        context=int(job.get("context") or 2048),
        batch=len(prompts) if batched else 1,
        link=job.get("link") or "disk",
        replay=Path(job["replay"]) if job.get("replay") else None,
    ) as engine:
        warmup = int(job.get("warmup_tokens") or 0)
        groups = [prompts] if batched else [[prompt] for prompt in prompts]
        if warmup:
            engine.generate(groups[0], max_new_tokens=warmup, ignore_eos=True)
        read_before = engine.store.bytes_read
        seed = int(job.get("seed") or 0)
        reports = [engine.generate(group, max_new_tokens=new_tokens, ignore_eos=True, seed=seed) for group in groups]
        steps = [step for report in reports for step in report.decode]
        lookups, hits = sum(s.lookups for s in steps), sum(s.hits for s in steps)
        seconds = sum(s.elapsed_s for s in steps)
        return {
            **engine.describe(),
            "bytes_read": engine.store.bytes_read - read_before,
            "decode_tokens_per_s": sum(s.tokens for s in steps) / seconds if seconds else 0.0,
            "ttft_s": sum(r.ttft_s for r in reports) / len(reports),
            "hit_rate": hits / lookups if lookups else 1.0,
            "stall_s": sum(s.stall_s for s in steps),
            "steps": len(steps),
            "per_step_s": [s.elapsed_s for s in steps],
            "decode_needed_bytes": sum(s.needed_bytes for s in steps),
            "token_ids": [ids for report in reports for ids in report.token_ids],
            "knobs": knobs.to_dict(),
        }


def _check(key: str, value: object) -> None:
    kind = _KEYS[key]
    # JSON has one kind of number; True is an int to Python, and to nobody else.
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if value is not None and not fits:
        raise UsageError(f"{key} in the measurement job must be {_NAMES[kind]}, not {json.dumps(value)[:60]}")
    if key == "prompts" and isinstance(value, list):
        for prompt in value:
            ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
            if not (isinstance(prompt, str) or ids):
                raise UsageError(
                    f"prompts in the measurement job are texts or lists of token ids, not {json.dumps(prompt)[:60]}"
                )


def main(arguments: Sequence[str] = ()) -> int:
    """Entry point of `python -m seqmoe.runtime.measure`; returns the exit code. `arguments`: --help, or none."""
    if arguments:
        if set(arguments) <= {"--help", "-h"}:
            print(f"Usage: python -m seqmoe.runtime.measure < job.json\n\n{(__doc__ or '').rstrip()}")
            return 0
        return _fail(UsageError(f"no argument {arguments[0]!r}: the job is read from standard input (see --help)"))
    die_with_parent()
    try:
        job = json.loads(sys.stdin.read())
        if not isinstance(job, dict) or "model" not in job:
            raise UsageError("the measurement job on standard input must be a JSON object with at least 'model'")
        result = run(job)
    except json.JSONDecodeError as error:
        return _fail(UsageError(f"the measurement job on standard input is no JSON: {error}"))
    except SeqmoeError as error:
        return _fail(error)
    except MemoryError:
        return _fail(SeqmoeError("out of memory while measuring"))
    print(json.dumps(result))
    return 0


def _fail(error: SeqmoeError) -> int:
    print(json.dumps({"error": {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}}))
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
