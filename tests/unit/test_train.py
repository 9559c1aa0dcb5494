"""Training: it learns what can be learnt, goes on exactly where it stopped, and names what cannot be."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file
from support.routing import routed
from support.toy_traces import random_trace, trace_of, walking_trace

from seqmoe.predictors.batches import Vocabulary
from seqmoe.predictors.eval_cli import eval_command
from seqmoe.predictors.objective import measure
from seqmoe.predictors.routers import save_routers
from seqmoe.predictors.seq2seq import Dropout, Seq2SeqConfig
from seqmoe.predictors.seq2seq_file import load_predictor
from seqmoe.predictors.trace import Trace, TraceMeta
from seqmoe.predictors.trace_file import write_trace
from seqmoe.predictors.train import Trainer
from seqmoe.predictors.train_cli import split_sequences, train_command
from seqmoe.predictors.train_options import TrainOptions
from seqmoe.predictors.within_step import SOURCES
from seqmoe.profiles.errors import CheckpointError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = Seq2SeqConfig(3, 8, 2, (3,), hidden=32, d_state=16, headdim=16, chunk=8)
OPTIONS = TrainOptions(
    epochs=12, batch_rows=2, row_steps=32, warmup=5, learning_rate=1e-2, patience=50, ema=0.9,
    dropout=Dropout(0.0, 0.05, 0.0),
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def train(
    folder: Path,
    options: TrainOptions = OPTIONS,
    learn: Trace | None = None,
    config: Seq2SeqConfig = CONFIG,
    **more: Any,
) -> Trainer:
    learn = learn or walking_trace(24, 30)
    vocabulary = Vocabulary.of(learn.tokens) if config.uses_tokens and learn.tokens is not None else None
    return Trainer(config, learn, walking_trace(4, 30, seed=1), options, folder, vocabulary, **more)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_predictor(folder).net.state_dict())


def test_it_learns_a_rule_one_step_and_eight_steps_ahead(tmp_path: Path) -> None:
    trainer = train(tmp_path, dataclasses.replace(OPTIONS, epochs=20, learning_rate=2e-2, ridge_start=False))
    assert trainer.validation is not None
    untrained = measure(trainer.average, trainer.validation)
    result = trainer.run()
    assert untrained.at[2] < 0.45 and result.recall is not None
    assert result.recall.at[2] > 0.88  # k of k: only the right ones
    assert min(result.recall.ahead) > 0.8
    assert result.progress.recursion_from == int(0.6 * result.progress.total + 0.999)
    again = measure(load_predictor(tmp_path).net, trainer.validation)
    assert again.at[2] == pytest.approx(result.recall.at[2], abs=0.02)  # bfloat16 weights


def test_the_ridge_start_is_most_of_the_way(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    assert trainer.validation is not None
    assert measure(trainer.average, trainer.validation).at[2] > 0.75


def test_choices_without_a_rule_stay_unknown(tmp_path: Path) -> None:
    validation = random_trace([30] * 4, seed=9)
    learn = random_trace([30] * 12)
    result = Trainer(CONFIG, learn, validation, OPTIONS, tmp_path).run()
    assert result.recall is not None and result.recall.at[2] == pytest.approx(2 / 8, abs=0.06)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, epochs=2)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tmp_path / name, dataclasses.replace(options, seed=seed)).run()
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize("stops", [(3,), (1, 20), (25, 2)])
@pytest.mark.parametrize("tokens", [False, True])
def test_resumed_it_goes_on_exactly(tmp_path: Path, stops: tuple[int, ...], tokens: bool) -> None:
    learn = walking_trace(8, 30)
    assert learn.tokens is not None
    config = CONFIG.replace(split=(1, 3), token_rows=Vocabulary.of(learn.tokens).rows if tokens else 0)
    options = dataclasses.replace(OPTIONS, epochs=9)
    whole = train(tmp_path / "whole", options, learn, config).run()
    for number, steps in enumerate(stops):
        train(tmp_path / "parts", options, learn, config, resume=number > 0).run(stop_after=steps)
    parts = train(tmp_path / "parts", options, learn, config, resume=True).run()
    assert parts.progress.step == whole.progress.step == 36
    a, b = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a)
    drop = {"seconds", "train_kl"}  # the mean of an epoch's losses has only those of the session
    strip = [[{k: v for k, v in row.items() if k not in drop} for row in r.progress.history] for r in (whole, parts)]
    assert strip[0] == strip[1]


def test_convergence_ends_the_phases(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, epochs=400, patience=2)
    result = train(tmp_path, options, random_trace([30] * 4)).run()
    progress = result.progress
    assert progress.finished == "converged" and progress.step < 0.5 * progress.total
    assert progress.recursion_from is not None and progress.skipped > 0


def test_without_a_second_phase_recursion_is_not_trained(tmp_path: Path) -> None:
    result = train(tmp_path, dataclasses.replace(OPTIONS, epochs=3, teacher_share=1.0)).run()
    assert result.progress.recursion_from is None
    assert not load_predictor(tmp_path).net.nets()[0].recursed.any()


def test_a_budget_is_kept(tmp_path: Path) -> None:
    result = train(tmp_path, dataclasses.replace(OPTIONS, budget_s=4.0)).run()
    assert 0.5 < result.progress.seconds < 8
    assert result.progress.finished in ("steps", "budget")


def test_only_the_same_training_is_resumed(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, epochs=2)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        train(tmp_path, options, resume=True)
    train(tmp_path, options).run(stop_after=2)
    with pytest.raises(UsageError, match="was trained with options"):
        train(tmp_path, dataclasses.replace(options, seed=5), resume=True)
    with pytest.raises(UsageError, match="was trained with trace"):
        train(tmp_path, options, learn=walking_trace(24, 30, seed=7), resume=True)
    with pytest.raises(UsageError, match="was trained with config"):
        train(tmp_path, options, config=CONFIG.replace(hidden=64), resume=True)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="not a checkpoint of seqmoe train"):
        train(tmp_path, options, resume=True)


def test_traces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the training trace has num_experts 9, expected 8"):
        Trainer(CONFIG, random_trace([5], experts=9), None, OPTIONS, tmp_path)
    with pytest.raises(UsageError, match="the validation trace has top_k 3, expected 2"):
        Trainer(CONFIG, random_trace([5]), random_trace([5], k=3), OPTIONS, tmp_path)
    with pytest.raises(UsageError, match="at least 2 steps"):
        Trainer(CONFIG, trace_of([1, 1], np.tile([0, 1], (2, 3, 1)), 8), None, OPTIONS, tmp_path)


def test_sequences_are_split_and_never_shared() -> None:
    trace = random_trace([3] * 18)
    learn, check = split_sequences(trace, None, None)
    assert check is not None and (learn.num_sequences, check.num_sequences) == (16, 2)
    learn, check = split_sequences(trace, "0:10", None)
    assert check is not None and (learn.num_sequences, check.num_sequences) == (9, 1)
    learn, check = split_sequences(trace, None, "0:10")
    assert check is not None and (learn.num_sequences, check.num_sequences) == (8, 10)
    learn, check = split_sequences(trace, "3:5", None)
    assert check is not None and (learn.num_sequences, check.num_sequences) == (1, 1)
    assert split_sequences(trace, "3:4", None)[1] is None
    with pytest.raises(UsageError, match="both name sequence 3"):
        split_sequences(trace, "0:4", "3:6")


def command(*arguments: str) -> Any:
    return CliRunner().invoke(train_command, arguments)


def test_the_command_trains_resumes_and_reports(tmp_path: Path) -> None:
    traces, out = tmp_path / "t.safetensors", tmp_path / "out"
    write_trace(traces, walking_trace(12, 30))
    arguments = ["--traces", str(traces), "--out", str(out), "--hidden", "32", "--trigger-layers", "1,3", "--tokens"]
    done = command(*arguments, "--epochs", "2", "--json")
    assert done.exit_code == 0, done.output
    reported = json.loads(done.stdout.splitlines()[-1])
    assert set(reported["validation"]["recall_at"]) == {str(m) for m in range(2, 9)}
    assert {path.name for path in out.iterdir()} >= {
        "predictor.json", "predictor.safetensors", "checkpoint.safetensors", "learning-curve.png",
    }  # fmt: skip
    assert load_predictor(out).net.config.split == (1, 3)
    assert command(*arguments, "--epochs", "2").exit_code == 2  # there is a checkpoint
    assert command(*arguments, "--epochs", "2", "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trigger-layers", "1,2"], "trigger layers must ascend from 1 and end with the number of layers"),
        (["--trigger-layers", "a"], "--trigger-layers takes layers such as 1,3"),
        (["--byte-budget", "1%"], "--byte-budget in % needs --expert-bytes"),
        (["--byte-budget", "x%", "--expert-bytes", "1GiB"], "--byte-budget must be a size or a share"),
        (["--byte-budget", "lots"], "--byte-budget must be a number with a unit"),
        (["--train", "0:99"], "sequence 4 is not in the trace"),
        (["--validation", "0:4"], "--train leaves no sequence"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, arguments: list[str], message: str) -> None:
    write_trace(tmp_path / "t.safetensors", random_trace([5] * 4))
    done = command("--traces", str(tmp_path / "t.safetensors"), "--out", str(tmp_path / "out"), *arguments)
    assert done.exit_code in (2, 6) and message in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1


def test_the_byte_budget_sets_the_width(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.safetensors", random_trace([5] * 4))
    base = ["--traces", str(tmp_path / "t.safetensors"), "--epochs", "1", "--expert-bytes"]
    widths = []
    for name, size in (("small", "1MiB"), ("large", "40MiB")):
        done = command(*base, size, "--out", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        widths.append(load_predictor(tmp_path / name).net.config.hidden)
    assert widths[0] == 64 < widths[1]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Without dropout the gradients of two processes' rows, averaged, are those of one process with all the rows."""
    script = tmp_path / "work.py"
    script.write_text(
        "import sys, dataclasses\n"
        "from pathlib import Path\n"
        "import torch\n"
        f"sys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "import conftest\n"
        "from unit.test_train import CONFIG, OPTIONS, Dropout, train\n"
        "from seqmoe.predictors.train import joined\n"
        "torch.set_num_threads(1)\n"
        "options = dataclasses.replace(OPTIONS, epochs=2, teacher_share=1.0, dropout=Dropout())\n"
        "with joined() as place:\n"
        "    train(Path(sys.argv[1]), options, place=place).run()\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for name, start in (("one", [sys.executable]), ("two", launch)):
        done = subprocess.run(
            [*start, str(script), str(tmp_path / name)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0.02, atol=2e-3, msg=name)


def test_adapters_are_trained_with_the_predictor_and_judged_by_eval(tmp_path: Path) -> None:
    traces, routers, out = tmp_path / "t.safetensors", tmp_path / "routers.safetensors", tmp_path / "out"
    trace, weights = routed(1, (40,) * 10, layers=4)
    write_trace(traces, trace)
    save_routers(routers, weights)
    common = ["--traces", str(traces), "--out", str(out), "--train", "0:6", "--validation", "6:8"]
    done = command(*common, "--hidden", "32", "--trigger-layers", "2,4", "--epochs", "1", "--routers", str(routers))
    assert done.exit_code == 0, done.output
    before, fusion = load_file(out / "adapters.safetensors"), (out / "fusion.json").read_bytes()
    judged = CliRunner().invoke(
        eval_command,
        ["--traces", str(traces), "--predictor", str(out), "--sequences", "8:10", "--horizon", "1", "--json"],
    )
    assert judged.exit_code == 0, judged.output
    rows = json.loads(judged.stdout.splitlines()[-1])["predictors"]
    assert set(rows[-1]["within_step"]) == {"1", "2", "3"} and set(rows[-1]["within_step"]["1"]) == set(SOURCES)
    # Only the adapters again: the same, since everything is seeded; and never for another split or another model.
    again = command(*common, "--adapters-only", "--trigger-layers", "2,4", "--routers", str(routers))
    after = load_file(out / "adapters.safetensors")
    assert again.exit_code == 0 and (out / "fusion.json").read_bytes() == fusion
    assert set(after) == set(before) and all((after[name] == before[name]).all() for name in before)
    refused = command(*common, "--adapters-only", "--trigger-layers", "1,4")
    assert refused.exit_code == 2 and "out: predictor has trigger layers 2,4, expected 1,4" in refused.output
    write_trace(traces, dataclasses.replace(trace, meta=TraceMeta("another")))
    refused = command(*common, "--adapters-only")
    assert refused.exit_code == 2 and "trained for model abc123, expected another" in refused.output
    judged = CliRunner().invoke(eval_command, ["--traces", str(traces), "--predictor", str(out)])
    assert judged.exit_code == 2 and "model_digest is another, expected abc123: a trace of another model" in judged.output
