"""Trace files: what is written comes back, only what is sliced is read, and a bad file is named by field."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.routing import routed_trace

from seqmoe.predictors.trace import Trace, TraceMeta
from seqmoe.predictors.trace_file import TraceWriter, open_trace, parse_sequences, read_trace, write_trace
from seqmoe.profiles.errors import UsageError

TRACE = routed_trace(router_inputs=True)


def same(a: Trace, b: Trace) -> None:
    assert a.num_experts == b.num_experts
    for name in ("expert_ids", "expert_weights", "tokens", "router_inputs", "seq_start", "seq_len"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            np.testing.assert_array_equal(one, other, err_msg=name)


def written(folder: Path, trace: Trace = TRACE) -> Path:
    path = folder / "trace.safetensors"
    write_trace(path, trace)
    return path


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path)
    back = read_trace(path)
    same(back, TRACE)
    assert back.meta == TraceMeta("abc123", "synthetic", "seed 0", str(path))
    parts = (TRACE.expert_ids, None, None, TRACE.seq_start, TRACE.seq_len, 8)
    bits = TRACE.router_inputs.view(np.uint16)  # type: ignore[union-attr]
    for small in (Trace(*parts), Trace(*parts, bits)):
        same(read_trace(written(tmp_path, small)), small)


def test_the_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    loaded = load_file(written(tmp_path))
    np.testing.assert_array_equal(loaded["expert_ids"], TRACE.expert_ids)
    np.testing.assert_array_equal(loaded["router_inputs"], TRACE.router_inputs)
    assert set(loaded) == {"seq_start", "seq_len", "tokens", "expert_weights", "expert_ids", "router_inputs"}


def test_slices_are_views_of_the_file_and_equal_select(tmp_path: Path) -> None:
    file = open_trace(written(tmp_path))
    assert (file.num_sequences, file.shape) == (3, (36, 3, 2))
    for chosen in ([1], [1, 2], [2, 0]):
        same(file.trace(chosen), TRACE.select(chosen))
    part = file.trace([1, 2])
    for name in ("expert_ids", "router_inputs", "expert_weights"):
        assert np.shares_memory(getattr(part, name), file.arrays[name]), name
    assert file.arrays["router_inputs"].flags.aligned and file.arrays["expert_weights"].flags.aligned
    for bad in ([3], [-1], []):
        with pytest.raises(UsageError, match=re.escape(str(file.path))):
            file.trace(bad)


def test_an_error_in_one_sequence_does_not_spoil_the_others(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    at = start + header["expert_ids"]["data_offsets"][0] + (12 * 3) * 2 * 2  # the first id of sequence 1
    raw[at : at + 2] = (77).to_bytes(2, "little")
    path.write_bytes(raw)
    same(read_trace(path, [0, 2]), TRACE.select([0, 2]))
    with pytest.raises(UsageError, match=r"expert_ids\[0, 0, 0\] is 77, not in 0 to 7 \(rows from 12 on\)"):
        read_trace(path, [1])


def test_router_inputs_are_read_as_float32_and_by_layer(tmp_path: Path) -> None:
    back = read_trace(written(tmp_path))
    np.testing.assert_array_equal(back.router_input(1, slice(3, 6)), TRACE.router_inputs[3:6, 1].astype(np.float32))  # type: ignore[index]
    bits = (np.array([1.5, -2.0, 0.0], dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = np.zeros((2, 1, 1), dtype=np.int16)
    brain = Trace(ids, None, None, np.array([0]), np.array([2]), 2, np.tile(bits, (2, 1, 1)))
    assert brain.router_input(0).tolist() == [[1.5, -2.0, 0.0]] * 2
    wrong = Trace(ids, None, None, np.array([0]), np.array([2]), 2, np.full((2, 1, 3), np.nan, dtype=np.float16))
    with pytest.raises(UsageError, match="router_inputs of layer 0 hold values that are not finite"):
        wrong.router_input(0)
    with pytest.raises(UsageError, match="router_inputs are not in this trace"):
        routed_trace().router_input(0)


def test_a_trace_of_another_model_is_named(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path))
    trace.check_model("abc123", 3, 8, 2)
    trace.check_model("", 3, 8, 2)
    for arguments, message in (
        (("abc123", 4, 8, 2), "layers is 3, expected 4"),
        (("abc123", 3, 16, 2), "experts is 8, expected 16"),
        (("abc123", 3, 8, 4), "k is 2, expected 4"),
        (
            ("def", 3, 8, 2),
            "model_digest is abc123, expected def: a trace of another model (it was made for synthetic)",
        ),
    ):
        with pytest.raises(UsageError, match=re.escape(f"{tmp_path / 'trace.safetensors'}: {message}")):
            trace.check_model(*arguments)


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def edit(raw: bytes) -> bytes:
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        change(header)
        packed = json.dumps(header).encode()
        return len(packed).to_bytes(8, "little") + packed + raw[start:]

    return edit


def field(name: str, key: str, value: Any) -> Callable[[bytes], bytes]:
    return edited(lambda header: header[name].__setitem__(key, value))


def tensor(name: str, index: int, value: bytes) -> Callable[[bytes], bytes]:
    def edit(raw: bytes) -> bytes:
        start = 8 + int.from_bytes(raw[:8], "little")
        at = start + json.loads(raw[8:start])[name]["data_offsets"][0] + index * len(value)
        return raw[:at] + value + raw[at + len(value) :]

    return edit


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", "0 bytes are not a safetensors file"),
    "cut in the header": (lambda raw: raw[:100], "cut off within its header (100 bytes of at least"),
    "cut in the data": (lambda raw: raw[:-10], "cut off within router_inputs:"),
    "not safetensors": (lambda raw: b"PK\x03\x04\xff\xff\xff\xff" + raw, "not a safetensors file (its header would"),
    "header no JSON": (lambda raw: raw[:8] + b"x" + raw[9:], "not a safetensors file (its header is not JSON)"),
    "another format": (field("__metadata__", "format", "pt"), "__metadata__.format is 'pt', expected 'seqmoe-trace'"),
    "another version": (field("__metadata__", "version", "9"), "__metadata__.version is '9', expected '1'"),
    "no experts": (field("__metadata__", "num_experts", "x"), "__metadata__.num_experts is 'x', expected a number"),
    "ids missing": (edited(lambda header: header.pop("expert_ids")), "tensor expert_ids is missing"),
    "ids of floats": (field("expert_ids", "dtype", "F16"), "expert_ids has dtype F16, expected I16 or U8"),
    "ids flat": (field("expert_ids", "shape", [36, 6]), "expert_ids has shape [36, 6], expected [steps, layers, k]"),
    "shape too large": (field("tokens", "shape", [37]), "tokens has 144 bytes, expected 148 for (37,)"),
    "entry damaged": (field("tokens", "data_offsets", [-4, 0]), "the header's entry for tokens is damaged"),
    "fewer experts": (field("__metadata__", "num_experts", "4"), ", not in 0 to 3"),
    "id too high": (tensor("expert_ids", 5, (9).to_bytes(2, "little")), "expert_ids[0, 2, 1] is 9, not in 0 to 7"),
    "nan weight": (
        tensor("expert_weights", 7, np.float32("nan").tobytes()),
        "expert_weights[1, 0, 1] is nan, must be finite",
    ),
    "one step": (tensor("seq_len", 1, (1).to_bytes(8, "little")), "seq_len[1] is 1: a sequence needs at least 2 steps"),
    "empty sequence": (tensor("seq_len", 0, (0).to_bytes(8, "little")), "seq_len[0] is 0: a sequence needs at least 2"),
    "beyond the end": (
        tensor("seq_len", 2, (99).to_bytes(8, "little")),
        "sequence 2 is rows 21 to 119, expert_ids has",
    ),
    "a gap": (tensor("seq_len", 0, (11).to_bytes(8, "little")), "seq_start and seq_len do not tile the 36 steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(tmp_path: Path, case: str) -> None:
    path = written(tmp_path)
    change, message = BAD[case]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value), str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.safetensors: no such trace file"):
        read_trace(tmp_path / "nothing.safetensors")


def test_a_writer_makes_what_write_trace_makes(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "grown.safetensors", 8, TRACE.meta)
    for i in range(3):
        writer.add(TRACE.sequence(i), key=f"prompt {i}")
    assert writer.finish() == tmp_path / "grown.safetensors"
    assert (tmp_path / "grown.safetensors").read_bytes() == written(tmp_path).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grown.safetensors", "trace.safetensors"]


def test_a_killed_writer_resumes_with_the_finished_sequences(tmp_path: Path) -> None:
    path = tmp_path / "grown.safetensors"
    writer = TraceWriter(path, 8, TRACE.meta)
    writer.add(TRACE.sequence(0), key="a")
    writer.add(TRACE.sequence(1), key="b")
    # killed while writing the third: data without a line, and half a line
    with (writer.parts / "expert_ids.raw").open("ab") as file:
        file.write(b"\x01" * 13)
    with (writer.parts / "journal.jsonl").open("ab") as file:
        file.write(b'{"key": "c", "ste')
    with pytest.raises(UsageError, match="an unfinished collection is there; resume it, or delete"):
        TraceWriter(path, 8, TRACE.meta)
    with pytest.raises(UsageError, match=r"model_digest is abc123, expected other"):
        TraceWriter(path, 8, TraceMeta("other"), resume=True)
    with pytest.raises(UsageError, match=r"num_experts is 8, expected 9"):
        TraceWriter(path, 9, TRACE.meta, resume=True)
    again = TraceWriter(path, 8, TRACE.meta, resume=True)
    assert again.done == ["a", "b"]
    again.add(TRACE.sequence(2), key="c")
    again.finish()
    same(read_trace(path), TRACE)


def test_a_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.safetensors", 8)
    with pytest.raises(UsageError, match="no sequence was added"):
        writer.finish()
    with pytest.raises(UsageError, match="must be one sequence of at least 2 steps, got 3 with 36"):
        writer.add(TRACE)
    writer.add(TRACE.sequence(0))
    with pytest.raises(UsageError, match="those before it have"):
        writer.add(routed_trace().sequence(0))
    with pytest.raises(UsageError, match="num_experts is 9, expected 8"):
        parts = (TRACE.expert_ids[:4], TRACE.expert_weights[:4], TRACE.tokens[:4])  # type: ignore[index]
        writer.add(Trace(*parts, np.array([0]), np.array([4]), 9, TRACE.router_inputs[:4]))  # type: ignore[index]
    # shorter than the journal says: a disk that lost data
    (writer.parts / "expert_ids.raw").write_bytes(b"")
    with pytest.raises(UsageError, match="shorter than its journal says"):
        TraceWriter(writer.path, 8, resume=True)


def test_shuffling_keeps_each_sequences_steps() -> None:
    shuffled = TRACE.shuffled(0)
    assert not np.array_equal(shuffled.expert_ids, TRACE.expert_ids)
    for i in range(3):
        a, b = TRACE.sequence(i), shuffled.sequence(i)
        order = [int(np.flatnonzero((a.router_inputs == row).all(axis=(1, 2)))[0]) for row in b.router_inputs]  # type: ignore[union-attr]
        assert sorted(order) == list(range(a.num_steps))
        np.testing.assert_array_equal(b.expert_ids, a.expert_ids[order])
        assert a.tokens is not None and b.tokens is not None
        np.testing.assert_array_equal(b.tokens, a.tokens[order])
    np.testing.assert_array_equal(TRACE.shuffled(0).expert_ids, shuffled.expert_ids)


def test_sequences_are_parsed() -> None:
    assert parse_sequences("2:5") == [2, 3, 4]
    assert parse_sequences("7, 1:3") == [7, 1, 2]
    for bad in ("", "a", "3:", ":3", "5:5", "-1", "1:2:3"):
        with pytest.raises(UsageError, match="--these takes numbers and ranges such as 288:321"):
            parse_sequences(bad, "--these")


def test_sequences_are_written_in_the_order_asked_for(tmp_path: Path) -> None:
    trace = routed_trace(5, router_inputs=True)
    writer = TraceWriter(tmp_path / "t.safetensors", trace.num_experts, trace.meta)
    for i in (2, 0, 1):
        writer.add(trace.sequence(i), str(i))
    writer.finish(["0", "1", "2"])
    write_trace(tmp_path / "whole.safetensors", trace)
    assert (tmp_path / "t.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
