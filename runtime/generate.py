"""The decode loop, as a `custom_generate` of Transformers.

Transformers prepares everything as it always does (generation config, logits processors, stopping criteria, cache,
padding); only the loop itself is ours, so that each step is timed, its expert statistics are kept, and the step can
run through a captured `DecodeGraph` instead of the model's Python. Greedy and multinomial sampling draw exactly what
`model.generate` draws for the same seed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from seqmoe.runtime.report import StepStats, Totals


class StepGraph(Protocol):
    """A captured decode step: `load_cache` takes over the prefill's cache, `step` feeds one token per sequence."""

    def load_cache(self, cache: Any, attention_mask: torch.Tensor | None) -> None: ...

    def step(self, token_ids: torch.Tensor) -> torch.Tensor: ...


@dataclass
class Recording:
    """What the loop leaves behind for the engine's report."""

    prefill: StepStats | None = None
    decode: list[StepStats] = field(default_factory=list)


def cache_of(model_kwargs: dict[str, Any]) -> Any:
    """The key-value cache among the model's keyword arguments, under either of the names Transformers 5 has used."""
    cache = model_kwargs.get("cache")
    return cache if cache is not None else model_kwargs.get("past_key_values")


def decode_loop(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # [batch, length]
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    totals: Totals,
    recording: Recording,
    before_pass: Callable[[torch.Tensor, bool], None],
    graph: Callable[[int, Any, torch.Tensor | None], StepGraph | None],
    ignore_eos: bool = False,
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor:  # [batch, length + new]
    """Generates until the stopping criteria say so; appends one `StepStats` per pass to `recording`.

    `before_pass(tokens, decoding)` is called before each forward pass with what it is fed, [batch, n]; `graph(batch, cache, mask)` may give a captured step after prefill.
    """
    started = time.perf_counter()
    batch = input_ids.shape[0]
    pad_token_id = generation_config._pad_token_tensor
    if ignore_eos:  # a config without end tokens gets the model's own back from Transformers
        stopping_criteria = StoppingCriteriaList(c for c in stopping_criteria if not hasattr(c, "eos_token_id"))
    can_end = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
    unfinished = torch.ones(batch, dtype=torch.long)

    before = totals.copy()
    before_pass(input_ids, False)
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    logits = outputs.logits[:, -1]
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
    del outputs  # the prefill's logits may be large
    captured: StepGraph | None = None
    fed = input_ids.numel()

    while True:
        scores = logits_processor(input_ids, logits.to(copy=True, dtype=torch.float32))
        if generation_config.do_sample:
            next_tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            next_tokens = torch.argmax(scores, dim=-1)
        if can_end:
            next_tokens = next_tokens * unfinished + pad_token_id * (1 - unfinished)
        input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
        if streamer is not None:
            streamer.put(next_tokens)
        unfinished = unfinished & ~stopping_criteria(input_ids, None)

        now = time.perf_counter()
        stats = StepStats.between(before, totals, fed, now - started)
        if recording.prefill is None:
            recording.prefill = stats
            captured = graph(batch, cache_of(model_kwargs), model_kwargs.get("attention_mask"))
            now = time.perf_counter()  # building the graph, once per batch size, is no decode step
        else:
            recording.decode.append(stats)
        if unfinished.max() == 0:
            break

        started, before, fed = now, totals.copy(), batch
        before_pass(next_tokens[:, None], True)
        if captured is not None:
            logits = captured.step(next_tokens[:, None])
        else:
            model_inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)
            outputs = model(**model_inputs, return_dict=True)
            logits = outputs.logits[:, -1]
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)

    if streamer is not None:
        streamer.end()
    return input_ids
