"""The deployment profile: machine + model + knobs + evidence in one YAML file, strict when read, commented when written.

Plain data: nothing in a profile is executed or taken as a path. Every version that was released loads for ever; the fixtures
in tests/golden hold that.
"""

import hashlib
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from seqmoe.profiles.errors import ProfileError, UsageError
from seqmoe.profiles.files import write_atomic
from seqmoe.profiles.knobs import KnobInfo, Knobs, knob_infos, nearest
from seqmoe.profiles.spec import LinkSpec
from seqmoe.profiles.yamlfile import dump_commented, load_yaml, one_line

API_VERSION = "seqmoe.dev/v1alpha1"
# (from, to, function on the plain mapping), oldest first; each step is lossless and is never removed.
MIGRATIONS: tuple[tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]]], ...] = ()

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Measured = Annotated[float, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Metadata(_Part):
    name: str
    created: str = Field(description="UTC, ISO 8601")
    tuner_version: str
    parent_digest: str | None = None


class ModelTarget(_Part):
    id: str = Field(description="a known name (demo, demo-xl), or the name of the folder it was tuned from")
    model_type: str
    digest: str = Field(description="of config, tensor headers and sizes: another model is refused")
    num_layers: Positive
    num_experts: Positive
    top_k: Positive
    record_bytes: Positive
    dtype: str


class RuntimeTarget(_Part):
    version: str
    backend: Literal["cpu"]


class Workload(_Part):
    context_max: Positive
    batch: Positive = 1
    memory_bytes: Positive = Field(description="the budget that covers everything the process takes")
    link: str = "disk"
    objective: Literal["decode_tokens_per_s"] = "decode_tokens_per_s"


class Target(_Part):
    model: ModelTarget
    runtime: RuntimeTarget
    workload: Workload


class Identity(_Part):
    cpu_model: str
    cpu_flags: tuple[str, ...] = ()
    cores: Positive
    ram_total_bytes: Count
    gpus: tuple[str, ...] = ()
    storage_model: str = ""
    fs_type: str = ""


class Environment(_Part):
    os: str
    kernel: str
    python: str
    packages: dict[str, str] = {}
    memory_limit_bytes: Positive | None = None


class Fingerprint(_Part):
    identity: Identity = Field(description="the machine: where one of these differs, measure again")
    environment: Environment = Field(description="for information")


class LinkFacts(_Part):
    kind: str
    record_bytes: Positive
    bytes_per_s_p10: Measured = Field(description="that nine of ten loads of one record reach")
    bytes_per_s_p50: Measured
    bytes_per_s_together: Measured | None = Field(
        default=None, description="as many records at once as a token has experts"
    )
    latency_us: Measured
    samples: Count


class Facts(_Part):
    link: LinkFacts | None = None
    full_tokens_per_s: Measured | None = Field(default=None, description="every expert in memory, where that fits")
    layer_ms: Measured | None = Field(
        default=None, description="one MoE layer of one decode step, all experts in memory (median)"
    )
    process_bytes: Count | None = Field(default=None, description="resident set after all imports")
    peak_rss_bytes: Count | None = Field(default=None, description="largest resident set seen with these knobs")
    memory_plan: dict[str, int] | None = None
    model_error_pct: float | None = Field(
        default=None, description="predicted against measured time, where there was a prediction"
    )


class Evidence(_Part):
    status: Literal["tuned", "default_kept", "untested"]
    reason: str = ""
    ratio: float | None = Field(
        default=None, gt=0, description="time a token takes with the default / with these knobs; more than 1 is faster"
    )
    ratio_ci95: tuple[float, float] | None = None
    aa_band: Measured | None = Field(
        default=None, description="ratio that two runs of the default differ by, as a share; a tie within it"
    )
    n_pairs: Count = 0
    trials: Count = 0
    seed: Count = 0
    default_tokens_per_s: Measured | None = None
    tuned_tokens_per_s: Measured | None = None
    prompts_digest: str = ""


class Integrity(_Part):
    sha256: str


def _knob_field(info: KnobInfo) -> tuple[Any, Any]:
    kind: Any = Literal[info.choices] if info.type is str else info.type
    bounds: dict[str, Any] = {"ge": info.low, "le": info.high} if info.type is int else {}
    unit = f" [{info.unit}]" if info.unit else ""
    kind = Annotated[kind, Field(**bounds)]
    return (kind | None if info.optional else kind, Field(info.default, description=f"{info.help}{unit}"))


KnobValues: type[BaseModel] = create_model(  # type: ignore[call-overload]
    "KnobValues", __base__=_Part, **{info.name: _knob_field(info) for info in knob_infos()}
)


class Profile(_Part):
    apiVersion: Literal["seqmoe.dev/v1alpha1"] = "seqmoe.dev/v1alpha1"
    kind: Literal["DeploymentProfile"] = "DeploymentProfile"
    metadata: Metadata
    target: Target
    fingerprint: Fingerprint = Field(description="where it was tuned")
    facts: Facts = Field(default_factory=Facts, description="what was measured there")
    knobs: KnobValues = Field(description="the settings; a hand-made change needs the section `integrity` removed")  # type: ignore[valid-type]
    evidence: Evidence = Field(
        description="how these knobs compared with the default, in fresh processes on held-out prompts"
    )
    integrity: Integrity | None = Field(default=None, description="digest of all the above; a mismatch is refused")

    def to_knobs(self) -> Knobs:
        """The settings as the runtime takes them."""
        return Knobs.from_mapping(self.knobs.model_dump())  # type: ignore[attr-defined]

    def digest(self) -> str:
        """SHA-256 of the canonical JSON (sorted keys, no spaces) of everything but `integrity`."""
        return canonical_digest(self.model_dump(mode="json", exclude={"integrity"}))

    def sealed(self) -> "Profile":
        """A copy with its `integrity` filled in."""
        return self.model_copy(update={"integrity": Integrity(sha256=self.digest())})


def canonical_digest(value: Any) -> str:
    """SHA-256 of plain data as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def knob_values(knobs: Knobs) -> Any:
    """`knobs` as the profile's section."""
    return KnobValues(**knobs.to_dict())


def read_profile(path: Path) -> Profile:
    """Read, migrate, check. Raises ProfileError with one line that says where in the file and what would be right."""
    content = _without_notes(load_yaml(path))
    profile = parse_profile(_migrate(content, str(path)), str(path))
    # The digest is checked on what the file says: fields added by a migration or a later version are not its fault.
    if profile.integrity is not None:
        claimed = profile.integrity.sha256
        given = {name: value for name, value in content.items() if name != "integrity"}
        if claimed not in (profile.digest(), canonical_digest(given)):
            raise ProfileError(
                f"{path} was changed after it was written (integrity.sha256 does not match); remove its section `integrity` "
                "to run with hand-made knobs, which then count as untested"
            )
    elif profile.evidence.status != "untested":
        evidence = profile.evidence.model_copy(update={"status": "untested", "reason": "changed by hand"})
        profile = profile.model_copy(update={"evidence": evidence})
    return profile


def parse_profile(content: dict[str, Any], where: str) -> Profile:
    """A profile from plain data of the present version."""
    try:
        # Through JSON, so that a list counts as a tuple while types stay strict.
        profile = Profile.model_validate_json(json.dumps(content))
        profile.to_knobs()
        LinkSpec.parse(profile.target.workload.link)
        return profile
    except UsageError as error:  # what a knob or a link demands beyond its type and range
        raise ProfileError(f"{where}: {error}") from None
    except ValidationError as error:
        raise ProfileError(f"{where}: {_first_problem(error, content)}") from None
    except (TypeError, ValueError) as error:  # bytes, sets: YAML types that JSON has not
        raise ProfileError(f"{where}: only plain values may stand in a profile: {one_line(str(error))}") from None


def write_profile(profile: Profile, path: Path) -> Profile:
    """Seal and write atomically, with comments; returns what was written. Raises UsageError or DiskSpaceError."""
    sealed = profile.sealed()
    status = sealed.evidence.status.replace("_", " ")
    header = f"seqmoe deployment profile ({status}). Use: seqmoe-run --profile FILE. Check: seqmoe profile verify FILE."
    write_atomic(path, dump_commented(sealed, header))
    return sealed


def json_schema() -> dict[str, Any]:
    """JSON Schema of the present version, for editors."""
    return Profile.model_json_schema()


def _migrate(content: dict[str, Any], where: str) -> dict[str, Any]:
    version = content.get("apiVersion")
    known = [API_VERSION, *(old for old, _, _ in MIGRATIONS)]
    if not isinstance(version, str) or version not in known:
        if version is None:
            raise ProfileError(f"{where}: apiVersion is missing; a profile begins with apiVersion: {API_VERSION}")
        raise ProfileError(
            f"{where}: apiVersion {one_line(str(version))!r} is not known here; this seqmoe reads {', '.join(known)}"
        )
    for old, new, step in MIGRATIONS:
        if content["apiVersion"] == old:
            content = {**step(content), "apiVersion": new}
    return content


def _without_notes(value: Any) -> Any:
    """Without the `x-` keys, which are for people and other tools."""
    if isinstance(value, dict):
        return {name: _without_notes(part) for name, part in value.items() if not name.startswith("x-")}
    return [_without_notes(part) for part in value] if isinstance(value, list) else value


def _first_problem(error: ValidationError, content: dict[str, Any]) -> str:
    problems = error.errors(include_url=False)
    # A misspelt name shows up twice, as unknown and as missing: the unknown one has the answer.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    path = ".".join(str(part) for part in first["loc"]) or "the file"
    kind, given = first["type"], one_line(repr(first["input"]))[:80]
    if kind == "extra_forbidden":
        names = _fields_at(first["loc"][:-1])
        text = f"unknown key {path}{nearest(str(first['loc'][-1]), names)}; known there: {', '.join(names)}"
    elif kind == "missing":
        text = f"{path} is missing"
    else:
        message = first["msg"].replace("Input should be ", "must be ").replace(" integer", " whole number")
        text = f"{path} {message[:1].lower() + message[1:]}, got {given}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return one_line(text) + more


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Profile
    for part in location:
        hint = model.model_fields[part].annotation
        if isinstance(hint, types.UnionType):
            hint = next(t for t in typing.get_args(hint) if t is not type(None))
        model = hint
    return list(model.model_fields)
