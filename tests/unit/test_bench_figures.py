"""`seqmoe bench` prints the papers' figures: batches, shares of full, tables, plots; and one real small run."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.bench_runs import figures, write_traces

from seqmoe.profiles.errors import UsageError
from seqmoe.runtime import bench_cli, measure
from seqmoe.runtime.bench import FIGURES, Arm, BenchResult, arm_job, plan_arms, run_bench
from seqmoe.runtime.bench_cli import FIGURE_NAMES, bench_command
from seqmoe.runtime.bench_plot import (
    FIGURE_PLOTS,
    breakdown,
    evictions,
    hit_rates,
    plot_bench,
    plot_figures,
    speeds,
    stalls,
)
from seqmoe.runtime.bench_table import bench_table
from seqmoe.runtime.policy import POLICIES

PNG = b"\x89PNG\r\n\x1a\n"


def made_up(
    modes: str,
    shares: tuple[float, ...] = (0.25, 0.5),
    batches: tuple[int, ...] = (1,),
    *,
    repeats: int = 2,
    run: Callable[[Mapping[str, Any]], dict[str, Any]] = figures,
) -> BenchResult:
    job = {"model": "/models/tiny", "link": "disk"}
    return run_bench(job, plan_arms(modes.split(","), shares, batches), repeats, run)


def render(result: BenchResult) -> str:
    console = Console(width=240, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(bench_table(result))
    return console.export_text()


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


# --- arms and figures ------------------------------------------------------------------------------------------------


def test_an_arm_is_a_mode_a_residency_and_a_batch() -> None:
    arms = plan_arms(["full", "lru"], [0.25], [1, 4])
    assert arms == [Arm("full"), Arm("lru", 0.25), Arm("full", None, 4), Arm("lru", 0.25, 4)]
    assert [arm.label for arm in arms] == ["full", "lru 25%", "full batch 4", "lru 25% batch 4"]
    assert arm_job({"model": "m"}, arms[3]) == {"model": "m", "mode": "lru", "residency": 0.25, "batch": 4}
    assert "batch" not in arm_job({"model": "m"}, arms[1])
    with pytest.raises(UsageError, match="--batch takes numbers of sequences from 1 on"):
        plan_arms(["lru"], [0.5], [0])


def test_every_mode_of_the_policies_is_an_arm() -> None:
    assert {arm.mode for arm in plan_arms(list(POLICIES), [0.5])} == set(POLICIES)


def test_of_full_is_paired_by_round_and_batch() -> None:
    """The machine is twice as slow in the second round, and three times in the third: the share stays what it is."""
    rounds = {
        "full": iter([20.0, 10.0, 6.0]),
        "lru": iter([10.0, 6.0, 3.0]),
        "full4": iter([40.0] * 3),
        "lru4": iter([10.0] * 3),
    }

    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        speed = next(rounds[job["mode"] + ("4" if job.get("batch") == 4 else "")])
        return figures(job, decode_tokens_per_s=speed)

    result = made_up("full,lru", (0.25,), (1, 4), repeats=3, run=run)
    arms = {arm["label"]: arm for arm in result.to_dict()["arms"]}
    share = arms["lru 25%"]["of_full"]
    assert share["values"] == [0.5, 0.6, 0.5] and (share["median"], share["min"], share["max"]) == (0.5, 0.5, 0.6)
    assert arms["lru 25% batch 4"]["of_full"]["median"] == 0.25 and arms["full"]["of_full"]["median"] == 1.0
    assert "50.0% [50.0% - 60.0%]" in render(result)


def test_of_full_where_full_stopped_early_is_of_the_rounds_that_both_ran() -> None:
    left = iter([1, 1, 0])

    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        if job["mode"] == "full" and not next(left):
            return {"error": {"type": "Killed", "message": "gone", "exit_code": 137}}
        return figures(job)

    result = made_up("full,lru", (0.25,), repeats=3, run=run)
    assert result.of_full(result.arms[1]).values == (0.6, 0.6) and result.exit_code == 1


def test_without_full_there_is_no_share_of_it() -> None:
    result = made_up("lru,lfu", (0.25,))
    assert result.of_full(result.arms[0]) is None and "of full" not in render(result)
    assert [arm["of_full"] for arm in result.to_dict()["arms"]] == [None, None]


def test_waiting_is_set_against_lru_at_the_same_residency() -> None:
    result = made_up(
        "lru,seqmoe", run=lambda job: figures(job) | ({"stall_s_per_step": 0.0} if job["residency"] == 0.5 else {})
    )
    stalls = {arm["label"]: arm["stall_of_lru"] for arm in result.to_dict()["arms"]}
    assert stalls["seqmoe 25%"]["median"] == pytest.approx(0.5) and stalls["lru 25%"]["median"] == 1.0
    assert stalls["seqmoe 50%"] is None  # lru does not wait there


def test_tokens_are_compared_within_a_batch_size() -> None:
    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        return figures(
            job, token_ids=[[9]] if (job["mode"], job.get("batch")) == ("lru", 2) else [[job.get("batch", 1)]]
        )

    result = made_up("full,lru", (0.25,), (1, 2), run=run)
    assert result.tokens_differ() == ["lru 25% batch 2"] and result.exit_code == 1


def test_the_json_has_every_figure_and_null_where_a_mode_has_none() -> None:
    result = made_up("full,lru,seqmoe", (0.25,), (1, 2)).to_dict()
    assert result["schema_version"] == 2
    arms = {arm["label"]: arm for arm in result["arms"]}
    for arm in arms.values():
        assert set(FIGURES) <= set(arm) and arm["experts_s_per_step"]["min"] >= 0
    assert arms["lru 25%"]["budget_avg"] is None and arms["seqmoe 25%"]["budget_avg"]["median"] == 1.5
    assert arms["lru 25%"]["read_mib_per_token"]["median"] == 2.0  # 16 MiB in 8 steps
    assert arms["lru 25% batch 2"]["read_mib_per_token"]["median"] == 1.0 and arms["lru 25% batch 2"]["batch"] == 2
    json.dumps(result, allow_nan=False)


def test_the_table_has_a_row_an_arm_with_all_that_is_asked_for() -> None:
    result = made_up("full,seqmoe", (0.25,), (1, 2), repeats=1)
    text = render(result)
    for name in ("mode", "residency", "batch", "tokens/s", "of full", "hit rate", "transfers/step", "MiB/token", "waiting",
                 "predictor", "management", "first token", "peak RSS"):  # fmt: skip
        assert name in text
    row = [
        "seqmoe",
        "25.0%",
        "1",
        "12.00",
        "60.0%",
        "0.500",
        "7.5",
        "2.00",
        "30%",
        "3.1%",
        "2.0%",
        "0.50 s",
        "1024 MiB",
    ]
    assert rows_of(text)[1] == row
    assert [row[2] for row in rows_of(text)] == ["1", "1", "2", "2"]


# --- plots -----------------------------------------------------------------------------------------------------------


def test_every_figure_is_drawn_where_there_are_data(tmp_path: Path) -> None:
    assert set(FIGURE_NAMES) == set(FIGURE_PLOTS)
    result = made_up("full,lru,belady,seqmoe", (0.25, 0.45))
    targets = {name: tmp_path / f"{name}.png" for name in FIGURE_NAMES}
    assert plot_figures(result, targets) == list(targets.values())
    plot_bench(result, tmp_path / "bench.png")
    assert all(path.read_bytes()[:8] == PNG for path in tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 7


def test_no_figure_without_data(tmp_path: Path) -> None:
    failed = made_up("full,lru", run=lambda job: {"error": {"type": "LinkError", "message": "no", "exit_code": 7}})
    assert plot_figures(failed, {}) == []
    assert speeds(made_up("lru,seqmoe")) is None and stalls(made_up("full,lru")) is None
    assert evictions(made_up("full,lru,seqmoe")) is None and hit_rates(made_up("full,eager")) is None


def lines(figure: Any) -> dict[str, int]:
    """Points by label, over all panels."""
    return {box.get_label(): len(box.lines[0].get_xdata()) for axes in figure.axes for box in axes.containers}


def test_a_figure_has_a_panel_each_batch_and_a_line_each_mode() -> None:
    result = made_up("full,lru,static,seqmoe,seqmoe-cache-only", batches=(1, 2, 4))
    assert lines(hit_rates(result)) == {"lru": 2, "static": 2, "seqmoe": 2, "seqmoe-cache-only": 2}
    assert set(lines(evictions(result))) == {"lru", "static", "seqmoe-cache-only"}
    assert [axes.get_title() for axes in speeds(result).axes] == ["batch 1", "batch 2", "batch 4"]
    assert lines(stalls(result)) == {"lru": 2, "static": 2, "seqmoe": 2, "seqmoe-cache-only": 2}


def test_bars_are_stacked_to_the_whole_step() -> None:
    figure = breakdown(made_up("full,lru", (0.25,)))
    ends = {}
    for bar in (patch for box in figure.axes[0].containers for patch in box):
        place = round(bar.get_y() + bar.get_height() / 2)
        ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())
    # full: 10 ms that are not split, predictor, management, 20 ms of waiting; lru: experts and other layers apart
    assert ends == {0: pytest.approx(10 + 10 + 10 + 20), 1: pytest.approx(10 + 10 + 10 + 10 + 20)}


# --- a real run ------------------------------------------------------------------------------------------------------


def test_a_real_run_of_the_demo_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None
) -> None:
    """In this process, so that everything is imported once. Random routing: no figure is worth looking at but that it is
    there, adds up, and that the tokens are full's."""
    write_traces(tmp_path)
    monkeypatch.setattr(bench_cli, "run_job", lambda job, timeout_s: measure.run(job))
    with pytest.raises(SystemExit) as caught:
        bench_command.main([
            "--model", "demo", "--modes", "full,seqmoe", "--residency", "0.25", "--batch", "2", "--repeats", "1",
            "--max-new-tokens", "6", "--warmup-tokens", "0", "--compute-threads", "1", "--no-restraint", "--k-prime", "6",
            "--predictor", "nearest-token", "--fit", str(tmp_path / "fit.safetensors"),
            "--replay", str(tmp_path / "replay.safetensors"), "--sequences", "0:2", "--json",
        ])  # fmt: skip
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    said = json.loads(out.splitlines()[-1])
    full, seqmoe = said["arms"]
    assert said["tokens_differ"] == []
    assert (full["hit_rate"]["median"], full["transfers_per_step"]["median"]) == (1.0, 0.0)

    def figure(name: str) -> float:
        return float(seqmoe[name]["median"])

    parts = sum(figure(f"{part}_s_per_step") for part in ("experts", "predictor", "management", "stall", "other"))
    step_s = 2 / figure("decode_tokens_per_s")  # two tokens a step
    assert parts == pytest.approx(step_s) and figure("predictor_s_per_step") > 0 < figure("experts_s_per_step")
    assert figure("predictor_share") == pytest.approx(figure("predictor_s_per_step") / step_s)
    assert 0 < figure("hit_rate") < 1 and figure("transfers_per_step") > 0 and figure("prefetched_bytes") > 0
    assert 0 < figure("link_busy_share") <= 1 and figure("budget_avg") > 0 and seqmoe["batch"] == 2
    assert "seqmoe" in err and "predictor nearest-token" in err
