"""Kernels on whatever is here: compiled on a GPU, by Triton's interpreter on a CPU (`tests/conftest.py`)."""

from typing import Any

import pytest
import torch
import triton
from triton.runtime import interpreter

if not torch.cuda.is_available() and triton.__version__.startswith("3.6."):
    # Its interpreter turns a loaded loop bound into a number in a way that NumPy 2.4 refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
