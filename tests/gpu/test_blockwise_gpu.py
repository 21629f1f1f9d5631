"""Quantizing weights and activations on a GPU gives the bytes that it gives on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvbench_kernels.gemm.blockwise import dequantize_blocks, quantize_activation_torch, quantize_blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (100, 192), (256, 256)])
def test_the_same_bytes_on_a_gpu(n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    w = (torch.randn(n, k) * torch.logspace(-3, 2, k)).to(dtype)
    w[:, :5] = 0
    for quantize in (quantize_blocks, quantize_activation_torch):
        codes, scales = quantize(w)
        on_gpu = quantize(w.cuda())
        assert torch.equal(codes.view(torch.uint8), on_gpu[0].cpu().view(torch.uint8))
        assert torch.equal(scales, on_gpu[1].cpu())
    codes, scales = quantize_blocks(w)
    assert torch.equal(dequantize_blocks(codes, scales), dequantize_blocks(codes.cuda(), scales.cuda()).cpu())
