"""Where a tune keeps what it has measured, so that it can be resumed, and the lock that keeps two off one folder."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import write_error
from seqmoe.runtime.demo_xl import default_cache_dir

JOURNAL = "trials.journal"


def state_folder(model_digest: str, memory: str, link: str, context: int) -> Path:
    """The folder for one question: this model, this memory (in words), this link, this context."""
    rest = hashlib.sha256(json.dumps([memory, link, context]).encode()).hexdigest()[:8]
    return default_cache_dir() / "tune" / f"{model_digest[:12]}-{rest}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises UsageError at once when another tune holds it."""
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Opened for appending: the holder's number must not be wiped by those that find the lock taken.
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise write_error(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UsageError(
                f"another seqmoe-tune (process {holder}) is at work in {folder}: wait for it, or choose another folder with --state"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
