"""FP8 activations of up to 128 rows times FP8 weights, both with block scales, on Hopper GPUs: hopper_rows_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvbench_kernels.blockwise import scale_shape
from kvbench_kernels.hopper_gemm import hopper_w8a8_torch
from kvbench_kernels.hopper_rows_config import (
    BLOCK,
    RowsTiling,
    config,
    pieces,
    supports_hopper_rows,
)
from kvbench_kernels.hopper_rows_kernel import hopper_w8a8_rows
from kvbench_kernels.launches import launched
from kvbench_kernels.splitk import tickets_of
from kvbench_kernels.support import Rejected

__all__ = ["RowsTiling", "config", "hopper_rows", "hopper_rows_torch", "supports_hopper_rows"]

# A thread's registers at the start, a number of groups; the groups then take 232 or 240 and leave the copying warp 24.
# 128 with one group is half of a multiprocessor's, so that two CTAs fit.
REGISTERS = {1: 128, 2: 168}
_CODES = torch.float8_e4m3fn
_SCALES = (torch.float32, torch.bfloat16, torch.float16)

hopper_rows_torch = hopper_w8a8_torch


def hopper_rows(
    codes_x: Tensor,
    scales_x: Tensor,
    codes_w: Tensor,
    scales_w: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: RowsTiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """codes_x [M, K] e4m3 with scales_x [M, K/128], codes_w [N, K] e4m3 with scales_w [N/128, K/128] -> [M, N].

    M is 1 to 128; N and K are multiples of 128. scales_x is float32 with stride (1, S), S a multiple of 4, as
    blockwise.empty_activation_scales makes it; scales_w is contiguous float32, bfloat16 or float16. bias [N] and `out`
    have out_dtype, bfloat16 or float16. tiling: None for the chosen one. Calls on one device must be on one stream at a
    time (they share their tickets). Raises ValueError for what the kernel does not take. Torch twin: hopper_rows_torch.
    """
    _check(codes_x, scales_x, codes_w, scales_w, bias, out_dtype, out)
    (m, k), n = codes_x.shape, codes_w.shape[0]
    if tiling is None:
        tiling = config(m, n, k)
    if (problem := tiling.problem(m)) is not None:
        raise ValueError(problem)
    if n % tiling.rows:
        raise ValueError(
            f"{n} rows of w are no whole number of the tile's {tiling.rows}; use a smaller tile."
        )
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=codes_x.device)
    tiles, steps, tokens = n // tiling.rows, k // BLOCK, tiling.tokens
    programs = min(tiling.programs or tiles, tiles * steps)
    sharing = pieces(tiles, steps, programs)
    parts, tickets = out, out
    if sharing > 1:
        parts = torch.empty(programs * 2 * tiling.rows * tokens, dtype=torch.float32, device=out.device)
        tickets = tickets_of(out.device, tiles * tiling.across)
    stride = scales_x.stride(1) if k > BLOCK else -(-m // 4) * 4
    numbers = scales_x.as_strided(((steps - 1) * stride + m,), (1,))
    compiled = hopper_w8a8_rows[(programs,)](
        _boxes(codes_w, [64, BLOCK], 128), _boxes(codes_x, [tokens, BLOCK], 128), _boxes(numbers, [tokens], 0),
        _boxes(out, [tokens, 64], 128), scales_w, bias, parts, tickets, steps, tiles * steps, stride,
        GROUPS=tiling.groups, PARTS=tiling.parts, TOKENS=tokens, STAGES=tiling.stages, PIECES=sharing,
        HAS_BIAS=bias is not None, EARLY=tiling.early, TURNS=tiling.turns,
        num_warps=4, maxnreg=REGISTERS[tiling.groups], launch_pdl=True,
    )  # fmt: skip
    launched(hopper_w8a8_rows.fn.__name__, compiled)
    return out


def _boxes(tensor: Tensor, box: list[int], swizzle: int) -> TensorDescriptor:
    """What the copy engine reads or writes boxes of; 128-byte rows in shared memory are swizzled."""
    bits = tensor.element_size() * 8
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(box))
    return TensorDescriptor.from_tensor(tensor, box, layout)


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
    for name, codes in (("x", codes_x), ("w", codes_w)):
        if codes.dim() != 2 or codes.dtype != _CODES or not codes.is_contiguous() or codes.data_ptr() % 16:
            raise ValueError(
                f"The codes of {name} are {list(codes.shape)} {codes.dtype} with strides {codes.stride()}; they must be "
                f"a contiguous, 16-byte aligned matrix of {_CODES}. Quantize it or call contiguous()."
            )
    (m, k), (n, k_w) = codes_x.shape, codes_w.shape
    if k_w != k:
        raise ValueError(f"A weight of {n} x {k_w} cannot multiply x of {m} x {k}; K must be the same.")
    answer = supports_hopper_rows(m, n, k, str(out_dtype).removeprefix("torch."))
    if isinstance(answer, Rejected):
        raise ValueError(answer.sentence)
    if (
        scales_x.shape != (m, k // BLOCK)
        or scales_x.dtype != torch.float32
        or (m > 1 and scales_x.stride(0) != 1)
        or (k > BLOCK and (scales_x.stride(1) < m or scales_x.stride(1) % 4))
        or scales_x.data_ptr() % 16
    ):
        raise ValueError(
            f"The scales of x are {list(scales_x.shape)} {scales_x.dtype} with strides {scales_x.stride()}; they must be "
            f"float32 [{m}, {k // BLOCK}], dense along M, with columns at multiples of 16 bytes. Make them with empty_activation_scales."
        )
    if scales_w.shape != scale_shape(n, k) or scales_w.dtype not in _SCALES or not scales_w.is_contiguous():
        raise ValueError(
            f"The scales of w are {list(scales_w.shape)} {scales_w.dtype}; they must be contiguous "
            f"{list(scale_shape(n, k))} of float32, bfloat16 or float16."
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype != out_dtype or not bias.is_contiguous()):
        raise ValueError(
            f"The bias is {list(bias.shape)} {bias.dtype}; it must be a contiguous [{n}] of {out_dtype}."
        )
    if out is not None and (
        out.shape != (m, n) or out.dtype != out_dtype or not out.is_contiguous() or out.data_ptr() % 16
    ):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} with strides {out.stride()}; it must be a contiguous, 16-byte aligned "
            f"[{m}, {n}] of {out_dtype}."
        )
    devices = {t.device for t in (codes_x, scales_x, codes_w, scales_w, bias, out) if t is not None}
    if len(devices) > 1 or codes_x.device.type != "cuda":
        raise ValueError(
            f"The operands are on {', '.join(sorted(map(str, devices)))}; the Hopper product takes one CUDA device. "
            "Use hopper_rows_torch elsewhere."
        )
