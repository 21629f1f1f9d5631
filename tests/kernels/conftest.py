"""Kernels on whatever is here: compiled on a GPU, by Triton's interpreter on a CPU (`tests/conftest.py`)."""

import pytest
import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import interpreter

if not torch.cuda.is_available() and triton.__version__.startswith("3.6."):
    # Its interpreter turns a loaded loop bound into a number in a way that NumPy 2.4 refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _float32_twin():
    """The attention twins by plain float32 matrix products, not by a fused kernel with other rounding."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
