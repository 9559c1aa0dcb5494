"""Sizes, rates and durations as people write them, to and from plain numbers (bytes, bytes/s, seconds)."""

import math
import re

from seqmoe.profiles.errors import UsageError

# Bare K/M/G/T are binary, as in docker, systemd and cgroup files; KB/MB/GB/TB are decimal, as on a disk's label.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*")
_DURATION = re.compile(rf"{_NUMBER}\s*(us|ms|s|m|h)?\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_MAX_BYTES = 1 << 62


def parse_bytes(value: str | int, what: str = "size") -> int:
    """Bytes of "6GiB", "500MB", "4096" or an int. At least 1. Raises UsageError naming `what` and an example."""
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise UsageError(f"{what} must be a number with a unit, such as 6GiB, 500MB or 4096, got {value!r}")
        number, unit = float(match[1]), match[2].lower()
    size = value if isinstance(value, int) else int(number * _UNITS[unit])
    if not 1 <= size < _MAX_BYTES:
        raise UsageError(f"{what} must be at least 1 byte and less than 4096 PiB, such as 6GiB, got {value!r}")
    return size


def parse_rate(value: str, what: str = "rate") -> float:
    """Bytes per second of "1.5GB/s". Raises UsageError."""
    text = value.strip()
    if not text.lower().endswith("/s"):
        raise UsageError(f"{what} must be a size per second, such as 1.5GB/s, got {value!r}")
    return float(parse_bytes(text[:-2], what))


def parse_duration(value: str | float, what: str = "duration") -> float:
    """Seconds of "10m", "90s", "1h30m", "80us" or a bare number of seconds. More than 0. Raises UsageError."""
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        text, seconds, at = value.strip().lower(), 0.0, 0
        while at < len(text):
            match = _DURATION.match(text, at)
            # A bare number is seconds, but only alone: "1h30" could mean anything.
            if match is None or (match[2] is None and match.span() != (0, len(text))):
                at = -1
                break
            seconds += float(match[1]) * _SECONDS[match[2] or ""]
            at = match.end()
        if at <= 0:
            raise UsageError(f"{what} must be a time such as 10m, 90s or 1h30m, got {value!r}")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"{what} must be more than 0, such as 10m or 90s, got {value!r}")
    return seconds


def format_bytes(size: float) -> str:
    """The size in the largest binary unit that leaves at least 1, with three digits: "6.00 GiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or (unit == "B" and abs(value) < 1000):
            break
        value /= 1024
    else:
        unit = "TiB"
    if unit == "B":
        return f"{int(value)} B"
    return f"{value:.{max(0, 2 - (abs(value) >= 10) - (abs(value) >= 100))}f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """Decimal, as links are labelled: "1.50 GB/s"."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_duration(seconds: float) -> str:
    """As 850ms, 12.3s, 4m05s or 1h02m."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
