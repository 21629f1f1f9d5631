"""Products of FP8 operands with block scales: against float64, at their edges, and what is refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench_kernels.gemm.activation import quantize_activation
from kvbench_kernels.gemm.blockwise import (
    BLOCK,
    blocks,
    empty_activation_scales,
    quantize_activation_torch,
    quantize_blocks,
)
from kvbench_kernels.gemm.w8a8 import Tiling, config, w8a8, w8a8_torch
from kvbench_kernels.gemm.w8a8_config import BLOCKS_M, BLOCKS_N, supports_w8a8
from kvbench_kernels.kv.quantize import e4m3_to_float
from kvbench_kernels.launches import record
from kvbench_kernels.splitk import splits_used
from tests.kernels.cover import cover, grid
from tests.kernels.offline import compiled
from tests.kernels.products import assert_supports

TILINGS = {
    "pointers": Tiling(64, 64, tma=False),
    "descriptors": Tiling(64, 128),
    "halves": Tiling(128, 256, warps=8, stages=3, ctas=1),
    "halves, split": Tiling(64, 256, splits=2, stages=3, tma=False),
    "split": Tiling(64, 128, splits=3),
    "split, walking": Tiling(64, 64, splits=2, ctas=1, group=1),
    "swap": Tiling(16, 64, swap=True),
    "swap, pointers": Tiling(32, 128, swap=True, tma=False),
    "swap, split": Tiling(16, 64, splits=2, swap=True),
    "swap, wide": Tiling(128, 64, swap=True),
}
SHAPES = [(100, 128), (192, 192), (576, 576)]
ROWS = (1, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 130)


def operands(m, n, k, device):
    """Random codes and scales: x's, then the weight's. Every block has a scale of its own."""
    torch.manual_seed(m * n + k)
    x = torch.randn(m, k, device=device) * torch.logspace(-1, 1, m, device=device)[:, None]
    w = torch.randn(n, k, device=device) / math.sqrt(k)
    return *quantize_activation(x), *quantize_blocks(w)


def exact(codes_x, scales_x, codes_w, scales_w):
    """In float64: the product of the dequantized operands, and that of their magnitudes."""
    n, k = codes_w.shape
    x = e4m3_to_float(codes_x).double() * scales_x.double().repeat_interleave(BLOCK, 1)[:, :k]
    w = e4m3_to_float(codes_w).double()
    w = w * scales_w.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return x @ w.t(), x.abs() @ w.abs().t()


def assert_close(out, value, magnitude, device):
    """Within the sums' rounding of the float64 value, and one rounding to out's dtype.

    A tensor core cuts what is added in a block of 128 (4 instructions of 32) to at least 13 bits below the
    largest: 5 cuts of at most 2^-13 of the sum of magnitudes. The interpreter sums in float32, at most 128
    roundings. Then each block costs three roundings in float32.
    """
    inside = 5 * 2.0**-13 if device == "cuda" else 128 * 2.0**-24
    blocks_cost = 24 * 2.0**-24
    allowed = value.abs() * torch.finfo(out.dtype).eps + magnitude * (inside + blocks_cost)
    wrong = ~((out.double() - value).abs() <= allowed)
    assert out.shape == value.shape
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first at {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize(
    ("m", "n", "k"),
    cover([(m, *shape) for shape in SHAPES for m in ROWS], lambda case: (case[0], case[1:]), math.prod),
)
def test_chosen_tiling_against_float64(m, n, k, device):
    four = operands(m, n, k, device)
    value, magnitude = exact(*four)
    assert_close(w8a8(*four, None, torch.float32), value, magnitude, device)


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    cover(
        [(name, *shape) for name in TILINGS for shape in ((1, 100, 192), (33, 192, 128), (65, 320, 400))],
        lambda case: (case[0], case[1:], (TILINGS[case[0]].swap, case[1:3])),
        lambda case: math.prod(case[1:]) ** 0.5,
    ),
)
def test_every_kind_of_tiling_against_float64(name, m, n, k, device):
    four = operands(m, n, k, device)
    value, magnitude = exact(*four)
    bias = torch.randn(n, device=device)
    for dtype in (torch.float32, torch.bfloat16) if m == 33 else (torch.float16,):
        out = w8a8(*four, bias.to(dtype), dtype, TILINGS[name])
        assert out.dtype == dtype
        assert_close(out, value + bias.to(dtype).double(), magnitude + bias.abs(), device)
    assert_close(w8a8(*four, None, torch.float32, TILINGS[name]), value, magnitude, device)


@pytest.mark.parametrize("name", TILINGS)
def test_powers_of_two_are_exact_and_every_scale_is_its_own(name, device):
    m, n, k = (70, 300, 576) if device == "cuda" else (18, 140, 320)
    torch.manual_seed(0)
    # A 1 in each block of a row of x, powers of two in w: each output is a sum of few powers of two, whole in
    # float32.
    x = torch.zeros(m, k, device=device)
    x[:, 5::128] = 2.0 ** torch.randint(-2, 3, (m, blocks(k)), device=device)
    w = 2.0 ** torch.randint(-2, 3, (n, k), device=device).float()
    scales_x = empty_activation_scales(m, k, torch.device(device))
    scales_x.copy_(2.0 ** torch.randint(-3, 4, scales_x.shape, device=device))
    scales_w = 2.0 ** torch.arange(blocks(n) * blocks(k), device=device).float().view(
        blocks(n), blocks(k)
    ).sub(8)
    four = (x.to(torch.float8_e4m3fn), scales_x, w.to(torch.float8_e4m3fn), scales_w)
    value, _ = exact(*four)
    assert torch.equal(w8a8(*four, None, torch.float32, TILINGS[name]).double(), value)


def test_every_code_of_the_weight_and_of_x(device):
    codes = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    number = (codes & 0x7F) != 0x7F
    values = codes[number].view(torch.float8_e4m3fn).float()
    one = torch.zeros(len(values), 128, device=device)
    one[:, 0] = 1.0
    line = torch.zeros(len(values), 128, device=device)
    line[:, 0] = values
    scales_x = empty_activation_scales(len(values), 128, torch.device(device)).fill_(1.0)
    scales_w = torch.ones(2, 1, device=device)
    for name in ("pointers", "descriptors", "swap, wide"):
        for x, w, expected in (
            (one[:16], line, values.expand(16, -1)),
            (line, one[:16], values[:, None].expand(-1, 16)),
        ):
            sx, sw = scales_x[: len(x)], scales_w[: blocks(len(w))]
            out = w8a8(
                x.to(torch.float8_e4m3fn),
                sx,
                w.to(torch.float8_e4m3fn),
                sw,
                None,
                torch.float32,
                TILINGS[name],
            )
            assert torch.equal(out, expected)


def test_a_nan_code_stays_in_its_row_and_column(device):
    codes_x, scales_x, codes_w, scales_w = operands(9, 100, 192, device)
    codes_x.view(torch.uint8)[3, 150] = 0x7F
    codes_w.view(torch.uint8)[77, 2] = 0xFF
    for name in TILINGS:
        out = w8a8(codes_x, scales_x, codes_w, scales_w, None, torch.float32, TILINGS[name]).isnan()
        expected = torch.zeros_like(out)
        expected[3] = expected[:, 77] = True
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "m"),
    cover(itertools.product(TILINGS, (1, 7, 33, 65)), lambda case: case, lambda case: case[1] ** 0.5),
)
def test_a16_t3_rows_beyond_the_last_are_not_written_and_do_not_count(name, m, device):
    codes_x, scales_x, codes_w, scales_w = operands(132, 100, 192, device)
    clean = w8a8(codes_x[:m], scales_x[:m], codes_w, scales_w, None, torch.float16, TILINGS[name])
    codes_x.view(torch.uint8)[m:] = 0x7F
    scales_x[m:] = torch.nan
    more_w = torch.full((300, 192), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    more_w.view(torch.uint8)[:100] = codes_w.view(torch.uint8)
    held = torch.full((132, 150), torch.nan, dtype=torch.float16, device=device)
    out = w8a8(
        codes_x[:m], scales_x[:m], more_w[:100], scales_w, None, torch.float16, TILINGS[name], held[:m, :100]
    )
    assert out.data_ptr() == held.data_ptr()
    assert torch.equal(out, clean)
    assert not out.isnan().any()
    assert held[m:].isnan().all()
    assert held[:, 100:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "name"), grid([torch.bfloat16, torch.float16], ["descriptors", "halves", "swap"])
)
def test_scales_of_16_bits(name, dtype, device):
    codes_x, scales_x, codes_w, scales_w = operands(9, 300, 192, device)
    narrow = scales_w.to(dtype)
    out = w8a8(codes_x, scales_x, codes_w, narrow, None, torch.float32, TILINGS[name])
    assert torch.equal(
        out, w8a8(codes_x, scales_x, codes_w, narrow.float(), None, torch.float32, TILINGS[name])
    )


@pytest.mark.parametrize("name", TILINGS)
def test_the_same_bits_on_every_call(name, device):
    four = operands(33, 100, 576, device)
    first = w8a8(*four, None, torch.float32, TILINGS[name])
    assert torch.equal(first, w8a8(*four, None, torch.float32, TILINGS[name]))


def test_operands_at_odd_addresses(device):
    codes_x, scales_x, codes_w, scales_w = operands(9, 100, 192, device)
    room = torch.zeros(9 * 192 + 1, dtype=torch.uint8, device=device)
    moved = room[1:].view(9, 192).copy_(codes_x.view(torch.uint8)).view(torch.float8_e4m3fn)
    out = w8a8(moved, scales_x, codes_w, scales_w, None, torch.float32)
    value, magnitude = exact(codes_x, scales_x, codes_w, scales_w)
    assert_close(out, value, magnitude, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_linear_layer_agrees_with_its_twin(dtype, device):
    torch.manual_seed(0)
    x = torch.randn(33, 192, device=device).to(dtype)
    codes, scales = quantize_blocks(torch.randn(100, 192, device=device))
    bias = torch.randn(100, device=device).to(dtype)
    with record() as launches:
        out = w8a8(*quantize_activation(x), codes, scales, bias, dtype)
    assert [launch.name for launch in launches] == ["fp8_quantize_activation", "fp8_matmul_w8a8"]
    assert out.dtype == dtype
    twin = w8a8_torch(*quantize_activation_torch(x), codes, scales, bias, dtype)
    torch.testing.assert_close(
        out, twin, rtol=2 * torch.finfo(dtype).eps, atol=2e-2 if device == "cuda" else 1e-4
    )
    assert w8a8_torch(*quantize_activation(x), codes, scales, None, dtype).dtype == dtype


def test_no_rows(device):
    codes, scales = quantize_blocks(torch.randn(100, 192, device=device))
    out = w8a8(*quantize_activation(torch.randn(0, 192, device=device)), codes, scales, None, torch.float32)
    assert out.shape == (0, 100)


def test_what_is_refused(device):
    codes_x, scales_x, codes_w, scales_w = operands(8, 100, 192, device)

    given = {
        "codes_x": codes_x, "scales_x": scales_x, "codes_w": codes_w, "scales_w": scales_w, "bias": None,
        "out_dtype": torch.float16,
    }  # fmt: skip
    half = {"dtype": torch.float16, "device": device}
    for words, changed in (
        (r"must be \[M, K\] and \[N, K\]", {"codes_x": codes_x[:, :128]}),
        ("codes_x is .* torch.uint8", {"codes_x": codes_x.view(torch.uint8)}),
        ("codes_w is .* contiguous", {"codes_w": codes_w.t().contiguous().t()}),
        (r"scales_x is .* expected \[8, 2\] float32", {"scales_x": scales_x[:7]}),
        ("dense columns", {"scales_x": scales_x.contiguous()}),
        (
            "dense columns",
            {"scales_x": scales_x.t().contiguous().view(-1)[:16].view(2, 8)[:, :8].t().double()},
        ),
        (r"scales_w is \[1, 1\]", {"scales_w": scales_w[:, :1]}),
        ("scales_w is .* torch.float64", {"scales_w": scales_w.double()}),
        (r"bias is \[99\]", {"bias": torch.zeros(99, **half)}),
        ("bias is", {"bias": torch.zeros(100, device=device)}),
        ("out_dtype is torch.int8", {"out_dtype": torch.int8}),
        (r"out is \[8, 99\]", {"out": torch.zeros(8, 99, **half)}),
        ("multiple of 16 as K", {"codes_x": codes_x[:, :24], "codes_w": codes_w[:, :24]}),
        ("16 rows of x by 64 of the weight has no kernel", {"tiling": Tiling(16, 64)}),
        ("has no kernel", {"tiling": Tiling(64, 256, swap=True)}),
    ):
        with pytest.raises(ValueError, match=words):
            w8a8(**{**given, **changed})


def test_supports():
    rejected = {
        (0, 4096, 4096, "bfloat16"): "rows",
        (1, 4096, 4096, "float32"): "dtype",
        (1, 4096, 4104, "bfloat16"): "shape",
        (1, 0, 4096, "bfloat16"): "shape",
    }
    assert_supports(supports_w8a8, [(64, 4096, 4096, "bfloat16"), (1, 100, 192, "float16")], rejected)


@given(st.integers(1, 20_000), st.integers(1, 160_000), st.integers(1, 1024).map(lambda k: 16 * k))
def test_the_chosen_tiling_can_run(m, n, k):
    tiling = config(m, n, k)
    assert tiling.block_m in (BLOCKS_M if tiling.swap else (64, 128))
    assert tiling.block_n in (BLOCKS_N[:2] if tiling.swap else BLOCKS_N)
    assert tiling.warps in (4, 8)
    assert 1 <= splits_used(tiling, k) <= tiling.splits
    # The ring fits the shared memory of a multiprocessor of compute capability 9.0.
    assert tiling.stages * (tiling.block_m + tiling.block_n) * 128 <= 220 * 1024


@pytest.mark.slow
def test_the_tensor_cores_multiply_the_codes_and_nothing_is_spilled():
    facts = compiled("w8a8")
    assert set(facts) == {"128x128", "64x128 split", "64x64 swap", "32x64 swap pointers"}
    for name, (products, stack) in facts.items():
        assert len(products) == 1, name
        assert products[0].startswith("wgmma.mma_async.sync.aligned.m64"), name
        assert products[0].endswith(".f32.e4m3.e4m3"), name
        assert stack == 0, name
