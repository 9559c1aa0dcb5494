"""Importing traces, and the `seqmoe trace` commands."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.routing import routed_trace

from seqmoe.predictors.trace_cli import trace_group
from seqmoe.predictors.trace_file import read_trace, write_trace
from seqmoe.predictors.trace_import import import_trace
from seqmoe.predictors.trace_stats import overlap_by_layer, trace_stats
from seqmoe.profiles.errors import UsageError

LINES: list[dict[str, Any]] = [
    {"experts": [[[3, 1], [0, 4]], [[3, 2], [4, 2]]], "weights": [[[0.7, 0.3], [1, 0]], [[0.9, 0.1], [0.5, 0.5]]]},
    {"experts": [[[0, 1], [1, 0]], [[1, 0], [0, 1]], [[2, 3], [3, 4]]], "weights": [[[0.5, 0.5]] * 2] * 3},
]


def jsonl(folder: Path, lines: list[Any]) -> Path:
    path = folder / "routing.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_json_lines(tmp_path: Path) -> None:
    trace = import_trace(jsonl(tmp_path, [LINES[0], "", LINES[1]]))
    assert (trace.num_sequences, trace.num_steps, trace.num_layers, trace.top_k, trace.num_experts) == (2, 5, 2, 2, 5)
    assert trace.expert_ids[1].tolist() == [[3, 2], [4, 2]]
    assert trace.expert_weights is not None and trace.expert_weights[0, 0].tolist() == pytest.approx([0.7, 0.3])
    assert trace.tokens is None
    with_tokens = [{"experts": line["experts"], "tokens": list(range(len(line["experts"])))} for line in LINES]
    tokens = import_trace(jsonl(tmp_path, with_tokens), num_experts=16)
    assert tokens.tokens is not None and tokens.tokens.tolist() == [0, 1, 0, 1, 2] and tokens.num_experts == 16


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not JSON"),
    "no object": ("[1]", 'expected an object with "experts"'),
    "unknown field": ({**LINES[0], "expert": 1}, "unknown field 'expert'"),
    "ragged": (
        {**LINES[0], "experts": [[[1, 2]], [[1]]]},
        "experts must be whole numbers nested as [steps][layers][k]",
    ),
    "floats": ({**LINES[0], "experts": [[[1.5, 2]], [[1, 2]]]}, "experts must be whole numbers nested"),
    "one step": ({"experts": LINES[0]["experts"][:1], "weights": LINES[0]["weights"][:1]}, "experts has 1 step"),
    "other layers": (
        {"experts": [[[1, 2]], [[1, 2]]], "weights": []},
        "experts has [layers, k] = [1, 2], expected [2, 2]",
    ),
    "weights differ": ({**LINES[0], "weights": [[[1, 0]]]}, "weights has shape [1, 1, 2], expected [2, 2, 2]"),
    "no weights": ({"experts": LINES[0]["experts"]}, "has experts; the lines before it have"),
    "nan": (json.dumps(LINES[0]).replace("0.7", "NaN"), "expert_weights[0, 0, 0] is nan, must be finite"),
    "negative id": (json.dumps(LINES[0]).replace("[3, 2]", "[-3, 2]"), "expert_ids[1, 0, 0] is -3, not in 0 to"),
    "twice": (json.dumps(LINES[0]).replace("[3, 2]", "[2, 2]"), "expert_ids[1, 0] names an expert twice: [2, 2]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named(tmp_path: Path, case: str) -> None:
    line, message = BAD[case]
    path = jsonl(tmp_path, [LINES[0], line])
    with pytest.raises(UsageError) as caught:
        import_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value), str(caught.value)


def test_ids_beyond_the_given_experts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"routing\.jsonl:1: expert_ids\[0, 1, 1\] is 4, not in 0 to 3"):
        import_trace(jsonl(tmp_path, LINES), num_experts=4)
    with pytest.raises(UsageError, match="no sequence in it"):
        import_trace(jsonl(tmp_path, []))
    (tmp_path / "x.csv").write_text("")
    with pytest.raises(UsageError, match=re.escape("unknown kind of trace; .npz, .jsonl and .safetensors")):
        import_trace(tmp_path / "x.csv")


def test_stats_of_a_case_worked_by_hand(tmp_path: Path) -> None:
    trace = import_trace(jsonl(tmp_path, LINES))
    # layer 0: {3,1} -> {3,2} 1 of 2; {0,1} -> {1,0} 2 of 2 -> {2,3} 0 of 2; layer 1: 1, 2, 0 + nothing... by hand:
    # {0,4} -> {4,2} 1; {1,0} -> {0,1} 2; {0,1} -> {3,4} 0
    assert overlap_by_layer(trace).tolist() == pytest.approx([3 / 6, 3 / 6])
    stats = trace_stats(trace)
    assert stats.overlap == pytest.approx(trace.overlap())
    assert stats.popularity[0] == pytest.approx([0.2, 0.3, 0.2, 0.3, 0.0])
    assert stats.unused_experts == 1
    expected = -(2 * 0.2 * np.log2(0.2) + 2 * 0.3 * np.log2(0.3))
    assert stats.entropy_bits_by_layer[0] == pytest.approx(expected)
    lru = next(c for c in stats.curves if c.policy == "lru" and not c.pool)
    # two slots a layer: layer 0 hits 3, then 1 and 0; layer 1 hits 4, then 0 and 1: 6 of 20
    assert lru.slots[0] == 2 and lru.hit_rate[0] == pytest.approx(6 / 20)
    static = next(c for c in stats.curves if c.policy == "static" and not c.pool)
    assert static.hit_rate[0] == pytest.approx((6 + 6) / 20)
    with pytest.raises(UsageError, match="residency 0.1 of 5 experts is 0 a layer, must be 2"):
        trace_stats(trace, [0.1])


def test_import_and_stats_commands(tmp_path: Path) -> None:
    source, out = jsonl(tmp_path, LINES), tmp_path / "out.safetensors"
    runner = CliRunner()
    done = runner.invoke(trace_group, ["import", str(source), str(out), "--experts", "8", "--digest", "d1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["steps"], found["experts"], found["weights"], found["tokens"]) == (5, 8, True, False)
    trace = read_trace(out)
    assert trace.num_experts == 8 and trace.meta.model_digest == "d1" and trace.meta.source == "routing.jsonl"
    plot = tmp_path / "stats.png"
    done = runner.invoke(trace_group, ["stats", str(out), "--residency", "0.25,0.5", "--plot", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    stats = json.loads(done.stdout.splitlines()[-1])
    assert stats["sequences"] == 2 and len(stats["curves"]) == 6 and stats["curves"][0]["slots"] == [2, 4]
    assert plot.read_bytes().startswith(b"\x89PNG")
    done = runner.invoke(trace_group, ["stats", str(out)])
    assert done.exit_code == 0 and "mean overlap 0.500" in done.stdout


def test_commands_name_what_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    write_trace(out, routed_trace())
    runner = CliRunner()
    for arguments, message in (
        (["import", str(out), str(tmp_path / "t.npz")], "must end in .safetensors"),
        (["stats", str(out), "--residency", "half"], "--residency takes shares such as 0.25,0.44; got 'half'"),
        (["stats", str(out), "--sequences", "x"], "--sequences takes numbers and ranges"),
        (["stats", str(out), "--sequences", "7"], "sequence 7 is not in the trace, which has 3"),
        (["stats", str(tmp_path / "no.npz")], "no such trace file"),
    ):
        done = runner.invoke(trace_group, arguments)
        assert done.exit_code == 2 and message in done.output, done.output
    for command in ("import", "stats"):
        done = runner.invoke(trace_group, [command, "--help"])
        assert done.exit_code == 0 and "Examples:" in done.output
