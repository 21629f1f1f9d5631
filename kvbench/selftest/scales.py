"""Scales that are wrong where they are stored, or not read as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.engines.reference import engine as core
from kvbench.engines.reference import load
from kvbench.engines.reference.backends import TORCH
from kvbench.engines.reference.kv import store
from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.formats.checkpoint_scales import Stored, stored_scales
from kvbench.formats.scales import DEFAULT, Scale, settle
from kvbench.selftest.fault import Fault
from kvbench.selftest.writes import Side, after_write, each_side
from kvbench_kernels.attention.reference import paged_gather_torch
from kvbench_kernels.kv.layout import LayerPages

Broken = AbstractContextManager[Any]


def fixed(value: float) -> Callable[[], Broken]:
    return after_write(each_side(lambda side: side.put_scales(value)))


def bits(change: Callable[[Tensor], Tensor]) -> Callable[[], Broken]:
    """FP16 scales whose bits, as int16, are changed."""
    return after_write(
        each_side(lambda side: side.put_scales(change(side.scales.view(torch.int16)).view(torch.float16)))
    )


def stale() -> Broken:
    """Each write of a layer stores the last scales of the write before it."""
    before: dict[int, Tensor] = {}

    def change(side: Side) -> None:
        key, own = side.payload.data_ptr(), side.scales[-1:].clone()
        if key in before:
            side.put_scales(before[key].expand(len(side.x), -1))
        before[key] = own

    return after_write(each_side(change))()


def exchange(sides: tuple[Side, Side]) -> None:
    k, v = (side.scales.clone() for side in sides)
    sides[0].put_scales(v)
    sides[1].put_scales(k)


def rounded_down(side: Side) -> None:
    """FP16 by truncation: where the division left a remainder, one number below what is rounded up."""
    wanted, stored = side.x.float().abs().amax(-1) / 127, side.scales
    side.put_scales((stored.view(torch.int16) - (stored.float() > wanted).short()).view(torch.float16))


def as_bf16(side: Side) -> None:
    side.put_scales(side.scales.bfloat16().view(torch.int16).view(torch.float16))


def reading(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Broken]:
    """An inject: the pages' K and V scales [pages, H, page_size] are changed on their way to attention."""

    def gather(cache: LayerPages, *rest: Any) -> Any:
        if cache.k_scale is not None and cache.v_scale is not None:
            k_scale, v_scale = change(cache.k_scale, cache.v_scale)
            cache = cache._replace(k_scale=k_scale, v_scale=v_scale)
        return paged_gather_torch(cache, *rest)

    return lambda: patch.object(TORCH, "gather", gather)


def static_scale_of_one() -> Broken:
    def allocate(fmt: Any, *rest: Any) -> LayerPages:
        made = allocate_layer(fmt, *rest)
        if fmt.scale_kind == "static" and made.k_scale is not None:
            made.k_scale.fill_(1.0)
        return made

    return patch.object(store, "allocate_layer", allocate)


def checkpoint_dropped() -> Broken:
    """The engine gets the checkpoint's scales and hands 1.0 on to its store."""

    def settled(scale: Any, layers: int, stored: Stored) -> list[tuple[Scale, Scale]]:
        return settle(DEFAULT if stored else scale, layers, {})

    return patch.object(core, "settle", settled)


def late_fill(sides: tuple[Side, Side]) -> None:
    """Static scales become 1.0 when the first real K and V have been written with them."""
    for side in sides:
        if side.scale is not None and side.scale.ndim == 1:
            side.scale.fill_(1.0)


def sides_exchanged_in_the_checkpoint() -> Broken:
    """What the files hold for K is taken for V's, and V's for K's."""

    def exchanged(*rest: Any) -> Stored:
        return {
            (layer, "v" if side == "k" else "k"): held for (layer, side), held in stored_scales(*rest).items()
        }

    return patch.object(load, "stored_scales", exchanged)


