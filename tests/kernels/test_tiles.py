"""The pieces of the attention kernels: offsets, conversions, products, and the precision that they claim."""

import pytest
import torch
import triton
import triton.language as tl

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.tiles import codes_to, execution, product
from kvbench_kernels.kv.convert import narrow, widen
from tests.kernels.offline import compiled


@triton.jit
def product_of(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.zeros([N, N], tl.float32)
    tl.store(out_ptr + at, product(tl.load(a_ptr + at), tl.load(b_ptr + at), acc))


@triton.jit
def codes_of(codes_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, codes_to(tl.load(codes_ptr + i), out_ptr.dtype.element_ty))


@triton.jit
def bfloat16_and_back(x_ptr, out_ptr, back_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    rounded = narrow(tl.load(x_ptr + i), tl.bfloat16)
    tl.store(out_ptr + i, rounded)
    tl.store(back_ptr + i, widen(rounded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a11_t1_products_of_small_integers_are_exact(dtype, device):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (16, 16), generator=generator) for _ in range(2))
    out = torch.empty(16, 16, device=device)
    product_of[(1,)](a.to(device, dtype), b.to(device, dtype), out, 16)
    assert torch.equal(out.cpu().long(), a @ b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a11_every_e4m3_code_has_its_value_and_nan_stays_nan(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    out = torch.empty(256, dtype=dtype, device=device)
    codes_of[(1,)](codes, out, 256)
    assert torch.equal(out.nan_to_num(nan=1e3), codes.float().nan_to_num(nan=1e3).to(dtype))


def test_a11_bfloat16_is_rounded_to_nearest_even_and_keeps_nan(device):
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(device) * 3.0
    x[:6] = torch.tensor([1.00390625, 1.01171875, float("nan"), float("inf"), -0.0, 3.4e38], device=device)
    out = torch.empty(256, dtype=torch.bfloat16, device=device)
    back = torch.empty(256, device=device)
    bfloat16_and_back[(1,)](x, out, back, 256)
    wanted = x.bfloat16()
    assert torch.equal(out.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
    assert torch.equal(back.nan_to_num(nan=7.0), wanted.float().nan_to_num(nan=7.0))


def test_execution_precision_by_format_and_dtype():
    assert execution(KV_FORMATS["native"], torch.bfloat16) == "bfloat16 x bfloat16 -> float32"
    assert execution(KV_FORMATS["int8_sym"], torch.bfloat16) == "float16 x float16 -> float32"
    assert execution(KV_FORMATS["fp8_e4m3_static"], torch.float16) == "float16 x float16 -> float32"
    assert execution(KV_FORMATS["fp8_e4m3"], torch.float32) == "float32 x float32 -> float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "fmt", "dtype", "products"),
    [
        ("decode", "native", "bfloat16", ["f32.bf16.bf16"]),
        ("decode", "int8_sym", "bfloat16", ["f32.f16.f16"]),
        ("decode", "fp8_e4m3", "float32", []),
        ("prefill", "fp8_e4m3", "float16", ["f32.f16.f16"]),
    ],
)
def test_the_instructions_are_what_execution_states(kernel, fmt, dtype, products):
    assert compiled("attention", kernel, fmt, dtype) == products
    stated = {"bfloat16": ["f32.bf16.bf16"], "float16": ["f32.f16.f16"], "float32": []}
    assert stated[execution(KV_FORMATS[fmt], getattr(torch, dtype)).split(" x ")[0]] == products


@pytest.mark.slow
@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_write_and_gather_compile_under_the_names_that_are_recorded(fmt):
    assert compiled("kv", fmt) == {f"kv_write_{fmt}": 0, f"kv_gather_{fmt}": 0}
