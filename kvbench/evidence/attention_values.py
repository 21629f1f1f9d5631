"""E5 and E3-prefill: what attention works on, from engines made like the measured one, once a configuration.

E3-prefill: a prompt's own chunk is read back as stored; changing what a layer has just written changes the
logits. E5: each layer's attention equals attention over the values that the codes and scales stand for,
computed outside the store from the K and V that the layer wrote, with pages out of order and full of stale
values. Each element is within the format's bound, and the result is nearer to the stored values than to
native ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvbench.engines.reference.attention import Attention, Mask
from kvbench.engines.reference.kv.store import PagedKVStore, WriteObserver
from kvbench.evidence.probe_values import Make, changed, level_of, poison, probe_ids, put, shown, stored
from kvbench.evidence.scale_sources import expected_scales
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, VERIFIED, Level
from kvbench_kernels.attention.reference import paged_attention_torch
from kvbench_kernels.kv.quantize import QUANTIZE

PROMPT = 3  # tokens of the prefill probe: each but the first attends to another one of its chunk
LONGEST = 66  # most tokens of the value probe, which takes two pages and two tokens

# Largest error of an output element, as a share of the largest V: four roundings of the query dtype
# (dequantized V, scores, probabilities, output). In float32 the order of summation counts more than rounding.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}


@torch.inference_mode()
def probe_prefill(make: Make, layers: int) -> Level:
    """One packed prefill, a sequence a layer and side; a row whose logits do not move was not read back."""
    probes = len(SIDES) * layers
    engine = make(probes + 1, PROMPT)
    if engine.spec["prefill_reads"] == "fresh":
        sentence = "prefill_reads: fresh takes a prompt's own chunk as computed, not read back."
        return Level("E3-prefill", NOT_APPLICABLE, sentence)
    store, ids = engine.store, probe_ids(engine, PROMPT)
    seqs = [engine.add() for _ in range(probes + 1)]

    def prefill() -> Tensor:
        for seq in seqs:
            engine.truncate(seq, 0)
        return torch.cat(engine.forward([(seq, ids) for seq in seqs]))

    with store.observed(_Prompts(store, spoil=False)):
        reference = prefill()
    with store.observed(_Prompts(store, spoil=True)):
        moved = prefill()
    # Row 0 was not changed; its last bits may move where rows share arithmetic (see probe_layers).
    noise = (moved[0] - reference[0]).abs().max().item()
    change = (moved - reference)[1:].abs().amax(-1).nan_to_num(nan=math.inf).tolist()
    places = [f"layer {layer} {side.upper()}" for layer in range(layers) for side in SIDES]
    unread = [place for place, much in zip(places, change, strict=True) if much <= 10 * noise]
    wrong = "A prompt's own chunk is not read back from the pages"
    right = f"{probes} changes of a prompt's own chunk, one a layer and side, each moved the logits."
    return level_of("E3-prefill", unread, wrong, right, probes=probes)


class _Prompts(WriteObserver):
    """Makes all-zero codes of a prompt visible, in each sequence separately.

    spoil: also changes, of each layer, K in one sequence and V in the next; the first one is left alone.
    """

    def __init__(self, store: PagedKVStore, spoil: bool) -> None:
        self.store, self.spoil = store, spoil

    def after_write(self, layer: int, slots: Tensor) -> None:
        for at, side in enumerate(SIDES):
            payload: Tensor = getattr(self.store.layers[layer], side)
            for row, mine in enumerate(slots.view(-1, PROMPT)):
                codes = shown(stored(self.store, payload, mine))
                spoiled = self.spoil and row == 1 + len(SIDES) * layer + at
                put(self.store, payload, mine, changed(codes) if spoiled else codes)


@torch.inference_mode()
def probe_values(make: Make, page_size: int) -> Level:
    """E5, from a prompt in chunks, another one next to its last chunk, and two decode steps of both.

    Each layer is compared on the K and V that it wrote, so that no difference in one layer moves the codes of
    the next. The chunks take a backend's different paths: the first, one after others, unlike ones together.
    """
    engine = make(2, LONGEST)
    count = min(2 * page_size + 2, LONGEST, engine.model.facts.max_context or LONGEST)
    ids = probe_ids(engine, count)
    asked = KV_FORMATS[engine.decision.kv_format.resolved]
    given = [(k.value, v.value) for k, v in expected_scales(engine)] if asked.scale_kind == "static" else None
    _disorder(engine.store)
    one, two, beside = engine.add(), engine.add(), Beside(asked, given)
    fresh = engine.spec["prefill_reads"] == "fresh"
    prompt = max(1, count - 2)
    third, other = prompt // 3, max(1, 2 * prompt // 3)
    forwards = [[(one, ids[:third])], [(one, ids[third : 2 * third])]]
    forwards += [[(one, ids[2 * third : prompt]), (two, ids[:other])]]
    forwards += [[(one, [token]), (two, [token])] for token in ids[prompt:]]
    for at, work in enumerate(forwards):
        if work[0][1]:
            parts = tuple((seq, len(tokens)) for seq, tokens in work)
            # Longer contexts than a probe's are split, so the last step is, unless the cell sets kv_splits.
            splits = 2 if at == len(forwards) - 1 else None
            with engine.eagerly(partial(Watched, beside=beside, parts=parts, fresh=fresh), splits):
                engine.forward(work)
    tolerance = TOLERANCE[engine.model.dtype]
    facts = {**beside.facts(), "allowed": tolerance, "tokens": count}
    if not beside.finite:
        cause = (
            "a page slot that the sequence did not write, which the probe fills with NaN, or an invalid scale"
        )
        return Level("E5", MISMATCH, f"{beside.error_at} is not finite: it reads {cause}.")
    faults = []
    if beside.share > 1:
        faults.append(f"{beside.share_at} is off by {beside.share:.3g} times the bound of {asked.name}")
    if beside.error > tolerance:
        faults.append(
            f"{beside.error_at} differs by {beside.error:.3g} of the largest V from attention over what "
            "the codes and scales stand for"
        )
    if asked.quantized and beside.native <= 4 * beside.stored:
        faults.append("attention is as close to native values as to the stored ones")
    if faults:
        return Level("E5", MISMATCH, f"Attention does not work on {asked.name}: {'; '.join(faults)}.", facts)
    differ = ", and not that of native ones" if asked.quantized else ""
    sentence = f"Attention is that of the values that {asked.name} stands for, within its bound{differ}."
    return Level("E5", VERIFIED, sentence, facts)


@dataclass(frozen=True)
class Watched:
    """Attention of one forward, each layer's result compared with one computed outside the store.

    parts: (sequence, its new tokens) in packed order. fresh: as of `prefill_reads`; only decodes are
    compared.
    """

    attention: Attention
    beside: Beside
    parts: tuple[tuple[int, int], ...]
    fresh: bool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Mask) -> Tensor:
        out = self.attention.attend(layer, q, k, v, scaling, mask)
        start = 0
        for seq, count in self.parts:
            rows = slice(start, start + count)
            self.beside.append(seq, layer, k[rows], v[rows])
            if not (self.fresh and count > 1):
                self.beside.compare(out[rows], seq, layer, q[rows], scaling, *mask)
            start += count
        return out


class Beside:
    """K and V of each sequence as `fmt` gives them back, in float64 outside any page, and attention's error.

    share: worst element of K or V, as a share of the format's bound; error: worst element of an attention
    output, as a share of the largest V; stored, native: summed squared distances of all outputs from
    attention over the stored values, and over K and V as computed.
    """

    def __init__(self, fmt: KVFormat, scales: Sequence[tuple[float, float]] | None) -> None:
        self.fmt, self.scales = fmt, scales
        self.share, self.share_at = 0.0, ""
        self.error, self.error_at = 0.0, ""
        self.finite, self.stored, self.native = True, 0.0, 0.0
        self._kept: dict[tuple[int, int], list[tuple[Tensor, ...]]] = defaultdict(list)

    def facts(self) -> dict[str, float]:
        return {
            "error": self.error,
            "share_of_bound": self.share,
            "distance_from_stored": math.sqrt(self.stored),
            "distance_from_native": math.sqrt(self.native),
        }

    def append(self, seq: int, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v [N, H, D]: the next tokens of the sequence in `layer`."""
        self._kept[seq, layer].append((*self._stored(layer, k, v), k.double(), v.double()))

    def compare(
        self, out: Tensor, seq: int, layer: int, q: Tensor, scaling: float, window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """out, q [N, Hq, D]: of the sequence's newest tokens in `layer`."""
        stored_k, stored_v, native_k, native_v = (
            torch.cat(x).transpose(0, 1)[None] for x in zip(*self._kept[seq, layer], strict=True)
        )
        queries, past = q.double().transpose(0, 1)[None], stored_k.shape[2] - len(q)

        def off(keys: Tensor, values: Tensor) -> Tensor:
            expected = paged_attention_torch(queries, keys, values, scaling, past, window, softcap, sinks)
            return out.double() - expected[0].transpose(0, 1)

        # A kernel dequantizes exactly, or to the query's dtype like the reference; where scores are large,
        # that rounding of K moves them more than all other roundings.
        rounded = (x.to(q.dtype).double() for x in (stored_k, stored_v))
        both = off(stored_k, stored_v), off(*rounded)
        nearest = min(both, key=lambda x: float(x.abs().max().nan_to_num(nan=math.inf)))
        self.finite = self.finite and bool(nearest.isfinite().all())
        self.stored += nearest.square().sum().item()
        self.native += off(native_k, native_v).square().sum().item()
        worst = nearest.abs().max()
        error = (worst / stored_v.abs().max()).nan_to_num(nan=math.inf).item() if worst else 0.0
        if error > self.error:
            self.error, self.error_at = error, f"attention of layer {layer}"

    def _stored(self, layer: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """K and V as the reference quantizer's codes and scales stand for them, in float64."""
        pair = []
        for at, (side, x) in enumerate(zip(SIDES, (k, v), strict=True)):
            scale = None if self.scales is None else self.scales[layer][at]
            given = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=x.device)
            quantized = QUANTIZE[self.fmt.name](x, given)
            scales = given if quantized.scales is None else quantized.scales[..., None]
            values = quantized.codes.double() * (1.0 if scales is None else scales.double())
            share, _ = element_error(self.fmt, x, scale, values)
            if self.fmt.qmax is not None and (quantized.codes.double().abs() > self.fmt.qmax).any():
                share = math.inf
            if not share <= self.share:
                self.share, self.share_at = share, f"layer {layer} {side.upper()}"
            pair.append(values)
        return pair


def element_error(fmt: KVFormat, x: Tensor, scale: float | None, values: Tensor) -> tuple[float, float]:
    """Worst |x - values| as a share of the format's bound, and as such. Clipped elements have no bound.

    The bound is the payload's + 1e-6, for the given scale or the largest that may be stored.
    """
    x, payload = x.double(), fmt.payload
    error = (x - values).abs()
    worst = error.max().item()
    if payload is None:
        return (0.0 if worst == 0 else math.inf), worst
    if scale is not None:
        step = torch.full_like(x[..., :1], scale)
    else:
        step = x.abs().amax(-1, keepdim=True) / payload.qmax * (fmt.scale_margin or 1.0)
        if fmt.scale_dtype == "float16":
            step = step + 2.0**-24  # its smallest number
    bound = torch.maximum(x.abs() * payload.of_element, step * payload.of_scale)
    inside = x.abs() <= step * payload.qmax * (1 + 1e-6)
    return torch.where(inside, error / (bound + 1e-6), 0.0).max().item(), worst


def _disorder(store: PagedKVStore) -> None:
    """Stale values in every page and a descending free list: later pages are neither new nor in order."""
    for pages in store.layers:
        poison(pages, torch.ones(store.num_pages, store.page_size, dtype=torch.bool, device=store.device))
    seqs = [store.add() for _ in range(store.num_pages)]
    for seq in seqs:
        store.reserve(seq, 1)
    for seq in reversed(seqs):
        store.free(seq)
