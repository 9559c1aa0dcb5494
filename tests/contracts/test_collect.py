"""Trace collection: the packed pass records what decoding chooses, token for token, and nothing is lost or done twice."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.families import FAMILIES, make_checkpoint

from seqmoe.predictors.trace_file import read_trace, write_trace
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime import collect as collect_module
from seqmoe.runtime import measure
from seqmoe.runtime.collect import Recorder, collect, packed_routing
from seqmoe.runtime.collect_cli import collect_command, read_prompt_file
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.routers import model_routers

PROMPTS = [[5, 17, 33, 2, 71], [90, 8, 8, 41, 3, 12, 64, 1, 77, 20], [44, 45], [9, 8, 7]]
GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")
QUICK = ("qwen3_moe", "qwen3_next")  # attention alone, and a recurrent state
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]


def decoded_routing(engine: Engine, prompt: list[int], new_tokens: int) -> np.ndarray:
    """Every step's experts, sorted, from a request of its own: prefill, then one token at a time."""
    recorder = Recorder(engine.spec.num_layers, inputs=False)
    engine.runner.observer = recorder
    try:
        engine.generate([prompt], new_tokens, ignore_eos=True)
    finally:
        engine.runner.observer = None
    return np.sort(recorder.take(1)[0][0].numpy(), axis=-1)


@pytest.mark.parametrize("name", NAMES)
def test_the_packed_pass_chooses_as_decoding_does(name, tmp_path):
    folder = make_checkpoint(name, "saved", tmp_path / name)
    with Engine.open(folder, mode="lru", residency=0.4, context=64, batch=4) as engine:
        result = collect(engine, PROMPTS, tmp_path / "t.safetensors", max_new_tokens=24)
        trace = read_trace(tmp_path / "t.safetensors")
        if name == "deepseek_v4":  # its compressed blocks of positions differ between Transformers' prefill and decode
            assert result.agreement > 0.9
            return
        assert result.agreement == 1.0
        assert trace.meta.model_digest == engine.spec.digest
        assert trace.num_sequences == len(PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            one = trace.sequence(i)
            assert one.tokens[: len(prompt)].tolist() == prompt
            steps = decoded_routing(engine, prompt, one.num_steps - len(prompt) + 1)
            assert (np.sort(one.expert_ids, axis=-1) == steps).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint("qwen3_moe", "saved", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "qwen3_moe" else pytest.mark.slow) for n in FAMILIES]
)
def test_routers_and_their_inputs_give_what_was_chosen(name, tmp_path):
    if name in ("deepseek_v4",):
        pytest.skip("its first layers choose by token, not by router")
    with Engine.open(make_checkpoint(name, "saved", tmp_path / name), mode="full", context=64, batch=2) as engine:
        traces = packed_routing(engine, [PROMPTS[0], PROMPTS[1]], router_inputs=True)
        routers = model_routers(engine)
    for trace in traces:
        routers.check_trace(trace)
        for layer in range(trace.num_layers):
            if name in GROUPED:  # groups of experts and a correction bias have the last word
                continue
            logits = routers.logits(layer, trace.router_input(layer))
            chosen = np.sort(np.argsort(-logits, axis=-1)[:, : trace.top_k], axis=-1)
            # The inputs are kept in bfloat16, so that a near tie may go the other way.
            same = (chosen == np.sort(trace.expert_ids[:, layer], axis=-1)).mean()
            assert same >= 0.85, (layer, same)


def test_a_killed_collection_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    out, whole = tmp_path / "t.safetensors", tmp_path / "whole.safetensors"
    with Engine.open(folder, mode="lru", residency=0.4, context=64, batch=2) as engine:
        collect(engine, PROMPTS, whole, max_new_tokens=16, temperature=0.9, seed=3)
        real, calls = collect_module.packed_routing, []

        def killed(*arguments, **more):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return real(*arguments, **more)

        monkeypatch.setattr(collect_module, "packed_routing", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(engine, PROMPTS, out, max_new_tokens=16, temperature=0.9, seed=3)
        assert not out.exists()
        with pytest.raises(UsageError, match="unfinished collection"):
            collect(engine, PROMPTS, out, max_new_tokens=16, temperature=0.9, seed=3)
        with pytest.raises(UsageError, match="other prompts or settings"):
            collect(engine, PROMPTS, out, max_new_tokens=17, temperature=0.9, seed=3, resume=True)
        monkeypatch.setattr(collect_module, "_generate", lambda *a: pytest.fail("generated again"))
        collect(engine, PROMPTS, out, max_new_tokens=16, temperature=0.9, seed=3, resume=True)
    assert len(calls) == 3
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(out.name + ".parts").exists()


def test_the_command(folder, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "x"}) for _ in range(2)))
    done = CliRunner().invoke(
        collect_command, ["--model", str(folder), "--prompts", str(prompts), "--out", str(tmp_path / "t.npz")]
    )
    assert done.exit_code == 2 and "must end in .safetensors" in done.output
    arguments = ["--model", "demo", "--prompts", str(prompts), "--out", str(tmp_path / "t.safetensors")]
    more = ["--max-new-tokens", "6", "--context", "32", "--batch", "2", "--json"]
    done = CliRunner().invoke(collect_command, arguments + more)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    trace = read_trace(tmp_path / "t.safetensors")
    assert (found["sequences"], found["steps"]) == (trace.num_sequences, trace.num_steps)
    assert trace.num_layers == 8 and trace.router_inputs is None
    assert not found["replaced"]
    done = CliRunner().invoke(collect_command, arguments + more)
    assert json.loads(done.stdout.splitlines()[-1])["replaced"]
    # What was collected can be replayed, from either kind of file.
    np.savez(tmp_path / "t.npz", expert_ids=trace.expert_ids, seq_start=trace.seq_start, seq_len=trace.seq_len, num_experts=64)
    write_trace(tmp_path / "bare.safetensors", read_trace(tmp_path / "t.npz"))
    job = {"model": "demo", "mode": "belady", "residency": 0.25, "context": 64, "max_new_tokens": 5}
    runs = [measure.run({**job, "replay": str(tmp_path / name)}) for name in ("t.npz", "bare.safetensors")]
    assert runs[0]["token_ids"] == runs[1]["token_ids"] and runs[0]["hit_rate"] == runs[1]["hit_rate"]


def test_prompt_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "p.jsonl"
    for text, says in (
        ('{"a": 1}', "line 1: expected an object with prompt, question or text"),
        ("{", "line 1: not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_prompt_file(path)
    path.write_text('{"question": "q", "text": "t"}\n"just text"')
    assert read_prompt_file(path) == ["q", "just text"]
