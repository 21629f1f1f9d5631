"""FP8 products at the shapes of real models: the reference's bytes, float64's values, the same bits in any
launch order.

tests/kernels/test_activation.py and test_w8a8.py run compiled where there is a GPU; this file is for what is
too large for an interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvbench_kernels.gemm.activation import quantize_activation
from kvbench_kernels.gemm.blockwise import quantize_activation_torch, quantize_blocks
from kvbench_kernels.gemm.w8a8 import w8a8, w8a8_torch
from kvbench_kernels.gemm.w8a8_config import Tiling
from tests.kernels.products import assert_near, assert_same_in_a_graph, made

pytestmark = pytest.mark.gpu
SHARE = 4e-3  # errors of the tensor cores' sums are a small part of the outputs' size
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "small qkv": (960, 576),
    "small down": (576, 1536),
    "small lm_head": (49152, 576),
}
TILINGS = {
    "one CTA a tile": Tiling(128, 128, warps=8),
    "halves, walking": Tiling(128, 256, warps=8, ctas=1),
    "split": Tiling(64, 128, splits=4),
    "pointers, split": Tiling(64, 128, splits=3, tma=False),
    "swap": Tiling(64, 64, stages=6, swap=True, prefetch=True),
    "swap, split, walking": Tiling(32, 64, splits=3, swap=True, ctas=1, prefetch=True),
}


def test_every_bf16_value_under_many_scales() -> None:
    values = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    torch.manual_seed(0)
    for power in (-126, -100, -61, -60, -59, -9, 0, 9, 100, 119):
        # One element of each 128 sets the scale; the rest is every smaller value.
        largest = 448.0 * 2.0**power * (1 + torch.rand(1 << 12, 1, device="cuda"))
        x = values[torch.randint(0, 2**16, (1 << 12, 127), device="cuda")].float()
        x = torch.cat((torch.where(x.abs() < largest, x, largest * torch.rand_like(x)), largest), 1)
        codes, scales = quantize_activation(x)
        expected, expected_scales = quantize_activation_torch(x)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_tiling_against_float32(shape: str) -> None:
    torch.manual_seed(0)
    n, k = SHAPES[shape]
    weight = quantize_blocks(made(n, k, scale=k**-0.5))
    for m in (1, 9, 33, 64, 65, 127, 256, 1000, 2049):
        operands = (*quantize_activation(made(m, k)), *weight)
        exact = w8a8_torch(*operands, None, torch.float32)
        bias = made(n)
        assert_near(w8a8(*operands, None, torch.bfloat16), exact, SHARE)
        assert_near(w8a8(*operands, bias, torch.bfloat16), exact + bias.float(), SHARE)


def multiplied(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    return w8a8(*quantize_activation(x), codes, scales, None, x.dtype, tiling)


@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize("name", TILINGS)
def test_every_kind_of_tiling_and_its_bits_in_a_graph(name: str, pdl: bool) -> None:
    torch.manual_seed(0)
    tiling = replace(TILINGS[name], pdl=pdl)
    codes, scales = quantize_blocks(made(4096, 4096, scale=1 / 64))
    for m in (50, 128):
        x = made(m, 4096)
        product = partial(multiplied, codes=codes, scales=scales, tiling=tiling)
        first = assert_same_in_a_graph(product, x, 6, 20)
        assert_near(
            first, w8a8_torch(*quantize_activation_torch(x), codes, scales, None, torch.float32), SHARE
        )


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
def test_weights_and_outputs_above_2_to_the_31_elements(tma: bool) -> None:
    n, k = 540_032, 4096
    codes = torch.zeros(n, k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    assert codes.numel() > 2**31
    last, scales_of_last = quantize_blocks(made(128, k))
    codes.view(torch.uint8)[-128:] = last.view(torch.uint8)
    scales = torch.ones(n // 128, k // 128, device="cuda")
    scales[-1:] = scales_of_last
    for tiling, m in ((Tiling(64, 64, swap=True, tma=tma), 9), (Tiling(128, 128, warps=8, tma=tma), 4000)):
        x = quantize_activation(made(m, k))
        out = w8a8(*x, codes, scales, None, torch.bfloat16, tiling)
        assert_near(out[:, -128:], w8a8_torch(*x, last, scales_of_last, None, torch.float32), SHARE)
        assert not out[:, :-128].any()
        del out


def test_rows_above_2_to_the_31_elements() -> None:
    x = torch.zeros(180_000, 12288, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[-3:] = made(3, 12288)
    codes, scales = quantize_activation(x)
    expected, expected_scales = quantize_activation_torch(x[-3:])
    assert torch.equal(codes.view(torch.uint8)[-3:], expected.view(torch.uint8))
    assert torch.equal(scales[-3:], expected_scales)
    assert not codes.view(torch.uint8)[:-3].any()