FAULTS: dict[str, Fault] = {
    "scale_zero": Fault(
        "Every stored scale is 0.", "int8_sym", fixed(0.0),
        r"layer 0 K: the stored scale of token 0, head 0, page \d+ is 0,"),
    "scale_one": Fault(
        "Every stored scale is 1.", "int8_sym", fixed(1.0),
        r"layer 0 K: the stored scale of token 0, head 0, page \d+ is 1,"),
    "scale_nan": Fault(
        "Every stored scale is NaN.", "int8_sym", fixed(torch.nan),
        r"layer 0 K: the stored scale of token 0, head 0, page \d+ is nan", silent=False),
    "scale_unwritten": Fault(
        "Scales are never written and keep what the memory held: here 7, as fresh memory may hold anything.",
        "int8_sym", fixed(7.0), r"layer 0 K: the stored scale of token 0, head 0, page \d+ is 7,"),
    "scale_unwritten_fp8": Fault(
        "The same of the FP32 scales of fp8_e4m3: 0, as in memory that was cleared.",
        "fp8_e4m3", fixed(0.0),
        r"not fp8_e4m3 of the same.*layer 0 K: the stored scale of token 0, head 0, page \d+ is 0,"),
    "scale_stale": Fault(
        "A write stores the scale of the write before it.",
        "int8_sym", stale, r"layer 0 K: the stored scale of token 0, head 0, page \d+ is"),
    "scale_of_other_side": Fault(
        "K and V have each other's scales.",
        "int8_sym", after_write(exchange), r"layer 0 K: the stored scale of token 0.*those of V"),
    "scale_of_neighbour_head": Fault(
        "Each head has the scale of its neighbour.",
        "int8_sym", after_write(each_side(lambda side: side.put_scales(side.scales.roll(1, 1)))),
        r"layer 0 K: the stored scale of token 0, head 0.*those of another head"),
    "scale_of_neighbour_token": Fault(
        "Each token has the scale of the token before it in its write.",
        "int8_sym", after_write(each_side(lambda side: side.put_scales(side.scales.roll(1, 0)))),
        r"layer 0 K: the stored scale of token 0, head 0"),
    "scale_rounded_down": Fault(
        "The scale is cut to FP16 instead of rounded up, so the largest element does not fit.",
        "int8_sym", after_write(each_side(rounded_down)),
        r"layer 0 K: the stored scale of token \d+, head \d.*rounded down"),
    "scale_halved_by_a_lost_carry": Fault(
        "A carry from mantissa to exponent is lost, and the scale is half of what it should be.",
        "int8_sym", bits(lambda b: b - 0x400), r"layer 0 K: the stored scale of token 0, head 0.*half"),
    "scale_bf16_read_as_fp16": Fault(
        "Scales are written in BF16 and read as FP16.",
        "int8_sym", after_write(each_side(as_bf16)),
        r"layer 0 K: the stored scale of token 0, head 0, page \d+ is"),
    "static_scale_one": Fault(
        "A given scale is replaced by 1.",
        "int8_static", static_scale_of_one, r"layer 0 K: the stored scale is 1, given was 0\.05"),
    "static_scale_filled_late": Fault(
        "A late initialisation fills given scales with 1 after the first tokens were written with them.",
        "int8_static", after_write(late_fill), r"layer 0 K: the stored scale is 1, given was 0\.05"),
    "checkpoint_scales_dropped": Fault(
        "The checkpoint's scales are read, and 1.0 reaches the store.",
        "checkpoint_scales", checkpoint_dropped,
        r"layer 0 K: the stored scale is 1, checkpoint was 0\.01 "
        r"\(model\.layers\.0\.self_attn\.k_proj\.k_scale\)"),
    "checkpoint_scales_filled_late": Fault(
        "A late initialisation fills the checkpoint's scales with 1 after the first tokens were written "
        "with them.",
        "checkpoint_scales", after_write(late_fill),
        r"layer 0 K: the stored scale is 1, checkpoint was 0\.01"),
    "checkpoint_scales_exchanged": Fault(
        "The checkpoint's scales of K are taken for V's, and V's for K's.",
        "checkpoint_scales", sides_exchanged_in_the_checkpoint,
        r"layer 0 K: the stored scale is 0\.02, checkpoint was 0\.01 .*; it is that of V"),
    "v_scale_not_read": Fault(
        "Attention reads V's codes and not its scales.",
        "int8_sym", reading(lambda k, v: (k, torch.ones_like(v))),
        r"layer 0: the stored V scale is not read"),
    "static_v_scale_not_read": Fault(
        "V is quantized with the given scale and read as if it were 1.",
        "int8_static", reading(lambda k, v: (k, torch.ones_like(v) if v.ndim == 1 else v)),
        r"layer 0: the stored V scale is not read"),
    "scales_exchanged_on_reading": Fault(
        "Attention takes V's scales for K and K's for V.",
        "int8_sym", reading(lambda k, v: (v, k)),
        r"attention of layer \d differs.*codes and scales stand for"),
    "scale_of_neighbour_head_read": Fault(
        "Attention takes the scale of the neighbour head.",
        "int8_sym", reading(lambda k, v: (k.roll(1, 1), v.roll(1, 1))),
        r"attention of layer \d differs.*codes and scales stand for"),
}  # fmt: skip
