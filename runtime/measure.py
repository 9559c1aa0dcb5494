"""One measurement in one process: reads a JSON job on standard input, prints one JSON object as the last line of output.

    echo '{"model": "demo", "mode": "lru", "residency": 0.25, "prompts": ["Once"], "max_new_tokens": 32}' \
        | python -m seqmoe.runtime.measure

Keys of a job: `model` (name or folder), `mode`, `knobs` (object), `memory_bytes`, `slots`, `residency`, `context`,
`prompts`, `max_new_tokens`, `warmup_tokens` (decoded before the clock starts), `seed`, `link`; `batch` (prompts that
run together: the last batch is filled up with the first prompts) or `batched` (all as one batch); `predictor` (folder
of `seqmoe train`, or a rival's name), `fit` and `fit_sequences` (the trace that rivals and popularity are fitted to,
and which of its sequences, such as "0:256"), `policy` (fields of `policy.Changes`, in place of the mode's own);
`replay` (a trace, .safetensors or .npz, that takes the router's place) and `sequences` (only those of it: each request
replays one from its start).

Figures are over all decode steps of all prompts. An error a user can meet becomes
`{"error": {"type", "message", "exit_code"}}` and that exit code.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.profiles.startup import leave, quick_imports
from seqmoe.runtime.jobs_process import die_with_parent

if TYPE_CHECKING:
    from seqmoe.predictors.trace import Trace
    from seqmoe.runtime.policy import Policy

Prompt = str | list[int]

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
    "sequences": str,
    "batch": int,
    "batched": bool,
    "predictor": str,
    "fit": str,
    "fit_sequences": str,
    "policy": dict,
}

_NAMES = {
    str: "a text",
    dict: "an object",
    int: "a whole number",
    float: "a number",
    list: "a list",
    bool: "true or false",
}


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one job in this process and returns its figures. Raises SeqmoeError for what a user can mend."""
    _check_job(job)
    from seqmoe.profiles.knobs import Knobs
    from seqmoe.runtime.policy import Changes, find_policy, plan_for

    with quick_imports():  # after the job is known to be well-formed
        from seqmoe.runtime.checkpoint import Checkpoint
        from seqmoe.runtime.engine import Engine
        from seqmoe.runtime.measure_figures import DecodeCounters, run_figures
        from seqmoe.runtime.models import resolve_model
        from seqmoe.runtime.replay_requests import requests_of

    prompts: list[Prompt] = list(job.get("prompts") or ["Once upon a time"])
    batch = job.get("batch") or (len(prompts) if job.get("batched") else 1)
    groups = in_batches(prompts, batch)
    new_tokens = int(job.get("max_new_tokens") or 32)
    knobs = Knobs.from_mapping(dict(job.get("knobs") or {}))
    mode = job.get("mode") or knobs.policy
    policy, changes = find_policy(mode), Changes.from_mapping(job.get("policy") or {})
    checkpoint = Checkpoint.open(resolve_model(job["model"]))
    plan = None
    if policy.plan is not None and changes.to_dict():
        plan = plan_for(policy, checkpoint.facts.top_k, checkpoint.num_experts, changes)
    replay, starts = None, None
    if job.get("replay"):
        replay, starts = requests_of(_read(job, "replay", "sequences"), batch, len(groups))
    fit = None
    if job.get("fit") and policy.wants_fit:
        fit = _read(job, "fit", "fit_sequences")
        # a replayed trace has another model's routing, and so has what is fitted for it
        digest = "" if replay is not None else checkpoint.digest
        fit.check_model(digest, checkpoint.num_layers, checkpoint.num_experts, checkpoint.facts.top_k)
        _check_inputs(fit, policy, checkpoint.facts.hidden_size)
    with Engine.open(
        checkpoint,
        mode=mode,
        knobs=knobs,
        memory_bytes=job.get("memory_bytes"),
        slots=job.get("slots"),
        residency=job.get("residency"),
        context=int(job.get("context") or 2048),
        batch=batch,
        link=job.get("link") or "disk",
        replay=replay,
        policy=plan,
        predictor=_predictor(job, policy),
        fit=fit,
    ) as engine:

        def begin(request: int) -> None:
            if starts is not None and engine.replay is not None:
                engine.replay.position, engine.replay.width = starts[request], 0

        warmup = int(job.get("warmup_tokens") or 0)
        if warmup:
            begin(-1)  # the last: the first is not known already when it is measured
            engine.generate(groups[0], max_new_tokens=warmup, ignore_eos=True)
        read_before = engine.store.bytes_read
        seed = int(job.get("seed") or 0)
        counters = DecodeCounters(engine)
        reports = []
        for request, group in enumerate(groups):
            begin(request)
            reports.append(
                engine.generate(group, max_new_tokens=new_tokens, ignore_eos=True, seed=seed, streamer=counters)
            )
        figures = run_figures(engine, reports, counters.total)
        if replay is not None and starts is not None:
            rows = [max(report.prompt_tokens) + new_tokens - 1 for report in reports]
            figures["notices"] += _outgrown(replay, starts, rows)
        return {
            **engine.describe(),
            "batch": batch,
            "bytes_read": engine.store.bytes_read - read_before,
            **figures,
            "token_ids": [ids for report in reports for ids in report.token_ids],
            "knobs": knobs.to_dict(),
            "policy": changes.to_dict(),
        }


