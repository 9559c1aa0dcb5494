"""`seqmoe bench` compares fairly: interleaved, fresh processes, failures reported beside what worked."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.runtime import bench_cli, measure
from seqmoe.runtime.bench import Arm, BenchResult, Spread, arm_job, order, plan_arms, run_bench
from seqmoe.runtime.bench_cli import bench_command, read_prompts
from seqmoe.runtime.bench_plot import plot_bench
from seqmoe.runtime.bench_table import bench_table
from seqmoe.runtime.jobs_process import job_error, raise_job_error, run_job

JOB = {"model": "/models/tiny", "link": "disk", "max_new_tokens": 4}


def child(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def figures(job: Mapping[str, Any], speed: float = 10.0, tokens: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    parts = ("experts", "predictor", "management", "worker", "stall", "other")
    return {
        "decode_tokens_per_s": speed, "ttft_s": 0.5, "hit_rate": 0.75, "peak_rss_bytes": 2**30, "stall_s": 0.1,
        "steps": 4, "per_step_s": [0.1] * 4, "decode_tokens": 4, "decode_moved_bytes": 8 * 2**20, "budget_avg": None,
        **{f"{part}_s_per_step": 0.025 for part in parts}, "stall_share": 0.25, "management_share": 0.25,
        "predictor_share": 0.25, "transfers_per_step": 2.0, "link_busy_share": 0.5,
        **{f"{name}_bytes": 2**20 for name in ("prefetched", "useful", "late", "wasted")},
        "token_ids": [list(tokens)], "residency": job.get("residency", 1.0), "slots": 8, "model_digest": "d", "link": "disk",
    }  # fmt: skip


# --- run_job ---------------------------------------------------------------------------------------------------------


def test_a_job_goes_in_and_the_last_line_comes_out() -> None:
    code = "import json, sys; job = json.load(sys.stdin); print('noise'); print(json.dumps({'got': job}))"
    assert run_job({"model": "x", "n": 3}, 20, child(code)) == {"got": {"model": "x", "n": 3}}


def test_an_error_object_is_passed_on() -> None:
    error = {"error": {"type": "BudgetError", "message": "too small", "exit_code": 4}}
    result = run_job({}, 20, child(f"import sys; print({json.dumps(json.dumps(error))}); sys.exit(4)"))
    assert result == error and job_error(result) == "BudgetError: too small"
    with pytest.raises(SeqmoeError, match="too small") as caught:
        raise_job_error(result)
    assert caught.value.exit_code == 4
    assert job_error({"decode_tokens_per_s": 1}) is None
    raise_job_error({"decode_tokens_per_s": 1})


@pytest.mark.parametrize(
    ("code", "kind", "exit_code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "Killed", 137, "out of memory"),
        ("import os; os.kill(os.getpid(), 11)", "Killed", 139, "SIGSEGV"),
        ("raise ValueError('went wrong')", "Crashed", 1, "ValueError: went wrong"),
        ("print('{\"a\": 1}'); raise SystemExit(3)", "Crashed", 3, "exit code 3"),
        ("print('not json')", "Crashed", 1, "no output"),
    ],
)
def test_a_process_that_ends_badly_is_an_error_not_an_exception(
    code: str, kind: str, exit_code: int, words: str
) -> None:
    error = run_job({}, 20, child(code))["error"]
    assert (error["type"], error["exit_code"]) == (kind, exit_code) and words in error["message"]


def test_a_command_that_cannot_start() -> None:
    assert run_job({}, 5, ["/no/such/program"])["error"]["type"] == "NotStarted"


def test_a_timeout_ends_the_job_and_its_children(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        f"grandchild = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(grandchild.pid))\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    error = run_job({}, 2, child(code))["error"]
    assert error["type"] == "Timeout" and "2 s" in error["message"] and time.monotonic() - start < 20
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < deadline, "the job's own child is still running"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_job_is_gone_when_the_process_that_wanted_it_is_killed(tmp_path: Path) -> None:
    job = f"""
import os, time
from seqmoe.runtime.jobs_process import die_with_parent
die_with_parent()
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()) + " ")
time.sleep(60)
"""
    parent = f"""
