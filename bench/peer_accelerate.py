"""One run of Transformers with Accelerate's disk offload. Job on stdin, see `peer_common.py`.

`write_offload` makes what `from_pretrained(..., offload_folder=...)` itself writes for a Mixture-of-Experts model on
first use: one safetensors file per stacked experts tensor. It is made once, outside the measured process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peer_common import Meter, PeerJob, TokenStream, model_config, serve

from seqmoe.runtime.safetensors_stream import TensorSpec, building, header_bytes, index_folder

PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def write_offload(checkpoint: Path, folder: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the stacked experts of a Qwen3-MoE checkpoint to `folder`, by streaming."""
    config = model_config(checkpoint)
    tensors = index_folder(checkpoint)
    total = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    done = 0
    with building(folder, total) as partial:
        for layer in range(config["num_hidden_layers"]):
            for parameter, parts in PARAMETERS.items():
                prefix = f"model.layers.{layer}.mlp.experts"
                rows = [
                    [tensors[f"{prefix}.{expert}.{part}.weight"] for part in parts]
                    for expert in range(config["num_experts"])
                ]
                shape = (len(rows), sum(part.shape[0] for part in rows[0]), rows[0][0].shape[1])
                name = f"{prefix}.{parameter}"
                with (partial / f"{name}.safetensors").open("wb") as file:
                    file.write(header_bytes([TensorSpec(name, rows[0][0].dtype, shape)]))
                    for row in rows:
                        for part in row:
                            part.read().tofile(file)
                            done += part.nbytes
                    if progress:
                        progress(done, total)
        np.zeros(0).tofile(partial / "complete")
    return folder


def device_map_of(module: Any, on_disk: set[str], name: str = "") -> dict[str, str]:
    """The coarsest device map that has `on_disk` on disk and everything else in RAM."""
    if name in on_disk:
        return {name: "disk"}
    if name and not any(path.startswith(f"{name}.") for path in on_disk):
        return {name: "cpu"}
    children = [
        device_map_of(child, on_disk, f"{name}.{own}" if name else own) for own, child in module.named_children()
    ]
    return {path: device for part in children for path, device in part.items()}


def run(job: PeerJob) -> dict[str, Any]:
    """Greedy tokens. `extra`: `offload` (folder of `write_offload`), `resident_layers` (kept in RAM; the rest on disk)."""
    import torch
    from accelerate import dispatch_model, init_empty_weights
    from accelerate.utils import set_module_tensor_to_device
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    offload, resident = Path(job.extra["offload"]), int(job.extra["resident_layers"])
    config = AutoConfig.from_pretrained(job.path)
    options = {"experts_implementation": job.extra["experts"]} if job.extra.get("experts") else {}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, **options)
    for path in sorted(Path(job.path).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if ".experts." not in name:
                    set_module_tensor_to_device(model, name, "cpu", file.get_tensor(name).clone())
    index, on_disk = {}, set()
    for layer in range(config.num_hidden_layers):
        module = f"model.layers.{layer}.mlp.experts"
        for parameter in PARAMETERS:
            name = f"{module}.{parameter}"
            path = offload / f"{name}.safetensors"
            if layer < resident:
                with safe_open(path, "pt") as file:
                    set_module_tensor_to_device(model, name, "cpu", file.get_tensor(name).clone())
            else:
                index[name] = {"safetensors_file": str(path), "weight_name": name}
                on_disk.add(module)
    model.tie_weights()
    model.eval()
    dispatch_model(
        model,
        device_map_of(model, on_disk),
        main_device="cpu",
        offload_index=index,
        skip_keys=model._skip_keys_device_placement,
    )
    model.generation_config.eos_token_id = None

    def generate(prompt: list[int], count: int, meter: Meter) -> None:
        meter.start()
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            streamer=TokenStream(meter),
        )

    if job.warmup_tokens:
        generate(job.prompts[0], job.warmup_tokens, Meter())
    meter = Meter()
    for prompt in job.prompts:
        generate(prompt, job.max_new_tokens, meter)
    return meter.result() | {"resident_layers": resident}


if __name__ == "__main__":
    serve(run, ("accelerate",))
