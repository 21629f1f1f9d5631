"""Checks of the tensors of a product, before a kernel gets their addresses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench_kernels.support import Accepted, Rejected

Dtypes = Sequence[torch.dtype]


def accept(answer: Accepted | Rejected) -> None:
    """ValueError with the sentence of a rejection."""
    if isinstance(answer, Rejected):
        raise ValueError(answer.sentence)


def expect(
    name: str,
    x: Tensor,
    shape: Sequence[int],
    dtypes: Dtypes,
    device: torch.device,
    layout: str = "contiguous",
) -> None:
    """ValueError for a tensor of another shape, dtype, device or layout.

    layout: "contiguous", "contiguous, 16-byte aligned", or "with a dense last axis".
    """
    dense = x.is_contiguous() if layout.startswith("contiguous") else x.stride(-1) == 1
    aligned = not layout.endswith("aligned") or x.data_ptr() % 16 == 0
    if x.shape == tuple(shape) and x.dtype in dtypes and x.device == device and dense and aligned:
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(f"{_found(name, x)}; expected {list(shape)} {wanted}, {layout}, on {device}.")


def expect_columns(
    name: str, x: Tensor, m: int, n: int, device: torch.device, *, aligned: bool = True
) -> None:
    """ValueError unless x is [m, n] float32 with dense columns; aligned: each at a multiple of 16 bytes."""
    fits = x.shape == (m, n) and x.dtype == torch.float32 and x.device == device
    if fits and m > 0:
        fits = (m == 1 or x.stride(0) == 1) and x.stride(1) >= m
        fits = fits and not (aligned and (x.stride(1) % 4 or x.data_ptr() % 16))
    if not fits:
        where = " at multiples of 16 bytes" if aligned else ""
        raise ValueError(
            f"{_found(name, x)}; expected [{m}, {n}] float32 with dense columns{where} on {device}. "
            "Make it with empty_activation_scales."
        )


def _found(name: str, x: Tensor) -> str:
    return f"{name} is {list(x.shape)} {x.dtype} with strides {x.stride()} on {x.device}"
