"""E1: dtypes and bytes of every layer. E2: stored codes and scales are the reference quantizer's for K and V.

Static scales are compared with their source; a checkpoint's are read again from its files.
"""

import torch
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.evidence.probe_values import level_of, same_bits, stored
from kvbench.evidence.scale_sources import as_stored, expected_scales, static_fault
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat, kv_bytes
from kvbench.records.record import UNVERIFIED, Level
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE

if _missing := [name for name in KV_FORMATS if name not in QUANTIZE]:
    raise ImportError(
        f"No quantizer is registered for KV format {', '.join(_missing)} in kvbench_kernels.kv.quantize."
    )


def reference_fault(fmt: KVFormat) -> str:
    """What the reference quantizer of a format gets wrong on its row worked out by hand, or ""."""
    known, name = fmt.known_row, f"the reference quantizer of {fmt.name}"
    row = torch.tensor(known.values)
    made = QUANTIZE[fmt.name](row, None if known.given is None else torch.tensor(known.given))
    found, expected = made.codes.double().tolist(), torch.tensor(known.codes).double().tolist()
    if found != expected:
        return f"{name} gives codes {found} for {list(known.values)}, expected {expected}"
    scale = None if made.scales is None else made.scales.item()
    if scale != known.scale:
        return f"{name} gives scale {scale} for {list(known.values)}, expected {known.scale}"
    return ""


def asked_format(engine: Engine) -> KVFormat:
    return KV_FORMATS[engine.decision.kv_format.resolved]


def live_format(pages: LayerPages, side: str, native_dtype: torch.dtype, asked: KVFormat) -> str:
    """The format that one side of a layer is stored in, by its tensors alone; or a description of them.

    asked: the format to name where several have the same tensors.
    """
    payload: Tensor = getattr(pages, side)
    scale: Tensor | None = getattr(pages, f"{side}_scale")
    kind = "none" if scale is None else "tensor" if scale.numel() == 1 else "token-head"
    for fmt in (asked, *KV_FORMATS.values()):
        same = dtype_name(payload.dtype) == (fmt.payload_dtype or dtype_name(native_dtype))
        same_scale = scale is None or dtype_name(scale.dtype) == fmt.scale_dtype
        if same and same_scale and fmt.scale_granularity == kind:
            return fmt.name
    scales = "no scales" if scale is None else f"{kind} {dtype_name(scale.dtype)} scales"
    return f"{dtype_name(payload.dtype)} with {scales}"


def bytes_level(engine: Engine) -> tuple[Level, str]:
    """E1, and the KV format that the live tensors show, or "mixed"."""
    asked, store = asked_format(engine), engine.store
    wrong, found = [], set()
    for index, pages in enumerate(store.layers):
        for side in SIDES:
            live = live_format(pages, side, engine.model.dtype, asked)
            found.add(live)
            if live != asked.name:
                found_as = f"{live} ({dtype_name(getattr(pages, side).dtype)})"
                wrong.append(f"layer {index} {side.upper()} is stored as {found_as}, asked was {asked.name}")
        # By the resolved format's formula, so that a store of another format is not compared with itself.
        slots = store.num_pages * store.page_size
        expected = kv_bytes(asked, engine.layers[index].shape, slots, dtype_name(engine.model.dtype))
        live_bytes = store.live_bytes(index)
        if live_bytes != expected:
            wrong.append(f"layer {index} holds {live_bytes.total} B, {asked.name} takes {expected.total} B")
    layers = len(store.layers)
    facts = {"layers": layers, "bytes": sum(store.live_bytes(i).total for i in range(layers))}
    right = f"All {layers} layers store {asked.name}; live bytes equal the formula."
    level = level_of("E1", wrong, f"kv_format {asked.name} did not reach the store", right, **facts)
    return level, found.pop() if len(found) == 1 else "mixed"


