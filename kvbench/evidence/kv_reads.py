"""E3: the logits follow what the store holds, and nothing else. E3-reads: what the measured run itself read
from pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.evidence.probe_values import (
    FACTORS,
    changed,
    eager,
    poison,
    put,
    same_bits,
    shown,
    stored,
    words,
    written_with,
)
from kvbench.evidence.stored_kv import asked_format
from kvbench.formats.kv import SIDES
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED, Level

# A captured or compiled step's logits may differ from an eager step's by this share of the largest: compilers
# keep float32 where eager layers round to 16 bits, and a code on a tie moves by a whole step.
APART = 0.125


def reads_level(engine: Engine, reads: Mapping[str, int], reads_expected: bool) -> Level:
    """E3-reads. reads: tokens, quantized_tokens and due_tokens of the run."""
    asked, tokens, expected = asked_format(engine), reads["tokens"], reads["due_tokens"]
    quantized = tokens if asked.quantized else 0

    def level(state: str, sentence: str) -> Level:
        return Level("E3-reads", state, sentence, reads)

    if tokens == 0 and not reads_expected:
        return level(NOT_APPLICABLE, "This runner makes no attention reads.")
    if tokens == 0 and (expected or not engine.computed_tokens):
        return level(MISMATCH, "The measured run never read the KV store; its numbers come from elsewhere.")
    if tokens == 0 and asked.quantized:
        return level(
            UNVERIFIED,
            "The measured run read no token from pages (prefill_reads: fresh and prompts of one chunk); "
            "its numbers say nothing about the cache.",
        )
    if tokens != expected:
        return level(
            MISMATCH,
            f"The measured run read {tokens} tokens of K/V from pages; its forwards attended to "
            f"{expected}, so attention took others from elsewhere.",
        )
    if reads["quantized_tokens"] != quantized:
        return level(
            MISMATCH,
            f"The measured run read {tokens} tokens of K/V from pages, {reads['quantized_tokens']} of them "
            f"quantized; {asked.name} needs {quantized}.",
        )
    return level(VERIFIED, f"{tokens} K/V tokens were read from {asked.name} pages.")


def store_level(engine: Engine, seq: int, token: int) -> Level:
    """E3: change, restore and poison the pages of all layers at once, always at the same length."""
    store, length = engine.store, engine.length(seq)
    slots = store.slots_for(seq, 0, length)
    for payload in (getattr(pages, side) for pages in store.layers for side in SIDES):
        put(store, payload, slots, shown(stored(store, payload, slots)))

    def decode() -> Tensor:
        engine.truncate(seq, length)
        return engine.decode([seq], [token]).clone()

    reference = decode()
    if not reference.isfinite().all():
        return Level("E3", MISMATCH, "The probe's logits are not finite, so they show nothing.")
    faults, plain = [], reference
    if engine.decode_mode == "graph" or engine.compile_mode == "layer":
        with eager(engine):
            plain = decode()
        apart, largest = (reference - plain).abs().max().item(), plain.abs().max().item()
        if not apart <= APART * largest:
            faults.append(
                f"a captured or compiled step gives logits that are {apart:.3g} from an eager one's, of at "
                f"most {largest:.3g}"
            )
    names = dict.fromkeys(name for pages in store.layers for name in pages.tensors())
    for name in names:
        live = [tensor for pages in store.layers if (tensor := getattr(pages, name)) is not None]
        kept = [tensor.clone() for tensor in live]
        if _unread(engine, name, live, kept, decode, reference, plain):
            faults.append(f"changing every stored {words(name)} changes no logit: attention does not read it")
        for tensor, old in zip(live, kept, strict=True):
            tensor.copy_(old)
        if not same_bits(decode(), reference):
            faults.append(f"restoring every stored {words(name)} does not restore the logits bit for bit")
    engine.truncate(seq, length)
    # The slot of the decoded token is written again by every decode, so it is poisoned too.
    outside = torch.ones(store.num_pages * store.page_size, dtype=torch.bool, device=store.device)
    outside[slots] = False
    for pages in store.layers:
        poison(pages, outside.view(-1, store.page_size))
    if not same_bits(decode(), reference):
        faults.append("poison outside the sequence reaches the logits")
    if faults:
        sentence = f"The read path is not the store: {'; '.join(faults)}."
        return Level("E3", MISMATCH, sentence, {"faults": faults})
    checked = ", ".join(words(name) for name in names)
    return Level("E3", VERIFIED, f"Logits follow the stored {checked} and nothing outside the sequence.")


def _unread(
    engine: Engine,
    name: str,
    live: Sequence[Tensor],
    kept: Sequence[Tensor],
    decode: Callable[[], Tensor],
    reference: Tensor,
    plain: Tensor,
) -> bool:
    """Whether no change of a tensor in every layer moves a logit. plain: logits of an eager step."""
    is_scale = name.endswith("scale")
    for factor in FACTORS if is_scale else (None,):
        for tensor, old in zip(live, kept, strict=True):
            tensor.copy_(changed(old) if factor is None else old * factor)
        unread = same_bits(decode(), reference)
        if is_scale and live[0].numel() == 1:  # a decode writes with it too, so it writes with the old one
            given = {(layer, name): old for layer, old in enumerate(kept)}
            with eager(engine), written_with(engine.store, given):
                unread = unread or same_bits(decode(), plain)
        if not unread:
            return False
    return True
