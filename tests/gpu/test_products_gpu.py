"""Products at the shapes of real models: exact values, the same bits in any launch order, no address lost."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kvbench.engines.reference.weights.linear import SkinnyLinear, replace_linears
from kvbench_kernels.gemm import skinny_config, w8a8_config
from kvbench_kernels.gemm.activation import quantize_activation
from kvbench_kernels.gemm.blockwise import dequantize_blocks, quantize_activation_torch, quantize_blocks
from kvbench_kernels.gemm.skinny_linear import skinny_linear, skinny_linear_many
from kvbench_kernels.gemm.w8a8 import w8a8, w8a8_torch
from kvbench_kernels.gemm.w8a16 import w8a16
from kvbench_kernels.launches import record
from tests.kernels.products import assert_near, assert_same_in_a_graph, made

pytestmark = pytest.mark.gpu
W8A8 = 4e-3  # errors of the tensor cores' sums are a small part of the outputs' size
SKINNY = {
    "qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "k": ((1024,), 4096), "down": ((4096,), 12288),
    "gate_up": ((12288, 12288), 4096), "lm_head": ((151936,), 4096), "small qkv": ((576, 192, 192), 576),
    "small gate_up": ((1536, 1536), 576), "small down": ((576,), 1536), "small lm_head": ((49152,), 576),
}  # fmt: skip
FP8 = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (960, 576), (576, 1536), (49152, 576)]
ODD = [(192, 576), (1000, 192), (1, 16)]
Few, Many = skinny_config.Tiling, w8a8_config.Tiling
TILINGS = [
    ("skinny", Few("vector", 4, 1024)),
    ("skinny", Few("vector", 4, 512, splits=3, warps=2)),
    ("skinny", Few("vector", 8, 512, stages=4)),
    ("skinny", Few("vector", 2, 4096)),
    ("skinny", Few("dot", 16, 256, warps=1, stages=4)),
    ("skinny", Few("dot", 64, 256, splits=4, stages=3)),
    ("skinny", Few("dot", 64, 128, splits=4, stages=4, swap=True)),
    ("skinny", Few("dot", 128, 128, stages=3, swap=True)),
    ("w8a16", Few("vector", 4, 1024)),
    ("w8a16", Few("vector", 8, 512, splits=3, warps=2)),
    ("w8a16", Few("vector", 8, 1024, stages=3)),
    ("w8a16", Few("dot", 16, 256, warps=1, stages=4)),
    ("w8a16", Few("dot", 32, 128, warps=2, stages=4, cvt=False)),
    ("w8a16", Few("dot", 64, 256, splits=4, stages=3)),
    ("w8a16", Few("dot", 256, 128, warps=8, stages=2)),
    ("w8a16", Few("dot", 64, 128, warps=2, stages=4, swap=True)),
    ("w8a16", Few("dot", 64, 128, splits=4, stages=4, swap=True)),
    ("w8a16", Few("dot", 64, 128, stages=4, swap=True, cvt=False)),
    ("w8a16", Few("dot", 128, 128, warps=8, stages=3, swap=True)),
    ("w8a16", Few("dot", 256, 128, warps=8, stages=2, swap=True)),
    ("w8a8", Many(128, 128, warps=8)),
    ("w8a8", Many(128, 256, warps=8, ctas=1)),
    ("w8a8", Many(64, 128, splits=4)),
    ("w8a8", Many(64, 128, splits=3, tma=False)),
    ("w8a8", Many(64, 64, stages=6, swap=True, prefetch=True)),
    ("w8a8", Many(32, 64, splits=3, swap=True, ctas=1, prefetch=True)),
]
ROWS = {"vector": (1, 2, 4), "skinny": (2, 16), "w8a16": (9, 16, 31, 33, 64), "w8a8": (50, 128)}


def weight(kind, n, k):
    """The weight's tensors, the exact product with it, and the share that assert_near allows."""
    w = made(n, k, scale=k**-0.5)
    if kind == "skinny":
        return (w,), lambda x: x.double() @ w.double().T, 1e-4
    pair = quantize_blocks(w)
    if kind == "w8a16":
        wide = dequantize_blocks(*pair).double()
        return pair, lambda x: x.double() @ wide.T, 1e-4
    return pair, lambda x: w8a8_torch(*quantize_activation_torch(x), *pair, None, torch.float32), W8A8


def multiply(kind, x, held, tiling=None):
    if kind == "skinny":
        return skinny_linear(x, *held, tiling=tiling)
    if kind == "w8a16":
        return w8a16(x, *held, tiling=tiling)
    return w8a8(*quantize_activation(x), *held, None, x.dtype, tiling)


@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize(("kind", "tiling"), TILINGS, ids=str)
def test_every_kind_of_tiling_and_its_bits_in_a_graph(kind, tiling, pdl):
    torch.manual_seed(0)
    tiling = replace(tiling, pdl=pdl)
    held, exact, share = weight(kind, 4096, 4096)
    for m in ROWS["vector" if getattr(tiling, "kind", "") == "vector" else kind]:
        x = made(m, 4096)
        first = assert_same_in_a_graph(lambda y: multiply(kind, y, held, tiling), x, 5, 12)
        assert_near(first, exact(x), share)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SKINNY)
