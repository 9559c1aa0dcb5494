"""Print how the demo model routes on held-out text, and how well a cache of a quarter of its experts would do.

    python examples/demo_model/routing_report.py --text TEXT_DIR

Each sequence is a decode of its own: the cache starts cold, and the text's own tokens are fed one after the other
(computed in one pass, which routes the same).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from corpus import encode, held_out_windows, load_corpus
from numpy.typing import NDArray
from routing import belady_hits, layer_stats, lru_hits, positions
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
RESIDENCY = 0.25


@torch.no_grad()
def record_choices(model: Any, ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Experts chosen for one sequence [steps]: int [steps, layers, top_k]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy()


def generate(model: Any, prompt: NDArray[np.int32], steps: int) -> NDArray[np.int32]:
    """The model's own greedy continuation of a prompt, `steps` tokens long, without the prompt."""
    ids = torch.from_numpy(prompt).long()[None]
    out: torch.Tensor = model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
    return np.asarray(out[0, len(prompt) :], dtype=np.int32)


@click.command(context_settings={"show_default": True})
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder with the text.")
@click.option("--checkpoint", type=click.Path(exists=True, path_type=Path), default=HERE / "checkpoint")
@click.option("--sequences", default=2, help="Held-out sequences per source.")
@click.option("--steps", default=320, help="Tokens per sequence.")
@click.option("--generated", is_flag=True, help="Route the model's own greedy text after a held-out prompt of 32.")
@click.option("--float32", is_flag=True, help="Compute in float32 in place of the checkpoint's bfloat16.")
@click.option("--json", "as_json", is_flag=True, help="Add the same as one JSON line at the end.")
def main(
    text: Path, checkpoint: Path, sequences: int, steps: int, generated: bool, float32: bool, as_json: bool
) -> None:
    """Report on routing and cache hit rates."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32 if float32 else torch.bfloat16, experts_implementation="eager"
    )
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    seed = json.loads((checkpoint / "training.json").read_text())["seed"]  # the split depends on it
    experts, layers = model.config.num_experts, model.config.num_hidden_layers
    slots = round(RESIDENCY * experts * layers)

    choices: dict[str, list[NDArray[np.int64]]] = {}
    for name, split in load_corpus(text, seed).items():
        stream = encode(split.held_out[:200], tokenizer)
        if len(stream) > steps:
            windows = [w[:steps] for w in held_out_windows(stream, sequences, steps)]
            windows = [generate(model, w[:32], steps) for w in windows] if generated else windows
            choices[name] = [record_choices(model, w) for w in windows]
    everything = [sequence for group in choices.values() for sequence in group]

    stats = layer_stats(everything, experts)
    click.echo(f"{len(everything)} sequences of {steps} tokens, {layers} layers of {experts} experts")
    click.echo("layer  used  entropy  overlap  max share  dead")
    for layer, s in enumerate(stats):
        click.echo(f"{layer:5d} {s.used:5d} {s.entropy:8.3f} {s.overlap:8.3f} {s.max_share:10.3f} {s.dead:5d}")

    click.echo(f"\nhit rate with {slots} of {experts * layers} slots (one pool, cold start)")
    click.echo("source        LRU  Belady")
    rates: dict[str, dict[str, float]] = {}
    for name, group in [*choices.items(), ("all", everything)]:
        needs = [positions(sequence, experts) for sequence in group]
        lookups = sum(sequence.size for sequence in group)
        rates[name] = {
            "lru": sum(lru_hits(n, slots) for n in needs) / lookups,
            "belady": sum(belady_hits(n, slots) for n in needs) / lookups,
        }
        click.echo(f"{name:11s} {rates[name]['lru']:5.3f} {rates[name]['belady']:7.3f}")
    dead_experts = sum(s.dead for s in stats)
    dead_layers = [layer for layer, s in enumerate(stats) if s.used <= model.config.num_experts_per_tok]
    click.echo(f"\ndead experts: {dead_experts}; dead layers (always the same experts): {dead_layers or 'none'}")
    if as_json:
        report = {"layers": [asdict(s) for s in stats], "hit_rate": rates, "slots": slots}
        click.echo(json.dumps(report | {"dead_experts": dead_experts, "dead_layers": dead_layers}))


if __name__ == "__main__":
    main()
