"""Every tunable, once: default, range, unit and meaning. Click options, the search space and profiles derive from it."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seqmoe.profiles.errors import UsageError

POLICIES = ("lru", "lfu", "static")


def _knob(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: int | None = None,
    high: int | None = None,
    choices: tuple[Any, ...] = (),
    tune: bool = False,
    log: bool = False,
) -> Any:
    metadata = {"help": help, "unit": unit, "low": low, "high": high, "choices": choices, "tune": tune, "log": log}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Knobs:
    """One choice of settings. Out of range or wrong type: UsageError naming the knob."""

    slots: int | None = _knob(
        None,
        "experts kept in memory at once; null: as many as the memory budget holds",
        unit="experts",
        low=1,
        tune=True,
    )
    policy: str = _knob(
        "lru", "which expert makes room: lru, lfu or static (most popular stay)", choices=POLICIES, tune=True
    )
    read_threads: int = _knob(4, "threads that read experts from storage", unit="threads", low=1, high=64, tune=True)
    queue_depth: int = _knob(8, "reads under way at once", unit="reads", low=1, high=256, tune=True, log=True)
    read_chunk_bytes: int = _knob(
        2 << 20, "an expert is read in pieces of this size, a multiple of 4096",
        unit="bytes", low=64 << 10, high=64 << 20, choices=(256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20), tune=True,
    )  # fmt: skip
    compute_threads: int | None = _knob(
        None, "threads that compute; null: one for each core this process may use", unit="threads", low=1, high=256
    )
    direct_io: bool = _knob(True, "read past the page cache (O_DIRECT) where the file system allows it")

    def __post_init__(self) -> None:
        for info in knob_infos():
            info.check(getattr(self, info.name))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Knobs":
        """Strict: an unknown name is a UsageError that names the nearest one. Missing knobs take their defaults."""
        known = [info.name for info in knob_infos()]
        for name in values:
            if name not in known:
                raise UsageError(f"unknown knob {name!r}{nearest(name, known)}; knobs are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Name to plain value, in order of declaration."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> "Knobs":
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class KnobInfo:
    """What is known of one knob: `low` and `high` are inclusive bounds, `choices` for a number are what the tuner tries."""

    name: str
    type: Any  # int, str or bool
    optional: bool  # null is a value: "decide from the machine"
    default: Any
    help: str
    unit: str
    low: int | None
    high: int | None
    choices: tuple[Any, ...]
    tune: bool
    log: bool

    def check(self, value: Any) -> None:
        """Raises UsageError unless `value` is of the right type and in range."""
        if value is None and self.optional:
            return
        # bool is an int to Python, but `read_threads: true` is a mistake.
        if not isinstance(value, self.type) or (self.type is int and isinstance(value, bool)):
            raise UsageError(f"knob {self.name} must be {self.expected()}, got {value!r}")
        if self.type is str and self.choices and value not in self.choices:
            raise UsageError(f"knob {self.name} must be {self.expected()}, got {value!r}{nearest(value, self.choices)}")
        below = self.low is not None and self.type is int and value < self.low
        if below or (self.high is not None and self.type is int and value > self.high):
            raise UsageError(f"knob {self.name} must be {self.expected()}, got {value}")
        if self.name == "read_chunk_bytes" and value % 4096:
            raise UsageError(f"knob read_chunk_bytes must be a multiple of 4096, got {value}")

    def expected(self) -> str:
        """Words for what the value has to be."""
        if self.type is str:
            return f"one of {', '.join(self.choices)}"
        if self.type is bool:
            return "true or false"
        text = "a whole number"
        if self.high is not None:
            text += f" from {self.low} to {self.high}"
        elif self.low is not None:
            text += f" of at least {self.low}"
        return text + (" or null" if self.optional else "")


_INFOS: list[KnobInfo] = []


def knob_infos() -> tuple[KnobInfo, ...]:
    """All knobs in order of declaration."""
    if not _INFOS:
        hints = typing.get_type_hints(Knobs)
        for field in dataclasses.fields(Knobs):
            hint = hints[field.name]
            optional = isinstance(hint, types.UnionType)
            plain = next(t for t in typing.get_args(hint) if t is not type(None)) if optional else hint
            _INFOS.append(KnobInfo(field.name, plain, optional, field.default, **field.metadata))
    return tuple(_INFOS)


def nearest(name: str, known: "typing.Iterable[str]") -> str:
    """` (did you mean X?)` when something close is known, else nothing."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
