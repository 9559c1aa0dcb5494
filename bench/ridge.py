"""Ridge regression of the chosen experts on the step before, one fit for each horizon: the reference that recursion must beat.

python bench/ridge.py --traces routing.npz --train 0:256 --test 288:321 --out ridge.json
"""

import argparse
import json
from pathlib import Path

import numpy as np

from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import parse_sequences, read_trace


def pairs(trace: Trace, index: int, ahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Features [t, L * E + 1] of the steps of one sequence that have a step `ahead` later, and the ids chosen then."""
    sequence = trace.sequence(index)
    psi = psi_numpy(sequence.expert_ids, sequence.expert_weights, trace.num_experts)
    features = psi.reshape(len(psi), -1)[: max(0, len(psi) - ahead)]
    return np.concatenate([features, np.ones((len(features), 1), np.float32)], axis=1), sequence.expert_ids[ahead:]


def fit(trace: Trace, ahead: int, penalty: float) -> np.ndarray:
    """Weights [L * E + 1, L * E] that minimise the squared error of the chosen set plus penalty * |weights|^2."""
    size = trace.num_layers * trace.num_experts
    gram, moment = np.zeros((size + 1, size + 1)), np.zeros((size + 1, size))
    for index in range(trace.num_sequences):
        features, ids = pairs(trace, index, ahead)
        chosen = np.zeros((len(ids), trace.num_layers, trace.num_experts), np.float32)
        np.put_along_axis(chosen, ids.astype(np.int64), 1, axis=-1)
        gram += features.T @ features
        moment += features.T @ chosen.reshape(len(ids), -1)
    ridge = np.full(size + 1, penalty)
    ridge[-1] = 1e-3
    return np.linalg.solve(gram + np.diag(ridge), moment).astype(np.float32)


def recall(trace: Trace, weights: np.ndarray, ahead: int, most: list[int]) -> dict[str, float]:
    """Recall at each m of `most`, over all steps that have something before them, layers and chosen experts."""
    hits, count = np.zeros(len(most)), 0
    for index in range(trace.num_sequences):
        features, ids = pairs(trace, index, ahead)
        scores = (features @ weights).reshape(len(ids), trace.num_layers, trace.num_experts)
        own = np.take_along_axis(scores, ids.astype(np.int64), axis=-1)
        place = (scores[..., None, :] > own[..., None]).sum(-1)
        hits += [(place < m).sum() for m in most]
        count += place.size
    return {str(m): round(float(hit / count), 4) for m, hit in zip(most, hits, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--train", default="0:256")
    parser.add_argument("--test", default="288:321")
    parser.add_argument("--ahead", default="1,2,4,8")
    parser.add_argument("--penalty", type=float, default=100.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trace = read_trace(arguments.traces)
    train = trace.select(parse_sequences(arguments.train, "--train"))
    test = trace.select(parse_sequences(arguments.test, "--test"))
    most = [m for m in range(trace.top_k, trace.top_k + 9) if m <= trace.num_experts]
    result = {}
    for ahead in (int(part) for part in arguments.ahead.split(",")):
        result[str(ahead)] = recall(test, fit(train, ahead, arguments.penalty), ahead, most)
    text = json.dumps({"penalty": arguments.penalty, "recall_at_by_steps_ahead": result})
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
