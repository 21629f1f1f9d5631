"""E3-pages: whether each sequence reads the pages that its table names, all of them and no others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.evidence.examine import probe_ids
from kvbench.evidence.layer_order import Make
from kvbench.evidence.probe_values import changed
from kvbench.evidence.read_path import LONGEST
from kvbench.formats.kv import SIDES
from kvbench.records.record import MISMATCH, VERIFIED, Level
from kvbench.text import and_more

SHARED = 1e-3  # a row that moves by less, as a share of its largest logit, moved with the arithmetic that it shares


@torch.inference_mode()
def probe_pages(make: Make, page_size: int) -> Level:
    """Two sequences of several pages decode together, once for each page, whose codes are changed in every layer: the sequence
    that owns the page must move, the other must not. The pages of nobody must move neither.
    """
    count = min(2 * page_size + 2, LONGEST)
    engine = make(3, count)
    store, count = engine.store, min(count, engine.model.facts.max_context or count)
    for pages in store.layers:  # memory is not initialised, and NaN would hide which page it was read from
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
        return Level(
            "E3-pages", MISMATCH, "The probe's logits are not finite, so nothing can be told from them."
        )
    bound = SHARED * reference.abs().amax(-1)
    owned = {
        page: (at, column)
        for at, row in enumerate(store.tables(seqs).tolist())
        for column, page in enumerate(row)
    }
    faults = []
    for page in range(store.num_pages):
        moved = (_decoded_with(engine, page, decode) - reference).abs().amax(-1).nan_to_num(nan=float("inf"))
        owner, column = owned.get(page, (None, 0))
        stranger = [at for at in range(2) if at != owner and moved[at] > bound[at]]
        if owner is None:
            faults += [f"sequence {at} reads page {page}, which belongs to none" for at in stranger]
            continue
        faults += [
            f"sequence {at} reads page {page}, which is page {column} of sequence {owner}" for at in stranger
        ]
        if (
            not stranger
            and _due(engine, column * page_size, (column + 1) * page_size, count)
            and not moved[owner] > 10 * moved[1 - owner]
        ):
            faults.append(f"sequence {owner} does not read its page {column} (page {page} of the store)")
    facts = {"pages": store.num_pages, "faults": len(faults), "first_faults": faults[:4]}
    if faults:
        sentence = f"Pages are not read as the table has them: {faults[0]}{and_more(faults)}."
        return Level("E3-pages", MISMATCH, sentence, facts)
    free = store.num_pages - len(owned)
    sentence = f"Each of {len(owned)} pages is read by the sequence that owns it alone, and {free} free ones by none."
    return Level("E3-pages", VERIFIED, sentence, facts)


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


def _due(engine: Engine, start: int, end: int, count: int) -> bool:
    """Whether the last of `count` tokens must read a page of the tokens from `start` to before `end`: it holds an earlier one,
    which the window of some layer reaches. The last token's own slot is written anew by the step.
    """
    last = min(end, count - 1) - 1
    windows = [layer.sliding_window for layer in engine.layers]
    return start <= last and any(window is None or count - 1 - last < window for window in windows)
