"""Records and skeleton against `from_pretrained`, for every family in every layout on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import FAMILIES, LAYOUTS, make_checkpoint
from transformers import AutoModelForCausalLM

from seqmoe.runtime.checkpoint import TORCH_DTYPES, Checkpoint
from seqmoe.runtime.meta import expert_parameters
from seqmoe.runtime.skeleton import load_skeleton

CASES = [
    pytest.param(name, layout, dtype, id=f"{name}-{layout}-{str(dtype)[6:]}")
    for name in FAMILIES
    for layout in LAYOUTS
    for dtype in ((torch.float32,) if layout == "saved" else (torch.bfloat16,))
]


def assemble(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every experts parameter, put together from the files' bytes alone, through layout and sources."""
    model = checkpoint.meta_model
    files = [np.fromfile(path, dtype=np.uint8) for path in checkpoint.files]
    whole = {}
    for layer, name in enumerate(checkpoint.moe_modules):
        for param, meta in expert_parameters(model.get_submodule(name)).items():
            whole[f"{name}.{param}"] = torch.full(meta.shape, float("nan"), dtype=meta.dtype)
        for expert in range(checkpoint.num_experts):
            for i, view in enumerate(checkpoint.layout.views):
                file, offset = checkpoint.sources[layer, expert, i]
                raw = torch.from_numpy(files[file][offset : offset + view.nbytes].copy())
                piece = raw.view(TORCH_DTYPES[view.dtype]).as_strided(view.shape, view.strides)
                target = whole[f"{name}.{view.param}"][expert]
                target.narrow(view.dim, view.start, view.shape[view.dim]).copy_(piece)
    return whole


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize(("name", "layout", "dtype"), CASES)
def test_records_and_skeleton_equal_from_pretrained(name: str, layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(name, layout, tmp_path, dtype=dtype)
    checkpoint = Checkpoint.open(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    skeleton = load_skeleton(checkpoint)
    expected, found, experts = named_tensors(model), named_tensors(skeleton), assemble(checkpoint)
    assert found.keys() == expected.keys()
    assert experts.keys() == {key for key, tensor in found.items() if tensor.is_meta}
    for key, tensor in expected.items():
        ours = experts.get(key, found[key])
        assert ours.dtype == tensor.dtype, key
        assert torch.equal(ours, tensor), key
    tied = skeleton.get_input_embeddings().weight is skeleton.get_output_embeddings().weight
    assert tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    assert skeleton.generation_config.to_dict() == model.generation_config.to_dict()
    assert type(skeleton) is type(model)
    assert not any(module.training for module in skeleton.modules())
    ours_config, config = skeleton.config.to_dict(), model.config.to_dict()
    assert {key for key in config if ours_config.get(key) != config[key]} <= {"_name_or_path"}
    dense = {id(tensor): tensor.nbytes for key, tensor in found.items() if key not in experts}
    assert checkpoint.dense_bytes == sum(dense.values())
    assert checkpoint.layout.nbytes * checkpoint.num_layers * checkpoint.num_experts == sum(
        tensor.nbytes for tensor in experts.values()
    )
