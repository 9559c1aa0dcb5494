"""`seqmoe-tune`: measure this machine, find the settings that run a model fastest on it, prove it, write the profile."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console

from seqmoe.profiles.cliutil import DURATION, INTERRUPTED, LINK, SIZE, Command, emit_json, json_option, require
from seqmoe.profiles.files import check_output
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import machine_spec, memory_facts
from seqmoe.profiles.schema import write_profile
from seqmoe.profiles.spec import LinkSpec

if TYPE_CHECKING:
    from seqmoe.autotune.measure import Measure
    from seqmoe.autotune.probe import Probe
    from seqmoe.autotune.tune import Plan, Request


@dataclass(frozen=True)
class Workers:
    """What measures and what probes a model; None is our own. Click's `obj`, so that a test can bring a machine of its own."""

    measure: "Measure | None" = None
    probe: "Callable[..., Probe] | None" = None


EXIT_TUNED, EXIT_DEFAULT_KEPT = 0, 3
LINK_SECONDS = 3.0
# Runs are forked from a server that has imported, where there is so much room beside the budget, in processes' sizes: the
# server's own, and what a run changes of the memory that the two share.
SERVER_SHARE = 2
DEFAULT_CONTEXT = 2048
EPILOG = """\b
Examples:
  seqmoe-tune --model demo
  seqmoe-tune --model demo-xl --memory 4GiB --budget 10m --out xl.yaml
  seqmoe-tune --model ~/models/Qwen3-30B-A3B --memory 12GiB --dry-run
  seqmoe-tune --model demo --resume          (goes on where the last one stopped)

\b
Exit codes: 0 tuned, 3 the default settings stay, 4 the memory cannot hold the model, 130 interrupted (the profile
then holds the best so far, untested); others are errors, one line each.
"""


