"""The model without its experts' bytes: everything else is loaded as `from_pretrained` loads it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.checkpoint import TORCH_DTYPES, Checkpoint
from seqmoe.runtime.headers import TensorEntry
from seqmoe.runtime.meta import build_meta_model, expert_parameters


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read from its file when indexed with `[...]`, as Transformers' loader does.

    What it returns owns its memory; nothing is memory-mapped, so page cache and tensor are never both in the process.
    """

    path: Path
    entry: TensorEntry

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert index is ..., index
        dtype = TORCH_DTYPES.get(self.entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensors of type {self.entry.dtype} cannot be loaded")
        data = torch.empty(self.entry.nbytes, dtype=torch.uint8)
        view = data.numpy().data
        done = 0
        with open(self.path, "rb", buffering=0) as file:
            while done < len(view):
                count = os.preadv(file.fileno(), [view[done:]], self.entry.offset + done)
                if count == 0:
                    raise CheckpointError(f"{self.path}: ends at byte {self.entry.offset + done}, more was expected")
                done += count
        return data.view(dtype).reshape(self.entry.shape)


def load_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> Any:
    """The model in eval mode with all weights, buffers and its generation config, but experts on the meta device.

    The loading itself is Transformers' own (renaming, conversion, types, tying, buffers); it just never sees the
    experts' tensors. Peak memory is that of the weights loaded.

    Args:
        dtype: What to load with; None means `checkpoint.dtype`, as `from_pretrained` chooses.
        attn_implementation: As in `from_pretrained`.

    Raises:
        CheckpointError: weights that are missing, or of another shape than the config says, by name.
    """
    dtype = dtype or checkpoint.dtype
    model = build_meta_model(checkpoint.config, dtype, attn_implementation)
    model.config.name_or_path = str(checkpoint.folder)
    experts: set[str] = set()
    for name in checkpoint.moe_modules:
        module = model.get_submodule(name)
        module._is_hf_initialized = True
        for param, tensor in expert_parameters(module).items():
            experts.add(f"{name}.{param}")
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # so that no init function fills it
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(checkpoint.folder),
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    lazy = {name: LazyTensor(checkpoint.files[e.file], e) for name, e in checkpoint.dense_tensors.items()}
    cls = type(model)
    info, _ = cls._load_pretrained_model(model, lazy, None, load_config)
    info.missing_keys -= experts
    _refuse_incomplete(checkpoint, model, info)
    cls._finalize_model_loading(model, load_config, info)
    model.eval()
    _load_generation_config(model, checkpoint.folder)
    left = {name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta} - experts
    assert not left, f"not loaded: {sorted(left)}"
    return model


def _refuse_incomplete(checkpoint: Checkpoint, model: Any, info: Any) -> None:
    """from_pretrained would fill what is missing with random numbers and warn."""
    if info.conversion_errors:
        name, text = next(iter(info.conversion_errors.items()))
        raise CheckpointError(f"{checkpoint.folder}: {name} cannot be loaded: {text.strip().splitlines()[-1]}")
    if info.mismatched_keys:
        name, found, expected = min(info.mismatched_keys)
        raise CheckpointError(
            f"{checkpoint.folder}: {name} has shape {list(found)} on disk, the config says {list(expected)}"
        )
    missing = set(info.missing_keys)
    # Of tied weights one is enough, whichever.
    for target, source in model.all_tied_weights_keys.items():
        if target not in info.missing_keys or source not in info.missing_keys:
            missing -= {target, source}
    ignored = model._keys_to_ignore_on_load_missing or ()
    missing = {name for name in missing if not any(re.search(pattern, name) for pattern in ignored)}
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"{checkpoint.folder}: weights are missing: {', '.join(names[:3])}{more}")


def _load_generation_config(model: Any, folder: Path) -> None:
    """As from_pretrained: from generation_config.json, else from the model's config."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )
