"""The experts kernels against Transformers' own experts implementations, interleaved; the last line is one JSON object.

    python bench/bench_experts.py [--rounds 9] [--threads 2] [--shapes 128x12288x4,2048x768x8] [--tokens 1,2,4,8,128]

For each shape (hidden size x expert width x k) one layer of bfloat16 experts, as many as 64 and as memory allows, with
random routing. Each round times every implementation once on the same input, one after the other; the figure is the
median over the rounds. `gb_per_s` counts the weights of the experts chosen, once each. `overhead_us` is our time on
experts so small that they are in cache (hidden 64, width 32, k 4): what a call costs besides weights.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute

PEERS = ("eager", "batched_mm", "grouped_mm")
BATCHED_MAX_BYTES = 2 << 30  # batched_mm copies the weights of every pair: left out where that is more


@dataclass(frozen=True)
class View:
    param: str
    dim: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "BF16"


@dataclass(frozen=True)
class Layout:
    views: tuple[View, ...]


class Layer:
    """One layer of experts, seen by Transformers as a module and by the kernels as addresses."""

    def __init__(self, hidden: int, width: int, k: int, num_experts: int, threads: int) -> None:
        self.hidden, self.width, self.k, self.num_experts = hidden, width, k, num_experts
        self.config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=width, num_experts=num_experts, num_experts_per_tok=k
        )
        with torch.device("meta"):
            self.module = Qwen3MoeExperts(self.config)
        for name, parameter in list(self.module.named_parameters()):
            memory = torch.empty(parameter.shape, dtype=torch.bfloat16)
            for part in memory:  # no second copy of the whole
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16) * 0.05)
            setattr(self.module, name, torch.nn.Parameter(memory, requires_grad=False))
        views = (
            View("gate_up_proj", 0, 0, (2 * width, hidden), (hidden, 1)),
            View("down_proj", 0, 0, (hidden, width), (width, 1)),
        )
        self.compute = ExpertsCompute(Layout(views), self.module, torch.bfloat16, threads)
        up, down = self.module.gate_up_proj, self.module.down_proj
        self.addresses = np.array([[up[e].data_ptr(), down[e].data_ptr()] for e in range(num_experts)], dtype=np.int64)
        self.expert_bytes = 3 * hidden * width * 2

    def implementations(self) -> dict[str, Callable[..., torch.Tensor]]:
        def ours(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.compute.forward(x, index, weights, self.addresses)

        def peer(name: str) -> Callable[..., torch.Tensor]:
            def run(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                self.config._experts_implementation = name
                return self.module(x, index, weights)

            return run

        return {"seqmoe": ours, **{name: peer(name) for name in PEERS}}


def measure(layer: Layer, tokens: int, rounds: int, seed: int) -> dict:
    """Median seconds of each implementation, new routing each round; one warm-up round."""
    generator = torch.Generator().manual_seed(seed)
    implementations = layer.implementations()
    if tokens * layer.k * layer.expert_bytes > BATCHED_MAX_BYTES:
        del implementations["batched_mm"]
    times: dict[str, list[float]] = {name: [] for name in implementations}
    weights_read = []
    for round_number in range(rounds + 1):
        x = torch.randn(tokens, layer.hidden, generator=generator).to(torch.bfloat16)
        scores = torch.rand(tokens, layer.num_experts, generator=generator)
        weights, index = scores.softmax(-1).topk(layer.k)
        for name, run in implementations.items():
            started = time.perf_counter()
            run(x, index, weights.to(torch.bfloat16))
            if round_number:
                times[name].append(time.perf_counter() - started)
        weights_read.append(len(index.unique()) * layer.expert_bytes)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best_peer = min(medians[name] for name in PEERS if name in medians)
    return {
        "hidden": layer.hidden,
        "width": layer.width,
        "k": layer.k,
        "experts": layer.num_experts,
        "tokens": tokens,
        "us": {name: round(value * 1e6) for name, value in medians.items()},
        "best_us": {name: round(min(values) * 1e6) for name, values in times.items()},
        "gb_per_s": round(statistics.median(weights_read[1:]) / medians["seqmoe"] / 1e9, 2),
        "speedup_over_best_peer": round(best_peer / medians["seqmoe"], 2),
    }


def call_overhead_us(threads: int) -> float:
    """Median time of a call whose weights are in cache, in microseconds."""
    layer = Layer(64, 32, 4, 16, threads)
    ours = layer.implementations()["seqmoe"]
    x, weights = torch.randn(1, 64).to(torch.bfloat16), torch.rand(1, 4)
    index = torch.arange(4)[None]
    times = []
    for _ in range(2000):
        started = time.perf_counter()
        ours(x, index, weights)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", default="128x12288x4,2048x768x8", help="hidden x width x k, separated by commas")
    parser.add_argument("--tokens", default="1,2,4,8,128")
    parser.add_argument("--max-bytes", type=int, default=1 << 30, help="memory for one layer's experts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    with torch.inference_mode():
        overhead = call_overhead_us(args.threads)
        print(f"call overhead: {overhead:.1f} us", flush=True)
        for shape in args.shapes.split(","):
            hidden, width, k = map(int, shape.split("x"))
            layer = Layer(hidden, width, k, min(64, args.max_bytes // (6 * hidden * width)), args.threads)
            for tokens in map(int, args.tokens.split(",")):
                result = measure(layer, tokens, args.rounds, seed=tokens)
                results.append(result)
                print(json.dumps(result), flush=True)
    print(json.dumps({"threads": args.threads, "overhead_us": round(overhead, 1), "results": results}))


if __name__ == "__main__":
    main()