def in_batches(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """The prompts in groups of `batch`, in order; what the last group lacks are the first prompts again."""
    count = -(-len(prompts) // batch)
    return [[prompts[i % len(prompts)] for i in range(group * batch, (group + 1) * batch)] for group in range(count)]


def _read(job: Mapping[str, Any], path: str, sequences: str) -> "Trace":
    from seqmoe.predictors.trace_file import parse_sequences, read_trace

    chosen = job.get(sequences)
    return read_trace(Path(job[path]), parse_sequences(chosen, sequences) if chosen else None)


def _predictor(job: Mapping[str, Any], policy: "Policy") -> str | None:
    """As the engine takes it: a folder without adapters is no use to a mode that needs some, which can fit its own."""
    from seqmoe.runtime.policy import LAYERS

    given = job.get("predictor")
    if given and policy.predictor == LAYERS and job.get("fit"):
        from seqmoe.runtime.assemble import ADAPTERS

        folder = Path(given)
        return given if folder.is_file() or (folder / ADAPTERS).is_file() else None
    return given


def _check_inputs(fit: "Trace", policy: "Policy", hidden_size: int) -> None:
    """UsageError where a mode that learns from router inputs was given those of another model."""
    from seqmoe.runtime.policy import LAYERS

    if policy.predictor == LAYERS and fit.router_inputs is not None and fit.router_inputs.shape[2] != hidden_size:
        raise UsageError(f"fit: router_inputs have {fit.router_inputs.shape[2]} values, the model's {hidden_size}")


def _outgrown(trace: "Trace", starts: Sequence[int], rows: Sequence[int]) -> list[str]:
    """Says so where a request took more rows than the sequence has that it began with."""
    lengths = dict(zip(trace.seq_start.tolist(), trace.seq_len.tolist(), strict=True))
    short = [(lengths[start], need) for start, need in zip(starts, rows, strict=True) if need > lengths[start]]
    if not short:
        return []
    (steps, tokens), many = min(short), f"{len(short)} of {len(rows)} requests"
    text = f"{many} outgrew their sequence of the replayed trace and went on into the next"
    return [f"{text} (the shortest: {steps} steps for {tokens} tokens)"]


def _check_job(job: Mapping[str, Any]) -> None:
    unknown = sorted(set(job) - set(_KEYS))
    if unknown:
        raise UsageError(f"unknown key in the measurement job: {unknown[0]!r} (known: {', '.join(_KEYS)})")
    for key, value in job.items():
        _check(key, value)
    if job.get("batch") is not None and (job["batch"] < 1 or job.get("batched")):
        raise UsageError("batch in the measurement job must be at least 1, and stands in place of batched")
    for part, whole in (("sequences", "replay"), ("fit_sequences", "fit")):
        if job.get(part) and not job.get(whole):
            raise UsageError(f"{part} in the measurement job says which of {whole}'s, which is missing")


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
