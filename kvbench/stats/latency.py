"""Latency definitions: from the times at which tokens arrive to TTFT, ITL and rates. Pure; in seconds.

TTFT ends with the first chunk that holds a token. ITL is the gap between consecutive tokens of one sequence
and never contains TTFT: its mean is (last arrival - first arrival) / (tokens - tokens of the first chunk).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class FailedRequestError(ValueError):
    """A request without any output token: it failed and has no latency."""


@dataclass(frozen=True)
class Timing:
    """One request. gaps_s: one gap for each token after the first chunk."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    tokens: int

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens; None where no token came after the first chunk."""
        return math.fsum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None


def request_timing(
    submitted: float, arrivals: Sequence[float], chunk_tokens: Sequence[int] | None = None
) -> Timing:
    """Timing of one request of one sequence. arrivals: time of each chunk; chunk_tokens: tokens in each,
    default 1. A chunk without tokens (a role, a usage line) is skipped; the n tokens of a chunk share its gap
    evenly. Raises FailedRequestError for no token at all, ValueError for times that go backwards."""
    sizes = [1] * len(arrivals) if chunk_tokens is None else list(chunk_tokens)
    chunks = [(at, n) for at, n in zip(arrivals, sizes, strict=True) if n > 0]
    if not chunks:
        raise FailedRequestError("the request failed: it gave no output token")
    times = [submitted, *(at for at, _ in chunks)]
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise ValueError(f"times go backwards: {times}; take them from a monotonic clock")
    gaps: list[float] = []
    for (before, _), (at, n) in itertools.pairwise(chunks):
        gaps += [(at - before) / n] * n
    return Timing(chunks[0][0] - submitted, tuple(gaps), sum(n for _, n in chunks))


def wrong_gap_count(requests: Sequence[Mapping[str, Any]]) -> str:
    """Which request does not have N - 1 gaps for its N output tokens, as a sentence, or ""."""
    for one in requests:
        tokens, gaps = one["new_tokens"], len(one["itl_ms"])
        if gaps != tokens - 1:
            return f"{tokens} output tokens have {tokens - 1} gaps, but {gaps} were recorded"
    return ""


def decode_tok_s(batch: int, gaps_s: Sequence[float]) -> float | None:
    """batch * (N - 1) / sum of the N - 1 steps of a static batch; None for one output token (no step)."""
    if not gaps_s:
        return None
    seconds = math.fsum(gaps_s)
    return batch * len(gaps_s) / seconds if seconds else math.inf


def prefill_tok_s(prompt_tokens: int, ttft_s: float) -> float:
    """batch * length / TTFT; `prompt_tokens` counts all sequences of the batch together."""
    return prompt_tokens / ttft_s if ttft_s else math.inf
