"""The prompts that settings are measured on: some to search with, others, never seen by the search, for the verdict."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import read_lines

SEARCH = (
    "The old lighthouse keeper climbed the stairs every evening, and when he reached the top he",
    'def read_config(path):\n    """Return the settings in the file as a dictionary."""\n',
    "In the beginning of the nineteenth century, the cities of the north were",
)
HELD_OUT = (
    "She opened the letter with trembling hands and read the first line aloud:",
    'class Queue:\n    """A first-in, first-out queue."""\n\n    def __init__(self):\n',
    "The experiment began at noon. We weighed each sample twice, and",
)


def load_prompts(path: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(to search with, held out): the built-in ones, or every other non-empty line of the file. Raises UsageError."""
    if path is None:
        return SEARCH, HELD_OUT
    lines = read_lines(path, "--prompts")
    if len(lines) < 2:
        raise UsageError(f"{path} must hold at least 2 prompts, one a line (half to search with, half for the verdict)")
    return tuple(lines[::2]), tuple(lines[1::2])


def prompts_digest(*groups: Sequence[str]) -> str:
    """SHA-256 of the prompts, so that a profile says what it was measured on."""
    return hashlib.sha256(json.dumps([list(group) for group in groups]).encode()).hexdigest()
