"""Safetensors headers and indices that lie are refused by name before anything is read or allocated by them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.headers import read_headers


def write(path: Path, header: Any, data_bytes: int) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data_bytes))


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, 12, "b overlaps a"),
        ({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, 8, "b overlaps a"),
        ({"a": tensor(0, 8, [2]), "b": tensor(12, 20, [2])}, 20, "b leaves a gap after a"),
        ({"a": tensor(4, 12, [2])}, 12, "a leaves a gap after the header"),
        ({"a": tensor(0, 8, [-1, -2])}, 8, "-1 is no whole number"),
        ({"a": tensor(-8, 0, [2])}, 0, "-8 is no whole number"),
        ({"a": tensor(0, 8, [2.5])}, 8, "2.5 is no whole number"),
        ({"a": tensor(0, 8, [True, 2])}, 8, "True is no whole number"),
        ({"a": tensor(0, 8, [3])}, 8, "a has 8 bytes, 12 expected"),
        ({"a": tensor(0, 1 << 70, [1 << 68])}, 8, "truncated"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, Infinity]}}', 8, "inf is no whole number"),
        (b"[" * 200_000, 0, "header is damaged"),
        (b"\xff\xfe" * 8, 0, "header is damaged"),
        ({"a": None}, 0, "header is damaged"),
        ([], 0, "header is damaged"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: Any, data_bytes: int, message: str) -> None:
    write(tmp_path / "model.safetensors", header, data_bytes)
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_headers(tmp_path)
    assert "model.safetensors" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("length", [1 << 63, 100_000_001, 4096])
def test_a_header_longer_than_its_file(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match="not a"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", 5, None, ["a"], {}])
def test_an_index_that_names_what_is_not_in_the_folder(tmp_path: Path, name: Any) -> None:
    write(tmp_path / "model.safetensors", {"a": tensor(0, 8, [2])}, 8)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"not a file of this folder|not a safetensors index"):
        read_headers(folder)


def test_a_tensor_in_two_files_is_the_one_that_the_index_names(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": tensor(0, 8, [2]), "b": tensor(8, 16, [2])}, 16)
    write(tmp_path / "2.safetensors", {"a": tensor(0, 4, [1])}, 4)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"says that c is in 2.safetensors, which does not hold it"):
        read_headers(tmp_path)
    write(tmp_path / "2.safetensors", {"a": tensor(0, 4, [1]), "c": tensor(4, 8, [1])}, 8)
    found = read_headers(tmp_path)
    assert found.files[found.tensors["a"].file].name == "1.safetensors" and found.tensors["a"].shape == (2,)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"says that b is in 2.safetensors"):
        read_headers(tmp_path)
