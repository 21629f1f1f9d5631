"""Codes and scales that are stored wrongly, by the reference too, or not read as they are stored."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.engines.reference import engine as core
from kvbench.engines.reference import load
from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.graph import DecodeGraph
from kvbench.engines.reference.kv import store
from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.formats.checkpoint_scales import Stored, stored_scales
from kvbench.formats.scales import DEFAULT, Scale, settle
from kvbench.selftest.fault import Broken, Fault, Inject, Loud, swap
from kvbench_kernels.attention.reference import paged_gather_torch, paged_write_torch
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE, Quantized

_CAPTURE, _INT8 = DecodeGraph.__init__, QUANTIZE["int8_sym"]


@dataclass(frozen=True)
class Side:
    """K or V of one write. x [N, H, D]: what was written; page, offset [N]: where.

    payload [pages, H, page_size, D], scale [pages, H, page_size], [1] or None: the layer's tensors.
    """

    x: Tensor
    page: Tensor
    offset: Tensor
    payload: Tensor
    scale: Tensor | None

    @property
    def codes(self) -> Tensor:
        """[N, H, D], as they are stored."""
        return self.payload[self.page, :, self.offset]

    @property
    def scales(self) -> Tensor:
        """[N, H], as they are stored; zeros where the format stores none a row."""
        if self.scale is None or self.scale.ndim == 1:
            return self.x.new_zeros(self.x.shape[:2])
        return self.scale[self.page, :, self.offset]

    def put_codes(self, codes: Tensor) -> None:
        self.payload[self.page, :, self.offset] = codes.to(self.payload.dtype)

    def put_scales(self, scales: Tensor | float) -> None:
        if self.scale is not None and self.scale.ndim > 1:
            self.scale[self.page, :, self.offset] = torch.as_tensor(scales, dtype=self.scale.dtype)


def after_write(change: Callable[[Side, Side], object]) -> Inject:
    """`change` is called with K and V after each honest write of a quantized format."""

    def write(cache: LayerPages, k: Tensor, v: Tensor, slots: Tensor, health: Tensor) -> None:
        paged_write_torch(cache, k, v, slots, health)
        if cache.fmt.quantized:
            where = slots // cache.page_size, slots % cache.page_size
            change(Side(k, *where, cache.k, cache.k_scale), Side(v, *where, cache.v, cache.v_scale))

    return swap(TORCH, "write", write)


def each_side(change: Callable[[Side], object]) -> Inject:
    return after_write(lambda k, v: (change(k), change(v)))


def scales(change: Callable[[Tensor], Tensor | float]) -> Inject:
    return each_side(lambda side: side.put_scales(change(side.scales)))


def as_fp16(bits: Tensor) -> Tensor:
    return bits.view(torch.int16).view(torch.float16)


def rounded_down(scales: Tensor, x: Tensor) -> Tensor:
    """FP16 by truncation: where the division left a remainder, one number below what is rounded up."""
    return as_fp16(scales.view(torch.int16) - (scales.float() > x.float().abs().amax(-1) / 127).short())


def exchange(k: Side, v: Side) -> None:
    of_k, of_v = k.scales.clone(), v.scales.clone()
    k.put_scales(of_v)
    v.put_scales(of_k)


def stale() -> Broken:
    """Each write of a layer stores the last scales of the write before it."""
    before: dict[int, Tensor] = {}

    def change(side: Side) -> None:
        key, own = side.payload.data_ptr(), side.scales[-1:].clone()
        if key in before:
            side.put_scales(before[key].expand(len(side.x), -1))
        before[key] = own

    return each_side(change)()


def late_fill(side: Side) -> None:
    """Static scales become 1.0 when the first real K and V have been written with them."""
    if side.scale is not None and side.scale.ndim == 1:
        side.scale.fill_(1.0)


def allocate_ones(fmt: Any, *rest: Any) -> LayerPages:
    made = allocate_layer(fmt, *rest)
    if fmt.scale_kind == "static" and made.k_scale is not None:
        made.k_scale.fill_(1.0)
    return made


def settle_without_checkpoint(scale: Any, layers: int, stored: Stored) -> list[tuple[Scale, Scale]]:
    """The engine gets the checkpoint's scales and hands 1.0 on to its store."""
    return settle(DEFAULT if stored else scale, layers, {})


def sides_exchanged(*rest: Any) -> Stored:
    """What the files hold for K is taken for V's, and V's for K's."""
    found = stored_scales(*rest).items()
    return {(layer, "v" if side == "k" else "k"): held for (layer, side), held in found}


