"""How far a profile may be trusted on this machine: the worst of several checks, before any weight is read."""

import shlex
from dataclasses import dataclass
from typing import Literal

from seqmoe.profiles.errors import ProfileError
from seqmoe.profiles.schema import Environment, Fingerprint, Identity, Profile
from seqmoe.profiles.sizes import format_bytes
from seqmoe.profiles.spec import MachineSpec, ModelSpec

VerdictName = Literal["optimal", "adapt", "retune", "reject"]
ORDER: tuple[VerdictName, ...] = ("optimal", "adapt", "retune", "reject")


@dataclass(frozen=True)
class Check:
    """One comparison: how bad it is, and one line why."""

    verdict: VerdictName
    message: str


def fingerprint_of(machine: MachineSpec, packages: dict[str, str]) -> Fingerprint:
    """The sections of a profile that say where it was made."""
    storage = machine.storage
    return Fingerprint(
        identity=Identity(
            cpu_model=machine.cpu_model,
            cpu_flags=machine.cpu_flags,
            cores=machine.cores,
            ram_total_bytes=machine.ram_total_bytes,
            gpus=tuple(gpu.pci_id for gpu in machine.gpus),
            storage_model=storage.model or storage.device if storage else "",
            fs_type=storage.fs_type if storage else "",
        ),
        environment=Environment(
            os=machine.os,
            kernel=machine.kernel,
            python=machine.python,
            packages=packages,
            memory_limit_bytes=machine.memory_limit_bytes,
        ),
    )


def check_model(profile: Profile, model: ModelSpec, called: str = "") -> None:
    """Raises ProfileError when the profile was made for another model; `called` is what the user calls this one."""
    target = profile.target.model
    if target.digest != model.digest:
        raise ProfileError(
            f"the profile was made for another model: {target.id} with digest {target.digest[:16]}, "
            f"{called or model.name} has {model.digest[:16]}; "
            f"tune this one with seqmoe-tune --model {shlex.quote(called or model.name)}"
        )


def compare_machine(profile: Profile, machine: MachineSpec) -> tuple[Check, ...]:
    """One check for each difference that matters, worst first; a single "optimal" when nothing differs."""
    then, now = profile.fingerprint.identity, fingerprint_of(machine, {}).identity
    checks: list[Check] = []
    for name in ("cpu_model", "cpu_flags", "storage_model", "fs_type"):
        before, after = getattr(then, name), getattr(now, name)
        # Versions that knew no name of a virtual disk wrote none: that says nothing about the disk.
        if before != after and (before or name != "storage_model"):
            words = name.replace("_", " ")
            checks.append(Check("retune", f"{words} differs: tuned on {_show(before)}, here {_show(after)}"))
    if now.cores != then.cores:
        worse: VerdictName = "retune" if now.cores < then.cores else "adapt"
        checks.append(Check(worse, f"cores differ: tuned on {then.cores}, here {now.cores}"))
    need = profile.target.workload.memory_bytes
    room = min(machine.ram_available_bytes, machine.memory_limit_bytes or machine.ram_available_bytes)
    if room < need:
        checks.append(
            Check("adapt", f"memory: tuned for {format_bytes(need)}, here {format_bytes(room)}: fewer experts will fit")
        )
    if profile.fingerprint.environment.python.split(".")[:2] != machine.python.split(".")[:2]:
        checks.append(Check("adapt", f"Python {machine.python} here, {profile.fingerprint.environment.python} then"))
    checks.sort(key=lambda check: -ORDER.index(check.verdict))
    return tuple(checks) or (Check("optimal", "the machine is like the one it was tuned on"),)


def _show(value: object) -> str:
    return (" ".join(value) if isinstance(value, tuple) else str(value)) or "(not known)"
