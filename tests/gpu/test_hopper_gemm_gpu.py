"""The Hopper FP8 product on its GPU against float64 products of the dequantized operands, and what must not
be touched.
"""

from dataclasses import replace

import pytest
import torch

from kvbench_kernels.gemm.activation import quantize_activation
from kvbench_kernels.gemm.blockwise import (
    dequantize_blocks,
    empty_activation_scales,
    quantize_activation_torch,
    quantize_blocks,
)
from kvbench_kernels.gemm.hopper_gemm import hopper_w8a8
from kvbench_kernels.gemm.hopper_gemm_config import HopperTiling
from kvbench_kernels.launches import record
from kvbench_kernels.splitk import tickets_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.timeout(60, method="thread"),  # a deadlock holds the process inside the driver
]
TILINGS = {
    "192 x 128": HopperTiling(3, 1, 128, 4, height=3),
    "192 x 128, turns": HopperTiling(3, 1, 128, 4, height=11, turns=True),
    "192 x 64": HopperTiling(3, 1, 64, 6),
    "256 x 128": HopperTiling(2, 2, 128, 3, height=4, buffers=2),
    "256 x 128, turns": HopperTiling(2, 2, 128, 3, buffers=2, turns=True),
    "256 x 64": HopperTiling(2, 2, 64, 4),
    "128 x 128": HopperTiling(2, 1, 128, 5, height=3, turns=True),
    "128 x 128, two CTAs": HopperTiling(1, 2, 128, 2, height=16, ctas=2),
    "128 x 128, two stages": HopperTiling(2, 1, 128, 2),
    "128 x 64": HopperTiling(2, 1, 64, 7, turns=True),
    "64 x 128, two CTAs": HopperTiling(1, 1, 128, 3, height=16, ctas=2),
    "64 x 64": HopperTiling(1, 1, 64, 11),
}
SHARED = {name: replace(tiling, splits=8) for name, tiling in TILINGS.items()}


def operands(m, n, k):
    """Quantized random values. Behind x's rows lie NaN codes, and NaN in the scales' padding."""
    torch.manual_seed(m + n)
    row_size = 2.0 ** (torch.rand(m, 1, device="cuda") * 8 - 4)
    codes, scales = quantize_activation_torch(torch.randn(m, k, device="cuda") * row_size)
    room = torch.full((m + 64, k), 0x7F, dtype=torch.uint8, device="cuda")
    room[:m] = codes.view(torch.uint8)
    padded = empty_activation_scales(m, k, codes.device)
    base = torch.as_strided(padded, (k // 128, padded.stride(1)), (padded.stride(1), 1))
    base.fill_(torch.nan)
    padded.copy_(scales)
    w = quantize_blocks(torch.randn(n, k, device="cuda") * k**-0.5)
    return room[:m].view(torch.float8_e4m3fn), padded, *w


def exact(x, sx, w, sw):
    return (x.double() * sx.double().repeat_interleave(128, 1)) @ dequantize_blocks(w, sw).double().T


def check(out, right):
    """Half a unit of the output's dtype, and 13 bits of the row's size for sums over 128 columns in the
    tensor core.
    """
    size = right.pow(2).mean(1, keepdim=True).sqrt()
    allowed = right.abs() * torch.finfo(out.dtype).eps / 2 * 1.01 + size * 2**-7
    wrong = ~((out.double() - right).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}"
    off = (out.double() - right).norm() / right.norm()
    assert off <= torch.finfo(out.dtype).eps / 2 + 2**-11


@pytest.mark.parametrize("m", [1, 63, 64, 65, 300, 1000])
@pytest.mark.parametrize("name", TILINGS)
def test_against_float64(name, m):
    dtype = torch.float16 if m % 2 else torch.bfloat16
    for n, k in ((128, 128), (384, 640), (6144, 1024)):
        case = operands(m, n, k)
        room = torch.full((m + 2, n), 7.0, dtype=dtype, device="cuda")
        out = hopper_w8a8(*case, None, dtype, tiling=TILINGS[name], out=room[1:-1])
        check(out, exact(*case))
        assert (room[0] == 7).all()
        assert (room[-1] == 7).all()


@pytest.mark.parametrize(("m", "n"), [(100, 256), (1000, 4096), (2300, 1280)])
@pytest.mark.parametrize("name", SHARED)
def test_tiles_that_are_shared(name, m, n):
    """All of them, or those of the last wave; who comes last does not change a bit, and every ticket is zero
    again.
    """
    case = operands(m, n, 4096)
    bias = torch.randn(n, device="cuda").bfloat16()
    right = exact(*case) + bias.double()
    outs = [hopper_w8a8(*case, bias, tiling=SHARED[name]) for _ in range(20)]
    check(outs[0], right)
    for out in outs[1:]:
        assert torch.equal(out, outs[0])
    assert not tickets_of(outs[0].device, 1).any()


def test_a_launch_before_the_end_of_the_one_in_front_reads_what_that_writes():
    """x is made by a product that is made from x, 40 times over in one graph: the same bits as with a stop
    after each.
    """
    torch.manual_seed(5)
    w = [quantize_blocks(torch.randn(1024, 1024, device="cuda") / 32) for _ in range(40)]
    x = torch.randn(200, 1024, device="cuda").bfloat16()

    def chain(stop):
        y = x
        for codes, scales in w:
            y = hopper_w8a8(*quantize_activation(y), codes, scales)
            if stop:
                torch.cuda.synchronize()
        return y

    due = chain(stop=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(stop=False)
    for _ in range(20):
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, due)


@pytest.mark.parametrize("m", [33, 65, 128, 129, 257, 513, 1025, 4096])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)])
def test_the_chosen_tiling_at_the_shapes_of_a_model(m, n, k):
    case = operands(m, n, k)
    first = hopper_w8a8(*case)
    check(first, exact(*case))
    for _ in range(3):
        assert torch.equal(hopper_w8a8(*case), first)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_and_scale_dtypes(scales):
    x, sx, w, sw = operands(200, 512, 512)
    sw = sw.to(scales)
    bias = torch.randn(512, device="cuda").bfloat16()
    out = hopper_w8a8(x, sx, w, sw, bias)
    right = exact(x, sx, w, sw) + bias.double()
    check(out, right)
    assert torch.equal(hopper_w8a8(x, sx, w, sw, bias, tiling=TILINGS["64 x 64"]), out)


def test_the_tile_does_not_change_a_bit():
    case = operands(700, 1024, 2048)
    outs = [hopper_w8a8(*case, tiling=tiling) for tiling in TILINGS.values()]
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


def test_a_nan_stays_in_its_row_and_column():
    x, sx, w, sw = operands(300, 256, 256)
    clean = hopper_w8a8(x, sx, w, sw)
    x.view(torch.uint8)[77, 200] = 0x7F
    out = hopper_w8a8(x, sx, w, sw)
    assert out[77].isnan().all()
    assert torch.equal(out[:77], clean[:77])
    assert torch.equal(out[78:], clean[78:])


def test_a_launch_is_recorded_by_name():
    with record() as launches:
        hopper_w8a8(*operands(64, 128, 128))
    assert [launch.name for launch in launches if "w8a8" in launch.name] == ["hopper_w8a8_groups"]
    assert "wgmma.mma_async" in launches[-1].compiled.asm["ptx"]
