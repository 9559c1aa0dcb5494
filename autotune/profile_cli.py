"""`seqmoe profile`: what is in a deployment profile, how far it may be trusted here, and how two of them differ."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from seqmoe.profiles.cliutil import Command, Group, emit_json, json_option
from seqmoe.profiles.fingerprint import compare_machine
from seqmoe.profiles.knobs import Knobs, knob_infos
from seqmoe.profiles.machine import machine_spec
from seqmoe.profiles.schema import Profile, json_schema, read_profile
from seqmoe.profiles.sizes import format_bytes, format_rate

FILE = click.argument("file", type=click.Path(path_type=Path))
EXIT_STALE = 5  # the exit code of ProfileError: the profile is good, but not for this machine


EXAMPLES = """\b
Examples:
  seqmoe profile explain demo.profile.yaml
  seqmoe profile verify demo.profile.yaml --model demo
  seqmoe profile diff before.yaml after.yaml
"""


@click.group("profile", cls=Group, epilog=EXAMPLES)
def profile_group() -> None:
    """Show, explain, verify and compare deployment profiles."""


@profile_group.command(cls=Command, epilog="Example: seqmoe profile show demo.profile.yaml")
@FILE
@json_option
def show(file: Path, as_json: bool) -> None:
    """The profile's contents, checked: the file as it is, or its values as JSON."""
    profile = read_profile(file)
    if as_json:
        emit_json(profile.model_dump(mode="json"))
    else:
        click.echo(file.read_text(encoding="utf-8"), nl=False)


@profile_group.command(cls=Command, epilog="Example: seqmoe profile explain demo.profile.yaml")
@FILE
@json_option
def explain(file: Path, as_json: bool) -> None:
    """In words: for what model and memory, what the settings mean, and how they were proven."""
    profile = read_profile(file)
    lines = _explain(profile)
    if as_json:
        emit_json({"explanation": lines})
    else:
        for line in lines:
            click.echo(line)


@profile_group.command(cls=Command, epilog="Example: seqmoe profile verify demo.profile.yaml --model ~/models/M")
@FILE
@click.option("--model", help="Also open this checkpoint and check that the profile was made for it.")
@json_option
def verify(file: Path, model: str | None, as_json: bool) -> int:
    """Is the file whole, and does it fit this machine? Exit 0: yes, perhaps with fewer experts; 5: no, tune again."""
    profile = read_profile(file)
    if model is not None:
        from seqmoe.autotune.probe import probe_model
        from seqmoe.profiles.fingerprint import check_model
        from seqmoe.runtime.models import resolve_model

        check_model(profile, probe_model(resolve_model(model), "disk", Knobs(), link_seconds=0).spec, model)
    checks = compare_machine(profile, machine_spec(file.parent))
    verdict = checks[0].verdict
    if as_json:
        emit_json({"verdict": verdict, "checks": [{"verdict": c.verdict, "message": c.message} for c in checks]})
    else:
        for check in checks:
            click.echo(f"{check.verdict}: {check.message}")
    return EXIT_STALE if verdict in ("retune", "reject") else 0


@profile_group.command(cls=Command, epilog="Example: seqmoe profile diff a.yaml b.yaml")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@json_option
def diff(first: Path, second: Path, as_json: bool) -> int:
    """Every value that differs. Exit 0 when none does, 1 otherwise."""
    before, after = (
        _flat(read_profile(path).model_dump(mode="json", exclude={"integrity"})) for path in (first, second)
    )
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if as_json:
        emit_json({"differences": {name: [before.get(name), after.get(name)] for name in names}})
    elif names:
        table = Table("", str(first), str(second))
        for name in names:
            table.add_row(name, json.dumps(before.get(name)), json.dumps(after.get(name)))
        Console().print(table)
    return 1 if names else 0


@profile_group.command(cls=Command, epilog="Example: seqmoe profile schema > profile.schema.json")
@json_option
def schema(as_json: bool) -> None:
    """JSON Schema of the present version, for editors."""
    if as_json:
        emit_json(json_schema())
    else:
        json.dump(json_schema(), sys.stdout, indent=2)
        click.echo()


def _explain(profile: Profile) -> list[str]:
    model, work, evidence = profile.target.model, profile.target.workload, profile.evidence
    total = model.num_layers * model.num_experts
    knobs = profile.to_knobs()
    share = f"{knobs.slots} of {total} experts ({knobs.slots / total:.0%})" if knobs.slots else "as many experts as fit"
    experts = f"{model.num_layers} layers x {model.num_experts} experts of {format_bytes(model.record_bytes)}"
    lines = [
        f"{profile.metadata.name}, made {profile.metadata.created} by seqmoe {profile.metadata.tuner_version}",
        f"model: {model.id} ({model.model_type}), {experts}, digest {model.digest[:16]}",
        f"for: {format_bytes(work.memory_bytes)} of memory, a context of {work.context_max} tokens, link {work.link}",
        f"tuned on: {profile.fingerprint.identity.cpu_model}, {profile.fingerprint.identity.cores} cores",
        f"keeps: {share} in memory",
    ]
    if profile.facts.link:
        lines.append(f"link: {format_rate(profile.facts.link.bytes_per_s_p50)} at the size of an expert")
    default = Knobs().to_dict()
    for info in knob_infos():
        value = getattr(knobs, info.name)
        same = info.name == "slots" or value == default[info.name]
        changed = "" if same else f" (default {_knob_value(info.name, default[info.name])})"
        lines.append(f"  {info.name} = {_knob_value(info.name, value)}{changed}: {info.help}")
    return [*lines, f"evidence: {evidence.status.replace('_', ' ')}. {evidence.reason}".rstrip()]


def _knob_value(name: str, value: Any) -> str:
    """As the file says it (null, true), sizes with their unit."""
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    return value if isinstance(value, str) else json.dumps(value)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: part for key, inner in value.items() for name, part in _flat(inner, f"{prefix}.{key}".strip(".")).items()
    }