def codes_level(engine: Engine) -> Level:
    """E2, on the first sequence of the store, whose K and V the engine has tapped in every layer."""
    asked, store = asked_format(engine), engine.store
    sources = expected_scales(engine) if asked.scale_kind == "static" else None
    seq = next(iter(store.sequences()))
    slots = store.slots_for(seq, 0, engine.length(seq))
    page = slots // store.page_size
    wrong = [fault] if (fault := reference_fault(asked)) else []
    for index, pages in enumerate(store.layers):
        if index not in engine.taps:
            return Level("E2", UNVERIFIED, f"Layer {index} wrote nothing in the probe forward.")
        references = [
            QUANTIZE[asked.name](x, None if sources is None else as_stored(sources[index][at], x.device))
            for at, x in enumerate(engine.taps[index])
        ]
        for at, (side, reference) in enumerate(zip(SIDES, references, strict=True)):
            where = f"layer {index} {side.upper()}"
            payload, live_scale = pages.side(side)
            if sources is not None:
                if fault := static_fault(live_scale, sources[index], at):
                    wrong.append(f"{where}: {fault}")
            elif reference.scales is not None:
                held = None if live_scale is None else stored(store, live_scale, slots)
                if held is None or not same_bits(held, reference.scales):
                    other = f"all are those of {SIDES[1 - at].upper()}", references[1 - at].scales
                    wrong.append(f"{where}: {_scale_fault(held, reference.scales, other, page)}")
            codes = stored(store, payload, slots)
            if not same_bits(codes, reference.codes):
                wrong.append(f"{where}: {_code_fault(codes, reference.codes, page)}")
    facts = {"layers": len(store.layers), "tokens": slots.numel()}
    right = f"Codes and scales of {slots.numel()} tokens equal the reference quantizer."
    return level_of("E2", wrong, f"Stored data is not {asked.name} of the same K/V", right, **facts)


def _scale_fault(
    held: Tensor | None, expected: Tensor, other: tuple[str, Tensor | None], page: Tensor
) -> str:
    """The first scale that differs, and what all of them are where that is known.

    held, expected [N, H]; page [N]. other: scales that they may be instead, in words.
    """
    if held is None or held.shape != expected.shape:
        return "no scale is stored for each token and head"
    at = (held != expected).nonzero()
    if not len(at):
        return f"scales have dtype {dtype_name(held.dtype)}, the reference {dtype_name(expected.dtype)}"
    token, head = at[0].tolist()
    known = {
        other[0]: other[1],
        "all are those of another head": expected.roll(1, 1),
        "all are those of another token": expected.roll(1, 0),
        "all are half of it": expected / 2,
    }
    same = (name for name, scales in known.items() if scales is not None and same_bits(held, scales))
    cause = f"; {name}" if (name := next(same, "")) else ""
    if held.dtype == expected.dtype == torch.float16:
        steps = expected.view(torch.int16) - held.view(torch.int16)
        if bool(((steps == 0) | (steps == 1)).all()):
            cause = "; all are it or the FP16 number below it: rounded down"
    where = f"token {token}, head {head}, page {page[token].item()}"
    is_, reference = held[token, head].item(), expected[token, head].item()
    return f"the stored scale of {where} is {is_:.6g}, the reference {reference:.6g}{cause}"


def _code_fault(held: Tensor, expected: Tensor, page: Tensor) -> str:
    """The first code that differs. held, expected [N, H, D]; page [N]."""
    differ = "stored codes differ from the reference quantizer"
    if held.shape != expected.shape or held.dtype != expected.dtype:
        return differ
    at = (held.float() != expected.float()).nonzero()
    if not len(at):
        return differ
    token, head, _ = at[0].tolist()
    is_, reference = (x[tuple(at[0])].item() for x in (held, expected))
    where = f"token {token}, head {head}, page {page[token].item()}"
    return f"{differ}: in {where}, {is_:.6g} is stored for {reference:.6g}"
