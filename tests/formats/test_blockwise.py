"""FP8 block quantization in torch: the exact bytes, tails of dimensions, and which way a scale goes."""

import pytest
import torch

from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.formats.kv import WEIGHT_FORMATS, StoredBytes, weight_bytes
from kvbench_kernels.gemm.blockwise import (
    dequantize_blocks,
    fp8_dequantize_matmul_torch,
    quantize_blocks,
    scale_shape,
)


def raw(codes):
    return codes.view(torch.uint8)


def test_a03_t1_a_block_of_zeros_dequantizes_to_zeros():
    w = torch.zeros(256, 256)
    w[0, 0] = 1
    codes, scales = quantize_blocks(w)
    assert raw(codes)[0, 0].item() == 0x7E
    assert raw(codes).count_nonzero().item() == 1
    assert scales[0, 0].item() == torch.tensor(1 / 448).item()
    assert ((scales > 0) & scales.isfinite()).all()
    back = dequantize_blocks(codes, scales)
    assert back.isnan().sum().item() == 0
    assert torch.equal(back, w)


def one_block(*values):
    """Codes of `values` in a block whose largest magnitude is 448, so that its scale is 1."""
    codes, scales = quantize_blocks(torch.tensor([[448.0, *values]]))
    assert scales.tolist() == [[1.0]]
    return raw(codes)[0, 1:]


def test_a06_t1_a_block_saturates_and_never_holds_nan_and_t2_has_subnormals():
    assert one_block(2**-9, 1.5 * 2**-10, 2**-10, 0.00097).tolist() == [0x01, 0x01, 0x00, 0x00]
    assert one_block(448, -448, 447.9, 432, 431.9).tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x7D]
    # amax / (amax / 448) can come out a little above 448.
    draw = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0))
    for row in (draw * 2.0 ** torch.arange(-60, 68).repeat(32)[:, None])[::16]:
        codes, _ = quantize_blocks(row[None])
        assert raw(codes).tolist() == [[0x7E]]
    codes, _ = quantize_blocks(torch.tensor([[1000.0, 465.0], [-1000.0, 3e38]]))
    assert ((raw(codes) & 0x7F) != 0x7F).all()


@pytest.mark.parametrize(
    ("n", "k", "shape"),
    [(576, 2048, (5, 16)), (4544, 128, (36, 1)), (1000, 128, (8, 1)), (192, 192, (2, 2)), (100, 1, (1, 1))],
)
def test_a13_t1_a_tail_is_a_block_of_its_own(n, k, shape):
    assert scale_shape(n, k) == shape
    codes, scales = quantize_blocks(torch.ones(n, k))
    assert (tuple(codes.shape), tuple(scales.shape)) == ((n, k), shape)
    w = torch.ones(1, 192)  # 128 and 64 columns
    w[0, 127], w[0, 128] = 2.0, 4.0  # the last of the first block, the first of the second
    assert quantize_blocks(w)[1].mul(448).tolist() == [[2.0, 4.0]]


def test_a13_t2_1000_rows_in_8_blocks_are_not_125_each():
    codes = torch.ones(1000, 128).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.arange(8)[:, None]
    back = dequantize_blocks(codes, scales)
    assert back[:, 0].sum().item() == 29_568
    assert torch.equal(back[:, 0], back[:, 127])
    even = scales.repeat_interleave(125, 0)
    assert even.sum().item() == 31_875
    assert (back[:, :1] != even).nonzero()[0].tolist() == [125, 0]


def test_a13_t3_a_product_with_a_tail_is_dequantize_then_multiply():
    torch.manual_seed(0)
    whole = torch.full((640, 2176), 1e4)
    w = whole[:576, :2048]
    w.normal_()
    x, bias = torch.randn(1, 2048), torch.randn(576)
    codes, scales = quantize_blocks(w)
    got = fp8_dequantize_matmul_torch(x, codes, scales, bias)
    torch.testing.assert_close(got, x @ dequantize_blocks(codes, scales).T + bias)
    assert scales[-1, -1] == w[512:, 1920:].abs().max() / torch.tensor(448.0)  # of real elements only
    again = quantize_blocks(w.contiguous())  # without the 1e4 beyond
    assert torch.equal(raw(codes), raw(again[0]))
    assert torch.equal(scales, again[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a14_t1_a_scale_multiplies(dtype):
    codes = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5]], dtype=dtype)
    assert dequantize_blocks(codes, scales).item() == 1.0
    assert fp8_dequantize_matmul_torch(torch.ones(1, 1), codes, scales).item() == 1.0
    assert Fp8Linear(codes, scales, None)(torch.ones(1, 1)).item() == 1.0


def test_a14_t3_a_float32_scale_is_not_rounded_and_a_bfloat16_one_is_exact():
    codes, scales = quantize_blocks(torch.ones(1, 1))
    assert scales.item() == pytest.approx(0.0022321430, abs=5e-11)
    narrow = scales.bfloat16()
    assert narrow.item() == pytest.approx(0.0022277832, abs=5e-11)
    assert narrow.item() / scales.item() - 1 == pytest.approx(-0.00195, abs=5e-6)
    assert torch.tensor(0.01).bfloat16().item() == pytest.approx(0.0100097656, abs=5e-11)
    assert dequantize_blocks(codes, scales).item() == 1.0
    assert dequantize_blocks(codes, narrow).item() == 448 * narrow.item()


def test_weight_bytes_count_a_whole_scale_for_a_tail():
    native, fp8 = WEIGHT_FORMATS["native"], WEIGHT_FORMATS["fp8_block128"]
    assert weight_bytes(native, 576, 192, "bfloat16") == StoredBytes(576 * 192 * 2, 0)
    assert weight_bytes(fp8, 576, 192, "bfloat16") == StoredBytes(576 * 192, 5 * 2 * 4)
    assert weight_bytes(fp8, 576, 192, "bfloat16", "bfloat16").scales == 20
    assert weight_bytes(fp8, 1, 1, "float32").total == 5
    codes, scales = quantize_blocks(torch.ones(576, 192))
    live = [t.numel() * t.element_size() for t in (codes, scales)]
    assert live == [weight_bytes(fp8, 576, 192, "float32").payload, 40]


@pytest.mark.parametrize("shape", [(4, 16), (6, 16), (5, 15), (5, 17), (16, 5)])
def test_a13_t4_the_primitives_refuse_scales_of_another_shape(shape):
    codes = torch.zeros(576, 2048, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"\[5, 16\]"):
        dequantize_blocks(codes, torch.ones(shape))
    with pytest.raises(ValueError, match=r"\[5, 16\]"):
        fp8_dequantize_matmul_torch(torch.zeros(1, 2048), codes, torch.ones(shape))