def before_permute(side: Side) -> None:
    """Quantizes rows of [N, D, H], which mix values of all heads, and puts the codes in order afterwards."""
    n, heads, dim = side.x.shape
    mixed = _INT8(side.x.transpose(1, 2).reshape(n, heads, dim), None)
    side.put_codes(mixed.codes.reshape(n, dim, heads).transpose(1, 2))
    if mixed.scales is not None:
        side.put_scales(mixed.scales)


def one_off() -> Broken:
    """V of the second layer only."""
    seen: dict[int, int] = {}

    def change(k: Side, v: Side) -> None:
        if seen.setdefault(v.payload.data_ptr(), len(seen)) % 4 == 1:
            v.put_codes(v.codes.clamp(max=126) + 1)

    return after_write(change)()


def cut(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() / scales.float()[..., None]).trunc()


def reference(change: Callable[[Tensor, Quantized, Tensor], Quantized]) -> Inject:
    """The reference quantizer itself, by which the evidence compares, gives something else."""

    def quantize(x: Tensor, scale: Tensor | None) -> Quantized:
        sound = _INT8(x, scale)
        assert sound.scales is not None
        return change(x, sound, sound.scales)

    return lambda: patch.dict(QUANTIZE, int8_sym=quantize)


def reading(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Inject:
    """The pages' K and V scales [pages, H, page_size] are changed on their way to attention."""

    def gather(cache: LayerPages, *rest: Any) -> Any:
        if cache.k_scale is not None and cache.v_scale is not None:
            k_scale, v_scale = change(cache.k_scale, cache.v_scale)
            cache = cache._replace(k_scale=k_scale, v_scale=v_scale)
        return paged_gather_torch(cache, *rest)

    return swap(TORCH, "gather", gather)


def capture_with_copies(self: DecodeGraph, engine: Any, *rest: Any) -> None:
    """A decode step is captured over copies of the scales, so its replays see them as they were then."""
    layers = engine.store.layers
    kept = list(layers)
    for at, pages in enumerate(kept):
        if pages.k_scale is not None:
            k_scale, v_scale = (s.nan_to_num(1.0, 1.0, 1.0) for s in (pages.k_scale, pages.v_scale))
            layers[at] = pages._replace(k_scale=k_scale, v_scale=v_scale)
    vars(self)["old"] = list(layers)  # a graph does not keep what it reads
    try:
        _CAPTURE(self, engine, *rest)
    finally:
        layers[:] = kept


SCALE = r"layer 0 K: the stored scale of token 0, head 0"
CODES = r"layer 0 K: stored codes differ.*in token 0, head 0, page \d+"
STATIC = r"layer 0 K: the stored scale is 1, given was 0\.05"
DIFFERS = r"attention of layer \d differs.*codes and scales stand for"
V_UNREAD = r"layer 0: the stored V scale is not read"

FAULTS: dict[str, Fault] = {
    "scale_zero": Fault("Every stored scale is 0.", scales(lambda s: 0.0), rf"{SCALE}, page \d+ is 0,"),
    "scale_one": Fault("Every stored scale is 1.", scales(lambda s: 1.0), rf"{SCALE}, page \d+ is 1,"),
    "scale_nan": Loud(
        "Every stored scale is NaN.", scales(lambda s: torch.nan), rf"{SCALE}, page \d+ is nan"
    ),
    "scale_unwritten": Fault(
        "Scales are never written and keep what the memory held: here 7, as fresh memory may hold anything.",
        scales(lambda s: 7.0),
        rf"{SCALE}, page \d+ is 7,",
    ),
    "scale_unwritten_fp8": Fault(
        "The same of the FP32 scales of fp8_e4m3: 0, as in memory that was cleared.",
        scales(lambda s: 0.0),
        rf"not fp8_e4m3 of the same.*{SCALE}, page \d+ is 0,",
        "fp8_e4m3",
    ),
    "scale_stale": Fault("A write stores the scale of the write before it.", stale, rf"{SCALE}, page \d+ is"),
    "scale_of_other_side": Fault(
        "K and V have each other's scales.", after_write(exchange), rf"{SCALE}.*those of V"
    ),
    "scale_of_neighbour_head": Fault(
        "Each head has the scale of its neighbour.",
        scales(lambda s: s.roll(1, 1)),
        rf"{SCALE}.*those of another head",
    ),
    "scale_of_neighbour_token": Fault(
        "Each token has the scale of the token before it.", scales(lambda s: s.roll(1, 0)), SCALE
    ),
    "scale_rounded_down": Fault(
        "The scale is cut to FP16 instead of rounded up, so the largest element does not fit.",
        each_side(lambda side: side.put_scales(rounded_down(side.scales, side.x))),
        r"layer 0 K: the stored scale of token \d+, head \d.*rounded down",
    ),
    "scale_halved_by_a_lost_carry": Fault(
        "A carry from mantissa to exponent is lost, and the scale is half of what it should be.",
        scales(lambda s: as_fp16(s.view(torch.int16) - 0x400)),
        rf"{SCALE}.*half",
    ),
    "scale_bf16_read_as_fp16": Fault(
        "Scales are written in BF16 and read as FP16.",
        scales(lambda s: as_fp16(s.bfloat16())),
        rf"{SCALE}, page \d+ is",
    ),
    "static_scale_one": Fault(
        "A given scale is replaced by 1.", swap(store, "allocate_layer", allocate_ones), STATIC, "int8_static"
    ),
    "static_scale_filled_late": Fault(
        "A late initialisation fills given scales with 1 after the first tokens were written.",
        each_side(late_fill),
        STATIC,
        "int8_static",
    ),
    "checkpoint_scales_dropped": Fault(
        "The checkpoint's scales are read, and 1.0 reaches the store.",
        swap(core, "settle", settle_without_checkpoint),
        r"stored scale is 1, checkpoint was 0\.01 \(model\.layers\.0\.self_attn\.k_proj\.k_scale\)",
        "checkpoint_scales",
    ),
    "checkpoint_scales_filled_late": Fault(
        "A late initialisation fills the checkpoint's scales with 1 after the first tokens were written.",
        each_side(late_fill),
        r"layer 0 K: the stored scale is 1, checkpoint was 0\.01",
        "checkpoint_scales",
    ),
    "checkpoint_scales_exchanged": Fault(
        "The checkpoint's scales of K are taken for V's, and V's for K's.",
        swap(load, "stored_scales", sides_exchanged),
        r"layer 0 K: the stored scale is 0\.02, checkpoint was 0\.01 .*; it is that of V",
        "checkpoint_scales",
    ),
    "v_scale_not_read": Fault(
        "Attention reads V's codes, not its scales.", reading(lambda k, v: (k, torch.ones_like(v))), V_UNREAD
    ),
    "static_v_scale_not_read": Fault(
        "V is quantized with the given scale and read as if it were 1.",
        reading(lambda k, v: (k, torch.ones_like(v) if v.ndim == 1 else v)),
        V_UNREAD,
        "int8_static",
    ),
    "scales_exchanged_on_reading": Fault(
        "Attention takes V's scales for K and K's for V.", reading(lambda k, v: (v, k)), DIFFERS
    ),
    "scale_of_neighbour_head_read": Fault(
        "Attention takes the scale of the next head.",
        reading(lambda k, v: (k.roll(1, 1), v.roll(1, 1))),
        DIFFERS,
    ),
    "graph_replays_old_scales": Fault(
        "A CUDA graph of a decode step replays with the scales of its capture.",
        swap(DecodeGraph, "__init__", capture_with_copies),
        r"changing every stored K scale changes no logit",
        "cuda",
    ),
    "codes_truncated": Fault(
        "Codes are cut towards 0 instead of rounded.",
        each_side(lambda side: side.put_codes(cut(side.x, side.scales))),
        CODES,
    ),
    "code_minus_128": Fault(
        "The code -128 is stored for -127.",
        each_side(lambda side: side.put_codes(side.codes.masked_fill(side.codes == -127, -128))),
        r"layer 0 K: stored codes differ.*page \d+, -128 is stored for -127",
    ),
    "quantized_before_permute": Fault(
        "K and V are quantized before heads and head_dim are exchanged: each scale is that of mixed heads.",
        each_side(before_permute),
        SCALE,
    ),
    "one_layer_one_off": Fault("V of one layer is off by one code.", one_off, CODES.replace("0 K", r"\d V")),
    "reference_truncates": Fault(
        "The reference quantizer cuts codes, so the store agrees with it.",
        reference(lambda x, sound, scales: replace(sound, codes=cut(x, scales).to(torch.int8))),
        r"the reference quantizer of int8_sym gives codes",
    ),
    "reference_rounds_scales_down": Fault(
        "The reference quantizer cuts scales to FP16: the store agrees with it, within the format's bound.",
        reference(lambda x, sound, scales: replace(sound, scales=rounded_down(scales, x))),
        r"the reference quantizer of int8_sym gives scale",
    ),
}
