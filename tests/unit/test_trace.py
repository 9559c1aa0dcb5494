"""Reading routing traces: what a good one gives, and that a bad one is named by file, field and place."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqmoe.predictors.trace import Trace, read_npz
from seqmoe.profiles.errors import UsageError

STEPS, LAYERS, EXPERTS, TOP_K = 7, 2, 5, 2


def good() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((STEPS, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)
    ids[0, 0] = [4, 1]
    probs = np.tile(np.array([0.75, 0.25], dtype=np.float16), (STEPS, LAYERS, 1))
    return {
        "expert_ids": ids,
        "expert_probs": probs,
        "token": np.arange(STEPS, dtype=np.int32),
        "seq_start": np.array([0, 4]),
        "seq_len": np.array([4, 3]),
    }


def write(folder: Path, arrays: dict[str, Any]) -> Path:
    path = folder / "routing.npz"
    np.savez(path, **arrays)
    return path


def test_reads_what_was_written(tmp_path: Path) -> None:
    arrays = good()
    trace = read_npz(write(tmp_path, arrays))
    assert (trace.num_steps, trace.num_layers, trace.top_k, trace.num_experts) == (STEPS, LAYERS, TOP_K, EXPERTS)
    assert trace.num_sequences == 2
    assert trace.expert_ids.dtype == np.int16 and np.array_equal(trace.expert_ids, arrays["expert_ids"])
    assert trace.expert_weights is not None and trace.expert_weights.dtype == np.float16
    assert trace.tokens is not None and trace.tokens.dtype == np.int32 and trace.tokens.tolist() == list(range(STEPS))
    assert (trace.seq_start.tolist(), trace.seq_len.tolist()) == ([0, 4], [4, 3])
    for array in (trace.expert_ids, trace.expert_weights, trace.tokens, trace.seq_start, trace.seq_len):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_weights_and_tokens_may_be_absent(tmp_path: Path) -> None:
    arrays = good()
    del arrays["expert_probs"], arrays["token"]
    trace = read_npz(write(tmp_path, arrays))
    assert trace.expert_weights is None and trace.tokens is None
    assert trace.sequence(1).expert_weights is None and trace.select([1]).tokens is None


def test_number_of_experts_is_given_or_in_the_file_or_the_highest_id(tmp_path: Path) -> None:
    arrays = good()
    assert read_npz(write(tmp_path, arrays)).num_experts == 5
    assert read_npz(write(tmp_path, arrays), num_experts=8).num_experts == 8
    assert read_npz(write(tmp_path, {**arrays, "num_experts": np.array(6)})).num_experts == 6


def test_sequence_and_select(tmp_path: Path) -> None:
    arrays = good()
    trace = read_npz(write(tmp_path, arrays))
    second = trace.sequence(1)
    assert np.array_equal(second.expert_ids, arrays["expert_ids"][4:7])
    assert np.shares_memory(second.expert_ids, trace.expert_ids)
    assert (second.seq_start.tolist(), second.seq_len.tolist()) == ([0], [3])
    assert second.tokens is not None and second.tokens.tolist() == [4, 5, 6]
    swapped = trace.select([1, 0])
    assert swapped.tokens is not None and swapped.tokens.tolist() == [4, 5, 6, 0, 1, 2, 3]
    assert (swapped.seq_start.tolist(), swapped.seq_len.tolist()) == ([0, 3], [3, 4])
    one = trace.layer(1)
    assert one.num_layers == 1 and np.array_equal(one.expert_ids[:, 0], arrays["expert_ids"][:, 1])
    for call in (lambda: trace.sequence(2), lambda: trace.select([0, -1]), lambda: trace.layer(2)):
        with pytest.raises(UsageError, match="is not in the trace, which has 2"):
            call()
    with pytest.raises(UsageError, match="at least one sequence"):
        trace.select([])


def test_rows_outside_sequences_are_left_out(tmp_path: Path) -> None:
    arrays = {**good(), "seq_start": np.array([4, 1]), "seq_len": np.array([3, 2])}
    trace = read_npz(write(tmp_path, arrays))
    assert trace.tokens is not None and trace.tokens.tolist() == [4, 5, 6, 1, 2]
    assert (trace.seq_start.tolist(), trace.seq_len.tolist()) == ([0, 3], [3, 2])
    assert np.array_equal(trace.expert_ids[3], arrays["expert_ids"][1])


def test_popularity_and_overlap() -> None:
    ids = np.array([[[0, 1]], [[1, 2]], [[0, 2]], [[1, 3]]], dtype=np.int16)
    trace = Trace(ids, None, None, np.array([0, 3]), np.array([3, 1]), 4)
    assert trace.popularity().tolist() == [2, 3, 2, 1]
    assert trace.overlap() == pytest.approx((1 + 1) / 2 / 2)  # 1 of 2, 1 of 2; with row 3 a new sequence begins
    assert trace.flat_ids().shape == (4, 1, 2)
    two = Trace(np.concatenate([ids, ids], axis=1), None, None, np.array([0]), np.array([4]), 4)
    assert two.flat_ids()[0].tolist() == [[0, 1], [4, 5]]
    with pytest.raises(UsageError, match="overlap needs a sequence of at least 2 steps"):
        trace.sequence(1).overlap()


def changed(key: str, index: Any, value: Any, dtype: Any = None) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        arrays = good()
        array = arrays[key] if dtype is None else arrays[key].astype(dtype)
        array[index] = value
        return {**arrays, key: array, "num_experts": np.array(EXPERTS)}

    return make


def replaced(**values: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {key: value for key, value in {**good(), **values}.items() if value is not None}


IDS = good()["expert_ids"]
BAD = {
    "id too high": (changed("expert_ids", (3, 1, 0), 5), "expert_ids[3, 1, 0] is 5, not in 0 to 4"),
    "id negative": (changed("expert_ids", (2, 0, 1), -1, np.int64), "expert_ids[2, 0, 1] is -1, not in 0 to 4"),
    "id over int16": (changed("expert_ids", (2, 0, 1), 70000, np.int64), "expert_ids[2, 0, 1] is 70000"),
    "id twice": (changed("expert_ids", (6, 1), 3), "expert_ids[6, 1] names an expert twice: [3, 3]"),
    "ids of floats": (
        replaced(expert_ids=IDS.astype(float)),
        "expert_ids must be integers of shape [steps, layers, k]",
    ),
    "ids flat": (replaced(expert_ids=IDS[:, 0]), "expert_ids must be integers of shape [steps, layers, k], got uint8"),
    "no layers": (replaced(expert_ids=IDS[:, :0]), "expert_ids is empty: shape [7, 0, 2]"),
    "no steps": (
        replaced(expert_ids=IDS[:0], expert_probs=None, token=None),
        "sequence 0 is rows 0 to 3, expert_ids has rows 0 to -1",
    ),
    "nan weight": (changed("expert_probs", (5, 1, 1), np.nan), "expert_weights[5, 1, 1] is nan, must be finite"),
    "infinite weight": (changed("expert_probs", (0, 0, 0), np.inf), "expert_weights[0, 0, 0] is inf, must be finite"),
    "negative weight": (changed("expert_probs", (0, 1, 0), -0.5), "expert_weights[0, 1, 0] is -0.5, must be finite"),
    "weights of integers": (
        replaced(expert_probs=IDS),
        "expert_weights must be an array of floating values, got uint8",
    ),
    "weights of other k": (
        replaced(expert_probs=good()["expert_probs"][:, :, :1]),
        "expert_weights has shape [7, 2, 1], expert_ids has [7, 2, 2]",
    ),
    "weights too few": (replaced(expert_probs=good()["expert_probs"][:5]), "expert_probs has shape [5, 2, 2]"),
    "tokens too many": (replaced(token=np.arange(9)), "token has shape [9], expert_ids has 7 steps"),
    "tokens of floats": (replaced(token=np.ones(7)), "tokens must be an array of integer values, got float64"),
    "tokens in a table": (replaced(token=np.ones((7, 2), int)), "tokens has shape [7, 2], expert_ids has 7 steps"),
    "no ids": (replaced(expert_ids=None), "array expert_ids is missing"),
    "no starts": (replaced(seq_start=None), "array seq_start is missing"),
    "no lengths": (replaced(seq_len=None), "array seq_len is missing"),
    "nothing known": (lambda: {"other": np.ones(3)}, "of the known ones the file has none"),
    "empty sequence": (replaced(seq_len=np.array([4, 0])), "seq_len[1] is 0: a sequence needs at least 2 steps"),
    "one-step sequence": (replaced(seq_len=np.array([1, 3])), "seq_len[0] is 1: a sequence needs at least 2 steps"),
    "negative length": (replaced(seq_len=np.array([4, -3])), "seq_len[1] is -3: a sequence needs at least 2 steps"),
    "past the end": (replaced(seq_len=np.array([4, 4])), "sequence 1 is rows 4 to 7, expert_ids has rows 0 to 6"),
    "before the start": (replaced(seq_start=np.array([-1, 4])), "sequence 0 is rows -1 to 2"),
    "overlapping": (
        replaced(seq_start=np.array([0, 3])),
        "sequences 0 and 1 overlap: 1 starts at row 3, 0 ends with row 3",
    ),
    "unequal tables": (replaced(seq_len=np.array([4])), "seq_start has 2 entries, seq_len has 1"),
    "no sequences": (replaced(seq_start=np.array([], int), seq_len=np.array([], int)), "seq_len is empty"),
    "lengths of floats": (replaced(seq_len=np.array([4.0, 3.0])), "seq_len must be integers of shape [sequences]"),
    "fewer experts": (replaced(num_experts=np.array(3)), "not in 0 to 2"),
    "fewer experts than k": (replaced(num_experts=np.array(1)), "expert_ids chooses k=2 experts of 1"),
    "no experts": (replaced(num_experts=np.array(0)), "num_experts must be 1 to 32768, got 0"),
    "experts as text": (replaced(num_experts=np.array("32")), "num_experts must be one integer, got <U2"),
    "pickled": (replaced(token=np.array([{}] * 7, dtype=object)), "array token cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_named(tmp_path: Path, case: str) -> None:
    make, message = BAD[case]
    path = write(tmp_path, make())
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_npz(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    path = write(tmp_path, good())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UsageError, match="not a complete .npz file") as caught:
        read_npz(path)
    assert str(path) in str(caught.value)


def test_every_flipped_byte_is_named_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    np.savez_compressed(path, **good())
    data = path.read_bytes()
    reference = read_npz(path)
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            trace = read_npz(path)
        except UsageError as error:
            assert str(error).startswith(str(path))
        else:  # a byte that carries no data, or the name of an optional array
            assert np.array_equal(trace.expert_ids, reference.expert_ids)


def test_not_an_npz_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such trace file"):
        read_npz(tmp_path / "missing.npz")
    with pytest.raises(UsageError, match="no such trace file"):
        read_npz(tmp_path)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(UsageError, match="not a complete .npz file"):
        read_npz(tmp_path / "array.npy")


@pytest.mark.parametrize(
    ("start", "length"), [([0], [6]), ([1], [7]), ([0, 4], [4, 4]), ([0, 3], [4, 3]), ([0, 7], [7, 0]), ([], [])]
)
def test_sequences_must_tile_the_steps(start: list[int], length: list[int]) -> None:
    with pytest.raises(UsageError, match="seq_len"):
        Trace(IDS, None, None, np.array(start, dtype=np.int64), np.array(length, dtype=np.int64), EXPERTS)


def test_a_list_is_not_an_array() -> None:
    with pytest.raises(UsageError, match="expert_ids must be an array of integer values, got list"):
        Trace([[[0]]], None, None, np.array([0]), np.array([1]), 1)  # type: ignore[arg-type]
