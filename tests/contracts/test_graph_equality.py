"""`DecodeGraph` gives what the model's own forward gives: the same greedy tokens in float32 over 64 steps, alone and in a
left-padded batch, past sliding windows; in bfloat16 logits within the spread of Transformers' own implementations.
"""

from typing import Any

import pytest
import torch
from support.families import FAMILIES, make_model
from transformers import DynamicCache

from seqmoe.runtime.graph import DecodeGraph, GraphUnsupported, PlainDecode, compile_decode
from seqmoe.runtime.graph_tape import ForwardNames

PROMPTS = [[5, 17, 33, 2, 71], [90, 8, 8, 41, 3, 12, 64, 1, 77, 20], [44, 45]]
NEW_TOKENS = 64
CAPTURED = [name for name in FAMILIES if name != "deepseek_v4"]
# Small windows and other settings, so that 64 tokens meet them.
CHANGES: dict[str, dict[str, Any]] = {"gpt_oss": {"sliding_window": 16}, "mixtral": {"sliding_window": 24}}


pytestmark = pytest.mark.usefixtures("one_thread")


def real_experts(graph: DecodeGraph) -> Any:
    """The experts modules' own eager code."""

    def call(layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        module = graph.experts_modules[layer]
        return type(module).forward.__wrapped__(module, hidden, index, weights)  # type: ignore[attr-defined]

    return call


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[DynamicCache, torch.Tensor]:
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = ForwardNames(model).arguments(cache=cache, position_ids=positions)
    return cache, model(input_ids=ids, attention_mask=mask, use_cache=True, **arguments).logits[:, -1]


def decode(step: Any, logits: torch.Tensor, count: int, follow: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
    """Greedy tokens [batch, count + 1] (or those of `follow`) and each step's logits."""
    tokens, all_logits = [logits.argmax(-1) if follow is None else follow[:, 0]], []
    for number in range(count):
        logits = step.step(tokens[-1][:, None].contiguous()).float().clone()
        all_logits.append(logits)
        tokens.append(logits.argmax(-1) if follow is None else follow[:, number + 1])
    return torch.stack(tokens, 1), torch.stack(all_logits)


def both(model: Any, prompts: list[list[int]], count: int) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    ids, mask = padded(prompts)
    model.config._experts_implementation = "eager"
    plain = PlainDecode(model, "reference")
    cache, logits = prefill(model, ids, mask)
    plain.load_cache(cache, mask)
    want, want_logits = decode(plain, logits, count)
    graph = DecodeGraph.build(model, None, max_context=ids.shape[1] + count, batch=len(prompts))  # type: ignore[arg-type]
    graph.experts_call = real_experts(graph)
    cache, logits = prefill(model, ids, mask)
    graph.load_cache(cache, mask)
    _, got_logits = decode(graph, logits, count, follow=want)
    return got_logits.argmax(-1).T, want[:, 1:], got_logits, want_logits


@pytest.mark.parametrize("name", CAPTURED)
def test_float32_greedy_tokens_are_the_models_own(name: str) -> None:
    model = make_model(FAMILIES[name], **CHANGES.get(name, {}))
    for prompts, count in (([PROMPTS[0]], 24), (PROMPTS, NEW_TOKENS)):
        got, want, got_logits, want_logits = both(model, prompts, count)
        assert torch.equal(got, want)
        torch.testing.assert_close(got_logits, want_logits, rtol=0, atol=2e-3 * float(want_logits.std()))


@pytest.mark.parametrize("name", CAPTURED)
def test_bfloat16_logits_are_as_close_as_transformers_own_implementations(name: str) -> None:
    model = make_model(FAMILIES[name], dtype=torch.bfloat16, **CHANGES.get(name, {}))
    _, _, got, want = both(model, [PROMPTS[1]], 12)
    spread = (got - want).square().mean(dim=(1, 2)).sqrt() / want.std()
    assert float(spread.median()) < 0.1, spread


def test_a_model_that_cannot_be_captured_goes_on_in_transformers_with_the_reason() -> None:
    model = make_model(FAMILIES["deepseek_v4"])
    told: list[str] = []
    step = compile_decode(model, None, max_context=64, batch=1, notice=told.append)  # type: ignore[arg-type]
    assert isinstance(step, PlainDecode)
    assert told == [step.reason]
    assert "cache layers" in step.reason
    with pytest.raises(GraphUnsupported, match="cache layers"):
        DecodeGraph.build(model, None, max_context=64, batch=1)  # type: ignore[arg-type]


def test_the_model_is_left_as_it_was() -> None:
    model = make_model(FAMILIES["qwen3_moe"])
    before = (model.config._attn_implementation, model.config._experts_implementation)
    DecodeGraph.build(model, None, max_context=64, batch=2)  # type: ignore[arg-type]
    assert (model.config._attn_implementation, model.config._experts_implementation) == before
    ids, mask = padded(PROMPTS)
    prefill(model, ids, mask)  # and still runs
