"""`seqmoe-run`: starts a model from a deployment profile; answers a prompt, chats, or measures."""

import sys
from pathlib import Path
from typing import Any

import click

from seqmoe.profiles.cliutil import Command, emit_json, json_option
from seqmoe.profiles.errors import BudgetError, ProfileError, UsageError
from seqmoe.profiles.fingerprint import check_model, compare_machine
from seqmoe.profiles.machine import machine_spec
from seqmoe.profiles.schema import Profile, read_profile
from seqmoe.profiles.sizes import format_bytes
from seqmoe.profiles.startup import quick_imports

BENCH_PROMPTS = (
    "Once upon a time there was",
    "Question: Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether? Answer:",
    "def fibonacci(n):\n",
)
EPILOG = """\b
Examples:
  seqmoe-run --profile demo.yaml --prompt "Once upon a time"
  seqmoe-run --profile demo.yaml                      (chat; an empty line or Ctrl-D ends it)
  seqmoe-run --profile demo.yaml --bench --json

\b
In a chat a model with a chat template sees all earlier turns; a model without one continues each line by itself.
"""


@click.command(cls=Command, epilog=EPILOG)
@click.option("--profile", "profile_path", required=True, type=click.Path(path_type=Path), help="Deployment profile to start from.")
@click.option("--prompt", help="Text to continue; without it: chat.")
@click.option("--model", help="The model's folder, where the profile's own name for it is not known here.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Most tokens to write.")
@click.option("--temperature", type=click.FloatRange(0, min_open=True), help="Sample at this temperature. [default: greedy]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample from the likeliest tokens of this total probability.")
@click.option("--seed", type=int, default=0, show_default=True, help="For sampling.")
@click.option("--bench", is_flag=True, help="Measure on three built-in prompts instead of answering one.")
@click.option("--verify", is_flag=True, help="Read every file and compare its digest with SHA256SUMS or with the first verification.")
@json_option
@click.version_option(package_name="seqmoe", prog_name="seqmoe-run")
def main(
    profile_path: Path,
    prompt: str | None,
    model: str | None,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    bench: bool,
    verify: bool,
    as_json: bool,
) -> int:
    """Start a model from a deployment profile, as it was tuned, and answer a prompt."""
    if bench and prompt is not None:
        raise UsageError("--bench runs its own prompts: leave out --prompt")
    if as_json and prompt is None and not bench:
        raise UsageError("--json needs --prompt or --bench: a chat has no single result")
    profile = read_profile(profile_path)
    # A prompt has a token at least; how long it is, only the model's tokenizer knows.
    _check_room(1, max_new_tokens, profile.target.workload.context_max)
    folder = _model_folder(profile, profile_path, model)

    with quick_imports():  # not before the profile is known to be good
        from seqmoe.runtime.checkpoint import Checkpoint
        from seqmoe.runtime.engine import Engine
        from seqmoe.runtime.models import KNOWN, model_id

    checkpoint = Checkpoint.open(folder)
    known = model_id(folder)
    check_model(profile, checkpoint.spec(slot_bytes=0), model or (known if known in KNOWN else folder))
    checks = compare_machine(profile, machine_spec(Path(folder)))
    notes = [f"{check.verdict}: {check.message}" for check in checks if check.verdict != "optimal"]
    with _open(Engine, profile, checkpoint, notes) as engine:
        # What is wrong with the request is said before anything else is written.
        for text in BENCH_PROMPTS if bench else [] if prompt is None else [prompt]:
            _check_room(engine.encode([text])[0].shape[1], max_new_tokens, engine.context)
        for note in notes:
            _note(note)
        if verify:
            from seqmoe.runtime.verify import verify_files

            verify_files(engine.checkpoint, _note)
        for notice in engine.store.link.notices:
            _note(notice)
        _note(
            f"{engine.spec.name}: {engine.plan.slots} of {engine.plan.total_experts} experts in memory "
            f"({engine.plan.residency:.0%}), {engine.mode}, link {engine.store.link.describe()}"
        )
        sampling: dict[str, Any] = {}
        if temperature is not None or top_p is not None:
            sampling = {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0}
        if bench:
            return _bench(engine, max_new_tokens, as_json)
        if prompt is not None:
            return _answer(engine, prompt, max_new_tokens, sampling, seed, as_json)
        return _chat(engine, max_new_tokens, sampling, seed)


def _check_room(prompt_tokens: int, max_new_tokens: int, context: int) -> None:
    """UsageError, with what would be right, where prompt and answer do not fit the profile's context."""
    room = context - prompt_tokens
    if max_new_tokens > room:
        shorter = f"at most --max-new-tokens {room}" if room > 0 else "a shorter prompt"
        after = "" if prompt_tokens == 1 else f" after a prompt of {prompt_tokens}"
        raise UsageError(
            f"{max_new_tokens} new tokens{after} do not fit the context of {context} tokens that this profile was tuned for: "
            f"take {shorter}, or tune with a larger --context"
        )


