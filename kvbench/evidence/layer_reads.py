"""E3-layers: each layer reads its own stored K and V, payload and scales."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.evidence import probe_values as probe
from kvbench.evidence.probe_values import Make
from kvbench.formats.kv import SIDES
from kvbench.records.record import MISMATCH, Level

Read = dict[tuple[int, str], bool]  # (layer, name of a tensor) -> whether changing it moved the logits


@dataclass(frozen=True)
class _Row:
    layer: int
    name: str
    seq: int


@torch.inference_mode()
def probe_layers(make: Make, layers: int, page_size: int) -> Level:
    """One sequence a change, all decoded in one forward; a row whose logits do not move was not read."""
    engine = make(4 * layers + 2, page_size)
    store = engine.store
    first = engine.add()
    ids = probe.probe_ids(engine, page_size)
    engine.forward([(first, ids[:-1])], "none")
    length = engine.length(first)
    for index in range(layers):
        for side in SIDES:
            held = _page(store, _Row(index, side, first))[:, :length]  # [heads, tokens, dim]
            held.copy_(probe.shown(held.transpose(0, 1)).transpose(0, 1))
    rows, shared = [], []
    for index, pages in enumerate(store.layers):
        for name, live in pages.tensors().items():
            if live.numel() == 1:
                shared.append((index, name))  # one scale a layer serves all sequences: changed one at a time
            else:
                rows.append(_Row(index, name, engine.fork(first)))
    seqs = [first] + [row.seq for row in rows]

    def decode(which: list[int]) -> Tensor:
        for seq in which:
            engine.truncate(seq, length)
        return engine.decode(which, [ids[-1]] * len(which)).clone()

    reference = decode(seqs)
    if not reference.isfinite().all():
        return Level("E3-layers", MISMATCH, "The probe's logits are not finite, so they show nothing.")
    faults: list[str] = []
    read: Read = {}
    kept = [_page(store, row).clone() for row in rows]
    for row in rows:
        live = _page(store, row)
        live.copy_(live * 2 if row.name.endswith("scale") else probe.changed(live))
    moved = decode(seqs)
    for row, old in zip(rows, kept, strict=True):
        _page(store, row).copy_(old)
    restored = decode(seqs)
    # Row 0 was not changed. Where rows share arithmetic (experts batch tokens by route) its last bits may
    # move, and a change counts only when it is clearly larger.
    noise = (moved[0] - reference[0]).abs().max().item()
    if noise > 1e-3 * reference[0].abs().max().item():
        faults.append("a sequence whose pages were left alone changed with the others")
    for at, row in enumerate(rows, start=1):
        change = (moved[at] - reference[at]).abs().max().nan_to_num(nan=float("inf")).item()
        read[row.layer, row.name] = change > 10 * noise
        if change <= 10 * noise:
            faults.append(f"{_where(row.layer, row.name)} is not read: changing it changes no logit")
        elif not probe.same_bits(restored[at], reference[at]):
            faults.append(f"{_where(row.layer, row.name)} was restored, the logits were not")
    faults += _probe_shared(engine, shared, lambda: decode([first]), read)
    facts = {"probes": len(read), "moved": _layers(read, True), "unmoved": _layers(read, False)}
    right = f"{len(read)} changes, one a layer and side, each moved the logits."
    return probe.level_of("E3-layers", faults, "The read path is not the store", right, **facts)


def _where(layer: int, name: str) -> str:
    return f"layer {layer}: the stored {probe.words(name)}"


def _probe_shared(
    engine: Engine, shared: list[tuple[int, str]], decode: Callable[[], Tensor], read: Read
) -> Iterator[str]:
    """Faults of the scales that serve all sequences of a layer; `read` gets whether each moved the logits.

    A decode writes its token with the scale too, which alone would move them, so it writes with the old one
    here. A captured or compiled step cannot be observed at its write, so it is also compared as it is.
    """
    if not shared:
        return
    store, plain = engine.store, decode()
    captured = engine.decode_mode == "graph" or engine.compile_mode == "layer"
    with probe.eager(engine):
        reference = decode()
    for layer, name in shared:
        live: Tensor = getattr(store.layers[layer], name)
        old = live.clone()
        for factor in probe.FACTORS:
            live.copy_(old * factor)
            with probe.eager(engine), probe.written_with(store, {(layer, name): old}):
                moved = not probe.same_bits(decode(), reference)
            read[layer, name] = moved and not (captured and probe.same_bits(decode(), plain))
            if read[layer, name]:
                break
        live.copy_(old)
        if not read[layer, name]:
            yield f"{_where(layer, name)} is not read: changing it changes no logit"
    if not probe.same_bits(decode(), plain):
        yield "restoring the static scales does not restore the logits"


def _layers(read: Mapping[tuple[int, str], bool], whether: bool) -> dict[str, list[int]]:
    """Name of a tensor -> the layers in which changing it moved the logits, or did not."""
    found: dict[str, list[int]] = {}
    for (layer, name), moved in read.items():
        if moved == whether:
            found.setdefault(name, []).append(layer)
    return found


def _page(store: PagedKVStore, row: _Row) -> Tensor:
    """The live page of a row's only page (a view)."""
    tensor: Tensor = getattr(store.layers[row.layer], row.name)
    return tensor[int(store.tables([row.seq])[0, 0])]
