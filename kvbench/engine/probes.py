"""Evidence of what attention works on, from engines made like the measured one, once a configuration.

E3-prefill  a prompt's own chunk is read back as stored: changing what a layer has just written changes the logits
E5          the logits are those of attention over what the codes and scales stand for, taken beside the store from the
            K/V that the layers wrote, over pages in no order and full of stale values; each element lies within the
            format's bound; and a quantized format's logits differ from native ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.core import Engine, static_scales
from kvbench.engine.evidence import SIDES, changed, poison, probe_ids, same_bits, stored
from kvbench.engine.layer import indexable
from kvbench.engine.store import PagedKVStore
from kvbench.formats import KV_FORMATS, KVFormat
from kvbench.record import MISMATCH, NOT_APPLICABLE, VERIFIED, Level
from kvbench_kernels.quantize import QUANTIZE

Make = Callable[[int, int], Engine]

PROMPT = 3  # tokens of the prefill probe: each but the first attends to another one of its chunk
LONGEST = 66  # tokens of the value probe, where two pages and two tokens are more

# Logits may differ by this many units in the last place of the model's dtype, of the largest logit.
ULPS = 8


@torch.inference_mode()
def probe_prefill(make: Make, layers: int) -> Level:
    """One sequence a layer and side, all in one packed prefill; a row whose logits do not move was not read back."""
    engine = make(len(SIDES) * layers + 1, PROMPT)
    if engine.spec["prefill_reads"] == "fresh":
        sentence = "Asked for: a prompt's own chunk is taken as computed, not read back."
        return Level("E3-prefill", NOT_APPLICABLE, sentence)
    store, ids = engine.store, probe_ids(engine, PROMPT)
    seqs = [engine.add() for _ in range(len(SIDES) * layers + 1)]

    def prefill() -> Tensor:
        for seq in seqs:
            engine.truncate(seq, 0)
        return torch.cat(engine.forward([(seq, ids) for seq in seqs]))

    def spoil(layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        PagedKVStore.write(store, layer, slots, k, v)
        for at, side in enumerate(SIDES):
            row = 1 + len(SIDES) * layer + at
            mine = slots[row * PROMPT : (row + 1) * PROMPT]
            payload: Tensor = getattr(store.layers[layer], side)
            other = indexable(changed(stored(store, payload, mine)))
            indexable(payload)[mine // store.page_size, :, mine % store.page_size] = other

    reference = prefill()
    with _replaced(store, write=spoil):
        moved = prefill()
    # Row 0 was left alone; it may move in its last bits where rows share arithmetic (see probe_layers).
    noise = (moved[0] - reference[0]).abs().max().item()
    unread = [
        f"layer {i // len(SIDES)} {SIDES[i % len(SIDES)].upper()}"
        for i, (new, old) in enumerate(zip(moved[1:], reference[1:], strict=True))
        if (new - old).abs().max().nan_to_num(nan=float("inf")).item() <= 10 * noise
    ]
    facts = {"probes": len(seqs) - 1, "faults": len(unread), "first_faults": unread[:4]}
    if unread:
        more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        sentence = f"A prompt's own chunk is not read back from the pages: {unread[0]}{more}."
        return Level("E3-prefill", MISMATCH, sentence, facts)
    sentence = (
        f"{facts['probes']} changes of a prompt's own chunk, one a layer and side, each moved the logits."
    )
    return Level("E3-prefill", VERIFIED, sentence, facts)


@torch.inference_mode()
def probe_values(make: Make, page_size: int) -> Level:
    """A prompt and two decode steps, against the same over values that come from no page."""
    engine = make(1, LONGEST)
    count = min(2 * page_size + 2, LONGEST, engine.model.facts.max_context or LONGEST)
    ids, store = probe_ids(engine, count), engine.store
    asked = KV_FORMATS[engine.decision.kv_format.resolved]
    _disorder(store)
    seq = engine.add()

    def logits(beside: Beside | None) -> Tensor:
        engine.truncate(seq, 0)
        prompt = max(1, count - 2)
        methods: dict[str, Callable[..., Any]] = {}
        if beside:
            methods = {"write": beside.write, "read": beside.read}
        with _replaced(store, **methods), engine.plainly() if beside else nullcontext():
            out = engine.forward([(seq, ids[:prompt])])
            out += [engine.decode([seq], [token]) for token in ids[prompt:]]
        return torch.cat(out)

    given = static_scales(engine.spec["scale"], len(engine.layers)) if asked.scale_kind == "static" else None
    beside = Beside(asked, len(engine.layers), given)
    found, due = logits(None), logits(beside)
    native = logits(Beside(KV_FORMATS["native"], len(engine.layers), None))
    if not due.isfinite().all():
        return Level("E5", MISMATCH, "The probe's logits are not finite, so nothing can be told from them.")
    difference = (found - due).abs().max().nan_to_num(nan=float("inf")).item()
    allowed = ULPS * torch.finfo(engine.model.dtype).eps * due.abs().max().item()
    facts = {"difference": difference, "allowed": allowed, "share_of_bound": beside.worst, "tokens": count}
    faults = []
    if beside.worst > 1:
        faults.append(f"{beside.where} is off by {beside.worst:.3g} times the bound of {asked.name}")
    if difference > allowed:
        faults.append(
            f"logits differ by {difference:.3g} from attention over what the codes and scales stand for"
        )
    if asked.quantized and same_bits(found, native):
        faults.append("logits equal native ones bit for bit")
    if faults:
        return Level("E5", MISMATCH, f"Attention does not work on {asked.name}: {'; '.join(faults)}.", facts)
    differ = " and differ from native" if asked.quantized else ""
    sentence = f"Logits are those of the values that {asked.name} stands for, within its bound{differ}."
    return Level("E5", VERIFIED, sentence, facts)


class Beside:
    """The K/V of one sequence as `fmt` gives them back, kept in order and in no page."""

    def __init__(self, fmt: KVFormat, layers: int, scales: Sequence[tuple[float, float]] | None) -> None:
        self.fmt, self.scales = fmt, scales
        self.worst, self.where = 0.0, ""
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        pair = []
        for at, (side, x) in enumerate(zip(SIDES, (k, v), strict=True)):
            scale = None if self.scales is None else self.scales[layer][at]
            given = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=x.device)
            quantized = QUANTIZE[self.fmt.name](x, given)
            values = quantized.codes.double()
            if quantized.scales is not None:
                values = values * quantized.scales.double()[..., None]
            elif given is not None:
                values = values * given.double()
            share, _ = element_error(self.fmt, x, scale, values)
            if self.fmt.payload_dtype == "int8" and (quantized.codes == -128).any():
                share = float("inf")
            if not share <= self.worst:
                self.worst, self.where = share, f"layer {layer} {side.upper()}"
            pair.append(values)
        self._kept[layer].append((pair[0], pair[1]))

    def read(self, layer: int, pages: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = (
            torch.cat(x)[:length].transpose(0, 1)[None].to(dtype)
            for x in zip(*self._kept[layer], strict=True)
        )
        return k, v


def element_error(fmt: KVFormat, x: Tensor, scale: float | None, values: Tensor) -> tuple[float, float]:
    """Worst |x - values| as a share of the format's bound, and as such. Clipped elements have no bound.

    int8: half a step of the stored scale + 1e-6. e4m3: a 16th of the element, or half the smallest step, + 1e-6.
    """
    x = x.double()
    error = (x - values).abs()
    worst = error.max().item()
    if fmt.qmax is None:
        return (0.0 if worst == 0 else float("inf")), worst
    if scale is not None:
        step = torch.full_like(x[..., :1], scale)
    else:
        step = x.abs().amax(-1, keepdim=True) / fmt.qmax
        if fmt.scale_dtype == "float16":
            step = step * (1 + 2.0**-10) + 2.0**-24  # rounded up to FP16
    half = step / 2 if fmt.payload_dtype == "int8" else torch.maximum(x.abs() / 16, step * 2.0**-10)
    inside = x.abs() <= step * fmt.qmax * (1 + 1e-6)
    return torch.where(inside, error / (half + 1e-6), 0.0).max().item(), worst


def _disorder(store: PagedKVStore) -> None:
    """Stale values in every page, and a free list in descending order: later pages are neither new nor in order."""
    for pages in store.layers:
        poison(pages, torch.ones(store.num_pages, store.page_size, dtype=torch.bool, device=store.device))
    seqs = [store.add() for _ in range(store.num_pages)]
    for seq in seqs:
        store.reserve(seq, 1)
    for seq in reversed(seqs):
        store.free(seq)


@contextmanager
def _replaced(store: PagedKVStore, **methods: Callable[..., Any]) -> Iterator[None]:
    """Methods of this one store replaced for a while."""
    vars(store).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(store)[name]
