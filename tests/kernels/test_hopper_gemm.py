"""The Hopper FP8 product without a GPU: its tile table, what it refuses, its twin, and what the compiler
makes of it.
"""

from dataclasses import astuple, replace

import pytest
import torch

from kvbench_kernels.gemm.blockwise import empty_activation_scales, quantize_activation_torch, quantize_blocks
from kvbench_kernels.gemm.hopper_gemm import hopper_w8a8
from kvbench_kernels.gemm.hopper_gemm_config import (
    _BY_SIZE,
    MEASURED,
    HopperTiling,
    _default,
    config,
    supports_hopper_gemm,
    waves,
)
from tests.gpu.test_hopper_gemm_gpu import TILINGS
from tests.kernels.offline import compiled
from tests.kernels.products import assert_supports

COMPILED = [
    HopperTiling(3, 1, 128, 4),
    HopperTiling(3, 1, 128, 4, turns=True),
    HopperTiling(3, 1, 64, 6),
    HopperTiling(2, 2, 128, 3, buffers=2, turns=True),
    HopperTiling(2, 1, 64, 8, splits=2),
    HopperTiling(2, 1, 128, 5, height=16, splits=2),
    HopperTiling(1, 1, 128, 3, ctas=2),
    HopperTiling(1, 1, 64, 6, ctas=2),
    HopperTiling(1, 1, 64, 8, splits=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("tiling", COMPILED, ids=str)
def test_the_compiler_gives_fp8_products_without_spilled_registers(tiling):
    found = compiled("hopper_gemm", astuple(tiling), tiling.turns)
    # Of turns only where there are turns: a barrier that nothing waits on shares its memory with something
    # else.
    assert found["barriers"] == 2 * tiling.stages + (tiling.groups if tiling.turns else 0)
    shape = f"m64n{tiling.block_n}k32"
    assert found["products"] == [f"wgmma.mma_async.sync.aligned.{shape}.f32.e4m3.e4m3"]
    assert found["count"] == 4 * tiling.groups * tiling.parts  # 128 columns
    assert found["registers"]
    assert found["waits"] == tiling.groups + 1  # each group, and the warp that copies
    assert found["lets_go"] == 1
    assert found["warps"] == 4 * (tiling.groups + 1)
    assert found["shared"] <= tiling.shared_bytes
    assert found["stack"] == 0


def test_every_tiling_of_the_table_can_be_built():
    for ranges in MEASURED.values():
        ends = [rows for rows, _ in ranges]
        assert ends == sorted(set(ends))
        assert ends[-1] >= 1 << 40
    measured = [tiling for ranges in MEASURED.values() for _, tiling in ranges]
    for tiling in [*measured, *_BY_SIZE, *COMPILED, *TILINGS.values()]:
        assert tiling.problem() is None
    for m in (1, 64, 100, 128, 500, 4096, 100_000):
        for n, k in ((128, 128), (6144, 4096), (4096, 12288)):
            assert config(m, n, k).problem() is None


def test_defaults_grow_with_the_product():
    sizes = [t.block_m * t.block_n for t in (config(m, 5120, 5120) for m in (64, 1024, 8192))]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize(
    ("m", "n", "rows", "columns"),
    [
        (128, 4096, 64, 64),
        (256, 4096, 64, 128),
        (512, 4096, 128, 128),
        (768, 4096, 192, 128),
        (1024, 4096, 256, 128),
        (1024, 6144, 128, 128),
        (512, 24576, 256, 128),
    ],
)
def test_the_default_is_the_tile_that_was_fastest(m, n, rows, columns):
    for tiling in (config(m, n, 4096), _default(m, n, 4096)):
        assert (tiling.block_m, tiling.block_n) == (rows, columns)


@pytest.mark.parametrize(
    ("tiles", "programs", "steps", "splits", "found"),
    [
        (64, 132, 96, 2, (0, 64, 2)),  # all in one wave, shared
        (64, 132, 96, 8, (0, 64, 2)),  # no more CTAs than there are
        (160, 132, 32, 8, (132, 28, 4)),  # one full wave, then the rest
        (160, 132, 12, 8, (132, 28, 3)),  # four steps a part at least
        (264, 132, 32, 8, (264, 0, 1)),  # nothing is left
        (96, 132, 96, 8, (96, 0, 1)),  # none is free to help
        (160, 132, 32, 1, (160, 0, 1)),
        (1, 132, 7, 8, (1, 0, 1)),
    ],
)
def test_tiles_of_the_last_wave_are_shared(tiles, programs, steps, splits, found):
    assert waves(tiles, programs, steps, splits) == found
    whole, rest, shared = found
    assert whole + (rest or 0) == tiles or shared == 1
    assert whole % programs == 0 or shared == 1
    assert rest * shared <= programs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": 4}, "4 groups of 1 parts and 128 columns make no tile"),
        ({"parts": 2}, "3 groups of 2 parts and 128 columns make no tile"),
        ({"block_n": 96}, "96 columns make no tile"),
        ({"stages": 1}, "1 stages and height 8 are too few"),
        ({"stages": 5}, "5 stages take 258304 bytes of shared memory, of 232448"),
        ({"ctas": 2}, "2 CTAs of 3 groups exceed"),
        ({"buffers": 3}, "3 buffers a group"),
        ({"splits": 9}, "9 CTAs cannot share a tile; use 1 to 8"),
        ({"groups": 1, "turns": True}, "One group cannot take turns"),
    ],
)
def test_what_is_no_tiling(changes, words):
    problem = replace(COMPILED[0], **changes).problem()
    assert problem is not None
    assert words in problem


