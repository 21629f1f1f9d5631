"""FP8 linear layers by every path: the same product, the path recorded, no row beyond M read or written."""

import itertools

import pytest
import torch

from kvbench_kernels.gemm import fp8_route
from kvbench_kernels.gemm.blockwise import (
    dequantize_activation,
    dequantize_blocks,
    quantize_activation_torch,
    quantize_blocks,
)
from kvbench_kernels.gemm.fp8_linear import fp8_linear, target_of
from kvbench_kernels.gemm.fp8_route import W8A8, path_of_kernel, route
from kvbench_kernels.launches import record
from tests.kernels.cover import cover

ROWS = (0, 1, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65)
N, K = 192, 256
# Share of the output's norm: one rounding to float16, and FP8 tensor cores that keep 14 bits of a sum of 128.
TOLERANCE = {"reference": 2.0**-9, "w8a16": 2.0**-10, "w8a8": 2.0**-9, "hopper": 2.0**-9}


def weight(n=N, k=K, device="cpu"):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    w *= (
        2.0 ** torch.arange(-(-n // 128)).repeat_interleave(128)[:n, None]
    )  # each block row has scales of its own
    codes, scales = quantize_blocks(w)
    return codes.to(device), scales.to(device)


def rows_of(m, k=K, device="cpu", dtype=torch.float16):
    """The first rows are the same for every m."""
    return torch.randn(4097, k, generator=torch.Generator().manual_seed(1))[:m].to(device, dtype)


def due(x, codes, scales, path):
    used = dequantize_activation(*quantize_activation_torch(x)) if path in W8A8 else x.float()
    return used.double() @ dequantize_blocks(codes, scales).double().t()


def distance(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def by_edges(case):
    """Every path, and every number of rows by one that is not the reference; the ends of a range by all."""
    gemm, m = case
    return [gemm, *([] if gemm == "reference" else [m]), *([case] if m in (0, 1, 9, 33) else [])]


def ran(launches):
    """Paths of the multiplying kernels."""
    names = [launch.name for launch in launches]
    return [path_of_kernel(name) for name in names if not name.startswith("fp8_quantize_activation")]


@pytest.mark.parametrize(
    ("gemm", "m"), cover(itertools.product(["auto", "reference", "w8a16", "w8a8"], ROWS), by_edges)
)
def test_a16_t1_every_m_by_every_path(m, gemm, device):
    codes, scales = weight(device=device)
    x = rows_of(m, device=device)
    with record() as launches:
        y = fp8_linear(x, codes, scales, gemm=gemm)
    assert y.shape == (m, N)
    assert y.dtype == x.dtype
    if m == 0:
        assert not launches
        return
    path = route(m, N, K, "float16", target_of(x.device), gemm)
    assert ran(launches) == [path]
    assert {launch.product for launch in launches} == {(m, N, K)}
    assert distance(y, due(x, codes, scales, path)) < TOLERANCE[path]


@pytest.mark.slow
def test_a16_t1_4097_rows(device):
    codes, scales = weight(16, 128, device)
    x = rows_of(4097, 128, device)
    with record() as launches:
        y = fp8_linear(x, codes, scales)
    (path,) = ran(launches)
    assert path in W8A8
    assert distance(y, due(x, codes, scales, path)) < TOLERANCE[path]


@pytest.mark.parametrize(
    ("shape", "target", "paths"),
    [
        ((576, 576), "cuda", {1: "w8a16", 8: "w8a16", 9: "w8a16", 32: "w8a16", 33: "w8a8", 4097: "w8a8"}),
        ((4096, 4096), "hopper", {1: "w8a16", 16: "w8a16", 17: "w8a8", 64: "w8a8", 65: "hopper", 8192: "hopper"}),
        ((4096, 12288), "hopper", {16: "w8a16", 17: "w8a8", 32: "w8a8", 33: "hopper", 4097: "hopper"}),
    ],
)  # fmt: skip
def test_a16_t1_thresholds(shape, target, paths):
    assert {m: route(m, *shape, "bfloat16", target) for m in paths} == paths


def test_a16_t1_odd_m_takes_the_path_of_its_neighbours():
    """M % 4 != 0 is no reason for another path: paths change at the ends of the measured ranges and nowhere
    else.
    """
    for target, shape in itertools.product(("cuda", "hopper"), (*fp8_route.MEASURED, (576, 1536))):
        paths = [route(m, *shape, "bfloat16", target) for m in range(1, 8194)]
        ends = {
            at for at, (one, next_one) in enumerate(itertools.pairwise(paths), start=1) if one != next_one
        }
        table = (
            fp8_route.MEASURED.get(shape, fp8_route._DEFAULT) if target == "hopper" else fp8_route._PORTABLE
        )
        assert ends <= {rows for rows, _ in table}, (target, shape, ends)


@pytest.mark.parametrize("gemm", ["auto", "w8a16", "w8a8"])
def test_a16_t2_row_0_is_the_same_on_both_sides_of_every_boundary(gemm, device):
    codes, scales = weight(device=device)
    first = {m: fp8_linear(rows_of(m, device=device), codes, scales, gemm=gemm)[0] for m in (8, 9, 32, 33)}
    assert len({y.argmax().item() for y in first.values()}) == 1
    # W8A8 rounds x to 4 significant bits: 2^-4 an element at worst, 2.6% of a norm as a rule.
    allowed = 0.05 if gemm == "auto" else 2.0**-9
    for y in first.values():
        assert distance(y, first[8].double()) < allowed


@pytest.mark.parametrize(
    ("gemm", "n", "k"),
    [(gemm, *shape) for gemm in ("w8a16", "w8a8") for shape in ((200, 192), (192, 320), (100, 128), (1, 16))]
    + [pytest.param(gemm, 576, 2048, marks=pytest.mark.slow) for gemm in ("w8a16", "w8a8")],
)
def test_a16_t4_ragged_blocks_are_computed_and_named(n, k, gemm, device):
    codes, scales = weight(n, k, device)
    x = rows_of(1 if k == 2048 else 9, k, device)
    with record() as launches:
        y = fp8_linear(x, codes, scales, gemm=gemm)
    assert ran(launches) == [gemm]
    assert distance(y, due(x, codes, scales, gemm)) < TOLERANCE[gemm]


@pytest.mark.parametrize("gemm", ["auto", "w8a16", "w8a8"])
def test_a16_t4_k_that_no_kernel_takes_is_computed_by_the_reference(gemm, device):
    codes, scales = weight(32, 200, device)
    x = rows_of(3, 200, device)
    with record() as launches:
        y = fp8_linear(x, codes, scales, gemm=gemm)
    assert ran(launches) == ["reference"]
    assert distance(y, due(x, codes, scales, "reference")) < TOLERANCE["reference"]


@pytest.mark.parametrize("gemm", ["reference", "w8a16", "w8a8"])
def test_bias_and_strided_x(gemm, device):
    codes, scales = weight(device=device)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    wide = rows_of(5, 2 * K, device)
    for x in (wide[:, :K], wide[:, ::2]):
        y = fp8_linear(x, codes, scales, bias, gemm)
        expected = due(x, codes, scales, gemm) + bias.double()
        assert distance(y, expected) < TOLERANCE[gemm]


def test_float32_is_exact_unless_a_path_is_asked_for():
    for gemm in ("auto", "reference", "w8a16", "w8a8"):
        assert route(1, N, K, "bfloat16", "torch", gemm) == "reference"  # torch has no other
    for target in ("cuda", "hopper", "interpreter"):
        assert route(1, N, K, "float32", target) == "reference"
    assert route(1, N, K, "float32", "cuda", "w8a16") == "w8a16"
    assert route(64, N, K, "float32", "cuda", "w8a8") == "reference"  # there is none for float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gemm": "marlin"}, "gemm 'marlin' is unknown; choose one of auto, reference, w8a16, w8a8"),
        ({"x": torch.zeros(2, K + 128)}, r"x is \[2, 384\] torch.float32; expected a float \[M, 256\]"),
        ({"x": torch.zeros(2, K, dtype=torch.int8)}, "x is .* torch.int8"),
        ({"codes": torch.zeros(N, K)}, "codes is .* torch.float32"),
        ({"scales": torch.ones(2, 3)}, r"scales is \[2, 3\] .* expected \[2, 2\]"),
        ({"scales": torch.ones(2, 2, dtype=torch.float64)}, "scales is .* torch.float64"),
        ({"bias": torch.zeros(N, dtype=torch.float64)}, r"bias is \[192\] torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    codes, scales = weight()
    given = {"x": torch.zeros(2, K), "codes": codes, "scales": scales, **change}
    with pytest.raises(ValueError, match=words):
        fp8_linear(**given)


def test_kernels_of_no_path_have_none():
    assert path_of_kernel("cublas") is None
    assert set(fp8_route._KERNELS.values()) == {"reference", *fp8_route._SUPPORTS}
