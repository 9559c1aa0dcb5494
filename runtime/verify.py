"""`--verify`: reads every byte of a checkpoint and compares it with what is known of it.

Known is what a `SHA256SUMS` file in the model's folder says (the format of sha256sum), else what the first verification
on this machine found, which is kept in the cache folder by model digest.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from seqmoe.profiles.errors import CheckpointError
from seqmoe.profiles.files import write_atomic
from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.demo_xl import default_cache_dir


def verify_files(checkpoint: Checkpoint, notice: Callable[[str], None], cache_dir: Path | None = None) -> None:
    """Raises CheckpointError naming the first file whose bytes are not what they were."""
    record = (cache_dir or default_cache_dir()) / "verified" / f"{checkpoint.digest}.json"
    known, source = _known(checkpoint.folder, record)
    found: dict[str, str] = {}
    for path in checkpoint.files:
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        want = known.get(path.name)
        if want is not None and want != found[path.name]:
            raise CheckpointError(f"{path}: its bytes have SHA-256 {found[path.name][:16]}..., {source} says {want[:16]}...")
    unknown = [name for name in found if name not in known]
    if unknown:
        write_atomic(record, json.dumps({**known, **found}, indent=1))
        notice(f"{len(unknown)} files had never been verified here: their digests are kept for the next --verify")
    else:
        notice(f"verified {len(found)} files against {source}")


def _known(folder: Path, record: Path) -> tuple[dict[str, str], str]:
    sums = folder / "SHA256SUMS"
    if sums.is_file():
        rows = [line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip()]
        return {name.lstrip("*").strip(): digest for digest, name in (row for row in rows if len(row) == 2)}, str(sums)
    try:
        stored = json.loads(record.read_text())
        return {str(name): str(digest) for name, digest in stored.items()}, "the first verification"
    except (OSError, ValueError, AttributeError):
        return {}, "the first verification"
