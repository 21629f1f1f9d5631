"""Activations in FP8: every byte and every scale is the torch reference's."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from kvbench_kernels.gemm import activation
from kvbench_kernels.gemm.activation import Launch, quantize_activation, saturated_e4m3
from kvbench_kernels.gemm.blockwise import blocks, quantize_activation_torch, with_rows_behind
from kvbench_kernels.kv.convert import decode_e4m3
from kvbench_kernels.launches import record
from tests.kernels.cover import grid
from tests.kernels.offline import compiled

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Around the largest code: 464 is the tie between 448 and the first that does not exist, 480.
BOUNDARIES = (448.0, 449.0, 463.9, 464.0, 465.0, 480.0, 1000.0, -1000.0, 447.0, 432.0, 440.0, -448.0, 65504.0)

LAUNCHES = (Launch(8, 2, 4), Launch(4, 4, 2, 16), Launch(1, 2, 1), Launch(16, 1, 1, 16))


@triton.jit
def _encode(x, codes, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + i, saturated_e4m3(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def _decode(codes, x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, decode_e4m3(tl.load(codes + i)))


def encoded(x):
    """The bytes of float32 x, made by the kernel's own conversion."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _encode[(triton.cdiv(x.numel(), 4096),)](x, codes, x.numel(), BLOCK=4096)
    return codes


def elements(x):
    """The addresses of x's elements."""
    rows = torch.arange(x.shape[0])[:, None] * x.stride(0) + torch.arange(x.shape[1]) * x.stride(1)
    return (x.data_ptr() + rows * x.element_size()).view(-1)


def assert_encoded(x):
    """The bytes of float32 x are those of torch's cast, saturated; NaN is 0x7F, whatever sign torch gives it."""
    reference = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encoded(x), reference.masked_fill(x.isnan(), 0x7F))


def assert_same(x, launch=None):
    codes, scales = quantize_activation(x, launch=launch)
    expected, expected_scales = quantize_activation_torch(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.is_contiguous()
    assert scales.stride() == expected_scales.stride()
    assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))
    wrong = codes.view(torch.uint8) != expected.view(torch.uint8)
    first = wrong.nonzero()[0].tolist() if wrong.any() else None
    assert first is None, f"{int(wrong.sum())} bytes differ, first at {first}: {x[tuple(first)]}"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    grid(DTYPES, [(1, 128), (1, 16), (2, 192), (3, 576), (7, 128), (8, 256), (33, 192), (130, 320)]),
)
def test_random_rows(shape, dtype, device):
    m, k = shape
    torch.manual_seed(m)
    x = torch.randn(m, k, device=device) * torch.logspace(-3, 3, k, device=device)
    assert_same(x.to(dtype))


def test_more_rows_than_one_axis_of_a_launch_takes(device, monkeypatch):
    torch.manual_seed(0)
    # 10 programs of 8 rows on 3 x 4 places: two have no row.
    monkeypatch.setattr(activation, "AXIS", 3)
    assert_same(torch.randn(75, 192, device=device).bfloat16())


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("m", "k"), [(1, 512), (7, 192), (19, 400), (33, 1024)])
def test_every_kind_of_launch(launch, m, k, device):
    torch.manual_seed(m)
    whole = torch.full((m + 1, k + 128), torch.nan, device=device, dtype=torch.bfloat16)
    x = whole[:m, :k].copy_(torch.randn(m, k))
    assert_same(x, launch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="The interpreter's loads and stores are watched.")
@pytest.mark.parametrize("launch", [None, *LAUNCHES])
def test_nothing_outside_the_operands_is_touched(launch, monkeypatch):
    read = []
    written = []

    def watch(name, seen, mask_at):
        call = getattr(interpreter_builder, name)

        def watched(*arguments):
            addresses, mask = arguments[0].data, arguments[mask_at].data
            seen.append(torch.from_numpy(addresses[mask.astype(bool)].astype("int64").reshape(-1)))
            inside = seen is read or bool(torch.isin(seen[-1], allowed).all())
            assert inside, "a store outside codes and scales"
            return call(*arguments)

        monkeypatch.setattr(interpreter_builder, name, watched)

    m, k = 19, 272  # 3 blocks of columns; programs of one row stand on 3 x 7 places
    monkeypatch.setattr(activation, "AXIS", 3)
    x = torch.randn(m + 20, k + 128)[:m, :k]
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn)
    scales = torch.empty(blocks(k), 20)[:, :m].t()
    allowed = torch.cat((elements(codes), elements(scales)))
    monkeypatch.setattr(activation, "empty_activation_scales", lambda *_: scales)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: codes)
    watch("create_masked_load", read, 1)
    watch("create_masked_store", written, 2)
    quantize_activation(x, launch=launch)
    monkeypatch.undo()
    assert torch.equal(torch.cat(read).unique(), elements(x).unique())
    assert torch.equal(torch.cat(written).sort()[0], allowed.sort()[0])


