"""The headers of a checkpoint's safetensors files: which tensor lies where. Nothing else of the files is read.

The format: 8 bytes (little endian) with the header's length, the header (JSON: name -> dtype, shape, data_offsets),
then the tensors' bytes without a gap.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmoe.profiles.errors import CheckpointError

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk: `nbytes` bytes at byte `offset` of file number `file`."""

    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint by name. `digest` covers names, sizes and headers of the files."""

    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    digest: str


def read_headers(folder: Path) -> Headers:
    """Find the safetensors files of `folder` as Transformers does and read and check their headers.

    Raises:
        CheckpointError: no safetensors weights, a missing or truncated file, or a header or index that is wrong.
    """
    files, index = _find_files(folder)
    tensors: dict[str, TensorEntry] = {}
    digest = hashlib.sha256()
    for number, path in enumerate(files):
        header, data_start, raw = _read_header(path)
        digest.update(f"{path.name}:{path.stat().st_size}:".encode() + raw)
        entries = {name: _entry(path, number, data_start, name, entry) for name, entry in header.items()}
        _check_places(path, data_start, entries)
        for name, entry in entries.items():
            if name not in tensors or index.get(name) == path.name:  # of several, the one that the index names
                tensors[name] = entry
    for name, file_name in index.items():
        if name not in tensors or files[tensors[name].file] != folder / file_name:
            raise CheckpointError(f"{folder / _INDEX}: says that {name} is in {file_name}, which does not hold it")
    return Headers(files=files, tensors=tensors, digest=digest.hexdigest())


def _find_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    single, index_path = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return (single,), {}
    if not index_path.is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder}: its weights are pickle files ({pickles[0]}); convert them to safetensors "
                "(save_pretrained) first"
            )
        raise CheckpointError(f"{folder}: no weights: neither {_SINGLE} nor {_INDEX} is there")
    try:
        index = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(index.values()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index_path}: not a safetensors index with a weight_map: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index_path}: {name!r} is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, but {_INDEX} lists it")
    if not names:
        raise CheckpointError(f"{index_path}: its weight_map is empty")
    return tuple(folder / name for name in names), index


def _read_header(path: Path) -> tuple[dict[str, Any], int, bytes]:
    """Header without `__metadata__`, byte where the tensors begin, the header's raw bytes."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or 8 + length > size or length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: not a whole safetensors file: {size} bytes found, its header alone needs {8 + length}"
                    if len(start) == 8 and length <= _MAX_HEADER_BYTES
                    else f"{path}: not a safetensors file ({size} bytes)"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((_whole(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path}: its safetensors header is damaged: {error!r}") from None
    expected = 8 + length + end
    if size != expected:
        word = "truncated" if size < expected else "too long"
        raise CheckpointError(f"{path}: {word}: {size} bytes found, {expected} expected from its header")
    return header, 8 + length, raw


def _entry(path: Path, file: int, data_start: int, name: str, entry: dict[str, Any]) -> TensorEntry:
    try:
        begin, end = (_whole(value) for value in entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), tuple(_whole(size) for size in entry["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: header entry of {name} is damaged: {error!r}") from None
    expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if begin < 0 or end < begin or (dtype in ITEM_BYTES and end - begin != expected):
        raise CheckpointError(f"{path}: {name} has {end - begin} bytes, {expected} expected for {dtype} {list(shape)}")
    return TensorEntry(file=file, offset=data_start + begin, nbytes=end - begin, dtype=dtype, shape=shape)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number of at least 0")
    return value


def _check_places(path: Path, data_start: int, entries: dict[str, TensorEntry]) -> None:
    """As the format demands, the tensors follow each other without gap or overlap."""
    at, before = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != at:
            word = "overlaps" if entry.offset < at else "leaves a gap after"
            raise CheckpointError(f"{path}: its safetensors header is damaged: {name} {word} {before}")
        at, before = entry.offset + entry.nbytes, name
