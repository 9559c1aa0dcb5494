"""A run survives in a memory cgroup of exactly its budget, at full context, and stays within what it planned."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqmoe.profiles.sizes import parse_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import limit

MIB = 1 << 20
pytestmark = pytest.mark.slow
CONTEXT, NEW_TOKENS = 1024, 8


def run(job: dict[str, Any], group: limit.MemoryGroup | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "seqmoe.runtime.measure"]
    join = group.join if group else None
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, preexec_fn=join, check=False)
    assert done.stdout, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def job(budget: int, mode: str = "lru") -> dict[str, Any]:
    # As many tokens as the context holds, all over the vocabulary, so that nearly every expert is asked for.
    prompt = [i * 7919 % 4000 for i in range(CONTEXT - NEW_TOKENS)]
    return {
        "model": "demo",
        "mode": mode,
        "memory_bytes": budget,
        "context": CONTEXT,
        "prompts": [prompt],
        "max_new_tokens": NEW_TOKENS,
    }


@pytest.fixture
def group_of() -> Any:
    try:
        limit.MemoryGroup(2**30, f"seqmoe-test-probe-{os.getpid()}").close()
    except limit.SeqmoeError as error:
        pytest.skip(str(error))
    return lambda nbytes: limit.MemoryGroup(nbytes, f"seqmoe-test-{os.getpid()}")


@pytest.mark.parametrize("spare_mib", [0, 8])
def test_a_group_of_exactly_the_budget(group_of: Any, spare_mib: int) -> None:
    refused = run(job(64 * MIB), None)["error"]
    assert refused["exit_code"] == 4
    smallest = re.search(r"smallest that works is (\S+) ", refused["message"])
    assert smallest, refused
    # The size of a process that has only imported differs by some MiB from start to start.
    budget = parse_bytes(smallest[1]) + (16 + spare_mib) * MIB
    with group_of(budget) as group:
        answer = run(job(budget), group)
        assert group.out_of_memory_kills() == 0
    assert "error" not in answer, answer
    assert answer["peak_rss_bytes"] <= budget
    assert len(answer["token_ids"][0]) == NEW_TOKENS
    assert answer["token_ids"] == run(job(2**31, "full"), None)["token_ids"]


def test_without_a_budget_the_groups_limit_is_the_budget(group_of: Any) -> None:
    nbytes = 640 * MIB
    with group_of(nbytes) as group:
        answer = run({**job(0), "memory_bytes": None}, group)
        assert group.out_of_memory_kills() == 0
    assert "error" not in answer, answer
    assert answer["memory_plan"]["budget_bytes"] <= nbytes
    assert answer["peak_rss_bytes"] <= nbytes
