"""Predictors on disk and their configs: everything that can be wrong is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from seqmoe.predictors.batches import Vocabulary
from seqmoe.predictors.seq2seq import Seq2SeqConfig, Seq2SeqNet, hidden_for_budget, parameter_count
from seqmoe.predictors.seq2seq_file import PredictorInfo, check_fits, load_predictor, read_metadata, save_predictor
from seqmoe.profiles.errors import CheckpointError, UsageError

CONFIG = Seq2SeqConfig(4, 8, 2, (2, 4), hidden=32, d_state=16, headdim=16, token_rows=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_predictor(tmp_path, Seq2SeqNet(CONFIG), Vocabulary(np.array([1, 4, 6])), PredictorInfo("digest", {"seed": 3}))
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "predictor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_config(folder: Path, **fields: Any) -> None:
    change(folder, config=json.loads((folder / "predictor.json").read_text())["config"] | fields)


def test_what_was_saved_is_read(folder: Path) -> None:
    config, info, _ = read_metadata(folder)
    assert config == CONFIG and info == PredictorInfo("digest", {"seed": 3})
    saved = load_predictor(folder)
    assert saved.vocabulary is not None and saved.vocabulary.ids.tolist() == [1, 4, 6]
    torch.manual_seed(0)
    for (name, value), (_, other) in zip(
        Seq2SeqNet(CONFIG).state_dict().items(), saved.net.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=0.01, atol=1e-6, msg=name)  # bfloat16


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="predictor.json: no such file"):
        load_predictor(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "format must be 'seqmoe-seq2seq', got 'other'"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"config": 5}, "config must be an object"),
        ({"model_digest": 5}, "model_digest must be text or null"),
        ({"weights_sha256": "00"}, "the two files are not of one predictor"),
    ],
)
def test_bad_metadata(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        load_predictor(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": [2, 5]}, "trigger layers must ascend from 1 and end with the number of layers"),
        ({"split": "2,4"}, "config.split must be a list of type int"),
        ({"top_k": 9}, "top_k must be 1 to num_experts=8, got 9"),
        ({"hidden": "32"}, "config.hidden must be of type"),
        ({"colour": 1}, "config.colour is not known"),
        ({"feedback": "loud"}, "feedback must be one of psi, soft"),
        ({"hidden": 48}, r"has shape \[.*wants"),
        ({"blocks": 2}, "is missing"),
        ({"token_rows": 6}, "vocabulary has 5 rows"),
    ],
)
def test_bad_config(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        load_predictor(folder)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "predictor.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="one is damaged"):
        load_predictor(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="predictor.safetensors: no such file"):
        load_predictor(folder)


def test_weights_that_are_not_numbers(folder: Path) -> None:
    import hashlib

    path = folder / "predictor.safetensors"
    tensors = load_file(path)
    tensors["groups.0.recursed"] = tensors["groups.0.recursed"] * torch.nan
    save_file(tensors, path)
    change(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="groups.0.recursed has values that are not finite"):
        load_predictor(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 5}, "num_layers 4, expected 5"),
        ({"num_experts": 16}, "num_experts 8, expected 16"),
        ({"top_k": 4}, "top_k 2, expected 4"),
        ({"split": (4,)}, "trigger layers 2,4, expected 4"),
        ({"model_digest": "b"}, "trained for model a, expected b"),
    ],
)
def test_a_predictor_for_something_else(fields: dict[str, Any], message: str) -> None:
    fits: dict[str, Any] = {"num_layers": 4, "num_experts": 8, "top_k": 2, "split": (2, 4), "made_for": "a"}
    check_fits(CONFIG, "here", **fits)
    with pytest.raises(UsageError, match=f"here: predictor .*{message}"):
        check_fits(CONFIG, "here", **(fits | fields))


def test_the_budget_is_kept_and_used() -> None:
    config = Seq2SeqConfig(24, 32, 4, (12, 24))
    for budget in (2 << 20, 4 << 20, 7 << 20):
        hidden = hidden_for_budget(config, budget)
        assert parameter_count(config.replace(hidden=hidden)) * 2 <= budget
        assert parameter_count(config.replace(hidden=hidden + 64)) * 2 > budget
    assert hidden_for_budget(config, 1) == 64  # the least that works
    assert hidden_for_budget(config, 1 << 40) == 512
    assert parameter_count(config) == sum(p.numel() for p in Seq2SeqNet(config).parameters())


@pytest.mark.parametrize("split", [(), (4, 2), (2, 2, 4), (0, 4), (2, 3), (2, 5)])
def test_bad_splits(split: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="trigger layers must ascend from 1"):
        Seq2SeqConfig(4, 8, 2, split)
