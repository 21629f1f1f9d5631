"""The cost of each part of the cache in KLD: one layer quantized or native, K against V, the first tokens.

The writes of a native engine are quantized and dequantized first, for the part in question. To check this,
the logits with every part quantized are compared with those of the cell's own engine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.data.corpora import corpus
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.store import WriteObserver
from kvbench.errors import KvbenchError
from kvbench.evidence import kv_reads as evidence
from kvbench.evidence.kernels import backend_label
from kvbench.files import content_hash
from kvbench.formats.kv import SIDES
from kvbench.matrix.resolve_backend import check_context
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text.encode import document_heads
from kvbench.runners.text.logits import compare
from kvbench.stats.intervals import largest
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize

# Kernels of some backends round differently over quantized and native pages. This is the largest difference
# of the logits of "all" from those of the cell's own engine, as a share of the largest logit. A K/V that
# differs in its last bit may be stored as the neighbouring code: the same text in other chunks gives up to
# 1e-4 in float32 and 0.06 in 16 bits (a tiny model, INT8 and FP8). A layer that the emulation skips gives
# 0.005 and more, so float32 finds it; 16 bits find only more.
APART = {"float32": 1e-3, "float16": evidence.APART, "bfloat16": evidence.APART}


@dataclass(frozen=True)
class Part:
    """What is quantized: these layers, sides ("k", "v" or "kv") and positions [first, end).

    kind: "all", "side", "tokens", "alone" (one layer quantized), "kept" (one native), "suggested"; of: which.
    """

    kind: str
    of: str | int | None
    layers: frozenset[int]
    sides: str = "kv"
    first: int = 0
    end: int | None = None


class Writes(WriteObserver):
    """Observes a native store: values of `part` go through the format of `like` and back before they are
    written. start: position of the first token of the forward's single sequence.
    """

    def __init__(self, like: Engine) -> None:
        self.like = like.store
        self.part: Part | None = None
        self.start = 0

    def before_write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        part = self.part
        if part is None or layer not in part.layers:
            return k, v
        return self._passed(part, layer, "k", k), self._passed(part, layer, "v", v)

    def _passed(self, part: Part, layer: int, side: str, x: Tensor) -> Tensor:
        """x [n, H, D] with the tokens of the part quantized and dequantized."""
        fmt = self.like.fmt
        low = max(part.first - self.start, 0)
        high = len(x) if part.end is None else max(part.end - self.start, 0)
        some = x[low:high]
        if side not in part.sides or not len(some):
            return x
        given = None if fmt.scale_per_row else self.like.layers[layer].side(side)[1]
        made = QUANTIZE[fmt.name](some, given)
        back = dequantize(made.codes, made.scales if fmt.scale_per_row else given, x.dtype)
        return torch.cat((x[:low], back, x[high:]))


def run(ctx: Context) -> Measurement:
    """Raises Refused, UsageError for few documents, KvbenchError if "all" is not the cell's own engine."""
    options = ctx.options
    text = corpus(options["data"], ctx.data_dir)
    texts = document_heads(text, ctx.model.tokenizer, options["documents"], options["tokens"])
    longest = max(map(len, texts))
    check_context(ctx.model.facts, longest, 0)
    engine, native = (make(sequences=1, tokens=longest) for make in (ctx.engine, ctx.emulator))
    layers = frozenset(range(len(engine.store.layers)))
    bytes_ = [[e.store.live_bytes(i).total for e in (engine, native)] for i in sorted(layers)]
    slots = engine.store.num_pages * engine.store.page_size
    extra = [(n - q) / slots for q, n in bytes_]  # bytes a token of keeping a layer native
    quantized = sum(q for q, _ in bytes_)
    room = options["budget_pct"] / 100 * quantized / slots
    first = min(options["first_tokens"], longest)
    parts = [Part("all", None, layers)] if ctx.is_baseline else list(_parts(layers, first))
    measure = _Texts(ctx, engine, native, texts, len(parts) + (not ctx.is_baseline))
    found = measure(parts)
    suggested = [] if ctx.is_baseline else suggest(found, extra, room)
    if suggested:
        found += measure([Part("suggested", None, layers - set(suggested))])
    dtype = engine.model.dtype_name
    share = 0.0 if backend_label(engine) == "torch" else APART[dtype]
    if not (math.isfinite(measure.off_engine) and measure.off_engine <= share * measure.largest_logit):
        most = f" (up to {share:g} of the largest, {measure.largest_logit:.3g}, is rounding in {dtype})"
        raise KvbenchError(
            f"With every part quantized a logit differs by {measure.off_engine:.3g} from the engine in "
            f"{engine.store.fmt.name}{most if share else ''}: the parts are not what this cell stores, so "
            "they are not measured."
        )
    if kinds := untouched(found):
        raise KvbenchError(
            f"Quantizing everything costs {_kld(found[0]):.3g} nat, but every part of kind {kinds} costs "
            "exactly 0: the parts were not quantized, so they are not measured."
        )
    facts: dict[str, Any] = {"text_sha": content_hash(texts), "data_sha": text.sha256}
    facts |= {"data_source": text.source, "documents": len(texts), "tokens": [len(ids) for ids in texts]}
    facts |= {
        "first_tokens": first,
        "budget_pct": options["budget_pct"],
        "budget_bytes_per_token": room,
        "extra_bytes_per_token": extra,
        "quantized_bytes_per_token": quantized / slots,
        "suggested": suggested,
        "suggested_extra_bytes_per_token": sum(extra[i] for i in suggested),
        "largest_logit_difference_from_engine": measure.off_engine,
        "largest_logit": measure.largest_logit,
        "parts_are": "a native store whose writes go through the format and back, for the part; "
        "the rest native",
    }
    return Measurement({"parts": found}, facts)


