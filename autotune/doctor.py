"""`seqmoe doctor`: what this machine has, every limit that will matter, what will not work here and why. Never fails itself."""

import contextlib
import importlib.util
import mmap
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

from seqmoe.profiles import machine
from seqmoe.profiles.cliutil import SIZE, Command, emit_json, json_option, require
from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.sizes import format_bytes

Level = Literal["ok", "note", "problem"]
NEEDS = {"python": "3.11", "torch": "2.11", "transformers": "5.17", "numba": "0.61", "safetensors": "0.6", "optuna": "5",
         "numpy": "2", "pydantic": "2.10", "click": "8.1", "rich": "13", "yaml": "6"}  # fmt: skip
_DISTRIBUTIONS = {"yaml": "pyyaml"}


@dataclass(frozen=True)
class Finding:
    """One line: `consequence` says what will not work, "" where all is well."""

    level: Level
    name: str
    found: str
    consequence: str = ""


@click.command("doctor", cls=Command, epilog="Examples: seqmoe doctor; seqmoe doctor --model demo-xl --json")
@click.option("--model", help="Also look at this model: does it open, does it fit?")
@click.option("--memory", type=SIZE, help="With --model: the memory that it is to run in, such as 6GiB.")
@json_option
def doctor_command(model: str | None, memory: int | None, as_json: bool) -> int:
    """What this machine has, every limit that will matter, and what will not work here and why.

    Exit 0 when seqmoe can run here, 1 when something that it needs is missing.
    """
    require(memory is None or model is not None, "--memory says what --model is to run in: give both")
    findings = list(examine(model, memory))
    problems = [f for f in findings if f.level == "problem"]
    if as_json:
        emit_json({"ok": not problems, "findings": [vars(f) for f in findings]})
    else:
        _print(findings)
    return 1 if problems else 0


def examine(model: str | None = None, memory_bytes: int | None = None) -> Iterator[Finding]:
    """All findings; a check that breaks is itself a finding."""
    from seqmoe.runtime.demo_xl import default_cache_dir

    cache = default_cache_dir()
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("packages", packages),
        ("processor", processor),
        ("memory", memory_limits),
        ("storage", lambda: storage(cache)),
        ("gpu", gpu),
        ("compiler", compiler),
    ]
    if model is not None:
        checks.append(("model", lambda: model_fits(model, memory_bytes)))
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 (a doctor must not die of what it finds)
            yield Finding("note", name, f"could not be looked at: {type(error).__name__}: {error}")


def packages() -> Iterator[Finding]:
    """Python and the packages that seqmoe stands on, each against the least version."""
    for name, need in NEEDS.items():
        have = platform.python_version() if name == "python" else _version(_DISTRIBUTIONS.get(name, name))
        if not have:
            yield Finding("problem", name, "not installed", f"needs {name} >= {need}: pip install seqmoe brings it")
        elif _numbers(have) < _numbers(need):
            yield Finding("problem", name, have, f"needs {name} >= {need}")
        elif name not in ("python",) and importlib.util.find_spec(name) is None:
            yield Finding("problem", name, have, f"installed, but `import {name}` finds nothing")
        else:
            yield Finding("ok", name, have)


def processor() -> Iterator[Finding]:
    """Model, instruction sets and the cores that this process may use."""
    spec = machine.machine_spec()
    yield Finding("ok", "cpu", f"{spec.cpu_model} ({spec.os}, kernel {spec.kernel})")
    flags = ", ".join(spec.cpu_flags) or "none known"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in spec.cpu_flags:
        yield Finding("note", "instructions", flags, "no AVX2: decoding will be several times slower")
    elif any("bf16" in flag for flag in spec.cpu_flags):
        yield Finding("ok", "instructions", flags)
    else:
        yield Finding(
            "ok",
            "instructions",
            flags,
            "no bf16 arithmetic: bf16 weights are widened to float32 in registers, at little cost",
        )
    quota = f", quota {spec.cpu_quota:g} CPUs" if spec.cpu_quota else ""
    level: Level = "note" if spec.cores == 1 else "ok"
    alone = "reading and computing share one core" if spec.cores == 1 else ""
    yield Finding(level, "cores", f"{spec.cores} usable ({spec.physical_cores} physical{quota})", alone)


def memory_limits() -> Iterator[Finding]:
    """RAM, control groups and the process's own limits."""
    facts = machine.memory_facts()
    yield Finding(
        "ok", "ram", f"{format_bytes(facts.ram_room_bytes)} available of {format_bytes(facts.ram_total_bytes)}"
    )
    if facts.cgroup_limit_bytes is None:
        yield Finding("ok", "cgroup memory", "no limit")
    else:
        room = format_bytes(facts.cgroup_room_bytes or 0)
        found = f"{format_bytes(facts.cgroup_limit_bytes)} ({facts.cgroup_path}), {room} free for this process"
        yield Finding("note", "cgroup memory", found, "a larger --memory is cut to this")
    if facts.address_space_bytes is not None:
        found = format_bytes(facts.address_space_bytes)
        yield Finding(
            "note", "address space", found, "ulimit -v counts reserved memory too; torch alone reserves several GiB"
        )
    if facts.memlock_bytes is not None:
        found = format_bytes(facts.memlock_bytes)
        yield Finding(
            "note", "locked memory", found, "the pool of experts is not pinned: with swap in use it may be swapped out"
        )
    else:
        yield Finding("ok", "locked memory", "no limit")


