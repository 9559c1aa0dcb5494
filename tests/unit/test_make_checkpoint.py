"""The synthetic checkpoint is one that Transformers loads, with the geometry asked for."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from seqmoe.profiles.errors import UsageError

ROOT = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    """A script of bench/ as a module (that folder is no package)."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script("make_checkpoint")
SMALL = script.Geometry(layers=3, experts=6, top_k=2, hidden=128, expert_mib=0.1, dtype="F32")


def test_transformers_loads_it_and_activations_stay_sane(tmp_path: Path) -> None:
    folder = script.make_checkpoint(tmp_path / "made", SMALL)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    config = model.config
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (3, 6, 2)
    assert config.moe_intermediate_size == SMALL.width == 64
    with torch.no_grad():
        out = model(torch.arange(50)[None], output_hidden_states=True)
    sizes = [float(state.pow(2).mean().sqrt()) for state in out.hidden_states]
    assert all(np.isfinite(sizes)) and min(sizes) > 0.01 and max(sizes) < 100
    chosen = {int(t) for t in out.logits.argmax(-1).flatten()}
    assert len(chosen) > 5  # not one token whatever goes in


def test_weights_are_a_function_of_the_geometry(tmp_path: Path) -> None:
    first, second = (script.make_checkpoint(tmp_path / name, SMALL) for name in "ab")
    assert {p.name for p in first.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_sizes_come_from_a_trace_and_the_tokenizer_from_a_folder(tmp_path: Path) -> None:
    ids = np.zeros((10, 5, 3), np.uint8)
    ids[4, 2, 1] = 7
    np.savez(tmp_path / "trace.npz", expert_ids=ids)
    assert script.trace_shape(tmp_path / "trace.npz") == (5, 8, 3)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    vocab = {f"t{i}": i for i in range(300)}
    (tokenizer / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": [{"id": 320}]}))
    assert script.vocabulary(tokenizer) == 384 and script.vocabulary(None) == 256
    folder = script.make_checkpoint(tmp_path / "made", SMALL, tokenizer)
    assert (folder / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_nine_mib_experts_at_the_default_width() -> None:
    geometry = script.Geometry(24, 32, 4, 1024, 9)
    assert geometry.width == 1536 and 3 * geometry.width * 1024 * 2 == 9 * 2**20


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for bad in ({"top_k": 9}, {"layers": 0}, {"hidden": 100}, {"expert_mib": 0.0001}):
        with pytest.raises(UsageError):
            script.Geometry(**{"layers": 2, "experts": 8, "top_k": 2, "hidden": 128, "expert_mib": 1} | bad)
    with pytest.raises(UsageError, match="exists already"):
        script.make_checkpoint(tmp_path, SMALL)
    (tmp_path / "x.npz").write_bytes(b"no")
    with pytest.raises(UsageError, match="not a routing trace"):
        script.trace_shape(tmp_path / "x.npz")
