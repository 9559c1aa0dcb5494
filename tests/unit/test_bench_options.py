"""What `seqmoe bench` takes: modes and what they need, options that become a job, jobs, sequences that are replayed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bench_runs import figures, random_trace, write_traces

from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import write_trace
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime import assemble, bench_cli, bench_options, measure
from seqmoe.runtime.bench import plan_arms
from seqmoe.runtime.bench_cli import bench_command
from seqmoe.runtime.bench_options import Given, check_given
from seqmoe.runtime.measure import in_batches
from seqmoe.runtime.policy import POLICIES, Changes, Plan, find_policy, plan_for
from seqmoe.runtime.replay import Replay
from seqmoe.runtime.replay_requests import requests_of

# --- what modes need -------------------------------------------------------------------------------------------------


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    write_traces(tmp_path)
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "predictor.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("modes", "given", "words"),
    [
        ("lru,seqmoe", {}, "mode seqmoe needs --predictor"),
        ("belady-f8", {}, "mode belady-f8 needs --predictor"),
        ("forecasts-without-transfers", {}, "needs --predictor"),
        ("seqmoe", {"predictor": "nearest-token"}, "--predictor nearest-token needs --fit"),
        ("seqmoe", {"predictor": "ridge"}, "--predictor ridge needs --fit"),
        ("seqmoe", {"predictor": "no/such"}, "neither a folder nor one of popularity"),
        ("seqmoe", {"predictor": "."}, "no predictor.json in it"),
        ("seqmoe", {"predictor": "oracle"}, "mode foresight"),
        ("seqmoe", {"predictor": "token+last", "fit": "fit.safetensors"}, "a pool has to be calibrated"),
        ("seqmoe", {"predictor": "next-router"}, "mode specprefetch"),
        ("belady", {}, "mode belady needs --replay"),
        ("belady-8", {}, "mode belady-8 needs --replay"),
        ("foresight", {}, "mode foresight needs --replay"),
        ("moe-infinity", {}, "mode moe-infinity needs --fit"),
        ("patterns", {"predictor": "trained"}, "mode patterns needs --fit"),
        ("previous-token", {}, "mode previous-token needs --fit"),
        ("specprefetch", {}, "needs adapters"),
        ("specprefetch", {"fit": "fit.safetensors"}, "needs adapters"),
        ("specprefetch", {"predictor": "trained"}, "needs adapters"),
        ("specprefetch", {"fit": "inputs.safetensors", "replay": "replay.safetensors"}, "not a replayed trace's"),
        ("lru,static", {"replay": "replay.safetensors"}, "mode static with --replay needs --fit"),
        ("prefill-hot", {"replay": "replay.safetensors"}, "mode prefill-hot with --replay needs --fit"),
        ("lru", {"sequences": "1"}, "--sequences says which of --replay's"),
        ("lru", {"fit_sequences": "1"}, "--fit-sequences says which of --fit's"),
        ("lru", {"replay": "replay.safetensors", "sequences": "2:9"}, "sequence 4 is not in the trace"),
        ("lru", {"replay": "replay.safetensors", "sequences": "a"}, "--sequences takes numbers"),
        ("lru", {"fit": "no.npz"}, "no such file"),
        ("lru", {"fit": "replay.safetensors", "replay": "replay.safetensors"}, "must keep them apart"),
        (
            "lru",
            {"fit": "replay.safetensors", "fit_sequences": "0:3", "replay": "replay.safetensors", "sequences": "2,3"},
            "sequence 2 is among --sequences too",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_anything_runs(
    modes: str, given: dict[str, str], words: str, traces: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(traces)
    monkeypatch.setattr(bench_cli, "run_job", lambda job, timeout_s: pytest.fail("something ran"))
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    with pytest.raises(SystemExit) as caught:
        bench_command.main(["--modes", modes, *options])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and words in err and err.count("\n") == 1


def test_what_is_enough(traces: Path) -> None:
    fit, replay = traces / "fit.safetensors", traces / "replay.safetensors"
    others = [mode for mode in POLICIES if mode != "specprefetch"]
    assert check_given(Given("nearest-token", fit, None, replay, "1:3"), plan_arms(others, [0.5])) == 2
    assert check_given(Given(str(traces / "trained")), plan_arms(["seqmoe", "promoe"], [0.5], [1, 4])) == 0
    assert check_given(Given(fit=traces / "inputs.safetensors"), plan_arms(["specprefetch"], [0.5])) == 0
    assert (
        check_given(Given(fit=replay, fit_sequences="0", replay=replay, sequences="1"), plan_arms(["lru"], [0.5])) == 1
    )
    (traces / "trained" / "adapters.safetensors").touch()
    assert check_given(Given(str(traces / "trained")), plan_arms(["specprefetch"], [0.5])) == 0
    assert bench_options.ADAPTERS == assemble.ADAPTERS


def test_who_knows_the_future_knows_it_of_one_sequence(traces: Path) -> None:
    for mode in ("belady", "belady-8", "foresight"):
        given = Given(replay=traces / "replay.safetensors")
        assert check_given(given, plan_arms([mode], [0.5])) == 4
        with pytest.raises(UsageError, match="of one sequence: leave it out, or --batch 1"):
            check_given(given, plan_arms([mode], [0.5], [1, 2]))


# --- options and jobs ------------------------------------------------------------------------------------------------


def job_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The job that all arms of this command have in common."""
    monkeypatch.setattr(bench_cli, "run_job", lambda job, timeout_s: figures(job))
    with pytest.raises(SystemExit) as caught:
        bench_command.main(["--model", "demo", "--repeats", "1", "--json", *arguments])
    out = capsys.readouterr().out
    assert caught.value.code == 0, out
    return json.loads(out.splitlines()[-1])["job"]


