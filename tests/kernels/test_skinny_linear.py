"""Products with few rows: both kernels against float64, at their edges, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench_kernels.gemm.skinny_config import M_MAX, config, supports_skinny
from kvbench_kernels.gemm.skinny_linear import Tiling, skinny_linear, skinny_linear_many
from kvbench_kernels.launches import record
from kvbench_kernels.splitk import splits_used, tickets_of
from tests.kernels.cover import cover
from tests.kernels.products import assert_supports

VECTOR = {
    "registers": Tiling("vector", 4, 32),
    "registers, split": Tiling("vector", 4, 32, splits=3),
    "ring": Tiling("vector", 4, 16, stages=3),
    "ring, split": Tiling("vector", 8, 16, splits=2, stages=2),
}
DOT = {
    "dot": Tiling("dot", 16, 32, stages=2),
    "dot, split": Tiling("dot", 16, 16, splits=3, stages=2),
    "swap": Tiling("dot", 16, 32, swap=True),
    "swap, split": Tiling("dot", 16, 16, splits=2, swap=True),
}
CASES = [(name, m) for name in VECTOR for m in (1, 2, 3, 4)] + [(name, m) for name in DOT for m in (2, 16)]


def dense_in_nan(rows, columns, dtype, device, wide=False):
    """Random [rows, columns] in the middle of NaN, which shows if anything beside it is read.

    wide: the rows lie apart (a view into a wider tensor), else they are contiguous.
    """
    if wide:
        out = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=device)[1:-1, :columns]
    else:
        out = torch.full((rows + 2, columns), torch.nan, dtype=dtype, device=device)[1:-1]
    return out.copy_(torch.randn(rows, columns, device=device))


def close(out, exact):
    """The float64 value, rounded to out's dtype, up to the noise of float32 sums."""
    rounding = torch.finfo(out.dtype).eps
    allowed = exact.abs() * rounding + 1e-5 * exact.abs().max()
    return out.shape == exact.shape and bool(((out.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    cover(
        [(*case, dtype) for case in CASES for dtype in (torch.float32, torch.float16)],
        lambda case: (case[0], (case[0] in DOT, *case[1:])),
    ),
)
def test_against_float64(name, m, dtype, device):
    torch.manual_seed(m)
    tiling = (VECTOR | DOT)[name]
    # 72 columns are no multiple of a step, 19 and 5 rows no multiple of a tile, and 5 are fewer than one.
    x = dense_in_nan(m, 72, dtype, device, wide=True)
    weights = [dense_in_nan(n, 72, dtype, device) for n in (19, 8, 5)]
    biases = [torch.randn(n, device=device).to(dtype) for n in (19, 8, 5)]
    for count, use in ((3, biases), (2, None), (1, biases[:1])):
        outs = skinny_linear_many(x, weights[:count], use and use[:count], tiling)
        assert len(outs) == count
        for i, out in enumerate(outs):
            exact = x.double() @ weights[i].double().T
            assert out.dtype == dtype
            assert close(out, exact if use is None else exact + use[i].double())


@pytest.mark.parametrize("name", ["registers", "dot, split"])
def test_columns_that_are_whole_steps(name, device):
    torch.manual_seed(0)
    x = dense_in_nan(2, 96, torch.float32, device)
    w = dense_in_nan(21, 96, torch.float32, device)
    assert close(skinny_linear(x, w, tiling=(VECTOR | DOT)[name]), x.double() @ w.double().T)


def test_the_shape_of_x_is_kept_and_the_twin_agrees(device):
    x, w, b = (torch.randn(*shape, device=device) for shape in ((2, 1, 16), (24, 16), (24,)))
    out = skinny_linear(x, w, b)
    assert out.shape == (2, 1, 24)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, w, b), rtol=1e-5, atol=1e-5)


