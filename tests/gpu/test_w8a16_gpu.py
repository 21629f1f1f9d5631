"""W8A16 at the shapes of real models: float64's values, every code, the same bits every time, any launch
order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kvbench_kernels.gemm.blockwise import BLOCK, quantize_blocks
from kvbench_kernels.gemm.w8a16 import w8a16
from kvbench_kernels.gemm.w8a16_config import Tiling
from kvbench_kernels.kv.quantize import e4m3_to_float
from tests.kernels.products import assert_near, assert_same_in_a_graph, made

pytestmark = pytest.mark.gpu
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "small": (576, 576),
    "small kv": (192, 576),
    "small down": (576, 1536),
    "odd": (1000, 192),
    "one": (1, 16),
}
TILINGS = {
    "registers": Tiling("vector", 4, 1024),
    "registers, split": Tiling("vector", 8, 512, splits=3, warps=2),
    "ring": Tiling("vector", 8, 1024, stages=3),
    "dot": Tiling("dot", 16, 256, warps=1, stages=4),
    "dot, bits": Tiling("dot", 32, 128, warps=2, stages=4, cvt=False),
    "dot, split": Tiling("dot", 64, 256, splits=4, stages=3),
    "dot, two blocks of rows": Tiling("dot", 256, 128, warps=8, stages=2),
    "swap": Tiling("dot", 64, 128, warps=2, stages=4, swap=True),
    "swap, split": Tiling("dot", 64, 128, splits=4, stages=4, swap=True),
    "swap, bits": Tiling("dot", 64, 128, stages=4, swap=True, cvt=False),
    "wide swap": Tiling("dot", 128, 128, warps=8, stages=3, swap=True),
    "swap, two blocks of rows": Tiling("dot", 256, 128, warps=8, stages=2, swap=True),
}


def made_x(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows that lie apart, with NaN beside and behind them."""
    whole = torch.full((m + 2, k + 16), torch.nan, device="cuda", dtype=dtype)
    return whole[1:-1, :k].copy_(torch.randn(m, k, device="cuda"))


def made_weight(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scales, and the weight in float64."""
    codes, scales = quantize_blocks(torch.randn(n, k, device="cuda") * k**-0.5)
    wide = scales.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return codes, scales, e4m3_to_float(codes).double() * wide


def rows_of(tiling: Tiling) -> tuple[int, ...]:
    return (1, 2, 3, 4) if tiling.kind == "vector" else (1, 9, 16, 31, 33, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_tiling_against_float64(shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k = SHAPES[shape]
    codes, scales, w = made_weight(n, k)
    bias = made(n, dtype=dtype)
    for m in (1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 33, 64, 128):
        x = made_x(m, k, dtype)
        exact = x.double() @ w.T
        out = torch.full((m + 2, n), torch.nan, device="cuda", dtype=dtype)
        w8a16(x, codes, scales, out=out[1:-1])
        assert_near(out[1:-1], exact)
        assert out[0].isnan().all()
        assert out[-1].isnan().all()
        for half in (torch.bfloat16, torch.float16):
            rounded = scales.to(half)
            ratio = (rounded.double() / scales.double()).repeat_interleave(BLOCK, 0)[:n]
            again = x.double() @ (w * ratio.repeat_interleave(BLOCK, 1)[:, :k]).T
            if m in (1, 16):
                assert_near(w8a16(x, codes, rounded), again)
        assert_near(w8a16(x, codes, scales, bias), exact + bias.double())


@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize("name", TILINGS)
def test_every_kind_of_tiling_and_its_bits_in_a_graph(name: str, pdl: bool) -> None:
    torch.manual_seed(0)
    tiling = replace(TILINGS[name], pdl=pdl)
    codes, scales, w = made_weight(4096, 4096)
    for m in rows_of(tiling):
        x = made_x(m, 4096)
        product = partial(w8a16, codes=codes, scales=scales, tiling=tiling)
        assert_near(assert_same_in_a_graph(product, x, 4, 10), x.double() @ w.T)


def test_weights_above_2_to_the_31_elements() -> None:
    codes = torch.zeros(540_000, 4096, device="cuda", dtype=torch.uint8)
    assert codes.numel() > 2**31
    last, _, _ = made_weight(3, 4096)
    codes[-3:] = last.view(torch.uint8)
    scales = torch.ones(-(-540_000 // BLOCK), 32, device="cuda")
    for m in (1, 16, 64):
        x = made(m, 4096)
        out = w8a16(x, codes.view(torch.float8_e4m3fn), scales)
        assert_near(out[:, -3:], x.double() @ e4m3_to_float(last).double().T)
        assert not out[:, :-3].any()
