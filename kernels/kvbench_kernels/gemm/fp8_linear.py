"""An FP8 linear layer, y[M, N] = x[M, K] @ (codes * block scales)[N, K]^T + bias[N], as `fp8_route` says."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvbench_kernels.checks import expect
from kvbench_kernels.gemm.blockwise import SCALE_DTYPES, fp8_dequantize_matmul_torch, scale_shape
from kvbench_kernels.gemm.fp8_route import Path, Target, route
from kvbench_kernels.launches import product
from kvbench_kernels.support import GEMMS, interpreting


def fp8_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, gemm: str = "auto"
) -> Tensor:
    """x [M, K], codes [N, K] float8_e4m3fn, scales [ceil(N/128), ceil(K/128)], bias [N] -> [M, N] like x.

    gemm: one of `support.GEMMS`. Every launch is recorded with (M, N, K) (`kvbench_kernels.launches`). Raises
    ValueError for shapes, dtypes or layouts that no path takes.
    """
    _check(x, codes, scales, bias, gemm)
    (m, k), n = x.shape, codes.shape[0]
    if m == 0:
        return x.new_empty(0, n)
    dtype = str(x.dtype).removeprefix("torch.")
    path = route(m, n, k, dtype, target_of(x.device), gemm)
    if path != "reference" and x.stride(1) != 1:
        x = x.contiguous()
    with product(m, n, k):
        return _PATHS[path](x, codes, scales, bias)


@cache
def target_of(device: torch.device) -> Target:
    """What computes the products of tensors on `device`."""
    if device.type != "cuda":
        return "interpreter" if interpreting() else "torch"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return "torch"
    return "hopper" if capability == (9, 0) else "cuda"


# Triton is imported by the first call that needs it.


def _w8a16(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    from kvbench_kernels.gemm.w8a16 import w8a16

    return w8a16(x, codes, scales, bias)


def _w8a8(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    from kvbench_kernels.gemm.activation import quantize_activation
    from kvbench_kernels.gemm.w8a8 import w8a8

    return w8a8(*quantize_activation(x), codes, scales, bias, x.dtype)


def _hopper(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    from kvbench_kernels.gemm.activation import quantize_activation
    from kvbench_kernels.gemm.hopper_gemm import hopper_w8a8

    return hopper_w8a8(*quantize_activation(x), codes, scales, bias, x.dtype)


_PATHS: dict[Path, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {
    "reference": fp8_dequantize_matmul_torch,
    "w8a16": _w8a16,
    "w8a8": _w8a8,
    "hopper": _hopper,
}


def _check(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, gemm: str) -> None:
    if gemm not in GEMMS:
        raise ValueError(f"gemm {gemm!r} is unknown; choose one of {', '.join(GEMMS)}.")
    if codes.dim() != 2:
        raise ValueError(f"codes is {list(codes.shape)}; expected [N, K], as quantize_blocks makes them.")
    n, k = codes.shape
    expect("codes", codes, (n, k), (torch.float8_e4m3fn,), codes.device)
    if x.dim() != 2 or x.shape[1] != k or not x.is_floating_point():
        raise ValueError(f"x is {list(x.shape)} {x.dtype}; expected a float [M, {k}] for these codes.")
    if scales.shape != scale_shape(n, k) or scales.dtype not in SCALE_DTYPES:
        expect("scales", scales, scale_shape(n, k), SCALE_DTYPES, scales.device)
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        expect("bias", bias, (n,), (x.dtype,), bias.device)
