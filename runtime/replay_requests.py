"""Which rows of a routing trace the requests of a run replay: each a sequence, from its first row on. No torch."""

import numpy as np

from seqmoe.predictors.trace import Trace, starts_of


def requests_of(trace: Trace, batch: int, requests: int) -> tuple[Trace, list[int] | None]:
    """The trace as `Replay` takes it, and the row at which each request begins; None for a trace of one sequence, which
    goes on from request to request.

    Request i replays sequence i, or sequences i * batch and those after it; after the last comes the first again. The
    sequences of a batch lie `requests` sequences apart, all of one length, as `Replay` steps through them; one that is
    shorter than the longest is repeated to that length.
    """
    count = trace.num_sequences
    if count == 1:
        return trace, None
    if batch == 1:
        return trace, [int(trace.seq_start[request % count]) for request in range(requests)]
    order = [(request * batch + lane) % count for lane in range(batch) for request in range(requests)]
    length = int(trace.seq_len[order].max())
    rows = np.concatenate([trace.seq_start[i] + np.arange(length) % trace.seq_len[i] for i in order])
    lengths = np.full(len(order), length, dtype=np.int64)
    weights = None if trace.expert_weights is None else trace.expert_weights[rows]
    tokens = None if trace.tokens is None else trace.tokens[rows]
    laid_out = Trace(
        trace.expert_ids[rows], weights, tokens, starts_of(lengths), lengths, trace.num_experts, None, trace.meta
    )
    return laid_out, [request * length for request in range(requests)]
