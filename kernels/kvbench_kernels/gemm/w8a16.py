"""Products of few rows with FP8 weights: y[M, N] = x[M, K] @ dequantized codes[N, K]^T + bias[N], M <= 128.

The weights are E4M3 codes with one scale a 128 x 128 block and are read once, at 8 bits; x keeps its 16 (or
32) bits, so nothing is quantized here. Two kernels, both with FP32 accumulation and a fixed order of
summation (the same bits on every call). The scale of a block multiplies partial sums in FP32, never a 16-bit
value:

- `w8a16_vector` (M <= 4): codes go to registers in 16-byte loads and are multiplied there in FP32.
- `w8a16_dot` (M <= 128): x is padded to 16, 32, 64 or 128 rows, codes become 16-bit numbers in registers, and
  the tensor cores multiply, 128 columns at a time.

With splits > 1 several CTAs share a tile along K: each stores its FP32 part, and the one that comes last adds
the parts in the order of K. The torch twin is `kvbench_kernels.gemm.blockwise.fp8_dequantize_matmul_torch`,
which rounds the dequantized weight to x's dtype; these kernels do not, so they are nearer to the exact
product."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench_kernels.checks import expect
from kvbench_kernels.gemm.blockwise import SCALE_DTYPES, scale_shape
from kvbench_kernels.gemm.w8a16_config import VECTOR_M_MAX, Tiling, config, rows_padded, supports_w8a16
from kvbench_kernels.gemm.w8a16_kernel import w8a16_dot, w8a16_vector
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import has_pdl, tickets_of
from kvbench_kernels.splits import splits_used
from kvbench_kernels.support import Rejected

__all__ = ["Tiling", "config", "supports_w8a16", "w8a16"]


def w8a16(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], codes [N, K] float8_e4m3fn, scales [ceil(N/128), ceil(K/128)], bias [N] or None -> [M, N] in
    x's dtype.

    x: bfloat16 or float16, M <= 128, or float32, M <= 4; its last axis is dense. scales: float32, bfloat16 or
    float16. tiling: None for the chosen one. out: [M, N] in x's dtype, last axis dense, written and returned;
    None for a new one. Raises ValueError for shapes, dtypes or layouts the kernels do not take. With splits >
    1, calls on one device must be on one stream at a time (they share their tickets).
    """
    _check(x, codes, scales, bias, out)
    m, k = x.shape
    n = codes.shape[0]
    if tiling is None:
        tiling = config(m, n, k)
        if x.dtype == torch.float32 and tiling.kind == "dot":
            tiling = Tiling("vector", 8, 256, warps=4, stages=3)
    if tiling.kind == "vector" and m > VECTOR_M_MAX:
        raise ValueError(f"A vector tiling takes 1 to {VECTOR_M_MAX} rows of x, not {m}; use kind 'dot'.")
    if tiling.kind == "dot" and x.dtype == torch.float32 and x.is_cuda:
        raise ValueError(
            "A dot tiling takes bfloat16 or float16, not float32; use kind 'vector' with 1 to 4 rows."
        )
    y = torch.empty((m, n), dtype=x.dtype, device=x.device) if out is None else out
    tiles = -(-n // tiling.block_n)
    splits = splits_used(tiling, k)
    height = m if tiling.kind == "vector" else rows_padded(m)
    parts, tickets = y, y
    if splits > 1:
        parts = torch.empty((tiles, splits, height, tiling.block_n), dtype=torch.float32, device=x.device)
        tickets = tickets_of(x.device, tiles)
    pdl = tiling.pdl and x.is_cuda and has_pdl(x.device)
    arguments = (
        x, codes.view(torch.int8), scales, y if bias is None else bias, y, parts, tickets,
        n, k, x.stride(0), y.stride(0),
    )  # fmt: skip
    blocks = {
        "BIAS": bias is not None, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "SPLITS": splits,
        "STAGES": tiling.stages, "EVEN_K": k % tiling.block_k == 0, "PDL": pdl, "num_warps": tiling.warps,
    }  # fmt: skip
    if pdl:
        blocks["launch_pdl"] = True
    if tiling.kind == "vector":
        compiled = w8a16_vector[(tiles, splits)](*arguments, M=m, **blocks)
        launched(w8a16_vector.fn.__name__, compiled)
    else:
        compiled = w8a16_dot[(tiles, splits)](
            *arguments, m, M_PAD=height, SWAP=tiling.swap, CVT=tiling.cvt, **blocks
        )
        launched(w8a16_dot.fn.__name__, compiled)
    return y


def _check(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None) -> None:
    """ValueError for what would be read or written wrongly."""
    if x.dim() != 2 or codes.dim() != 2 or codes.shape[1] != x.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and codes {list(codes.shape)}; they must be [M, K] and [N, K]. Flatten x."
        )
    (m, k), n = x.shape, codes.shape[0]
    answer = supports_w8a16(m, n, k, str(x.dtype).removeprefix("torch."))
    if isinstance(answer, Rejected):
        raise ValueError(answer.sentence)
    if x.stride(1) != 1:
        raise ValueError(
            f"x has a last axis of stride {x.stride(1)}; it must be dense. Call contiguous() on it."
        )
    expect("codes", codes, (n, k), (torch.float8_e4m3fn,), x.device)
    expect("scales", scales, scale_shape(n, k), SCALE_DTYPES, x.device)
    if bias is not None:
        expect("bias", bias, (n,), (x.dtype,), x.device)
    if out is not None:
        expect("out", out, (m, n), (x.dtype,), x.device, contiguous=False)
