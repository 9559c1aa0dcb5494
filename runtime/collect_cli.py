"""`seqmoe trace collect`: run a model on prompts and record what its routers choose."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from seqmoe.profiles.cliutil import (
    LINK,
    SIZE,
    Command,
    emit_json,
    json_option,
    knob_options,
    knobs_from_options,
    progress_bar,
    require,
)
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import check_output, read_lines
from seqmoe.profiles.startup import quick_imports

FIELDS = ("prompt", "question", "text")  # of a line of .jsonl, the first that is there
EPILOG = """\b
Examples:
  seqmoe trace collect --model demo --prompts prompts.txt --out demo.safetensors
  seqmoe trace collect --model demo-xl --memory 3GiB --prompts prompts.jsonl --max-new-tokens 256 --out xl.safetensors
  seqmoe trace collect --model demo --prompts prompts.txt --router-inputs --temperature 0.8 --out demo.safetensors --resume

\b
A prompt is a line of the file, or in .jsonl the "prompt", "question" or "text" of a line's object.
"""


@click.command("collect", cls=Command, epilog=EPILOG)
@click.option("--model", required=True, help="demo, demo-xl, or the folder of a checkpoint.")
@click.option("--prompts", required=True, type=click.Path(path_type=Path), help="Prompts, one a line.")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The trace, a .safetensors file; one that is there is replaced.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most tokens a prompt.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many prompts.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Sequences that run together.")
@click.option("--context", type=click.IntRange(2), default=1024, show_default=True, help="Most tokens of a sequence.")
@click.option("--router-inputs", is_flag=True, help="Keep the routers' inputs too (layers x hidden x 2 bytes a step).")
@click.option(
    "--routers", type=click.Path(path_type=Path), help="Also write the routers' weights to this .safetensors file."
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the end of a sequence, for long ones.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="Sample. [default: 0, greedy]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="For sampling.")
@click.option("--memory", type=SIZE, help="Everything the process may take. [default: what this machine leaves]")
@click.option("--link", type=LINK, default="disk", show_default=True, help="disk, buffered, throttled:..., dma:...")
@click.option("--resume", is_flag=True, help="Go on with an unfinished collection of the same prompts.")
@knob_options()
@json_option
def collect_command(
    model: str,
    prompts: Path,
    out: Path,
    max_new_tokens: int,
    limit: int | None,
    batch: int,
    context: int,
    router_inputs: bool,
    routers: Path | None,
    ignore_eos: bool,
    temperature: float,
    seed: int,
    memory: int | None,
    link: Any,
    resume: bool,
    as_json: bool,
    **knobs: Any,
) -> int:
    """Run MODEL on prompts and write a routing trace: which experts each token's layers chose.

    First the answers are generated, then all sequences run again in packs while the routers are recorded.
    """
    require(out.suffix == ".safetensors", f"{out}: a trace file's name must end in .safetensors")
    for target in (out, routers):
        if target is not None:
            check_output(target)
    replaces = out.exists()
    texts = read_prompt_file(prompts)[:limit]
    require(max_new_tokens < context, f"--max-new-tokens {max_new_tokens} leaves no room in a --context of {context}")
    # Here, so that --help does not wait for torch.
    with quick_imports():
        from seqmoe.predictors.routers import save_routers
        from seqmoe.runtime.collect import collect
        from seqmoe.runtime.engine import Engine
        from seqmoe.runtime.routers import model_routers

    console = Console(stderr=True)
    with progress_bar(console, left=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        settings = knobs_from_options(knobs)
        with Engine.open(model, knobs=settings, memory_bytes=memory, context=context, batch=batch, link=link) as engine:
            kept: list[str | list[int]] = []
            room = context - max_new_tokens
            for text in texts:
                ids = engine.encode([text])[0][0].tolist()
                kept.append(ids[:room])  # a prompt that is too long gives a trace all the same
            result = collect(
                engine,
                kept,
                out,
                max_new_tokens=max_new_tokens,
                router_inputs=router_inputs,
                ignore_eos=ignore_eos,
                temperature=temperature,
                seed=seed,
                resume=resume,
                source=prompts.name,
                progress=show,
            )
            if routers is not None:
                save_routers(routers, model_routers(engine))
            facts = engine.describe()
    if as_json:
        emit_json(
            {
                "path": str(out),
                "replaced": replaces,
                "sequences": result.sequences,
                "steps": result.steps,
                "skipped": result.skipped,
                "routing_agreement": result.agreement,
                "bytes": out.stat().st_size,
                "peak_rss_bytes": facts["peak_rss_bytes"],
                "bytes_read": facts["bytes_read"],
            }
        )
    else:
        alike = (
            "" if result.agreement is None else f"; decode chose the same experts in {result.agreement:.2%} of cases"
        )
        short = f"; {result.skipped} prompts gave too few tokens" if result.skipped else ""
        replaced = " (replaced)" if replaces else ""
        click.echo(f"{out}{replaced}: {result.sequences} sequences, {result.steps} steps{alike}{short}")
    return 0


def read_prompt_file(path: Path) -> list[str]:
    """The prompts of a text or .jsonl file. Raises UsageError, naming the line."""
    lines = read_lines(path, "--prompts")
    if path.suffix != ".jsonl":
        require(bool(lines), f"--prompts {path}: no prompt in it; it takes one a line")
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UsageError(f"--prompts {path}, line {number}: not JSON ({error})") from None
        text = next((entry[key] for key in FIELDS if key in entry), None) if isinstance(entry, dict) else entry
        if not isinstance(text, str) or not text:
            raise UsageError(
                f"--prompts {path}, line {number}: expected an object with {', '.join(FIELDS[:-1])} or {FIELDS[-1]}"
            )
        prompts.append(text)
    require(bool(prompts), f"--prompts {path}: no prompt in it")
    return prompts
