"""Writing a file whole or not at all."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from seqmoe.profiles.errors import DiskSpaceError, SeqmoeError, UsageError

MAX_TEXT_BYTES = 16 << 20  # of a file of prompts


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty temporary file beside `path`, to be written in the block; it takes the place of `path` when the block
    ends well, synced, and is gone when it does not. A reader sees the old or the new, never a part.

    Raises what `write_error` makes of an OSError.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files for the owner only; give what open() would have given.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
        temporary = None
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the rename itself has happened
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                temporary.unlink()


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all (see `replacing`)."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_lines(path: Path, what: str) -> list[str]:
    """The lines of a text file that are not empty, without what surrounds them; UsageError that begins with `what`."""
    try:
        with open(path, "rb") as file:  # a pipe is fine, an endless one is not
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise UsageError(f"{what} {path}: more than {MAX_TEXT_BYTES >> 20} MiB")
        lines = [line.strip() for line in data.decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise UsageError(f"{what} {path}: cannot be read as text: {reason}") from None
    return [line for line in lines if line]


def check_output(path: Path) -> None:
    """UsageError now, rather than after all the work, where the file `path` cannot be written later. Makes nothing."""
    if not path.parent.is_dir():
        why = "is no folder" if path.parent.exists() else "does not exist: make that folder first"
        raise UsageError(f"cannot write {path}: {path.parent} {why}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """As `check_output`, for a file in a folder that is the command's own to make: makes it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from None
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a file name, such as {path / 'profile.yaml'}")
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise UsageError(f"{path} is no regular file; give another name")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: no permission in {path.parent}")


def write_error(path: Path, error: OSError) -> SeqmoeError:
    """The user's error for a failed write: DiskSpaceError when the disk or quota is full, else UsageError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskSpaceError(f"no room to write {path}: {error.strerror}; free some space or choose another place")
    return UsageError(f"cannot write {path}: {error.strerror or error}")
