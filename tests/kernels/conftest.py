"""Kernels on whatever is here: compiled on a GPU, by Triton's interpreter on a CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
