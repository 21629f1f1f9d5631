"""Kernels on whatever is here: compiled on a GPU, by Triton's interpreter on a CPU."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

    import triton
    from triton.runtime import interpreter

    if triton.__version__.startswith("3.6."):
        # Its interpreter turns a loaded loop bound into a number in a way that NumPy 2.4 refuses.
        patch_tensor = interpreter._patch_lang_tensor

        def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _float32_twin() -> Iterator[None]:
    """The attention twins by plain float32 matrix products, not by a fused kernel with other rounding."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