def test_options_become_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traces: Path
) -> None:
    job = job_of(
        capsys, monkeypatch, "--modes", "lru,seqmoe", "--predictor", "nearest-token", "--fit", str(traces / "fit.safetensors"),
        "--fit-sequences", "0:2", "--k-prime", "9", "--horizon", "4", "--lambda", "0.8", "--job-steps", "3", "--ema-alpha",
        "0.2", "--m-max", "5", "--lead", "2", "--least", "0.1", "--after", "--early-binding", "--no-restraint",
        "--read-threads", "2",
    )  # fmt: skip
    assert (job["predictor"], job["fit_sequences"], job["replay"]) == ("nearest-token", "0:2", None)
    assert job["knobs"]["read_threads"] == 2 and len(job["prompts"]) == 3
    assert job["policy"] == {
        "k_prime": 9, "horizon": 4, "discount": 0.8, "job_steps": 3, "ema_alpha": 0.2, "m_max": 5, "lead": 2, "least": 0.1,
        "after": True, "early_binding": True, "restraint": False,
    }  # fmt: skip
    assert set(job) <= set(measure._KEYS)
    assert job_of(capsys, monkeypatch)["policy"] == {}


def test_there_is_a_prompt_for_each_sequence_and_for_each_place_of_a_batch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traces: Path
) -> None:
    replay = str(traces / "replay.safetensors")
    assert len(job_of(capsys, monkeypatch, "--replay", replay)["prompts"]) == 3
    assert len(job_of(capsys, monkeypatch, "--replay", replay, "--sequences", "0:4")["prompts"]) == 4
    prompts = job_of(capsys, monkeypatch, "--batch", "1,2,4")["prompts"]
    assert len(set(prompts)) == 4


def test_figures_go_to_a_folder_or_beside_the_plot(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job_of(capsys, monkeypatch, "--figures", str(tmp_path / "made"))
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        "hit-rate.png", "speed-of-full.png", "first-token.png", "breakdown.png"
    }  # fmt: skip
    job_of(capsys, monkeypatch, "--plot", str(tmp_path / "b.png"), "--figures")
    assert (tmp_path / "b.png").is_file() and (tmp_path / "b-hit-rate.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--figures"], "--figures takes a folder, or stands beside --plot"),
        (["--figures", "no/such/folder"], "no/such does not exist"),
        (["--figures", "/dev/null"], "a file has that name"),
        (["--batch", "two"], "--batch takes numbers such as 1,2,4"),
        (["--batch", ","], "--batch is empty"),
        (["--k-prime", "0"], "--k-prime"),
        (["--lambda", "0"], "--lambda"),
        (["--horizon", "64"], "--horizon"),
        (["--least", "2"], "--least"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_command.main(arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and words in err and err.count("\n") == 1


def test_notices_are_shown_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli, "run_job", lambda job, timeout_s: figures(job, notices=["the worker [died]"]))
    with pytest.raises(SystemExit):
        bench_command.main(["--model", "demo", "--modes", "lru", "--residency", "0.25", "--repeats", "2"])
    assert capsys.readouterr().err.count("lru 25%: the worker [died]") == 1


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"batch": 0}, "batch in the measurement job must be at least 1"),
        ({"batch": 2, "batched": True}, "stands in place of batched"),
        ({"sequences": "0"}, "which of replay's"),
        ({"fit_sequences": "0"}, "which of fit's"),
        ({"policy": {"k-prime": 3}}, "did you mean 'k_prime'"),
        ({"policy": {"k_prime": 0}}, "k_prime must be a whole number from 1"),
        ({"policy": {"discount": "much"}}, 'discount must be a number from 1e-06 to 1, got "much"'),
        ({"policy": {"after": 1}}, "after must be true or false, got 1"),
        ({"policy": {"order": "best"}}, "order must be one of joint"),
        ({"policy": 3}, "policy in the measurement job must be an object"),
        ({"predictor": 3}, "predictor in the measurement job must be a text"),
        ({"mode": "seqmo"}, "did you mean 'seqmoe'"),
    ],
)
def test_jobs_that_cannot_be(job: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        measure.run({"model": "demo", **job})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "trace", "words"),
    [
        ("patterns", random_trace((4, 5)).layers(0, 3), "layers is 3, expected 8: a trace of another model"),
        ("specprefetch", random_trace((4,), inputs=True), "router_inputs have 8 values, the model's"),
    ],
)
def test_what_is_fitted_to_must_be_of_the_model(mode: str, trace: Trace, words: str, tmp_path: Path) -> None:
    write_trace(tmp_path / "other.safetensors", trace)
    with pytest.raises(UsageError) as caught:
        measure.run({"model": "demo", "mode": mode, "fit": str(tmp_path / "other.safetensors")})
    assert words in str(caught.value)