@pytest.mark.parametrize("m", [0, 1])
def test_no_row_and_one(m, device):
    x = torch.ones(m, 192, dtype=torch.bfloat16, device=device)
    assert_same(x)
    with record() as launches:
        quantize_activation(x)
    assert [launch.name for launch in launches] == ["fp8_quantize_activation"] * m


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_in_memory_and_nothing_beside_them_is_read(dtype, device):
    torch.manual_seed(0)
    whole = torch.full((11, 400), torch.nan, dtype=dtype, device=device)
    x = whole[1:10, 16:208]
    x.copy_(torch.randn(9, 192, device=device))
    assert_same(x)
    one = whole[3].expand(4, 400)[:, 16:208]  # the same row four times: stride 0
    assert_same(one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_boundaries_under_a_scale_of_one(dtype, device):
    # A row whose largest magnitude is 448 has the scale 1, and a larger element has a row of its own.
    values = torch.tensor(BOUNDARIES, device=device)
    x = torch.zeros(len(values), 256, device=device)
    x[:, 5] = values
    x[:, 130] = 448.0
    x[:, 131:144] = values.clamp(-448.0, 448.0)
    assert_same(x.to(dtype))
    assert (quantize_activation(x.to(dtype))[1][:, 1] == 1.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_tiny_and_huge_rows(dtype, device):
    torch.manual_seed(0)
    largest = torch.finfo(dtype).max
    smallest = (
        2.0**-149 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    )
    rows = [torch.zeros(256), -torch.zeros(256), torch.full((256,), largest), torch.full((256,), smallest)]
    rows += [
        torch.randn(256) * 2.0**power
        for power in (-146, -140, -133, -126, -120, -110, -100, -70, -60, -51, -20, 15)
    ]
    rows += [torch.linspace(-1, 1, 256) * largest, torch.randint(-500, 500, (256,)) * smallest]
    assert_same(torch.stack(rows).to(device).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_becomes_nan_and_leaves_the_scale_alone(dtype, device):
    torch.manual_seed(0)
    x = torch.randn(6, 192, device=device)
    x[0, 3], x[1, 130], x[2, 7] = torch.inf, -torch.inf, torch.nan
    x[3], x[4, 128:] = torch.nan, torch.inf
    assert_same(x.to(dtype))
    codes, scales = quantize_activation(x.to(dtype))
    assert (codes.view(torch.uint8)[3] == 0x7F).all()
    assert scales.isfinite().all()


def test_ties_and_products_next_to_them(device):
    # Codes' midpoints times scales, and the float32 numbers around them: the product must round as float32
    # does.
    torch.manual_seed(0)
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (finite[1:] + finite[:-1]) / 2
    for power in (-125, -70, -60, -59, -20, 0, 60, 118):
        scale = (1 + torch.rand(16, 1)) * 2.0**power
        x = ties.expand(16, -1) * scale
        x = torch.cat((x, torch.nextafter(x, 2 * x), torch.nextafter(x, 0 * x)))
        x = torch.cat((x, 448.0 * scale.repeat(3, 1), -x[:, :1]), 1)
        assert_same(x.to(device))


def test_an_element_is_multiplied_by_the_rounded_reciprocal_of_its_scale(device):
    # The scale is 441/448 and 1/scale is rounded up: 8.3671875 / scale is the tie 8.5, which would go down to
    # 8.
    x = torch.zeros(1, 128, device=device)
    x[0, 0], x[0, 1] = 441.0, 8.3671875
    for codes, scales in (quantize_activation(x), quantize_activation_torch(x)):
        assert scales.item() == 0.984375
        assert codes.float()[0, :2].tolist() == [448.0, 9.0]


def test_every_largest_magnitude_of_bfloat16(device):
    step = 1 if device == "cuda" else 31  # the interpreter would take a minute
    bits = torch.arange(0, 0x7F80, step, dtype=torch.int32).to(torch.int16)
    largest = bits.view(torch.bfloat16)[:, None]
    torch.manual_seed(0)
    x = torch.cat((largest, (largest.float() * torch.rand(1, 15)).bfloat16()), 1).to(device)
    assert_same(x)


def test_every_fp16_value(device):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    small = values[values.abs() <= 448]
    small = torch.cat((small, small.new_zeros(-len(small) % 127))).view(-1, 127)
    x = torch.cat((small, torch.full_like(small[:, :1], 448.0)), 1).to(device)  # scale 1
    assert_same(x)
    assert_same(values.view(512, 128).to(device))
    assert_encoded(values.float().to(device))


def test_every_midpoint(device):
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(
        ((finite[1:] + finite[:-1]) / 2, torch.tensor([464.0, 480.0, 1e9, torch.inf, torch.nan]))
    )
    x = torch.cat(
        (ties, torch.nextafter(ties, 2 * ties), torch.nextafter(ties, 0 * ties), torch.tensor(BOUNDARIES))
    )
    x = torch.cat((x, -x)).to(device)
    assert_encoded(x)


def test_every_code_decodes_as_torch_does(device):
    codes = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    values = torch.empty(256, device=device)
    _decode[(1,)](codes.view(torch.int8), values, BLOCK=256)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(values.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(values[number].view(torch.int32), expected[number].view(torch.int32))
    # And back: every number has its own code.
    assert torch.equal(encoded(values)[number], codes[number])


def test_scales_may_have_a_place(device):
    """Columns of scales 40 apart where 37 rows are; what lies between them stays."""
    x = torch.randn(37, 320, device=device)
    room = torch.full((3, 40), 7.0, device=device)
    codes, scales = quantize_activation(x, scales=room[:, :37].t())
    due = quantize_activation(x)
    assert scales.data_ptr() == room.data_ptr()
    assert torch.equal(codes.view(torch.uint8), due[0].view(torch.uint8))
    assert torch.equal(scales, due[1])
    assert (room[:, 37:] == 7).all()
    for wrong in (room[:, :36].t(), room[:, :37].t().double(), torch.empty(37, 3, device=device)):
        with pytest.raises(ValueError, match=r"expected \[37, 3\] float32 with dense columns"):
            quantize_activation(x, scales=wrong)


def test_what_is_refused(device):
    with pytest.raises(ValueError, match=r"\[2, 3, 16\] torch.float32; it takes \[M, K\]"):
        quantize_activation(torch.zeros(2, 3, 16, device=device))
    with pytest.raises(ValueError, match=r"torch\.int8; it takes"):
        quantize_activation(torch.zeros(2, 16, dtype=torch.int8, device=device))
    with pytest.raises(ValueError, match="dense last axis"):
        quantize_activation(torch.zeros(16, 2, device=device).t())


@pytest.mark.slow
def test_few_instructions_move_the_bytes_and_nothing_is_spilled():
    facts = compiled("activation")
    assert len(facts) == 12
    for name, (instructions, stack) in facts.items():
        assert stack == 0, name
        assert "cvt.rn.satfinite.e4m3x2.f32" in instructions, name
        assert not [i for i in instructions if i.startswith("div")], name
        if not name.startswith("1 "):  # one row has 4 columns a thread
            assert "ld.global.v4.b32" in instructions, name
            assert {"st.global.v2.b32", "st.global.v4.b32"} & set(instructions), name  # 8 or 16 codes


@pytest.mark.parametrize(("m", "rows"), [(1, 128), (127, 128), (128, 128), (129, 256)])
def test_there_is_room_behind_the_rows(m, rows, device):
    """Products read whole tiles of them."""
    codes, scales = quantize_activation(torch.randn(m, 256, device=device))
    for x in (codes.view(torch.uint8), scales):
        behind = with_rows_behind(x)
        assert behind.shape == (rows, x.shape[1])
        assert torch.equal(behind[:m], x)
        assert behind.data_ptr() == x.data_ptr()
    without = torch.zeros(3, 16)
    assert with_rows_behind(without) is without