def test_the_skinny_tiling_against_float64(shape, dtype):
    torch.manual_seed(0)
    ns, k = SKINNY[shape]
    weights = [made(n, k, scale=k**-0.5, dtype=dtype) for n in ns]
    biases = [made(n, dtype=dtype) for n in ns]
    for m in (1, 2, 3, 4, 5, 8, 15, 16):
        x = made(m, k, dtype=dtype)
        exact = [x.double() @ w.double().T for w in weights]
        held = [made(m, n).fill_(torch.nan) for n in ns]  # NaN in the memory of the next outputs
        del held
        for out, e in zip(skinny_linear_many(x, weights), exact, strict=True):
            assert_near(out, e)
        for out, e, b in zip(skinny_linear_many(x, weights, biases), exact, biases, strict=True):
            assert_near(out, e + b.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("n", "k"), FP8 + ODD)
def test_the_w8a16_tiling_against_float64(n, k, dtype):
    torch.manual_seed(0)
    (codes, scales), _, _ = weight("w8a16", n, k)
    bias = made(n, dtype=dtype)
    for m in (1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 33, 64, 128):
        room = torch.full((m + 2, k + 16), torch.nan, device="cuda", dtype=dtype)
        x = room[1:-1, :k].copy_(torch.randn(m, k, device="cuda"))
        exact = x.double() @ dequantize_blocks(codes, scales).double().T
        out = torch.full((m + 2, n), torch.nan, device="cuda", dtype=dtype)
        w8a16(x, codes, scales, out=out[1:-1])
        assert_near(out[1:-1], exact)
        assert out[[0, -1]].isnan().all()
        assert_near(w8a16(x, codes, scales, bias), exact + bias.double())
        for half in (torch.bfloat16, torch.float16) if m in (1, 16) else ():
            due = x.double() @ dequantize_blocks(codes, scales.to(half)).double().T
            assert_near(w8a16(x, codes, scales.to(half)), due)


@pytest.mark.parametrize(("n", "k"), FP8)
def test_the_w8a8_tiling_against_float32(n, k):
    torch.manual_seed(0)
    pair, _, _ = weight("w8a8", n, k)
    for m in (1, 9, 33, 64, 65, 127, 256, 1000, 2049):
        operands, bias = (*quantize_activation(made(m, k)), *pair), made(n)
        exact = w8a8_torch(*operands, None, torch.float32)
        assert_near(w8a8(*operands, None, torch.bfloat16), exact, W8A8)
        assert_near(w8a8(*operands, bias, torch.bfloat16), exact + bias.float(), W8A8)


@pytest.mark.parametrize(
    ("kind", "m", "tiling"),
    [
        *(("skinny", m, None) for m in (1, 16)), *(("w8a16", m, None) for m in (1, 16, 64)),
        *(("w8a8", 9, Many(64, 64, swap=True, tma=tma)) for tma in (True, False)),
        *(("w8a8", 4000, Many(128, 128, warps=8, tma=tma)) for tma in (True, False)),
    ],
)  # fmt: skip
def test_weights_and_outputs_above_2_to_the_31_elements(kind, m, tiling):
    n, k = 540_032, 4096
    last, exact, share = weight(kind, 128, k)
    zeros = torch.zeros(n, k * last[0].itemsize, dtype=torch.uint8, device="cuda")
    held = [zeros.view(last[0].dtype)]
    assert held[0].numel() > 2**31
    held[0].view(torch.uint8)[-128:] = last[0].view(torch.uint8)
    if kind != "skinny":
        held += [torch.ones(n // 128, k // 128, device="cuda")]
        held[1][-1:] = last[1]
    x = made(m, k)
    out = multiply(kind, x, held, tiling)
    assert_near(out[:, -128:], exact(x), share)
    assert not out[:, :-128].any()


def test_every_bf16_value_is_quantized_under_many_scales():
    values = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    torch.manual_seed(0)
    for power in (-126, -100, -61, -60, -59, -9, 0, 9, 100, 119):
        # One element of each 128 sets the scale; the rest is every smaller value.
        largest = 448.0 * 2.0**power * (1 + torch.rand(1 << 12, 1, device="cuda"))
        x = values[torch.randint(0, 2**16, (1 << 12, 127), device="cuda")].float()
        x = torch.cat((torch.where(x.abs() < largest, x, largest * torch.rand_like(x)), largest), 1)
        (codes, scales), (due, due_scales) = quantize_activation(x), quantize_activation_torch(x)
        assert torch.equal(scales, due_scales)
        assert torch.equal(codes.view(torch.uint8), due.view(torch.uint8))


def test_rows_above_2_to_the_31_elements_are_quantized():
    x = torch.zeros(180_000, 12288, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[-3:] = made(3, 12288)
    (codes, scales), (due, due_scales) = quantize_activation(x), quantize_activation_torch(x[-3:])
    assert torch.equal(codes.view(torch.uint8)[-3:], due.view(torch.uint8))
    assert torch.equal(scales[-3:], due_scales)
    assert not codes.view(torch.uint8)[:-3].any()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(576, 1536, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(1536, 576, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@torch.no_grad()
def test_a_model_with_its_linears_replaced_also_compiled() -> None:
    torch.manual_seed(0)
    model = Block().to("cuda", torch.bfloat16)
    few, many = made(4, 1, 576), made(1, 64, 576)
    before = [model(few), model(many)]
    assert replace_linears(model) == 3
    assert type(model.up_proj) is SkinnyLinear
    with record() as names:
        after = [model(few), model(many)]
    assert len(names) == 2  # gate and up in one, down; 64 rows stay with F.linear
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after[0], before[0], rtol=2e-2, atol=2e-2)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(few), after[0], rtol=2e-2, atol=2e-2)
    with record() as names:
        compiled(few)
    assert len(names) == 2
