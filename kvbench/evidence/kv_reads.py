"""E3: the logits follow the store and nothing else. E3-reads: what the measured run read from pages."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.evidence import probe_values as probe
from kvbench.evidence.stored_kv import asked_format
from kvbench.formats.kv import SIDES
from kvbench.records.record import MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED, Level

# A captured or compiled step's logits may differ from an eager step's by this share of the largest: compilers
# keep float32 where eager layers round to 16 bits, and a code on a tie moves by a whole step.
APART = 0.125


def reads_level(engine: Engine, reads: Mapping[str, int], reads_expected: bool) -> Level:
    """E3-reads. reads: tokens, quantized_tokens and due_tokens of the run."""
    asked, tokens, expected = asked_format(engine), reads["tokens"], reads["due_tokens"]
    quantized, needed = reads["quantized_tokens"], tokens if asked.quantized else 0
    run = f"The measured run read {tokens} tokens of K/V from pages"
    state = MISMATCH
    if tokens == 0 and not reads_expected:
        state, sentence = NOT_APPLICABLE, "This runner makes no attention reads."
    elif tokens == 0 and (expected or not engine.computed_tokens):
        sentence = "The measured run never read the KV store; its numbers come from elsewhere."
    elif tokens == 0 and asked.quantized:
        state, how = UNVERIFIED, "(prefill_reads: fresh and prompts of one chunk)"
        sentence = (
            f"The measured run read no token from pages {how}; its numbers say nothing about the cache."
        )
    elif tokens != expected:
        sentence = f"{run}; its forwards attended to {expected}, so attention took others from elsewhere."
    elif quantized != needed:
        sentence = f"{run}, {quantized} of them quantized; {asked.name} needs {needed}."
    else:
        state, sentence = VERIFIED, f"{tokens} K/V tokens were read from {asked.name} pages."
    return Level("E3-reads", state, sentence, reads)


def store_level(engine: Engine, seq: int, token: int) -> Level:
    """E3: change, restore and poison the pages of all layers at once, always at the same length."""
    store, length = engine.store, engine.length(seq)
    slots = store.slots_for(seq, 0, length)
    for payload in (getattr(pages, side) for pages in store.layers for side in SIDES):
        probe.put(store, payload, slots, probe.shown(probe.stored(store, payload, slots)))

    def decode() -> Tensor:
        engine.truncate(seq, length)
        return engine.decode([seq], [token]).clone()

    reference = decode()
    if not reference.isfinite().all():
        return Level("E3", MISMATCH, "The probe's logits are not finite, so they show nothing.")
    faults, plain = [], reference
    if engine.decode_mode == "graph" or engine.compile_mode == "layer":
        with probe.eager(engine):
            plain = decode()
        apart, largest = (reference - plain).abs().max().item(), plain.abs().max().item()
        if not apart <= APART * largest:
            far = f"{apart:.3g} from an eager one's, of at most {largest:.3g}"
            faults.append(f"a captured or compiled step gives logits that are {far}")
    names = dict.fromkeys(name for pages in store.layers for name in pages.tensors())
    for name in names:
        live = {at: x for at, pages in enumerate(store.layers) if (x := getattr(pages, name)) is not None}
        every = f"every stored {probe.words(name)}"
        kept = {(layer, name): x.clone() for layer, x in live.items()}
        is_scale, single, unread = name.endswith("scale"), live[0].numel() == 1, True
        for factor in probe.FACTORS if is_scale else (None,):
            for layer, x in live.items():
                x.copy_(probe.changed(kept[layer, name]) if factor is None else kept[layer, name] * factor)
            unread = probe.same_bits(decode(), reference)
            if is_scale and single:  # a decode writes with it too, so it writes with the old one
                with probe.eager(engine), probe.written_with(store, kept):
                    unread = unread or probe.same_bits(decode(), plain)
            if not unread:
                break
        if unread:
            faults.append(f"changing {every} changes no logit: attention does not read it")
        for layer, x in live.items():
            x.copy_(kept[layer, name])
        if not probe.same_bits(decode(), reference):
            faults.append(f"restoring {every} does not restore the logits bit for bit")
    engine.truncate(seq, length)
    # The slot of the decoded token is written again by every decode, so it is poisoned too.
    outside = torch.ones(store.num_pages * store.page_size, dtype=torch.bool, device=store.device)
    outside[slots] = False
    for pages in store.layers:
        probe.poison(pages, outside.view(-1, store.page_size))
    if not probe.same_bits(decode(), reference):
        faults.append("poison outside the sequence reaches the logits")
    if faults:
        sentence = f"The read path is not the store: {'; '.join(faults)}."
        return Level("E3", MISMATCH, sentence, {"faults": faults})
    checked = ", ".join(probe.words(name) for name in names)
    return Level("E3", VERIFIED, f"Logits follow the stored {checked} and nothing outside the sequence.")