def test_an_early_launch_is_ignored_where_there_is_none(device):
    x, w = torch.randn(1, 16, device=device), torch.randn(8, 16, device=device)
    early = skinny_linear(x, w, tiling=Tiling("vector", 4, 16, pdl=True))
    assert torch.equal(early, skinny_linear(x, w, tiling=Tiling("vector", 4, 16)))


@pytest.mark.parametrize("name", ["registers, split", "dot, split"])
def test_a_split_product_gives_the_same_bits_and_leaves_its_tickets_at_zero(name, device):
    torch.manual_seed(0)
    x, w = torch.randn(2, 72, device=device), torch.randn(19, 72, device=device)
    tiling = (VECTOR | DOT)[name]
    first = skinny_linear(x, w, tiling=tiling)
    tickets = tickets_of(x.device, 1)
    assert not tickets.any()
    assert torch.equal(first, skinny_linear(x, w, tiling=tiling))


def test_one_launch_for_three_weights(device):
    x, w = torch.randn(1, 16, device=device), torch.randn(8, 16, device=device)
    with record() as launches:
        skinny_linear_many(x, (w, w, w))
    assert [launch.name for launch in launches] == ["skinny_linear_vector"]


def test_what_is_refused(device):
    def zeros(*shape):
        return torch.zeros(*shape, device=device)

    x, w = zeros(2, 16), zeros(8, 16)
    for words, rows, weights, biases, tiling in (
        ("17 rows of 16; it takes 1 to 16", zeros(17, 16), (w,), None, None),
        ("2 rows of 12; .* multiple of 8", zeros(2, 12), (zeros(8, 12),), None, None),
        ("4 weights were given", x, (w, w, w, w), None, None),
        (r"weight is \[8, 24\]", x, (zeros(8, 24),), None, None),
        ("float16", x, (w.half(),), None, None),
        ("weight is .* contiguous", x, (zeros(16, 8).T,), None, None),
        (r"bias is \[7\]", x, (w,), (zeros(7),), None),
        ("zip", x, (w, w), (zeros(8),), None),
        ("1 to 4 rows of x, not 5", zeros(5, 16), (w,), None, VECTOR["registers"]),
        ("dense last axis", zeros(16, 2).T, (w,), None, None),
    ):
        with pytest.raises(ValueError, match=words):
            skinny_linear_many(rows, weights, biases, tiling)


def test_supports():
    rejected = {
        (17, 4096, 4096, "bfloat16"): "rows",
        (0, 4096, 4096, "bfloat16"): "rows",
        (1, 4096, 4096, "float32"): "dtype",
        (1, 4096, 4100, "bfloat16"): "shape",
        (1, 0, 4096, "bfloat16"): "shape",
    }
    assert_supports(supports_skinny, [(1, 4096, 4096, "bfloat16"), (16, 576, 1536, "float16")], rejected)


@given(st.integers(1, M_MAX), st.integers(1, 160_000), st.integers(1, 2048).map(lambda k: 8 * k))
def test_the_chosen_tiling_can_run(m, n, k):
    tiling = config(m, n, k)
    assert tiling.kind == "dot" or m <= 4
    assert all(b & (b - 1) == 0 for b in (tiling.block_n, tiling.block_k, tiling.warps))
    if tiling.kind == "dot":
        assert tiling.block_n >= 16
        assert tiling.block_k >= 16


@given(st.integers(1, 64), st.integers(1, 16))
def test_no_split_is_empty(steps, splits):
    used = splits_used(Tiling("vector", 4, 32, splits), 32 * steps)
    assert 1 <= used <= splits
    each = -(-steps // used)
    assert (used - 1) * each < steps <= used * each


def test_a11_t1_bfloat16_is_refused_where_the_interpreter_would_multiply_its_bits(device):
    if device == "cuda":
        pytest.skip("Compiled kernels multiply bfloat16 as numbers.")
    x = torch.ones(5, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no bfloat16 in the interpreter"):
        skinny_linear(x, torch.ones(16, 16, dtype=torch.bfloat16))