def test_supports():
    rejected = {
        (4096, 24576, 4096, "float32"): "dtype",
        (0, 128, 128, "bfloat16"): "rows",
        (8, 192, 128, "bfloat16"): "shape",
        (8, 128, 576, "bfloat16"): "shape",
        (8, 0, 128, "bfloat16"): "shape",
    }
    assert_supports(
        supports_hopper_gemm, [(1, 128, 128, "bfloat16"), (4096, 24576, 4096, "float16")], rejected
    )


def operands(m, n, k):
    torch.manual_seed(0)
    return (*quantize_activation_torch(torch.randn(m, k)), *quantize_blocks(torch.randn(n, k)))


def test_what_is_refused():
    x, sx, w, sw = operands(5, 128, 256)
    out = torch.empty(5, 64, dtype=torch.bfloat16)
    for words, arguments, options in (
        ("on cpu; the Hopper product takes a CUDA device", (x, sx, w, sw), {}),
        (r"codes_x is \[5, 256\] torch.float32", (x.float(), sx, w, sw), {}),
        ("codes_w is .* contiguous", (x, sx, w[:, :128], sw), {}),
        ("128 x 128 cannot multiply x of 5 x 256", (x, sx, w[:, :128].contiguous(), sw), {}),
        ("64 x 256 does not fit: N must be a multiple of 128", (x, sx, w[:64], sw), {}),
        ("dtype float32 has no Hopper product", (x, sx, w, sw), {"out_dtype": torch.float32}),
        ("dense columns at .* Make it with empty_activation_scales", (x, sx.contiguous(), w, sw), {}),
        # The copy engine cannot begin at the second column of these.
        ("columns at multiples of 16 bytes", (x, torch.empty(2, 5).t(), w, sw), {}),
        (r"scales_x is \[4, 2\]", (x, empty_activation_scales(4, 256, x.device), w, sw), {}),
        (r"scales_w is \[1, 1\]", (x, sx, w, sw[:, :1]), {}),
        (r"bias is \[128\] torch.float32", (x, sx, w, sw, torch.zeros(128)), {}),
        (r"out is \[5, 64\]", (x, sx, w, sw), {"out": out}),
    ):
        with pytest.raises(ValueError, match=words):
            hopper_w8a8(*arguments, **options)
