"""Codes that are no codes of the format, and a quantizer that is wrong for the store and for the evidence
alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.selftest.fault import Fault
from kvbench.selftest.writes import Side, after_write, each_side
from kvbench_kernels.kv.quantize import QUANTIZE, Quantized

Broken = AbstractContextManager[Any]


def truncated(side: Side) -> None:
    side.put_codes((side.x.float() / side.scales.float()[..., None]).trunc())


def minus_128(side: Side) -> None:
    side.put_codes(side.codes.masked_fill(side.codes == -127, -128))


def before_permute(side: Side) -> None:
    """Quantizes rows of [N, D, H], which mix values of all heads, and puts the codes in order afterwards."""
    n, heads, dim = side.x.shape
    mixed = QUANTIZE["int8_sym"](side.x.transpose(1, 2).reshape(n, heads, dim), None)
    side.put_codes(mixed.codes.reshape(n, dim, heads).transpose(1, 2))
    if mixed.scales is not None:
        side.put_scales(mixed.scales)


def one_off() -> Broken:
    """V of the second layer only."""
    seen: dict[int, int] = {}

    def change(side: Side) -> None:
        if seen.setdefault(side.payload.data_ptr(), len(seen)) % 4 == 1:
            side.put_codes(side.codes.clamp(max=126) + 1)

    return after_write(each_side(change, "v"))()


def reference(change: Callable[[Quantized, Tensor], Quantized]) -> Callable[[], Broken]:
    """An inject: the reference quantizer itself, by which the evidence compares, gives something else."""
    honest = QUANTIZE["int8_sym"]
    return lambda: patch.dict(QUANTIZE, int8_sym=lambda x, scale: change(honest(x, scale), x))


def scales_down(sound: Quantized, x: Tensor) -> Quantized:
    assert sound.scales is not None
    wanted = x.float().abs().amax(-1) / 127
    down = (sound.scales.view(torch.int16) - (sound.scales.float() > wanted).short()).view(torch.float16)
    return replace(sound, scales=down)


def codes_cut(sound: Quantized, x: Tensor) -> Quantized:
    assert sound.scales is not None
    return replace(sound, codes=(x.float() / sound.scales.float()[..., None]).trunc().to(torch.int8))


FAULTS: dict[str, Fault] = {
    "codes_truncated": Fault(
        "Codes are cut towards 0 instead of rounded.",
        "int8_sym", after_write(each_side(truncated)),
        r"layer 0 K: stored codes differ.*in token 0, head 0, page \d+"),
    "code_minus_128": Fault(
        "The code -128 is stored for -127.",
        "int8_sym", after_write(each_side(minus_128)),
        r"layer 0 K: stored codes differ.*page \d+, -128 is stored for -127"),
    "quantized_before_permute": Fault(
        "K and V are quantized before heads and head_dim are exchanged: each scale is that of a mixture of "
        "heads.",
        "int8_sym", after_write(each_side(before_permute)),
        r"layer 0 K: the stored scale of token 0, head 0"),
    "one_layer_one_off": Fault(
        "V of one layer is off by one code.",
        "int8_sym", one_off, r"layer \d V: stored codes differ.*in token 0, head 0, page \d+"),
    "reference_truncates": Fault(
        "The reference quantizer cuts codes, so the store agrees with it.",
        "int8_sym", reference(codes_cut), r"the reference quantizer of int8_sym gives codes"),
    "reference_rounds_scales_down": Fault(
        "The reference quantizer cuts scales to FP16, so the store agrees with it, within the bound of the "
        "format.",
        "int8_sym", reference(scales_down), r"the reference quantizer of int8_sym gives scale"),
}  # fmt: skip
