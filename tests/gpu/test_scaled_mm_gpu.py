"""torch's block-scaled product as a path of FP8 linear layers: any number of rows, every dtype of the scales, a bias."""

from __future__ import annotations

import pytest
import torch

from kvbench_kernels.blockwise import quantize_blocks
from kvbench_kernels.launches import record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 129, 130, 131, 132, 513])
def test_a16_t3_any_number_of_rows_against_the_twin(m: int, scales: torch.dtype) -> None:
    from kvbench_kernels.activation import quantize_activation
    from kvbench_kernels.scaled_mm import scaled_mm
    from kvbench_kernels.w8a8 import w8a8_torch

    torch.manual_seed(m)
    codes, own = quantize_blocks(torch.randn(256, 1024, device="cuda"))
    own = own.to(scales)
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    # Whatever lies behind the last row: the worst is a NaN.
    poisoned = torch.full((4096, 1024), float("nan"), device="cuda")
    del poisoned
    given = (*quantize_activation(x), codes, own)
    with record() as launches:
        y = scaled_mm(*given, bias)
    due = w8a8_torch(*given, bias.float(), torch.float32)
    assert y.shape == (m, 256)
    assert ((y - due).norm() / due.norm()).item() < 4e-3
    assert [launch.name for launch in launches] == ["scaled_mm"]
