"""FP8 activations times FP8 weights, both with block scales, on Hopper GPUs: the wrapper of
hopper_gemm_kernel.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvbench_kernels.checks import expect
from kvbench_kernels.gemm import hopper_gemm_kernel
from kvbench_kernels.gemm.blockwise import SCALE_DTYPES, scale_shape, with_rows_behind
from kvbench_kernels.gemm.hopper_gemm_config import BLOCK, HopperTiling, config, supports_hopper_gemm, waves
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import tickets_of
from kvbench_kernels.support import Rejected

__all__ = ["HopperTiling", "config", "hopper_w8a8", "supports_hopper_gemm"]

# A thread's registers at the start, a number of groups. The groups then take 232, 240 or 160 and leave the
# copying warp 24; 128 with one group is half of a multiprocessor's, so that two CTAs fit.
REGISTERS = {1: 128, 2: 168, 3: 128}
_CODES = torch.float8_e4m3fn


def hopper_w8a8(
    codes_x: Tensor,
    scales_x: Tensor,
    codes_w: Tensor,
    scales_w: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    tiling: HopperTiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """codes_x [M, K] e4m3 with scales_x [M, K/128], codes_w [N, K] e4m3 with scales_w [N/128, K/128] -> [M,
    N].

    N and K are multiples of 128. scales_x is float32 with stride (1, S), as blockwise.empty_activation_scales
    makes it; scales_w is contiguous float32, bfloat16 or float16. bias [N] and `out` have out_dtype, bfloat16
    or float16. tiling: None for the chosen one. Raises ValueError for what the kernel does not take. Calls on
    one device must be on one stream at a time (they may share tickets), and no kernel right before may write
    the weight: it is read early.
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
    programs = _multiprocessors(codes_x.device) * tiling.ctas
    whole, rest, splits = waves(m_tiles * n_tiles, programs, steps, tiling.splits)
    parts, tickets = None, None
    if splits > 1:
        parts = torch.empty(
            rest * splits * tiling.block_m * tiling.block_n, dtype=torch.float32, device=out.device
        )
        tickets = tickets_of(out.device, rest * tiling.groups)
    kernel = hopper_gemm_kernel.hopper_w8a8_groups
    compiled = kernel[(min(whole + rest * splits, programs),)](
        _boxes(with_rows_behind(codes_x), 64, BLOCK), _boxes(codes_w, tiling.block_n, BLOCK),
        _boxes(out, 64, tiling.block_n), _scales(with_rows_behind(scales_x)), scales_w, bias, parts, tickets,
        steps, m_tiles, n_tiles, whole, rest, splits, GROUPS=tiling.groups, PARTS=tiling.parts,
        BLOCK_N=tiling.block_n, STAGES=tiling.stages, GROUP=tiling.height, HAS_BIAS=bias is not None,
        BUFFERS=tiling.buffers, TURNS=tiling.turns, SPLIT=splits > 1, num_warps=4,
        maxnreg=REGISTERS[tiling.groups], launch_pdl=True,
    )  # fmt: skip
    launched(kernel.fn.__name__, compiled)
    return out


def _boxes(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine reads or writes [rows, columns] boxes of; 128-byte rows in shared memory are
    swizzled.
    """
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=tensor.element_size() * 8, rank=2)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


def _scales(scales: Tensor) -> TensorDescriptor:
    """Boxes of 64 rows' scales of one step for the copy engine; they begin at multiples of 16 bytes."""
    m, steps = scales.shape
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(scales, [steps, m], [scales.stride(1), 1], [1, 64], layout)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(
    codes_x: Tensor,
    scales_x: Tensor,
    codes_w: Tensor,
    scales_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> None:
    """ValueError for what would be read or written wrongly."""
    device = codes_x.device
    for name, codes in (("codes_x", codes_x), ("codes_w", codes_w)):
        if codes.dim() != 2:
            raise ValueError(f"{name} is {list(codes.shape)}; expected a matrix.")
        expect(name, codes, codes.shape, (_CODES,), device, aligned=True)
    (m, k), (n, k_w) = codes_x.shape, codes_w.shape
    if k_w != k:
        raise ValueError(f"A weight of {n} x {k_w} cannot multiply x of {m} x {k}; K must be the same.")
    answer = supports_hopper_gemm(m, n, k, str(out_dtype).removeprefix("torch."))
    if isinstance(answer, Rejected):
        raise ValueError(answer.sentence)
    if (
        scales_x.shape != (m, k // BLOCK)
        or scales_x.dtype != torch.float32
        or (m > 1 and scales_x.stride(0) != 1)
        or scales_x.stride(1) < m
        or scales_x.stride(1) % 4
        or scales_x.data_ptr() % 16
        or scales_x.device != device
    ):
        raise ValueError(
            f"scales_x is {list(scales_x.shape)} {scales_x.dtype} with strides {scales_x.stride()} on "
            f"{scales_x.device}; "
            f"expected [{m}, {k // BLOCK}] float32, dense along M, with columns at multiples of 16 bytes, "
            f"on {device}. "
            "Make them with empty_activation_scales."
        )
    expect("scales_w", scales_w, scale_shape(n, k), SCALE_DTYPES, device)
    if bias is not None:
        expect("bias", bias, (n,), (out_dtype,), device)
    if out is not None:
        expect("out", out, (m, n), (out_dtype,), device, aligned=True)
    if device.type != "cuda":
        raise ValueError(
            f"The operands are on {device}; the Hopper product takes a CUDA device. Use w8a8 elsewhere."
        )