import sys
from seqmoe.runtime.jobs_process import run_job
run_job({{}}, 60, [sys.executable, "-c", {job!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith(" "):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    while _alive(pid):
        assert time.monotonic() < deadline, "the job is still running"
        time.sleep(0.02)


# --- planning --------------------------------------------------------------------------------------------------------


def test_modes_without_residency_run_once() -> None:
    arms = plan_arms(["full", "lru", "eager", "lru"], [0.25, 0.45])
    assert arms == [Arm("full"), Arm("lru", 0.25), Arm("lru", 0.45), Arm("eager")]
    assert plan_arms(["lru"], []) == [Arm("lru")]
    assert [arm.label for arm in arms] == ["full", "lru 25%", "lru 45%", "eager"]
    assert arm_job({"model": "m"}, arms[1]) == {"model": "m", "mode": "lru", "residency": 0.25}
    assert "residency" not in arm_job({"model": "m"}, arms[0])


@pytest.mark.parametrize(("modes", "shares"), [(["fast"], [0.5]), (["lru"], [0.0]), (["lru"], [1.5])])
def test_plans_that_cannot_be(modes: list[str], shares: list[float]) -> None:
    with pytest.raises(UsageError, match=r"--modes takes|--residency takes"):
        plan_arms(modes, shares)


@pytest.mark.parametrize("arms", [1, 2, 3, 5])
def test_every_arm_runs_once_a_round_and_none_is_always_first(arms: int) -> None:
    rounds = 2 * arms
    sequence = list(order(arms, rounds))
    for start in range(0, len(sequence), arms):
        assert sorted(sequence[start : start + arms]) == list(range(arms))
    firsts = Counter(sequence[::arms])
    assert set(firsts) == set(range(arms)) and max(firsts.values()) <= 2 + (arms == 1) * rounds
    assert list(order(2, 2)) == [0, 1, 1, 0]  # the pairs are ABBA


# --- running ---------------------------------------------------------------------------------------------------------


def bench(run: Any, repeats: int = 3) -> BenchResult:
    return run_bench(JOB, plan_arms(["full", "lru"], [0.25, 0.5]), repeats, run)


def test_medians_and_spread_are_of_each_arm_alone() -> None:
    speeds = {None: iter([9.0, 30.0, 10.0]), 0.25: iter([1.0, 2.0, 6.0]), 0.5: iter([5.0, 4.0, 3.0])}
    result = bench(lambda job: figures(job, next(speeds[job.get("residency")])))
    assert [arm["decode_tokens_per_s"]["median"] for arm in result.to_dict()["arms"]] == [10.0, 2.0, 4.0]
    lru = result.to_dict()["arms"][1]
    assert lru["decode_tokens_per_s"] == {"median": 2.0, "min": 1.0, "max": 6.0, "iqr": None, "values": [1.0, 2.0, 6.0]}
    assert lru["read_mib_per_token"]["median"] == 2.0 and lru["stall_share"]["median"] == pytest.approx(0.25)
    assert lru["peak_rss_mib"]["max"] == 1024 and result.exit_code == 0
    assert Spread((1.0, 2.0, 3.0, 4.0, 5.0)).to_dict()["iqr"] == 2.0


def test_a_failing_arm_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = []

    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        if job.get("residency") == 0.25:
            return {"error": {"type": "BudgetError", "message": "needs [at least] 700 MiB", "exit_code": 4}}
        return figures(job)

    result = bench(run)
    assert result.exit_code == 1 and [arm.error is None for arm in result.arms] == [True, False, True]
    assert len(jobs) == 3 + 3 + 1  # not tried again
    text = render(result)
    assert "needs [at least] 700 MiB" in text and text.count("10.00") == 2 * 3 and text.count("100.0%") == 3 + 3 + 1
    plot_bench(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    json.dumps(result.to_dict(), allow_nan=False)


def test_when_nothing_works_there_is_still_a_report(tmp_path: Path) -> None:
    result = bench(lambda job: {"error": {"type": "CheckpointError", "message": "no config", "exit_code": 6}})
    assert result.exit_code == 1 and render(result).count("no config") == 3
    plot_bench(result, tmp_path / "plot.png")
    json.dumps(result.to_dict(), allow_nan=False)


def test_other_tokens_are_a_failure() -> None:
    result = bench(lambda job: figures(job, tokens=(1, 3) if job.get("residency") == 0.5 else (1, 2)))
    assert result.tokens_differ() == ["lru 50%"] and result.exit_code == 1


def render(result: BenchResult) -> str:
    console = Console(width=240, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(bench_table(result))
    return console.export_text()


# --- command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "fast"], "--modes takes"),
        (["--modes", ","], "--modes is empty"),
        (["--residency", "a"], "--residency takes"),
        (["--policy", "lru"], "No such option"),
        (["--modes", "lru,belady"], "belady needs --replay"),
        (["--replay", "/no/such.npz"], "no such file"),
        (["--out", "."], ". is a folder"),
        (["--plot", "/dev/full"], "/dev/full is no regular file"),
        (["--plot", "/no-such-folder/x.png"], "/no-such-folder does not exist: make that folder first"),
        (["--out", "/no-such-folder/x.json"], "/no-such-folder does not exist: make that folder first"),
        (["--prompts", "/dev/zero"], "more than 16 MiB"),
        (["--repeats", "0"], "--repeats"),
        (["--prompts", "/no/such.txt"], "cannot be read"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_command.main(["--model", str(tmp_path), *arguments])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and words in err and err.count("\n") == 1


def test_the_model_is_called_what_the_user_called_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cli, "run_job", lambda job, timeout_s: figures(job))
    with pytest.raises(SystemExit) as caught:
        bench_command.main(["--model", "demo", "--repeats", "1", "--json"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and json.loads(out.splitlines()[-1])["job"]["model"] == "demo"
    assert "demo, link disk" in err and "checkpoint" not in err


def test_measure_shows_its_help_and_takes_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: python -m seqmoe.runtime.measure < job.json")
    assert measure.main(["job.json"]) == 2
    assert "read from standard input" in capsys.readouterr().err


def test_prompts_are_the_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo words\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two words"]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(tmp_path / "empty.txt")