def test_a_change_concerns_the_plans_that_it_can() -> None:
    changes = Changes(k_prime=5, horizon=3, restraint=True, m_max=2, admission=True)
    assert changes.apply(Plan("lru")) == Plan("lru")
    seqmoe = changes.apply(POLICIES["seqmoe"].plan)
    assert (seqmoe.k_prime, seqmoe.horizon, seqmoe.m_max) == (5, 3, 2)
    promoe = changes.apply(POLICIES["promoe"].plan)
    assert promoe.k_prime == 5 and not promoe.restraint and not promoe.admission  # it evicts by recency
    assert changes.apply(POLICIES["forecasts-without-transfers"].plan).m_max == 0
    assert Changes.from_mapping(changes.to_dict()) == changes


def test_jobs_are_made_for_some_more_experts_than_are_needed() -> None:
    promoe = find_policy("promoe")
    assert plan_for(promoe, 8, 64).k_prime == 11 and plan_for(promoe, 4, 32).k_prime == 7
    assert plan_for(promoe, 8, 64, Changes(k_prime=9)).k_prime == 9 and plan_for(promoe, 4, 6).k_prime == 6
    assert plan_for(find_policy("specprefetch"), 4, 32, Changes(k_prime=5)).k_prime == 32


def test_the_last_batch_is_filled_up() -> None:
    assert in_batches(["a", "b", "c"], 1) == [["a"], ["b"], ["c"]]
    assert in_batches(["a", "b", "c"], 2) == [["a", "b"], ["c", "a"]]
    assert in_batches(["a", "b", "c"], 4) == [["a", "b", "c", "a"]]


# --- replay ----------------------------------------------------------------------------------------------------------


def replayed(trace: Trace, starts: list[int], batch: int, request: int, steps: int) -> list[np.ndarray]:
    """Rows of tokens that each sequence of a request is fed."""
    replay = Replay(trace, batch, position=starts[request])
    replay.next_request()
    fed = []
    for _ in range(steps):
        replay.begin(batch)
        fed.append(replay.tokens())
    return list(np.array(fed).T)


def test_each_request_replays_a_sequence_from_its_start() -> None:
    trace = random_trace((6, 9, 5))
    same, starts = requests_of(trace, 1, 4)
    assert same is trace and starts == [0, 6, 15, 0]
    for request, index in enumerate((0, 1, 2, 0)):
        (fed,) = replayed(same, starts, 1, request, 5)
        assert (fed == trace.sequence(index).tokens[:5]).all()


def test_a_batch_replays_several_each_from_its_start() -> None:
    trace = random_trace((6, 9, 5))
    laid_out, starts = requests_of(trace, 2, 2)
    for request, pair in enumerate(((0, 1), (2, 0))):
        for fed, index in zip(replayed(laid_out, starts, 2, request, 9), pair, strict=True):
            own = trace.sequence(index).tokens
            assert (fed == np.resize(own, 9)).all()  # a shorter one is repeated
    assert laid_out.num_sequences == 4 and set(laid_out.seq_len.tolist()) == {9}


def test_a_single_sequence_goes_on_from_request_to_request() -> None:
    trace = random_trace((12,))
    assert requests_of(trace, 1, 3) == (trace, None) and requests_of(trace, 4, 3) == (trace, None)
