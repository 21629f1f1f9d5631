"""The Hopper FP8 product of few rows on its GPU against float64 products, and what must not be touched."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvbench_kernels.blockwise import dequantize_blocks, empty_activation_scales, quantize_blocks
from kvbench_kernels.hopper_rows_config import RowsTiling
from kvbench_kernels.launches import record

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.timeout(60, method="thread"),  # a deadlock holds the process inside the driver
]
# Programs: whole tiles, equal runs inside tiles, runs over tiles, more than one a multiprocessor.
TILINGS = {
    "128 rows": RowsTiling(2, 1, 128, 5),
    "128 rows, 7 programs": RowsTiling(2, 1, 128, 5, 7),
    "128 rows, 132 programs": RowsTiling(2, 1, 128, 5, 132),
    "64 rows, 300 programs": RowsTiling(1, 1, 128, 3, 300),
    "64 rows in turns": RowsTiling(2, 1, 128, 7, 0, turns=True),
    "64 rows in turns, 5 programs": RowsTiling(2, 1, 128, 3, 5, turns=True),
    "128 rows, two parts in turns": RowsTiling(2, 2, 128, 2, 11, turns=True),
    "128 rows, late": RowsTiling(2, 1, 128, 2, 20, early=False),
}


@pytest.fixture
def module() -> ModuleType:
    from kvbench_kernels import hopper_rows

    return hopper_rows


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantized random values. Behind x's rows lie NaN codes, and NaN in the scales' padding."""
    from kvbench_kernels.blockwise import quantize_activation_torch

    torch.manual_seed(m + n)
    row_size = 2.0 ** (torch.rand(m, 1, device="cuda") * 8 - 4)
    codes, scales = quantize_activation_torch(torch.randn(m, k, device="cuda") * row_size)
    room = torch.full((m + 128, k), 0x7F, dtype=torch.uint8, device="cuda")
    room[:m] = codes.view(torch.uint8)
    padded = empty_activation_scales(m, k, codes.device)
    stride = -(-m // 4) * 4
    torch.as_strided(padded, (k // 128, stride), (stride, 1)).fill_(torch.nan)
    padded.copy_(scales)
    w = quantize_blocks(torch.randn(n, k, device="cuda") * k**-0.5)
    torch.cuda.synchronize()
    return room[:m].view(torch.float8_e4m3fn), padded, *w


def exact(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
    return (x.double() * sx.double().repeat_interleave(128, 1)) @ dequantize_blocks(w, sw).double().T


def check(out: Tensor, right: Tensor) -> None:
    """Half a unit of the output's dtype, and 13 bits of the row's size for sums over 128 columns in the tensor core."""
    size = right.pow(2).mean(1, keepdim=True).sqrt()
    allowed = right.abs() * torch.finfo(out.dtype).eps / 2 * 1.01 + size * 2**-7
    wrong = ~((out.double() - right).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}"
    off = (out.double() - right).norm() / right.norm()
    assert off <= torch.finfo(out.dtype).eps / 2 + 2**-11


@pytest.mark.parametrize("m", [1, 17, 64, 127, 128])
@pytest.mark.parametrize("name", TILINGS)
def test_against_float64(name: str, m: int, module: ModuleType) -> None:
    dtype = torch.float16 if m % 2 else torch.bfloat16
    for n, k in ((128, 128), (384, 640), (2048, 1024)):
        case = operands(m, n, k)
        room = torch.full((m + 2, n), 7.0, dtype=dtype, device="cuda")
        out = module.hopper_rows(*case, None, dtype, TILINGS[name], out=room[1:-1])
        check(out, exact(*case))
        assert (room[0] == 7).all()
        assert (room[-1] == 7).all()


@pytest.mark.parametrize("m", [17, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)])
def test_the_chosen_tiling_at_the_shapes_of_a_model(m: int, n: int, k: int, module: ModuleType) -> None:
    case = operands(m, n, k)
    first = module.hopper_rows(*case)
    check(first, exact(*case))
    for _ in range(10):
        assert torch.equal(module.hopper_rows(*case), first)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_and_scale_dtypes(scales: torch.dtype, module: ModuleType) -> None:
    x, sx, w, sw = operands(50, 512, 512)
    sw = sw.to(scales)
    bias = torch.randn(512, device="cuda").bfloat16()
    torch.cuda.synchronize()
    right = exact(x, sx, w, sw) + bias.double()
    for programs in (0, 5):
        check(module.hopper_rows(x, sx, w, sw, bias, tiling=RowsTiling(2, 1, 64, 4, programs)), right)


def test_a_nan_stays_in_its_row(module: ModuleType) -> None:
    x, sx, w, sw = operands(100, 256, 512)
    clean = module.hopper_rows(x, sx, w, sw)
    x.view(torch.uint8)[77, 200] = 0x7F
    out = module.hopper_rows(x, sx, w, sw)
    assert out[77].isnan().all()
    assert torch.equal(out[:77], clean[:77])
    assert torch.equal(out[78:], clean[78:])


def test_behind_the_quantizer_in_a_graph_with_new_values(module: ModuleType) -> None:
    from kvbench_kernels.activation import quantize_activation

    _, _, w, sw = operands(64, 1024, 4096)
    x = torch.randn(64, 4096, device="cuda").bfloat16()
    module.hopper_rows(*quantize_activation(x, pdl=True), w, sw)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [module.hopper_rows(*quantize_activation(x, pdl=True), w, sw) for _ in range(3)]
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        right = module.hopper_rows(*quantize_activation(x), w, sw)
        for out in outs:
            assert torch.equal(out, right)


def test_a_launch_is_recorded_by_name(module: ModuleType) -> None:
    with record() as launches:
        module.hopper_rows(*operands(64, 128, 128))
    assert launches[-1].name == "hopper_w8a8_rows"
    assert "wgmma.mma_async" in launches[-1].compiled.asm["ptx"]
