"""The model as Transformers builds it, on the meta device: every name and shape, no bytes."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import initialization as hf_init

from seqmoe.profiles.errors import CheckpointError

_SIZE_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def read_config(folder: Path) -> Any:
    """The folder's configuration; refuses a folder without one, unknown model types and quantised weights."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder (a local folder with config.json and safetensors is needed)")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json in this folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any config class's own checks, wrong JSON, unknown model type
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(f"{folder / 'config.json'}: not usable: {reason}") from error
    for part in (config, config.get_text_config()):
        quantised = getattr(part, "quantization_config", None)
        if quantised:
            fields = quantised if isinstance(quantised, dict) else vars(quantised)
            raise CheckpointError(
                f"{folder}: its weights are quantised ({fields.get('quant_method', 'unknown method')}); "
                "only unquantised checkpoints can be run for now"
            )
    return config


def build_meta_model(config: Any, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """The causal language model of `config` on the meta device, untied, in `dtype`; `config` is not changed."""
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with torch.device("meta"), hf_init.no_tie_weights():
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **kwargs
            ).eval()
    except Exception as error:  # whatever a model's own code stumbles over in this config
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(f"model type {config.model_type!r} cannot be built: {reason}") from error


def find_experts_modules(model: Any) -> dict[str, nn.Module]:
    """Experts modules by name, in layer order: those that Transformers' experts interface dispatches.

    Raises:
        CheckpointError: the model is dense, or keeps its experts outside that interface.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if {"has_gate", "has_bias", "is_transposed", "config"} <= vars(module).keys()
    }
    if found:
        return found
    config = model.config.get_text_config()
    sizes = {name: value for name in _SIZE_NAMES if isinstance(value := getattr(config, name, None), int) and value > 1}
    ffn_config = getattr(config, "ffn_config", None)
    if sizes or getattr(ffn_config, "moe_num_experts", 1) > 1:
        raise CheckpointError(
            f"model type {config.model_type!r} is not supported: it does not compute its experts through "
            "Transformers' experts interface (use_experts_implementation)"
        )
    raise CheckpointError(f"model type {config.model_type!r} is a dense model: it has no experts to keep elsewhere")


def expert_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The stacked parameters [E, ...] of an experts module, by name."""
    return dict(module.named_parameters(recurse=False))