def _note(text: str) -> None:
    click.echo(click.style(text, dim=True), err=True)


def _model_folder(profile: Profile, profile_path: Path, given: str | None) -> str:
    from seqmoe.runtime.models import resolve_model

    if given is not None:
        return str(resolve_model(given))
    name = profile.target.model.id
    beside = profile_path.parent / Path(name).name  # its own folder, whatever the name says
    if (beside / "config.json").is_file():
        return str(beside)
    try:
        return str(resolve_model(name))
    except UsageError:
        raise ProfileError(
            f"{profile_path}: its model {name!r} is no known name here and no folder beside the profile: add --model DIR"
        ) from None


def _open(engine_class: Any, profile: Profile, checkpoint: Any, notes: list[str]) -> Any:
    work, knobs = profile.target.workload, profile.to_knobs()
    options = {"memory_bytes": work.memory_bytes, "context": work.context_max, "batch": work.batch, "link": work.link}
    try:
        return engine_class.open(checkpoint, knobs=knobs, **options)
    except BudgetError as error:
        if knobs.slots is None:
            raise
        # Less memory than it was tuned for: as many experts as fit now, the other settings as tuned.
        engine = engine_class.open(checkpoint, knobs=knobs.replace(slots=None), **options)
        notes.append(f"adapt: {error}")
        return engine


def _answer(engine: Any, prompt: str, max_new_tokens: int, sampling: dict[str, Any], seed: int, as_json: bool) -> int:
    streamer = None if as_json else _streamer(engine.tokenizer)
    if streamer is not None:
        click.echo(prompt, nl=False)
    report = engine.generate([prompt], max_new_tokens=max_new_tokens, streamer=streamer, seed=seed, **sampling)
    figures = {**engine.describe(), **report.to_dict()}
    if as_json:
        text = engine.tokenizer.decode(report.token_ids[0], skip_special_tokens=True)
        emit_json({**figures, "text": text, "prompt": prompt})
    else:
        click.echo()
        _note(_summary(figures))
    return 0


def _chat(engine: Any, max_new_tokens: int, sampling: dict[str, Any], seed: int) -> int:
    tokenizer, turns = engine.tokenizer, []
    template = getattr(tokenizer, "chat_template", None)
    _note("type a message; an empty line ends" + ("" if template else " (this model has no chat template: it continues your text)"))
    while True:
        try:
            line = _line().strip()
        except EOFError:
            line = ""
        if not line:
            return 0
        if template:
            turns.append({"role": "user", "content": line})
            prompt = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            prompt = line
        _check_room(engine.encode([prompt])[0].shape[1], max_new_tokens, engine.context)
        report = engine.generate([prompt], max_new_tokens=max_new_tokens, streamer=_streamer(tokenizer), seed=seed, **sampling)
        turns.append({"role": "assistant", "content": tokenizer.decode(report.token_ids[0], skip_special_tokens=True)})
        click.echo()
        _note(_summary({**engine.describe(), **report.to_dict()}))


def _line() -> str:
    """One line of standard input. The prompt goes to a terminal only, never into output that is kept."""
    if sys.stdin.isatty():
        if sys.stdout.isatty():
            return input("> ")  # with line editing
        click.echo("> ", nl=False, err=True)
    return input()


def _bench(engine: Any, max_new_tokens: int, as_json: bool) -> int:
    engine.generate([BENCH_PROMPTS[0]], max_new_tokens=8, ignore_eos=True)  # builds what is built once
    reports = [engine.generate([prompt], max_new_tokens=max_new_tokens, ignore_eos=True) for prompt in BENCH_PROMPTS]
    steps = [step for report in reports for step in report.decode]
    seconds, lookups = sum(step.elapsed_s for step in steps), sum(step.lookups for step in steps)
    figures = {
        **engine.describe(),
        "decode_tokens_per_s": sum(step.tokens for step in steps) / seconds if seconds else 0.0,
        "ttft_s": sum(report.ttft_s for report in reports) / len(reports),
        "hit_rate": sum(step.hits for step in steps) / lookups if lookups else 1.0,
        "stall_s": sum(step.stall_s for step in steps),
        "steps": len(steps),
        "new_tokens": sum(len(ids) for report in reports for ids in report.token_ids),
        "token_ids": [ids for report in reports for ids in report.token_ids],
    }
    if as_json:
        emit_json(figures)
    else:
        click.echo(_summary(figures))
    return 0


def _summary(figures: dict[str, Any]) -> str:
    return (
        f"{figures['new_tokens']} tokens, {figures['decode_tokens_per_s']:.1f} tokens/s, first after {figures['ttft_s']:.2f} s, "
        f"hit rate {figures['hit_rate']:.1%}, read {format_bytes(figures['bytes_read'])}, "
        f"peak memory {format_bytes(figures['peak_rss_bytes'])}"
    )


def _streamer(tokenizer: Any) -> Any:
    """Writes text to standard output as soon as it is certain, a word at a time."""
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
