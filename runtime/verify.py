"""`--verify`: reads every byte of a checkpoint and compares it with what is known of it.

Known is what a `SHA256SUMS` file in the model's folder says (the format of sha256sum), else what the first verification
on this machine found, which is kept in the cache folder by model digest.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from seqmoe.profiles.errors import CheckpointError
from seqmoe.profiles.files import write_atomic
from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.demo_xl import default_cache_dir

SUMS = "SHA256SUMS"
DIGEST = re.compile("[0-9a-fA-F]{64}")


def verify_files(checkpoint: Checkpoint, notice: Callable[[str], None], cache_dir: Path | None = None) -> None:
    """Raises CheckpointError naming the first file whose bytes are not what they were."""
    record = (cache_dir or default_cache_dir()) / "verified" / f"{checkpoint.digest}.json"
    sums, stored = _sums(checkpoint.folder), _stored(record)
    known = {**stored, **sums}
    found: dict[str, str] = {}
    for path in checkpoint.files:
        try:
            with open(path, "rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        want = known.get(path.name)
        if want is not None and want != found[path.name]:
            source = SUMS if path.name in sums else "the first verification"
            raise CheckpointError(f"{path}: its bytes have SHA-256 {found[path.name][:16]}..., {source} says {want[:16]}...")
    unknown = [name for name in found if name not in known]
    if unknown:
        write_atomic(record, json.dumps({**stored, **found}, indent=1))
        notice(f"{len(unknown)} files had never been verified here: their digests are kept for the next --verify")
    else:
        source = SUMS if all(name in sums for name in found) else "the first verification"
        notice(f"verified {len(found)} files against {source}")


def _sums(folder: Path) -> dict[str, str]:
    """Name to digest, as sha256sum writes them."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    try:
        rows = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(f"{path}: cannot be read as text") from None
    sums = {}
    for row in rows:
        if len(row) != 2 or not DIGEST.fullmatch(row[0]):
            raise CheckpointError(f"{path}: not what sha256sum writes, one digest and one name a line: {' '.join(row)[:60]!r}")
        sums[row[1].strip().removeprefix("*").removeprefix("./")] = row[0].lower()
    return sums


def _stored(record: Path) -> dict[str, str]:
    try:
        return {str(name): str(digest) for name, digest in json.loads(record.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
