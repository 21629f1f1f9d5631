"""W8A16: both kernels against float64 at their edges, every E4M3 code, block scales, what is refused, what is
compiled.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench_kernels.gemm.blockwise import BLOCK, quantize_blocks, scale_shape
from kvbench_kernels.gemm.w8a16 import Tiling, config, supports_w8a16, w8a16
from kvbench_kernels.gemm.w8a16_config import M_MAX, rows_padded
from kvbench_kernels.kv.quantize import e4m3_to_float
from kvbench_kernels.splitk import tickets_of
from tests.kernels.cover import cover
from tests.kernels.offline import compiled
from tests.kernels.products import assert_supports

VECTOR = {
    "registers": Tiling("vector", 32, 256),
    "registers, split": Tiling("vector", 64, 128, splits=3),
    "ring": Tiling("vector", 64, 64, stages=3),
    "ring, split": Tiling("vector", 16, 1024, splits=2, stages=2),
}
DOT = {
    "dot": Tiling("dot", 32, 128, warps=2, stages=2, cvt=False),
    "dot, split": Tiling("dot", 16, 64, splits=3, warps=1, stages=2),
    "dot, two blocks a step": Tiling("dot", 64, 256, stages=2),
    "dot, two blocks of rows": Tiling("dot", 256, 64, stages=2),
    "swap": Tiling("dot", 64, 128, stages=2, swap=True),
    "swap, split": Tiling("dot", 32, 256, splits=2, warps=2, stages=2, swap=True),
    "swap, two blocks of rows": Tiling("dot", 256, 128, stages=2, swap=True),
}
TILINGS = VECTOR | DOT
# N and K of the weight: fewer than a tile, whole blocks, half blocks at the end, many blocks.
SHAPES = [(1, 16), (100, 128), (192, 192), (576, 192), (192, 576), (1000, 128), (100, 2048)]
ROWS = (1, 7, 8, 9, 16, 31, 32, 33, 63, 64)


Case = tuple[str, int, int, int, torch.dtype]


def programs(case):
    """How long the interpreter takes, about."""
    name, m, n, k, _ = case
    tiling = TILINGS[name]
    return (
        (1 + -(-n // tiling.block_n))
        * (tiling.splits + -(-k // tiling.block_k))
        * (1 if tiling.kind == "dot" else m)
    )


def cases():
    """Every tiling with every shape, every number of rows with both kernels that swap and do not, dtypes in
    turn.
    """
    found = []
    for i, (n, k) in enumerate(SHAPES):
        found += [(name, (1, 2, 3, 4)[(i + j) % 4], n, k) for j, name in enumerate(VECTOR)]
        found += [(name, ROWS[(3 * i + j) % len(ROWS)], n, k) for j, name in enumerate(DOT)]
    for m in ROWS:
        found += [("swap", m, 192, 192), ("dot", m, 100, 192)]
    found += [("swap", 128, 100, 192), ("dot", 65, 100, 192)]
    dtypes = {True: (torch.bfloat16, torch.float16, torch.float32), False: (torch.bfloat16, torch.float16)}
    turns = [dtypes[case[0] in VECTOR] for case in found]
    full = [(*case, turn[i % len(turn)]) for i, (case, turn) in enumerate(zip(found, turns, strict=True))]
    return cover(
        full,
        lambda case: (case[0], (case[0] in VECTOR, case[1]), case[2:4], (case[0] in VECTOR, case[4])),
        programs,
    )


def poisoned(rows, columns, dtype, device):
    """[rows, columns] of NaN in the middle of a larger NaN tensor, so that its rows lie apart."""
    return torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=device)[1:-1, :columns]


def made_x(m, k, dtype, device):
    return poisoned(m, k, dtype, device).copy_(torch.randn(m, k, device=device))


def made_weight(n, k, device, scale_dtype=torch.float32):
    codes, scales = quantize_blocks(torch.randn(n, k, device=device) / k**0.5)
    return codes, scales.to(scale_dtype)


def exact_of(x, codes, scales):
    """The float64 product, and the product of the magnitudes."""
    n, k = codes.shape
    wide = scales.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    w = e4m3_to_float(codes).double() * wide
    return x.double() @ w.T, x.double().abs() @ w.abs().T


def check(out, exact, magnitude, k):
    """Half a last place of out's dtype, and what K additions (one rounding a scale, two a bias) lose in
    float32.
    """
    half = torch.finfo(out.dtype).eps / 2
    noise = 1.01 * (k + 4) * 2**-24 * magnitude
    allowed = (exact.abs() + noise) * half + noise + torch.finfo(out.dtype).smallest_normal * half
    assert out.shape == exact.shape
    wrong = ~((out.double() - exact).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}"


@pytest.mark.parametrize("name", [name for name, tiling in TILINGS.items() if tiling.kind == "dot"])
def test_a16_t3_9_rows_in_a_tile_of_16_leave_the_others_alone(name, device):
    rows = made_x(16, 256, torch.float16, device)
    rows[9:] = torch.nan  # what lies behind x in memory
    codes, scales = made_weight(192, 256, device)
    out = torch.full((16, 192), torch.nan, dtype=torch.float16, device=device)
    w8a16(rows[:9], codes, scales, tiling=TILINGS[name], out=out[:9])
    check(out[:9], *exact_of(rows[:9], codes, scales), 256)
    assert out[9:].isnan().all()


@pytest.mark.parametrize(("name", "m", "n", "k", "dtype"), cases())
def test_against_float64(name, m, n, k, dtype, device):
    torch.manual_seed(m + n + k)
    scale_dtype = (torch.float32, torch.bfloat16, torch.float16)[(m + n) % 3]
    x = made_x(m, k, dtype, device)
    codes, scales = made_weight(n, k, device, scale_dtype)
    exact, magnitude = exact_of(x, codes, scales)
    out = poisoned(m, n, dtype, device)
    assert w8a16(x, codes, scales, tiling=TILINGS[name], out=out) is out
    check(out, exact, magnitude, k)
    # What lies around out is as it was.
    assert out._base is not None
    assert int(out._base.isnan().sum()) == out._base.numel() - out.numel()

    if k > 600 and device == "cpu":
        return  # The interpreter takes seconds for it.
    bias = torch.randn(n, device=device).to(dtype)
    check(
        w8a16(x, codes, scales, bias, TILINGS[name]),
        exact + bias.double(),
        magnitude + bias.double().abs(),
        k,
    )


@pytest.mark.parametrize("name", TILINGS)
def test_powers_of_two_are_exact(name, device):
    torch.manual_seed(0)
    m, n, k = 3, 300 if device == "cuda" else 136, 320
    x = torch.randint(-4, 5, (m, k), device=device).to(torch.bfloat16)
    codes = torch.randint(-8, 9, (n, k), device=device).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-2, 3, scale_shape(n, k), device=device)
    bias = torch.randint(-4, 5, (n,), device=device).to(torch.bfloat16)
    exact, _ = exact_of(x, codes, scales)
    assert torch.equal(
        w8a16(x, codes, scales, bias, TILINGS[name]), (exact + bias.double()).float().to(torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", TILINGS)
def test_every_code_comes_out_as_its_value(name, dtype, device):
    # 256 rows of one code and 127 zeros; the row of x that is one at the code's column gives it back.
    codes = torch.zeros(256, 128, dtype=torch.uint8, device=device)
    codes[:, 37] = torch.arange(256, device=device)
    weight = codes.view(torch.float8_e4m3fn)
    x = torch.zeros(2, 128, dtype=dtype, device=device)
    x[0, 37] = 1
    out = w8a16(x, weight, torch.ones(2, 1, device=device), tiling=TILINGS[name])
    expected = e4m3_to_float(weight)[:, 37].to(dtype)
    assert int(expected.isnan().sum()) == 2
    torch.testing.assert_close(out[0], expected, rtol=0, atol=0, equal_nan=True)
    # Zero times a number is zero, zero times NaN is NaN.
    torch.testing.assert_close(out[1], expected * 0, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", TILINGS)
def test_a13_t2_each_block_has_its_own_scale(name, device):
    # 1000 rows are 8 blocks, the last of 104: 128 * (2^0 + .. + 2^6) + 104 * 2^7 = 29,568. The interpreter
    # takes 3 blocks.
    count = 8 if device == "cuda" else 3
    scales = (2.0 ** torch.arange(count, device=device))[:, None]
    codes = torch.ones(128 * count - 24, 128, device=device).to(torch.float8_e4m3fn)
    x = torch.zeros(2, 128, dtype=torch.float16, device=device)
    x[0, 5] = 1
    out = w8a16(x, codes, scales, tiling=TILINGS[name])
    assert out[0].double().sum().item() == 128 * (2**count - 1) - 24 * 2 ** (count - 1)
    assert not out[1].any()
    # The same along K, which takes multiples of 16: 128 * (2^0 + .. + 2^6) + 112 * 2^7 = 30,592.
    wide = torch.ones(128, 128 * count - 16, device=device).to(torch.float8_e4m3fn)
    ones = torch.ones(1, 128 * count - 16, dtype=torch.float16, device=device)
    down = w8a16(ones, wide, scales.T.contiguous(), tiling=TILINGS[name])
    due = 128 * (2**count - 1) - 16 * 2 ** (count - 1)
    assert torch.equal(down, torch.full((1, 128), float(due), device=device).half())


@pytest.mark.parametrize("name", ["registers", "ring", "dot", "swap"])
def test_a_scale_beyond_16_bits_still_counts(name, device):
    # 2^-100 and 2^100 leave float16, and 1 + 2^-20 is no bfloat16: only a float32 scale gives these products.
    codes = torch.ones(1, 384, device=device).to(torch.float8_e4m3fn)
    x = torch.zeros(3, 384, dtype=torch.float16, device=device)
    for row in range(3):
        x[row, 128 * row] = 1
    big = torch.tensor([[2.0**-10, 1 + 2.0**-8, 60000.0]], device=device)
    out = w8a16(x, codes, big, tiling=TILINGS[name])
    assert out[:, 0].tolist() == [2.0**-10, 1 + 2.0**-8, 60000.0]
    tiny = torch.tensor([[2.0**-100, 2.0**100, 1.0]], device=device)
    wide = w8a16(x.to(torch.bfloat16), codes, tiny, tiling=TILINGS[name])
    assert wide[:, 0].tolist() == [2.0**-100, 2.0**100, 1.0]


@pytest.mark.parametrize("name", ["registers, split", "dot", "swap"])
def test_blocks_of_zeros_and_an_amax_in_the_tail(name, device):
    w = torch.zeros(192, 192, device=device)
    w[191, 191] = -448.0  # the last element of the last, smaller block decides its scale alone
    w[0, 0] = 3.5
    codes, scales = quantize_blocks(w)
    x = torch.ones(2, 192, dtype=torch.bfloat16, device=device)
    out = w8a16(x, codes, scales, tiling=TILINGS[name])
    expected = w.double().sum(1).to(torch.bfloat16).expand(2, -1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["registers, split", "ring, split", "dot, split", "swap, split"])
def test_a_split_product_gives_the_same_bits_and_leaves_its_tickets_at_zero(name, device):
    torch.manual_seed(0)
    x, (codes, scales) = made_x(2, 1024, torch.bfloat16, device), made_weight(100, 1024, device)
    first = w8a16(x, codes, scales, tiling=TILINGS[name])
    tickets = tickets_of(x.device, 1)
    assert not tickets.any()
    assert torch.equal(first, w8a16(x, codes, scales, tiling=TILINGS[name]))


def test_what_is_refused(device):
    x = torch.zeros(2, 128, dtype=torch.float16, device=device)
    codes, scales = made_weight(200, 128, device)
    zeros = {"dtype": torch.float16, "device": device}
    for words, arguments in (
        ("129 rows of x are outside 1 to 128", (torch.zeros(129, 128, **zeros), codes, scales)),
        ("5 rows of float32; W8A16 takes 1 to 4", (torch.zeros(5, 128, device=device), codes, scales)),
        ("dtype float64", (x.double(), codes, scales)),
        (r"x is \[2, 128\] and codes \[200, 64\]", (x, codes[:, :64].contiguous(), scales)),
        ("200 x 24 .* multiple of 16", (x[:, :24], codes[:, :24].contiguous(), scales)),
        ("dense last axis", (torch.zeros(128, 2, **zeros).T, codes, scales)),
        (r"codes is .* torch.uint8", (x, codes.view(torch.uint8), scales)),
        (
            "codes is .* float8_e4m3fn, contiguous",
            (x, torch.zeros(128, 200, device=device).to(codes.dtype).T, scales),
        ),
        (r"scales is \[1, 2\] .* expected \[2, 1\]", (x, codes, scales.T.contiguous())),
        (r"scales is \[2, 1\] torch.float64", (x, codes, scales.double())),
        (r"bias is \[199\]", (x, codes, scales, torch.zeros(199, **zeros))),
        (r"out is \[2, 199\]", (x, codes, scales, None, None, torch.zeros(2, 199, **zeros))),
        ("1 to 4 rows of x, not 5", (torch.zeros(5, 128, **zeros), codes, scales, None, VECTOR["registers"])),
    ):
        with pytest.raises(ValueError, match=words):
            w8a16(*arguments)


def test_float32_has_no_tensor_cores(device):
    if device == "cuda":
        with pytest.raises(ValueError, match="not float32"):
            w8a16(torch.zeros(1, 128, device=device), *made_weight(8, 128, device), tiling=DOT["dot"])


def test_supports():
    rejected = {
        (129, 4096, 4096, "bfloat16"): "rows",
        (0, 4096, 4096, "bfloat16"): "rows",
        (5, 4096, 4096, "float32"): "dtype",
        (1, 4096, 4096, "int8"): "dtype",
        (1, 4096, 4104, "bfloat16"): "shape",
        (1, 4096, 0, "bfloat16"): "shape",
        (1, 0, 4096, "bfloat16"): "shape",
    }
    assert_supports(
        supports_w8a16,
        [(1, 4096, 4096, "bfloat16"), (128, 576, 192, "float16"), (4, 1, 16, "float32")],
        rejected,
    )


@given(st.integers(1, 160_000), st.integers(1, 1024).map(lambda k: 16 * k))
def test_the_chosen_tiling_can_run(n, k):
    for m in range(1, M_MAX + 1):
        tiling = config(m, n, k)
        assert tiling.kind == "dot" or m <= 4
        assert m <= rows_padded(m) <= 128
        assert all(b & (b - 1) == 0 for b in (tiling.block_n, tiling.block_k, tiling.warps))
        assert tiling.block_k >= 16
        assert tiling.block_n >= 16 or tiling.kind == "vector"
        assert tiling.block_n <= 128 or tiling.kind == "dot"


EXPECTED = [
    (1, Tiling("vector", 8, 1024, stages=3), []),
    (4, Tiling("vector", 4, 512, warps=2), []),
    (16, Tiling("dot", 32, 128, warps=2, stages=4, cvt=False), ["mma.sync m16n8k16"]),
    (16, Tiling("dot", 64, 128, warps=2, stages=4, swap=True), ["mma.sync m16n8k16"]),
    (16, Tiling("dot", 64, 128, stages=4, swap=True), ["wgmma.mma_async m64n16k16"]),
    (64, Tiling("dot", 128, 128, warps=8, stages=3, swap=True), ["wgmma.mma_async m64n64k16"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("m", "tiling", "mma"), EXPECTED, ids=str)
def test_what_is_compiled_for_an_h200(m, tiling, mma, dtype):
    assert compiled("w8a16", m, dtype, vars(tiling)) == {"mma": mma, "local": 0, "stack": 0}
