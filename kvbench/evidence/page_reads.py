"""E3-pages: each sequence reads the pages that its table names, all of them and no others."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.evidence.attention_values import LONGEST
from kvbench.evidence.probe_values import Make, changed, level_of, probe_ids
from kvbench.formats.kv import SIDES
from kvbench.records.record import MISMATCH, Level

# A row that moves by less, as a share of its largest logit, moved with arithmetic that rows share.
SHARED = 1e-3


@torch.inference_mode()
def probe_pages(make: Make, page_size: int) -> Level:
    """Two sequences decode together, once for each page, whose codes are changed in every layer.

    The sequence that owns the page must move, the other must not. Free pages must move neither.
    """
    count = min(2 * page_size + 2, LONGEST)
    engine = make(3, count)
    store, count = engine.store, min(count, engine.model.facts.max_context or count)
    for pages in store.layers:  # uninitialised memory may hold NaN, which would hide the page it came from
        for tensor in pages.paged().values():
            tensor.zero_()
    ids = probe_ids(engine, count + 1)
    seqs = [engine.add(), engine.add()]
    engine.forward([(seq, ids[at : at + count - 1]) for at, seq in enumerate(seqs)], "none")

    def decode() -> Tensor:
        for seq in seqs:
            engine.truncate(seq, count - 1)
        return engine.decode(seqs, [ids[-1]] * 2).clone()

    reference = decode()
    if not reference.isfinite().all():
        return Level("E3-pages", MISMATCH, "The probe's logits are not finite, so they show nothing.")
    bound = SHARED * reference.abs().amax(-1)
    tables = enumerate(store.tables(seqs).tolist())
    owned = {page: (at, column) for at, row in tables for column, page in enumerate(row)}
    faults = []
    for page in range(store.num_pages):
        moved = (_decoded_with(engine, page, decode) - reference).abs().amax(-1).nan_to_num(nan=float("inf"))
        owner, column = owned.get(page, (None, 0))
        strangers = [at for at in range(2) if at != owner and moved[at] > bound[at]]
        whose = "belongs to none" if owner is None else f"is page {column} of sequence {owner}"
        faults += [f"sequence {at} reads page {page}, which {whose}" for at in strangers]
        if owner is None or strangers:
            continue
        must = _must_read(engine, column * page_size, (column + 1) * page_size, count)
        if must and not moved[owner] > 10 * moved[1 - owner]:
            faults.append(f"sequence {owner} does not read its page {column} (page {page} of the store)")
    free = store.num_pages - len(owned)
    right = f"Each of {len(owned)} pages is read only by its own sequence, and {free} free ones by none."
    return level_of(
        "E3-pages", faults, "Pages are not read as the table has them", right, pages=store.num_pages
    )


def _decoded_with(engine: Engine, page: int, decode: Callable[[], Tensor]) -> Tensor:
    """Logits of a decode step while a page holds other codes in every layer."""
    kept = []
    for pages in engine.store.layers:
        for side in SIDES:
            live: Tensor = getattr(pages, side)
            kept.append((live, live[page].clone()))
            live[page] = changed(live[page])
    logits = decode()
    for live, old in kept:
        live[page] = old
    return logits


def _must_read(engine: Engine, start: int, end: int, count: int) -> bool:
    """Whether the last of `count` tokens must read a page that holds the tokens `start` to `end` - 1.

    It must hold an earlier token that some layer's window reaches; the last one's slot is written again.
    """
    last = min(end, count - 1) - 1
    windows = [layer.sliding_window for layer in engine.layers]
    return start <= last and any(window is None or count - 1 - last < window for window in windows)
