"""The demo model's text: where it comes from, how it is split, and in which shares it is mixed.

Nothing here is copied into the project. The text folder is given by the caller; Python's own sources are read from
the interpreter that runs this.
"""

import json
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

EOS = "<|endoftext|>"
MIX = {  # share of the training tokens
    "gsm8k": 0.38,
    "shakespeare": 0.16,
    "mt_bench": 0.01,
    "humaneval": 0.02,
    "mbpp": 0.06,
    "stdlib": 0.37,
}
HELD_OUT = 0.02  # share of the documents; gsm8k brings a test set of its own
PASSAGE_CHARS = 4000  # a held-out passage of a long text must fill a window of 512 tokens
STDLIB_BYTES = 8_000_000
STDLIB_SKIP = {"site-packages", "test", "tests", "idlelib", "encodings", "lib2to3", "__pycache__", "turtledemo"}


@dataclass
class Split:
    """Documents of one source."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _gsm8k(path: Path) -> list[str]:
    # <<48/2=24>> is a hint for a calculator, not something a person would write.
    return [
        f"Question: {row['question'].strip()}\nAnswer: {re.sub(r'<<[^>]*>>', '', row['answer']).strip()}"
        for row in _rows(path)
    ]


def _passages(text: str) -> list[str]:
    """Cut at blank lines into passages of about PASSAGE_CHARS characters."""
    passages, current = [], ""
    for paragraph in text.split("\n\n"):
        current += paragraph + "\n\n"
        if len(current) >= PASSAGE_CHARS:
            passages.append(current.strip())
            current = ""
    return [*passages, current.strip()] if current.strip() else passages


def _stdlib(rng: random.Random) -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not STDLIB_SKIP & set(p.relative_to(root).parts))
    rng.shuffle(paths)
    documents, total = [], 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        # Very long files are mostly tables; very short ones are empty packages.
        if 500 <= len(text) <= 120_000:
            documents.append(text.strip())
            total += len(text)
        if total >= STDLIB_BYTES:
            break
    return documents


def load_corpus(text: Path, seed: int) -> dict[str, Split]:
    """Read every source under `text` and split it. The same seed and files give the same split."""
    rng = random.Random(seed)
    mbpp = [
        f"# {row['text'].strip()}\n{row['code'].strip()}\n\n" + "\n".join(row["test_list"])
        for row in _rows(text / "mbpp.jsonl")
    ]
    chat = [
        "\n\n".join(f"User: {turn.strip()}" for turn in row["turns"]) for row in _rows(text / "mt_bench_question.jsonl")
    ]
    human_eval = [(row["prompt"] + row["canonical_solution"]).strip() for row in _rows(text / "humaneval.jsonl")]
    documents = {
        "shakespeare": _passages((text / "tinyshakespeare.txt").read_text(encoding="utf-8")),
        "mt_bench": chat,
        "humaneval": human_eval,
        "mbpp": [re.sub(r"\r\n?", "\n", doc).replace("\t", "    ") for doc in mbpp],
        "stdlib": _stdlib(rng),
    }
    splits = {"gsm8k": Split(_gsm8k(text / "gsm8k_train.jsonl"), _gsm8k(text / "gsm8k_test.jsonl"))}
    for name, docs in documents.items():
        rng.shuffle(docs)
        count = max(1, round(len(docs) * HELD_OUT))
        splits[name] = Split(docs[count:], docs[:count])
    return splits


def encode(documents: list[str], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Token ids of all documents, each followed by the end-of-text token: int32 [N]."""
    encodings = tokenizer.encode_batch([document + EOS for document in documents])
    return np.concatenate([np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings])


def train_batch(
    streams: dict[str, NDArray[np.int32]], rows: int, length: int, seed: int, step: int
) -> NDArray[np.int32]:
    """Random windows [rows, length + 1], sources drawn by MIX. Depends on (seed, step) alone, so a restart goes on."""
    rng = np.random.default_rng((seed, step))
    names = list(MIX)
    picks = rng.choice(len(names), size=rows, p=np.asarray([MIX[n] for n in names]) / sum(MIX.values()))
    batch = np.empty((rows, length + 1), dtype=np.int32)
    for row, pick in enumerate(picks):
        stream = streams[names[pick]]
        start = int(rng.integers(0, len(stream) - length))
        batch[row] = stream[start : start + length + 1]
    return batch


def held_out_windows(stream: NDArray[np.int32], count: int, length: int) -> NDArray[np.int32]:
    """Up to `count` windows [count, length + 1], evenly spaced over a held-out stream."""
    last = len(stream) - length - 1
    starts = np.unique(np.linspace(0, max(last, 0), count).astype(int))
    return np.stack([stream[s : s + length + 1] for s in starts if len(stream) > length])
