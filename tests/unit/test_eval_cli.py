"""`seqmoe eval` end to end on synthetic traces."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.routing import routed, routed_trace

from seqmoe.autotune.main import LAZY
from seqmoe.predictors.eval_cli import eval_command
from seqmoe.predictors.routers import save_routers
from seqmoe.predictors.trace_file import write_trace


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "t.safetensors"
    write_trace(path, routed_trace(0, lengths=(30,) * 24))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(eval_command, list(arguments))


def last_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


SPLIT = ("--sequences", "20:24", "--fit-sequences", "0:16")


def test_several_predictors_with_calibration_and_a_plot(traces: Path, tmp_path: Path) -> None:
    plot = tmp_path / "eval.png"
    options = ("--horizon", "3", "--calibrate-sequences", "16:20", "--plot", str(plot), "--json")
    found = last_json(run("--traces", str(traces), "--predictor", "last,popularity,token", *SPLIT, *options))
    by_name = {row["predictor"]: row for row in found["predictors"]}
    assert list(by_name) == ["last", "popularity", "token"]
    assert found["recall_at"] == by_name["last"]["recall_at"] and set(found["recall_at"]) >= {"2", "5"}
    assert set(found["recall_at_step"]) == {"1", "2", "3"} and found["steps"] == 120
    assert by_name["token"]["with_tokens"] and not by_name["last"]["with_tokens"]
    assert by_name["token"]["brier_skill"][0] == pytest.approx(0)
    assert by_name["popularity"]["brier_skill"][0] < 0 and by_name["popularity"]["brier_reference"] == "token"
    assert all(row["worst_sum_error"] < 0.02 and row["calibrated"] for row in by_name.values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    without = last_json(run("--traces", str(traces), "--predictor", "token", "--no-tokens", *SPLIT, "--json"))
    assert without["recall_at"] == pytest.approx(by_name["popularity"]["recall_at"])


def test_the_table_names_every_predictor(traces: Path) -> None:
    result = run("--traces", str(traces), "--predictor", "within,oracle", *SPLIT, "--horizon", "2")
    assert result.exit_code == 0, result.output
    assert "within" in result.stdout and "oracle" in result.stdout and "skill, token" in result.stdout


def test_shuffled_steps_leave_the_last_step_nothing(traces: Path) -> None:
    plain = last_json(run("--traces", str(traces), "--predictor", "nearest-step", *SPLIT, "--json"))
    shuffled = last_json(run("--traces", str(traces), "--predictor", "nearest-step", *SPLIT, "--shuffle", "--json"))
    again = last_json(run("--traces", str(traces), "--predictor", "nearest-step", *SPLIT, "--shuffle", "--json"))
    assert shuffled["shuffled"] and shuffled["recall_at"] == again["recall_at"] != plain["recall_at"]


def test_within_the_step_from_router_inputs(tmp_path: Path) -> None:
    trace, routers = routed(0, lengths=(30,) * 8)
    path, weights = tmp_path / "t.safetensors", tmp_path / "routers.safetensors"
    write_trace(path, trace)
    save_routers(weights, routers)
    options = ("--sequences", "6:8", "--fit-sequences", "0:6", "--routers", str(weights), "--depth", "2", "--json")
    found = last_json(run("--traces", str(path), "--predictor", "next-router,specprefetch", *options))
    for row in found["predictors"]:
        assert set(row["recall_at_layers_ahead"]) == {"1", "2"} and 0 < row["recall_at"]["2"] <= 1
    result = run("--traces", str(path), "--predictor", "next-router")
    assert result.exit_code == 2 and "next-router needs --routers" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--predictor", "lst"), "neither a folder nor a known predictor; did you mean 'last'?"),
        (("--predictor", "last"), "predictor last must be fitted: give --fit-sequences"),
        (("--predictor", " , "), "--predictor is empty"),
        (("--predictor", "last", "--sequences", "90"), "sequence 90 is not in the trace, which has 24"),
        (
            ("--predictor", "last", "--sequences", "2:9", "--fit-sequences", "0:4"),
            "sequence 2 is among --sequences too",
        ),
        (("--predictor", "last", "--fit-sequences", "0:4"), "--fit-sequences needs --sequences"),
        (("--predictor", "last", "--save-calibration"), "--save-calibration needs --calibrate-sequences"),
        (("--predictor", "next-router"), "needs a trace with router inputs, this one has none"),
    ],
)
def test_what_is_wrong_is_said(traces: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("--traces", str(traces), *arguments)
    assert result.exit_code == 2 and message in result.output, result.output


def test_the_commands_are_registered_and_have_examples() -> None:
    assert LAZY["eval"][0] == "seqmoe.predictors.eval_cli:eval_command" and "trace" in LAZY
    result = run("--help")
    assert result.exit_code == 0 and "Examples:" in result.output and "recall_at_step" in result.output
