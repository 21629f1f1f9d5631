"""Tokens to logits to numbers: packed forwards, log-probabilities and divergences, a few rows at a time.

Exponentials are float32, after the maximum is subtracted; their sums, the logarithms and all other sums are
float64. No temporary has more than `ROWS` rows of the vocabulary, by device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engines.protocol import Engine, Logits

# Tokens of one packed forward by device type: enough to fill the device, few enough for the logits to fit.
BUDGET = {"cpu": 512, "cuda": 4096}
# Rows of a slice. CPU: 32 x 49,152 float32 = 6 MiB, which fits its cache. GPU: with slices of 32 rows the
# device waited for the host for a third of a pass; 512 x 151,936 float32 = 297 MiB.
ROWS = {"cpu": 32, "cuda": 512}
FAR = 20.0  # a logit's gap from the mean gap from which on two distributions are far apart


def budget(device: torch.device) -> int:
    return BUDGET.get(device.type, BUDGET["cpu"])


def packed(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indexes of neighbours whose lengths add up to at most `limit`; a longer one is alone."""
    pack: list[int] = []
    room = limit
    for i, length in enumerate(lengths):
        if pack and length > room:
            yield pack
            pack, room = [], limit
        pack.append(i)
        room -= length
    if pack:
        yield pack


def feed(
    engine: Engine, work: Sequence[tuple[int, Sequence[int]]], chunk: int, logits: Logits
) -> list[Tensor]:
    """Append each sequence's tokens, `chunk` of a sequence a forward, all sequences packed; float32 logits a
    sequence: [n, V] for "all", [1, V] for "last", [0, V] for "none".
    """
    if max(len(tokens) for _, tokens in work) <= chunk:
        return engine.forward(work, logits)
    parts: list[list[Tensor]] = [[] for _ in work]
    for start in range(0, max(len(tokens) for _, tokens in work), chunk):
        rows = [i for i, (_, tokens) in enumerate(work) if len(tokens) > start]
        piece = [(work[i][0], work[i][1][start : start + chunk]) for i in rows]
        for i, out in zip(rows, engine.forward(piece, logits), strict=True):
            parts[i] = [*parts[i], out] if logits == "all" else [out]
    return [torch.cat(part) if len(part) > 1 else part[0] for part in parts]


@dataclass(frozen=True)
class _Slice:
    """A few rows [r, V]: exp(x - max) [r, V]; its sum, log-partition and target's logprob, float64 [r]."""

    exp: Tensor
    total: Tensor
    log_z: Tensor
    logprob: Tensor


def _slice(x: Tensor, targets: Tensor) -> _Slice:
    top = x.amax(-1, keepdim=True)
    exp = (x - top).exp_()
    total = exp.sum(-1).double()
    shift = top[:, 0].double()
    chosen = x.gather(-1, targets[:, None])[:, 0].double()
    return _Slice(exp, total, shift + total.log(), chosen - shift - total.log())


def _slices(n: int, device: torch.device) -> Iterator[slice]:
    rows = ROWS.get(device.type, ROWS["cpu"])
    return (slice(i, min(i + rows, n)) for i in range(0, n, rows))


def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target]: float32 [n, V] and int64 [n] -> float64 [n]."""
    parts = [_slice(logits[s], targets[s]).logprob for s in _slices(len(targets), targets.device)]
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Compared:
    """A candidate against native, one value for each token: float64 [n], top1_equal bool [n].

    kld: of the native next-token distribution from the candidate's, full vocabulary, in nats;
    delta_p: probability of the true token, candidate - native.
    """

    native: Tensor
    candidate: Tensor
    kld: Tensor
    top1_equal: Tensor
    delta_p: Tensor


def compare(native: Tensor, candidate: Tensor, targets: Tensor) -> Compared:
    """native, candidate: float32 logits [n, V]; targets int64 [n], n >= 1."""
    parts: list[tuple[Tensor, ...]] = []
    for s in _slices(len(targets), targets.device):
        n, c = _slice(native[s], targets[s]), _slice(candidate[s], targets[s])
        kld = _divergence(n, c, candidate[s] - native[s])
        equal = native[s].argmax(-1) == candidate[s].argmax(-1)
        parts.append((n.logprob, c.logprob, kld, equal, c.logprob.exp() - n.logprob.exp()))
    return Compared(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _divergence(n: _Slice, c: _Slice, gap: Tensor) -> Tensor:
    """sum p (log p - log q) from gap = candidate - native logits [r, V], which it overwrites; float64 [r].

    The plain form subtracts numbers of the logits' size. With the gap centred on its mean m under p, it is
    log1p(a + b) - a for a = sum p (gap - m) and b = sum p (expm1(gap - m) - (gap - m)), where nothing large
    cancels. For distributions that are far apart expm1 overflows, and the plain form is accurate.
    """
    mean = (n.exp * gap).sum(-1).double() / n.total
    gap -= mean[:, None]
    a = (n.exp * gap).sum(-1).double() / n.total
    far = gap.amax(-1) > FAR
    b = torch.expm1(gap).sub_(gap).mul_(n.exp).sum(-1).double() / n.total
    return torch.where(far, c.log_z - n.log_z - mean, torch.log1p(a + b) - a)