def _parts(every: frozenset[int], first: int) -> Iterator[Part]:
    yield Part("all", None, every)
    for side in SIDES:
        yield Part("side", side, every, side)
    yield Part("tokens", "first", every, end=first)
    yield Part("tokens", "others", every, first=first)
    for i in sorted(every):
        yield Part("alone", i, frozenset({i}))
        yield Part("kept", i, every - {i})


class _Texts:
    """Measures parts over all texts, each against native on the same text."""

    def __init__(self, ctx: Context, engine: Engine, native: Engine, texts: list[list[int]], n: int) -> None:
        self.ctx, self.engine, self.native, self.texts = ctx, engine, native, texts
        self.total = n * len(texts)
        self.done = 0
        self.off_engine = 0.0  # largest |logit difference| of everything quantized from the cell's own engine
        self.largest_logit = 0.0  # of that engine

    def __call__(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """kind and of as in `Part`; texts: [scored tokens, sum of their KLD in nats, top-1 equal] each."""
        found: list[list[list[float]]] = [[] for _ in parts]
        writes = Writes(self.engine)
        with self.native.store.observed(writes):
            for ids in self.texts:
                targets = torch.tensor(ids[1:], device=self.native.store.device)
                plain = self._logits(self.native, ids, writes, None)
                for part, into in zip(parts, found, strict=True):
                    logits = self._logits(self.native, ids, writes, part)
                    if part.kind == "all":
                        own = self._logits(self.engine, ids, None, None)
                        self.off_engine = largest([self.off_engine, (own - logits).abs().max().item()])
                        self.largest_logit = largest([self.largest_logit, own.abs().max().item()])
                    got = compare(plain[:-1], logits[:-1], targets)
                    into.append([len(targets), float(got.kld.sum()), int(got.top1_equal.sum())])
                    self.done += 1
                    self.ctx.progress(self.done, self.total, "parts of texts")
        both = zip(parts, found, strict=True)
        return [{"kind": part.kind, "of": part.of, "texts": texts} for part, texts in both]

    def _logits(self, engine: Engine, ids: Sequence[int], writes: Writes | None, part: Part | None) -> Tensor:
        """[n, V] float32 of one text, in pieces of the cell's prefill chunk."""
        piece = self.ctx.spec["prefill_chunk"]
        seq = engine.add()
        rows = []
        for start in range(0, len(ids), piece):
            if writes is not None:
                writes.part, writes.start = part, start
            rows += engine.forward([(seq, ids[start : start + piece])], "all")
        engine.free(seq)
        return torch.cat(rows)


def untouched(found: Sequence[dict[str, Any]]) -> str:
    """The kinds of parts that all cost exactly 0 although the whole costs something; or "".

    One side, one range of tokens or one layer may cost nothing; both sides, both ranges or all layers cannot.
    """
    names = ("all", "side", "tokens", "alone")
    kinds = {kind: [_kld(part) for part in found if part["kind"] == kind] for kind in names}
    costly = kinds["all"][0] > 0
    return ", ".join(kind for kind, each in kinds.items() if costly and each and not any(each))


def suggest(found: Sequence[dict[str, Any]], extra: Sequence[float], room: float) -> list[int]:
    """The layers to keep native: those that reduce the KLD most for their bytes, while they fit."""
    total = _kld(next(part for part in found if part["kind"] == "all"))
    gain = {part["of"]: total - _kld(part) for part in found if part["kind"] == "kept"}
    chosen: list[int] = []
    for layer in sorted(gain, key=lambda i: (-gain[i] / extra[i] if extra[i] > 0 else 0.0, i)):
        if gain[layer] > 0 and extra[layer] > 0 and extra[layer] <= room:
            chosen.append(layer)
            room -= extra[layer]
    return sorted(chosen)


def _kld(part: dict[str, Any]) -> float:
    return float(sum(kld for _, kld, _ in part["texts"]) / sum(n for n, _, _ in part["texts"]))
