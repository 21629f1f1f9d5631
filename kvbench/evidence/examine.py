"""Evidence of effective precision, taken from the live engine and never from its configuration.

E1        live dtypes and exact bytes of every layer
E2        stored codes and scales equal the reference quantizer applied to the same K/V, in every layer; static scales equal
          their source, a checkpoint's read anew from its files
E3        the read path of this very engine: changed payload or scales change the logits, restored ones restore
          them bit for bit, and poison outside the sequence changes nothing
E3-reads  what the measured run itself read: all tokens that its forwards attended to, from quantized payload
E4        the kernels that ran, by name and layer (`kvbench.evidence.kernels`)
E3-layers: `kvbench.evidence.layer_order`; E3-pages: `kvbench.evidence.page_order`; E3-prefill, E5: `kvbench.evidence.read_path`

A level that does not hold is a `mismatch` whose sentence names what was lost and in which layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.kv.pages import SWAPPED
from kvbench.evidence.bits import same_bits
from kvbench.evidence.kernels import declared_execution, kernels_level, run_of
from kvbench.evidence.known_rows import reference_fault
from kvbench.evidence.probe_values import FACTORS, changed, poison, put, shown, stored, written_with
from kvbench.evidence.products import products_level
from kvbench.evidence.scale_sources import as_stored, due_scales, static_fault
from kvbench.evidence.weight_bytes import stored_weights, weights_level
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat, kv_bytes
from kvbench.records.record import LEVELS, MISMATCH, NOT_APPLICABLE, UNVERIFIED, VERIFIED, Evidence, Level
from kvbench.text import and_more
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE
from kvbench_kernels.launches import record

# Logits of a captured or compiled step may differ by this share of the largest from an eager step's: compilers keep float32
# where eager layers round to 16 bits, over all layers, and a code on a tie moves by a whole step.
APART = 0.125


def live_format(
    pages: LayerPages, side: str, native_dtype: torch.dtype, asked: KVFormat | None = None
) -> str:
    """The format that one side of a layer is stored in, by its tensors alone; or a description of them.

    asked: the format to name where several have the same tensors.
    """
    payload: Tensor = getattr(pages, side)
    scale: Tensor | None = getattr(pages, f"{side}_scale")
    kind = "none" if scale is None else "tensor" if scale.numel() == 1 else "token-head"
    for fmt in (*([asked] if asked else []), *KV_FORMATS.values()):
        stored = dtype_name(native_dtype) if fmt.payload_dtype is None else fmt.payload_dtype
        same_scale = fmt.scale_granularity == kind and (
            scale is None or dtype_name(scale.dtype) == fmt.scale_dtype
        )
        if dtype_name(payload.dtype) == stored and same_scale:
            return fmt.name
    scales = "no scales" if scale is None else f"{kind} {dtype_name(scale.dtype)} scales"
    return f"{dtype_name(payload.dtype)} with {scales}"


@torch.inference_mode()
def examine(engine: Engine, *probes: Level, reads_expected: bool) -> Evidence:
    """Take the evidence of an engine whose measurement has ended; its sequences are freed and its pages poisoned.

    probes: the levels of this configuration, from `probe_layers` and `kvbench.evidence.read_path`. reads_expected: the runner's number comes
    from attention over the pages, so an engine that read none is a mismatch.
    """
    reads, run, products = (
        {**engine.store.reads, "due_tokens": engine.due_reads},
        run_of(engine),
        engine.products,
    )
    e1, effective = _e1(engine)
    e1_weights, effective_weights = weights_level(engine.model, engine.decision)
    levels = [e1, _e3_reads(engine, reads, reads_expected)]
    for seq in engine.store.sequences():
        give_up = engine.discard_swapped if engine.store.state(seq) == SWAPPED else engine.free
        give_up(seq)
    with record() as prompt:
        seq, token = _write_probe(engine)
    levels += [_e2(engine), _e3(engine, seq, token)]
    engine.truncate(seq, engine.store.page_size - 1)
    step = engine.launches_of_step(seq, token)
    e4_weights, multiplied = products_level(engine, products, run.forwards, step)
    levels += [kernels_level(engine, run, prompt, step), e1_weights, e4_weights, *probes]
    levels.sort(key=lambda level: LEVELS.index(level.name))
    dtypes = {dtype_name(getattr(p, s).dtype) for p in engine.store.layers for s in SIDES}
    moved = [transfer.precision for transfer in engine.store.transfers]
    precision = {
        "storage": " + ".join(sorted(dtypes)),
        "transfer": " + ".join(dict.fromkeys(moved)) or "not measured",
        "execution": declared_execution(engine),
        "weights": stored_weights(engine.model),
        "gemm": multiplied,
    }
    return Evidence(effective, effective_weights, tuple(levels), precision, reads)


def _asked(engine: Engine) -> KVFormat:
    return KV_FORMATS[engine.decision.kv_format.resolved]


def _e1(engine: Engine) -> tuple[Level, str]:
    asked, store = _asked(engine), engine.store
    wrong, found = [], set()
    for index, pages in enumerate(store.layers):
        for side in SIDES:
            live = live_format(pages, side, engine.model.dtype, asked)
            found.add(live)
            if live != asked.name:
                dtype = dtype_name(getattr(pages, side).dtype)
                wrong.append(
                    f"layer {index} {side.upper()} is stored as {live} ({dtype}), asked was {asked.name}"
                )
        # By the resolved format's formula, not the store's own: a store of another format must not vouch for itself.
        slots = store.num_pages * store.page_size
        expected = kv_bytes(asked, engine.layers[index].shape, slots, dtype_name(engine.model.dtype))
        live_bytes = store.live_bytes(index)
        if live_bytes != expected:
            wrong.append(f"layer {index} holds {live_bytes.total} B, {asked.name} takes {expected.total} B")
    effective = found.pop() if len(found) == 1 else "mixed"
    total = sum(store.live_bytes(i).total for i in range(len(store.layers)))
    facts = {"layers": len(store.layers), "bytes": total, "first_faults": wrong[:4], "faults": len(wrong)}
    if wrong:
        lost = f"kv_format {asked.name} did not reach the store: {wrong[0]}"
        return Level("E1", MISMATCH, f"{lost}{and_more(wrong)}.", facts), effective
    sentence = f"All {len(store.layers)} layers store {asked.name}; live bytes equal the formula."
    return Level("E1", VERIFIED, sentence, facts), effective


def _e3_reads(engine: Engine, reads: dict[str, int], due_at_all: bool) -> Level:
    asked = _asked(engine)
    if reads["tokens"] == 0 and due_at_all and (reads["due_tokens"] or not engine.computed_tokens):
        return Level(
            "E3-reads",
            MISMATCH,
            "The measured run never read the KV store; its numbers come from elsewhere.",
            reads,
        )
    if reads["tokens"] == 0 and not due_at_all:
        return Level("E3-reads", NOT_APPLICABLE, "This runner makes no attention reads.", reads)
    if reads["tokens"] == 0 and due_at_all and asked.quantized:
        sentence = (
            "The measured run read no token from pages (prefill_reads: fresh and prompts of one chunk); its numbers "
            "say nothing about the cache."
        )
        return Level("E3-reads", UNVERIFIED, sentence, reads)
    if reads["tokens"] != reads["due_tokens"]:
        sentence = (
            f"The measured run read {reads['tokens']} tokens of K/V from pages; its forwards attended to "
            f"{reads['due_tokens']}, so attention took others from elsewhere."
        )
        return Level("E3-reads", MISMATCH, sentence, reads)
    quantized = reads["quantized_tokens"]
    due = reads["tokens"] if asked.quantized else 0
    if quantized != due:
        sentence = (
            f"The measured run read {reads['tokens']} tokens of K/V from pages, {quantized} of them quantized; "
            f"{asked.name} needs {due}."
        )
        return Level("E3-reads", MISMATCH, sentence, reads)
    return Level(
        "E3-reads", VERIFIED, f"{reads['tokens']} K/V tokens were read from {asked.name} pages.", reads
    )


def probe_ids(engine: Engine, count: int) -> list[int]:
    vocab: int = engine.model.vocab_size
    return [(7919 * i + 13) % vocab for i in range(count)]


def _write_probe(engine: Engine) -> tuple[int, int]:
    """One sequence of page_size - 1 tokens (all layers tapped) and the token to decode next."""
    ids = probe_ids(engine, engine.store.page_size)
    seq = engine.add()
    engine.tap_layers = frozenset(range(len(engine.store.layers)))
    engine.forward([(seq, ids[:-1])], "none")
    engine.tap_layers = frozenset()
    return seq, ids[-1]


def _e2(engine: Engine) -> Level:
    """Compare what `_write_probe` stored with the reference quantizer on the K/V that the layers produced."""
    asked, store = _asked(engine), engine.store
    sources = due_scales(engine) if asked.scale_kind == "static" else None
    seq = next(iter(store.sequences()))
    slots = store.slots_for(seq, 0, engine.length(seq))
    wrong = [fault] if (fault := reference_fault(asked)) else []
    for index, pages in enumerate(store.layers):
        if index not in engine.taps:
            return Level("E2", UNVERIFIED, f"Layer {index} wrote nothing in the probe forward.")
        scales = [
            None if sources is None else as_stored(sources[index][at], x.device)
            for at, x in enumerate(engine.taps[index])
        ]
        due = [QUANTIZE[asked.name](x, s) for x, s in zip(engine.taps[index], scales, strict=True)]
        for at, side in enumerate(SIDES):
            reference = due[at]
            where = f"layer {index} {side.upper()}"
            live_scale: Tensor | None = getattr(pages, f"{side}_scale")
            if sources is not None:
                if fault := static_fault(live_scale, sources[index], at):
                    wrong.append(f"{where}: {fault}")
            elif reference.scales is not None:
                held_scales = None if live_scale is None else stored(store, live_scale, slots)
                if held_scales is None or not same_bits(held_scales, reference.scales):
                    other = f"all are those of {SIDES[1 - at].upper()}", due[1 - at].scales
                    wrong.append(
                        f"{where}: {_scale_fault(held_scales, reference.scales, other, slots // store.page_size)}"
                    )
            codes = stored(store, getattr(pages, side), slots)
            if not same_bits(codes, reference.codes):
                wrong.append(f"{where}: {_code_fault(codes, reference.codes, slots // store.page_size)}")
    facts = {
        "layers": len(store.layers),
        "tokens": int(slots.numel()),
        "first_faults": wrong[:4],
        "faults": len(wrong),
    }
    if wrong:
        return Level(
            "E2",
            MISMATCH,
            f"Stored data is not {asked.name} of the same K/V: {wrong[0]}{and_more(wrong)}.",
            facts,
        )
    return Level(
        "E2", VERIFIED, f"Codes and scales of {slots.numel()} tokens equal the reference quantizer.", facts
    )


def _scale_fault(held: Tensor | None, due: Tensor, other: tuple[str, Tensor | None], page: Tensor) -> str:
    """The first scale that differs, and what all of them are where that is known. other: scales that they may be, in words.

    held, due [N, H]; page [N].
    """
    if held is None or held.shape != due.shape:
        return "no scale is stored for each token and head"
    at = (held != due).nonzero()
    if not len(at):
        return f"scales have dtype {dtype_name(held.dtype)}, the reference {dtype_name(due.dtype)}"
    token, head = at[0].tolist()
    known = {
        other[0]: other[1],
        "all are those of another head": due.roll(1, 1),
        "all are those of another token": due.roll(1, 0),
        "all are half of it": due / 2,
    }
    cause = next(
        (f"; {name}" for name, scales in known.items() if scales is not None and same_bits(held, scales)), ""
    )
    if held.dtype == due.dtype == torch.float16:
        steps = due.view(torch.int16) - held.view(torch.int16)
        if bool(((steps == 0) | (steps == 1)).all()):
            cause = "; all are it or the FP16 number below it: rounded down"
    return (
        f"the stored scale of token {token}, head {head}, page {page[token].item()} is {held[token, head].item():.6g}, "
        f"the reference {due[token, head].item():.6g}{cause}"
    )


def _code_fault(held: Tensor, due: Tensor, page: Tensor) -> str:
    """The first code that differs. held, due [N, H, D]; page [N]."""
    said = "stored codes differ from the reference quantizer"
    if held.shape != due.shape or held.dtype != due.dtype:
        return said
    at = (held.float() != due.float()).nonzero()
    if not len(at):
        return said
    token, head, element = at[0].tolist()
    first = f"{held[token, head, element].item():.6g} is stored for {due[token, head, element].item():.6g}"
    return f"{said}: in token {token}, head {head}, page {page[token].item()}, {first}"


def _e3(engine: Engine, seq: int, token: int) -> Level:
    """Change, restore and poison the pages of all layers at once; every decode starts from the same length."""
    store, length = engine.store, engine.length(seq)
    slots = store.slots_for(seq, 0, length)
    for payload in (getattr(pages, side) for pages in store.layers for side in SIDES):
        put(store, payload, slots, shown(stored(store, payload, slots)))

    def decode() -> Tensor:
        engine.truncate(seq, length)
        return engine.decode([seq], [token]).clone()

    reference = decode()
    if not reference.isfinite().all():
        return Level("E3", MISMATCH, "The probe's logits are not finite, so nothing can be told from them.")
    faults = []
    plain = reference
    if engine.decode_mode == "graph" or engine.compile_mode == "layer":
        with engine.eagerly(lambda attention: attention):
            plain = decode()
        apart, largest = (reference - plain).abs().max().item(), plain.abs().max().item()
        if not apart <= APART * largest:
            faults.append(
                f"a captured or compiled step gives logits that are {apart:.3g} from an eager one's, of at most {largest:.3g}"
            )
    names = []
    for name in ("k", "v", "k_scale", "v_scale"):
        live = [t for p in store.layers if (t := getattr(p, name)) is not None]
        if not live:
            continue
        names.append(name)
        kept = [t.clone() for t in live]
        unread = True
        for factor in FACTORS if name.endswith("scale") else (None,):
            for tensor, old in zip(live, kept, strict=True):
                tensor.copy_(changed(old) if factor is None else old * factor)
            unread = same_bits(decode(), reference)
            if name.endswith("scale") and live[0].numel() == 1:  # a decode writes with it too
                given = {(layer, name): old for layer, old in enumerate(kept)}
                with engine.eagerly(lambda attention: attention), written_with(store, given):
                    unread = unread or same_bits(decode(), plain)
            if not unread:
                break
        if unread:
            faults.append(f"changing every stored {words(name)} changes no logit: attention does not read it")
        for tensor, old in zip(live, kept, strict=True):
            tensor.copy_(old)
        if not same_bits(decode(), reference):
            faults.append(f"restoring every stored {words(name)} does not restore the logits bit for bit")
    engine.truncate(seq, length)
    outside = torch.ones(store.layers[0].k.shape[0] * store.page_size, dtype=torch.bool, device=store.device)
    # The slot of the decoded token is written anew by every decode, so it is poisoned too.
    outside[slots] = False
    for pages in store.layers:
        poison(pages, outside.view(-1, store.page_size))
    if not same_bits(decode(), reference):
        faults.append("poison outside the sequence reaches the logits")
    if faults:
        return Level(
            "E3", MISMATCH, "The read path is not the store: " + "; ".join(faults) + ".", {"faults": faults}
        )
    checked = ", ".join(words(n) for n in names)
    return Level("E3", VERIFIED, f"Logits follow the stored {checked} and nothing outside the sequence.")


def words(name: str) -> str:
    return name[0].upper() + (" scale" if name.endswith("scale") else " payload")