@click.command("seqmoe-tune", cls=Command, epilog=EPILOG)
@click.option("--model", required=True, help="demo, demo-xl, or the folder of a checkpoint.")
@click.option(
    "--memory", type=SIZE, help="Everything the process may take, such as 6GiB. [default: what this machine leaves]"
)
@click.option("--budget", type=DURATION, default="10m", show_default=True, help="Time for the whole tune.")
@click.option("--out", type=click.Path(path_type=Path), help="The profile. [default: MODEL.profile.yaml here]")
@click.option(
    "--context",
    type=click.IntRange(16),
    help=f"Tokens that must fit, prompt and answer. [default: {DEFAULT_CONTEXT}, or as many as the model was made for]",
)
@click.option(
    "--link",
    type=LINK,
    default="disk",
    show_default=True,
    help="disk, buffered, throttled:1.5GB/s,80us or dma:7GB/s,20us.",
)
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Your own prompts, one a line; half of them are for the verdict."
)
@click.option(
    "--trials", type=click.IntRange(1), help="Most trials of the search. [default: as many as there is time for]"
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the search and of the interval.")
@click.option("--resume", is_flag=True, help="Go on with the last tune of the same model, memory, link and context.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for what is measured. [default: in the cache]",
)
@click.option(
    "--storage", help="Optuna storage URL instead of a journal in the state folder, such as sqlite:///trials.db."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be done, how long it takes and what it needs: opens the model and looks at the machine, runs no model.",
)
@json_option
@click.version_option(package_name="seqmoe", prog_name="seqmoe-tune")
@click.pass_obj
def tune_command(
    workers: Workers | None,
    model: str,
    memory: int | None,
    budget: float,
    out: Path | None,
    context: int | None,
    link: LinkSpec,
    prompts: Path | None,
    trials: int | None,
    seed: int,
    resume: bool,
    state: Path | None,
    storage: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Find the settings that run MODEL fastest on this machine, compare them with the default, and write the profile.

    A profile is only ever better than the default, by a measured margin, or it is the default.
    """
    started = time.monotonic()
    # Here, so that --help does not wait for Optuna.
    from seqmoe.autotune.interrupts import shielded, terminable
    from seqmoe.autotune.measure import measure
    from seqmoe.autotune.probe import probe_model
    from seqmoe.autotune.prompts import load_prompts
    from seqmoe.autotune.report import Display, plan_summary, print_plan, print_report, summary
    from seqmoe.autotune.search import open_storage
    from seqmoe.autotune.state import JOURNAL, locked, state_folder
    from seqmoe.autotune.tune import Request, Tuning, plan_tune, room_beside
    from seqmoe.runtime.jobs_process import run_job
    from seqmoe.runtime.jobs_server import JobServer
    from seqmoe.runtime.models import model_id, resolve_model

    workers, stderr = workers or Workers(), Console(stderr=True)
    search_prompts, held_out = load_prompts(prompts)
    out = out or Path(f"{model_id(model)}.profile.yaml")
    check_output(out)
    with terminable(), Display(stderr, budget) as display:
        folder = resolve_model(model, progress=display.written)
        display.stage("probe", LINK_SECONDS + 10)
        probe_with = workers.probe or probe_model
        probe = probe_with(folder, str(link), Knobs(), link_seconds=0 if dry_run else LINK_SECONDS)
        # Messages call the model what the user calls it.
        probe = replace(probe, spec=replace(probe.spec, name=model_id(model)))
        most = probe.spec.max_context
        require(
            not (most and context) or (context or 0) <= most,
            f"--context {context} is more than the {most} tokens that {probe.spec.name} was made for",
        )
        context = context or min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
        request = Request(
            model_id(model), folder, memory, budget, context, link, seed, search_prompts, held_out, trials
        )
        plan = plan_tune(request, probe)
        if dry_run:
            display.stop()
            if as_json:
                emit_json(plan_summary(plan, request))
            else:
                print_plan(Console(), request, plan)
            return 0
        display.note(f"memory: {plan.memory_note}")
        tuning: Tuning | None = None
        state = state or state_folder(probe.spec.digest, plan.question, str(link), context)
        try:
            with locked(state), JobServer() as server:
                fork = room_beside(plan, memory_facts()) >= SERVER_SHARE * probe.process_bytes
                run = workers.measure or partial(measure, run=server.run if fork else run_job)
                version = metadata.version("seqmoe")
                tuning = Tuning(request, plan, probe, machine_spec(folder), run, display, version, started)
                opened = open_storage(storage or str(state / JOURNAL))
                verdict = tuning.run(opened, _study_prefix(probe.spec.digest, plan, request), resume)
                write_profile(tuning.profile(), out)
        except KeyboardInterrupt:
            if tuning is None:
                raise
            with shielded():
                profile = write_profile(tuning.profile(interrupted=True), out)
            measured = tuning.search is not None and tuning.search.result.trials > 0
            what = "the best so far" if measured else "the default settings"
            note = f"interrupted; {out} holds {what} ({profile.evidence.reason})"
            display.note(f"{note}; --resume goes on" if measured else note)
            if as_json:
                emit_json(summary(tuning, str(out), INTERRUPTED))
            return INTERRUPTED
    exit_code = EXIT_TUNED if verdict.status == "tuned" else EXIT_DEFAULT_KEPT
    print_report(stderr if as_json else Console(), tuning, str(out))
    if as_json:
        emit_json(summary(tuning, str(out), exit_code))
    return exit_code


def _study_prefix(digest: str, plan: "Plan", request: "Request") -> str:
    """Names the question that a study answers: another model, memory, link or prompts is another study."""
    from seqmoe.profiles.schema import canonical_digest

    parts = [digest, plan.question, request.context, str(request.link), list(request.search_prompts)]
    return f"seqmoe-{canonical_digest(parts)[:12]}-"


def main() -> NoReturn:
    """Entry point of `seqmoe-tune`."""
    tune_command.main(prog_name="seqmoe-tune")
    raise AssertionError("a command's main never returns")