def storage(cache: Path) -> Iterator[Finding]:
    """The disk of the cache folder: where demo-xl and the tuner's results go."""
    facts = machine.storage_facts(cache)
    if facts is None:
        yield Finding("problem", "cache folder", str(cache), "cannot be looked at; demo-xl and --resume need it")
        return
    device = f" on {facts.device}" + (f" ({facts.model})" if facts.model else "") if facts.device else ""
    low = facts.free_bytes < 6 << 30
    note = "demo-xl needs about 5 GiB" if low else ""
    yield Finding(
        "note" if low else "ok",
        "cache folder",
        f"{cache}: {facts.fs_type}{device}, {format_bytes(facts.free_bytes)} free",
        note,
    )
    works, why = direct_io_works(machine.existing_parent(cache))
    slower = "experts are read through the page cache, which takes memory and a copy"
    yield Finding(
        "ok" if works else "note", "direct reads", "O_DIRECT works" if works else why, "" if works else slower
    )
    if facts.read_ahead_bytes is not None and facts.read_ahead_bytes > 1 << 20:
        found = f"{format_bytes(facts.read_ahead_bytes)}"
        yield Finding(
            "note",
            "read-ahead",
            found,
            "buffered reads and mmap fetch far more than asked; direct reads are not affected",
        )
    elif facts.read_ahead_bytes is not None:
        yield Finding("ok", "read-ahead", format_bytes(facts.read_ahead_bytes))
    if facts.rotational and not facts.device.startswith("vd"):
        # Virtual disks say "rotational" whatever lies under them.
        yield Finding("note", "disk", f"{facts.device} says that it rotates", "on a hard disk a miss costs about 10 ms")


def direct_io_works(folder: Path) -> tuple[bool, str]:
    """(does O_DIRECT read here, why not): tried on a small file of our own, which is removed."""
    if not hasattr(os, "O_DIRECT"):
        return False, "this system has no O_DIRECT"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seqmoe-doctor-") as file, mmap.mmap(-1, 4096) as page:
            file.write(b"x" * 8192)
            file.flush()
            os.fsync(file.fileno())
            handle = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                return os.preadv(handle, [page], 4096) == 4096 and page[0] == ord("x"), "the read came back wrong"
            finally:
                os.close(handle)
    except OSError as error:
        return False, f"O_DIRECT is refused in {folder}: {error.strerror}"


def gpu() -> Iterator[Finding]:
    """GPUs that the driver shows, or why there are none."""
    gpus, why = machine.gpu_facts()
    if not gpus:
        yield Finding("note", "gpu", why, "the cpu backend is used; it needs no GPU")
    for found in gpus:
        text = f"{found.name}, {format_bytes(found.memory_bytes)}, compute {found.compute_capability}, driver {found.driver}"
        yield Finding("note", "gpu", text, "this version has the cpu backend only")


def compiler() -> Iterator[Finding]:
    """A C compiler: nothing on the cpu backend needs one."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        yield Finding("ok", "C compiler", found)
    else:
        yield Finding(
            "note",
            "C compiler",
            "none",
            "not needed by the cpu backend; triton kernels (cuda) and torch.compile would need one",
        )


def model_fits(model: str, memory_bytes: int | None) -> Iterator[Finding]:
    """Does the checkpoint open, and what does it take?"""
    from seqmoe.autotune import probe as probing
    from seqmoe.profiles.budget import plan_memory
    from seqmoe.runtime.models import model_id, resolve_model

    try:
        folder = resolve_model(model)
        probe = probing.probe_model(folder, "disk", Knobs(), link_seconds=0)
        spec = replace(probe.spec, name=model_id(model))
        text = f"{spec.model_type}, {spec.num_layers} layers x {spec.num_experts} experts of {format_bytes(spec.record_bytes)}"
        yield Finding("ok", "model", f"{text}, {format_bytes(spec.experts_bytes + spec.dense_bytes)} in all")
        works, why = direct_io_works(folder) if os.access(folder, os.W_OK) else (True, "")
        if not works:
            yield Finding("note", "model's disk", why, "its experts are read through the page cache")
        # As seqmoe-tune plans its runs: what fits here fits there.
        budget = probing.budget_of_runs(memory_bytes)
        context = min(2048, spec.max_context or 2048)
        plan = plan_memory(budget.budget_bytes, spec, context, 1, Knobs(), probe.planned_process_bytes)
        share = f"{plan.slots} of {plan.total_experts} experts ({plan.residency:.0%})"
        yield Finding("ok", "model in memory", f"{share} fit in {budget.explanation}")
    except SeqmoeError as error:
        yield Finding("problem", "model", model, str(error))


def _print(findings: list[Finding]) -> None:
    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for f in findings:
        table.add_row(marks[f.level], f.name, f.found)
    console.print(table)
    limits = [f for f in findings if f.consequence]
    if limits:
        table = Table("what will not work, or not as well", "why", title="\nOn this machine", title_justify="left")
        for f in limits:
            table.add_row(f.consequence, f"{f.name}: {f.found}")
        console.print(table)
    problems = sum(f.level == "problem" for f in findings)
    console.print(f"{problems} problem(s): seqmoe cannot run here yet" if problems else "seqmoe can run here")


def _version(distribution: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
