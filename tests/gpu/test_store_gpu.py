"""The same bytes on a GPU as on the CPU, and no address lost above 2^31 elements."""

import pytest
import torch

from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench_kernels.attention.reference import paged_attention_torch
from kvbench_kernels.gemm.blockwise import dequantize_blocks, quantize_activation_torch, quantize_blocks
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize

pytestmark = pytest.mark.gpu
QUANTIZED = [name for name, fmt in KV_FORMATS.items() if fmt.quantized]


def same_bytes(a, b):
    if a is None or b is None:
        return a is b
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def hard_rows(dtype):
    """Rows of every magnitude, with zeros, ties, subnormals and non-finite elements among them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 64, generator=generator) * 2.0 ** torch.randint(
        -40, 20, (4096, 1), generator=generator
    )
    x[0], x[1] = 0.0, 1e-42
    x[2, :32] = torch.arange(32) + 0.5
    x[3, 5], x[4, 6], x[5, 7] = torch.nan, torch.inf, -torch.inf
    x[6, 0] = 1e7
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_quantizers_give_the_same_bytes_on_the_gpu(fmt, dtype):
    x = hard_rows(dtype)
    scale = torch.tensor([0.05]) if KV_FORMATS[fmt].scale_kind == "static" else None
    cpu = QUANTIZE[fmt](x, scale)
    gpu = QUANTIZE[fmt](x.cuda(), None if scale is None else scale.cuda())
    assert same_bytes(cpu.codes, gpu.codes)
    assert same_bytes(cpu.scales, gpu.scales)
    for name in ("clipped", "nonfinite", "overflow"):
        assert getattr(cpu, name).item() == getattr(gpu, name).item()
    back = [
        dequantize(q.codes, q.scales if scale is None else scale.to(q.codes.device), dtype)
        for q in (cpu, gpu)
    ]
    # The payload of a NaN is free; everything else must agree in every bit.
    keep = ~back[0].isnan()
    assert torch.equal(keep, ~back[1].cpu().isnan())
    assert same_bytes(back[0][keep], back[1].cpu()[keep])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (100, 192), (256, 256)])
def test_blocks_have_the_same_bytes_on_the_gpu(n, k, dtype):
    torch.manual_seed(n)
    w = (torch.randn(n, k) * torch.logspace(-3, 2, k)).to(dtype)
    w[:, :5] = 0
    for quantize in (quantize_blocks, quantize_activation_torch):
        codes, scales = quantize(w)
        on_gpu = quantize(w.cuda())
        assert torch.equal(codes.view(torch.uint8), on_gpu[0].cpu().view(torch.uint8))
        assert torch.equal(scales, on_gpu[1].cpu())
    codes, scales = quantize_blocks(w)
    assert torch.equal(dequantize_blocks(codes, scales), dequantize_blocks(codes.cuda(), scales.cuda()).cpu())


def test_a12_t1_the_last_pages_of_a_pool_above_2_to_the_31_elements():
    shape, pages = KVShape(8, 128, 128), 131_200
    store = PagedKVStore(KV_FORMATS["int8_sym"], [shape], 16, pages, torch.bfloat16, "cuda")
    assert store.layers[0].k.numel() > 2**31
    k, v, q = (torch.randn(40, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 8, 32))
    outputs = []
    for first in (0, pages - 3):
        store.table.free_pages.clear()
        store.table.free_pages.extend(range(first, first + 3))
        seq = store.add()
        store.reserve(seq, 40)
        store.write(0, store.slots_for(seq, 0, 40), k, v)
        store.commit(seq, 40)
        assert store.tables([seq]).tolist() == [[first, first + 1, first + 2]]
        read_k, read_v = store.read(0, store.tables([seq]), 40, torch.bfloat16)
        outputs.append(paged_attention_torch(q[-1:, :, None], read_k, read_v, 128**-0.5, 39))
    assert outputs[0].abs().sum() > 0
    assert same_bytes(outputs[0], outputs[1])
