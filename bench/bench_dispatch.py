"""What a decode step costs a layer beyond its experts: Transformers' own forward beside `DecodeGraph`, interleaved.

Experts are replaced by a function that returns its input, in both. Prints a table and, as the last line, JSON.
`python bench/bench_dispatch.py --hidden 128 --layers 8 --dtype bfloat16 --threads 2`
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from seqmoe.runtime.graph import DecodeGraph
from seqmoe.runtime.graph_tape import ForwardNames


def make_model(args: argparse.Namespace) -> Any:
    """A Qwen3-MoE of the asked sizes with experts of one column, since they are never run."""
    config = Qwen3MoeConfig(
        hidden_size=args.hidden, intermediate_size=16, moe_intermediate_size=1, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim, num_experts=args.experts,
        num_experts_per_tok=args.top_k, vocab_size=args.vocabulary, norm_topk_prob=True, max_position_embeddings=4096,
        decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()


def microseconds(step: Callable[[], Any], count: int) -> tuple[list[float], list[float]]:
    """Wall and processor microseconds of each of `count` steps."""
    wall, busy = [], []
    for _ in range(count):
        started, before = time.perf_counter(), time.thread_time()
        step()
        wall.append((time.perf_counter() - started) * 1e6)
        busy.append((time.thread_time() - before) * 1e6)
    return wall, busy


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("hidden", 128), ("layers", 8), ("heads", 4), ("kv-heads", 2), ("head-dim", 32), ("experts", 64), ("top-k", 4),
        ("vocabulary", 2048), ("threads", 2), ("batch", 1), ("context", 128), ("rounds", 12), ("steps", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model(args)
    ALL_EXPERTS_FUNCTIONS["bench_stub"] = lambda module, hidden, index, weights: hidden
    model.config._experts_implementation = "bench_stub"
    total = args.rounds * args.steps + 16
    graph = DecodeGraph.build(
        model, lambda layer, hidden, index, weights: hidden, max_context=args.context + total, batch=args.batch
    )
    names, cache, other = ForwardNames(model), DynamicCache(config=model.config), DynamicCache(config=model.config)
    ids = torch.randint(0, args.vocabulary, (args.batch, args.context))
    token = ids[:, :1].contiguous()
    with torch.inference_mode():
        for one in (cache, other):
            model(input_ids=ids, use_cache=True, **names.arguments(cache=one, position_ids=None))
    graph.load_cache(other)

    def eager() -> None:
        with torch.inference_mode():
            positions = torch.full_like(token, cache.get_seq_length())
            model(input_ids=token, use_cache=True, **names.arguments(cache=cache, position_ids=positions))

    results: dict[str, tuple[list[float], list[float]]] = {"transformers": ([], []), "graph": ([], [])}
    for number in range(args.rounds + 1):
        for name, step in (("transformers", eager), ("graph", lambda: graph.step(token))):
            wall, busy = microseconds(step, args.steps if number else 4)
            if number:  # the first round warms up
                results[name][0].extend(wall)
                results[name][1].extend(busy)
    report: dict[str, Any] = {"bench": "dispatch", **vars(args), "graph": graph.describe()}
    print(f"{'':14s}{'step us':>10s}{'a layer us':>12s}{'least us':>10s}{'processor us a layer':>22s}")
    for name, (wall, busy) in results.items():
        median = statistics.median(wall)
        report[f"{name}_step_us"] = round(median, 1)
        report[f"{name}_layer_us"] = round(median / args.layers, 1)
        report[f"{name}_layer_least_us"] = round(min(wall) / args.layers, 1)
        report[f"{name}_layer_busy_us"] = round(statistics.median(busy) / args.layers, 1)
        print(
            f"{name:14s}{median:10.0f}{median / args.layers:12.1f}{min(wall) / args.layers:10.1f}"
            f"{statistics.median(busy) / args.layers:22.1f}"
        )
    report["speedup"] = round(report["transformers_step_us"] / report["graph_step_us"], 2)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
