"""Which experts are used most: counted once on a short text, for mode `static` and for prefetch in prefill, and kept by
model digest."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import SeqmoeError
from seqmoe.profiles.files import write_atomic
from seqmoe.runtime.demo_xl import default_cache_dir

if TYPE_CHECKING:
    from seqmoe.runtime.engine import Engine

log = logging.getLogger("seqmoe")

# Of the three kinds of text that people feed to models most: prose, a question with numbers, code.
CALIBRATION = (
    """The morning was cold and the road was long, but they had promised to be home before the first snow, and so they
walked on without a word.""",
    """Question: A shop sells 24 apples a day for 5 days and 36 apples on each of the two days after that. How many apples
does it sell in the whole week? Answer: In five days it sells 24 * 5 =""",
    """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
""",
)
CALIBRATION_NEW_TOKENS = 48


def measured_popularity(engine: "Engine", cache_dir: Path | None = None) -> NDArray[np.int64]:
    """How often each expert was chosen, int64 [L * E], from the cache folder or from one run of the calibration texts.

    The run goes through the engine as it is and leaves its pool in whatever state it came to.
    """
    path = (cache_dir or default_cache_dir()) / "popularity" / f"{engine.spec.digest}.json"
    total = engine.spec.total_experts
    with suppress(OSError, ValueError, TypeError):
        counts = np.array(json.loads(path.read_text())["counts"], dtype=np.int64)
        if counts.shape == (total,) and counts.min() >= 0:
            return counts
    log.info("counting which experts are popular (once for this model)")
    counts = np.zeros(total, dtype=np.int64)
    num_experts = engine.spec.num_experts
    engine.runner.observer = lambda layer, hidden, index, weights: np.add.at(
        counts, layer * num_experts + index.flatten().numpy(), 1
    )
    try:
        for text in CALIBRATION:
            engine.generate([text], max_new_tokens=CALIBRATION_NEW_TOKENS, ignore_eos=True)
    finally:
        engine.runner.observer = None
    with suppress(SeqmoeError):  # a cache that cannot be written costs a second count, nothing else
        write_atomic(path, json.dumps({"counts": counts.tolist()}))
    return counts
