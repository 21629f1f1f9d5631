"""FP8 activations times FP8 weights with block scales on Hopper GPUs: launches hopper_gemm_kernel.py."""

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvbench_kernels.checks import accept, expect, expect_columns
from kvbench_kernels.gemm import hopper_gemm_kernel
from kvbench_kernels.gemm.blockwise import SCALE_DTYPES, scale_shape, with_rows_behind
from kvbench_kernels.gemm.hopper_gemm_config import BLOCK, HopperTiling, config, supports_hopper_gemm, waves
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import multiprocessors, tickets_of

# A thread's registers at the start, by groups. Groups then take 232, 240 or 160 and leave the copying warp
# 24; with one group 128 are half of a multiprocessor's, so that two CTAs fit.
REGISTERS = {1: 128, 2: 168, 3: 128}


def _boxes(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[rows, columns] boxes for the copy engine, with swizzled 128-byte rows in shared memory."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=tensor.element_size() * 8, rank=2)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


def _scales(scales: Tensor) -> TensorDescriptor:
    """Boxes of one step's scales of 64 rows for the copy engine; they begin at multiples of 16 bytes."""
    m, steps = scales.shape
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(scales, [steps, m], [scales.stride(1), 1], [1, 64], layout)


def _check(
    x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None
) -> None:
    device, aligned = x.device, "contiguous, 16-byte aligned"
    for name, codes in (("codes_x", x), ("codes_w", w)):
        if codes.dim() != 2:
            raise ValueError(f"{name} is {list(codes.shape)}; expected a matrix.")
        expect(name, codes, codes.shape, (torch.float8_e4m3fn,), device, aligned)
    (m, k), (n, k_w) = x.shape, w.shape
    if k_w != k:
        raise ValueError(f"A weight of {n} x {k_w} cannot multiply x of {m} x {k}; K must be the same.")
    accept(supports_hopper_gemm(m, n, k, str(dtype).removeprefix("torch.")))
    expect_columns("scales_x", sx, m, k // BLOCK, device)
    expect("scales_w", sw, scale_shape(n, k), SCALE_DTYPES, device)
    if bias is not None:
        expect("bias", bias, (n,), (dtype,), device)
    if out is not None:
        expect("out", out, (m, n), (dtype,), device, aligned)
    if device.type != "cuda":
        raise ValueError(f"The operands are on {device}; the Hopper product takes a CUDA device. Use w8a8.")


# fmt: off
def hopper_w8a8(
    codes_x: Tensor, scales_x: Tensor, codes_w: Tensor, scales_w: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, *, tiling: HopperTiling | None = None, out: Tensor | None = None,
) -> Tensor:
    """codes_x [M, K] and codes_w [N, K] e4m3, scales_x [M, K/128], scales_w [N/128, K/128] -> [M, N].

    N and K are multiples of 128. scales_x is float32 in the layout of blockwise.empty_activation_scales,
    scales_w contiguous, one of `SCALE_DTYPES`. bias [N] and `out` have out_dtype, bfloat16 or float16.
    ValueError for other arguments. Calls on one device must be on one stream at a time (they may share
    tickets), and the previous kernel must not write the weight, which is read early.
    """
    _check(codes_x, scales_x, codes_w, scales_w, bias, out_dtype, out)
    (m, k), n = codes_x.shape, codes_w.shape[0]
    if tiling is None:
        tiling = config(m, n, k)
    elif (problem := tiling.problem()) is not None:
        raise ValueError(problem)
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=codes_x.device)
    m_tiles, n_tiles, steps = -(-m // tiling.block_m), n // tiling.block_n, k // BLOCK
    programs = multiprocessors(codes_x.device) * tiling.ctas
    whole, rest, splits = waves(m_tiles * n_tiles, programs, steps, tiling.splits)
    parts, tickets = None, None
    if splits > 1:
        elements = rest * splits * tiling.block_m * tiling.block_n
        parts = torch.empty(elements, dtype=torch.float32, device=out.device)
        tickets = tickets_of(out.device, rest * tiling.groups)
    kernel = hopper_gemm_kernel.hopper_w8a8_groups
    compiled = kernel[(min(whole + rest * splits, programs),)](
        _boxes(with_rows_behind(codes_x), 64, BLOCK), _boxes(codes_w, tiling.block_n, BLOCK),
        _boxes(out, 64, tiling.block_n), _scales(with_rows_behind(scales_x)), scales_w, bias, parts, tickets,
        steps, m_tiles, n_tiles, whole, rest, splits, GROUPS=tiling.groups, PARTS=tiling.parts,
        BLOCK_N=tiling.block_n, STAGES=tiling.stages, GROUP=tiling.height, HAS_BIAS=bias is not None,
        BUFFERS=tiling.buffers, TURNS=tiling.turns, SPLIT=splits > 1, num_warps=4,
        maxnreg=REGISTERS[tiling.groups], launch_pdl=True,
    )
    launched(kernel.fn.__name__, compiled)
    return out
