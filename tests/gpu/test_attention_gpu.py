"""Paged decode and prefill compiled on a GPU: shapes that an interpreter takes too long for, precision,
addresses.
"""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.decode import paged_decode
from kvbench_kernels.attention.prefill import paged_prefill
from kvbench_kernels.attention.reference import paged_decode_torch, paged_prefill_torch
from kvbench_kernels.attention.tiles import execution
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.launches import record
from tests.kernels.kv_pool import DTYPES, FORMATS, Pool, assert_close, make_pool, queries, random_pool

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _float32_twin():
    """The twin's attention by plain float32 matrix products, not by a fused kernel with other rounding."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def decoded(pool, q, splits, twin=False, **options):
    function = paged_decode_torch if twin else paged_decode
    return function(pool.cache, q, pool.table, pool.lengths, q.shape[-1] ** -0.5, splits=splits, **options)


def prefilled(pool, q, new, twin=False, **options):
    function = paged_prefill_torch if twin else paged_prefill
    starts = torch.tensor([0, *new], device=DEVICE).cumsum(0).to(torch.int32)
    where = (pool.table, pool.lengths, starts, max(new), q.shape[-1] ** -0.5)
    return function(pool.cache, q, *where, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_and_prefill_equal_their_twins(fmt, head_dim, dtype):
    lengths = (1, 16, 333, 2048)
    pool = random_pool(fmt, dtype, lengths, DEVICE, kv_heads=2, head_dim=head_dim, value_dim=head_dim)
    q = queries(4, 8, head_dim, dtype=dtype, device=DEVICE)
    for splits in (1, 7):
        assert_close(decoded(pool, q, splits), decoded(pool, q, splits, twin=True))
    new = [1, 16, 200, 130]
    q = queries(sum(new), 8, head_dim, dtype=dtype, device=DEVICE)
    assert_close(prefilled(pool, q, new), prefilled(pool, q, new, twin=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_instructions_are_what_execution_says_and_nothing_spills(fmt, dtype):
    pool = random_pool(fmt, dtype, (300,), DEVICE, kv_heads=2, head_dim=128, value_dim=128)
    with record() as launches:
        decoded(pool, queries(1, 8, 128, dtype=dtype, device=DEVICE), 2)
        prefilled(pool, queries(100, 8, 128, dtype=dtype, device=DEVICE), [100])
    wanted = {"float16": "f32.f16.f16", "bfloat16": "f32.bf16.bf16"}.get(
        execution(KV_FORMATS[fmt], dtype).split(" x ")[0]
    )
    for launch in launches:
        products = set(
            re.findall(r"m\d+n\d+k\d+\.(?:row\.col\.)?(f32\.\w+\.\w+)", launch.compiled.asm["ptx"])
        )
        combines = launch.name == "paged_decode_combine"
        assert products == (set() if combines or wanted is None else {wanted})
        # float32 is there to be exact, not fast: it may spill a register or two.
        assert launch.compiled.n_spills == 0 or dtype == torch.float32


@pytest.mark.parametrize("kernel", [decoded, prefilled])
def test_a11_t4_float32_keeps_what_tf32_drops(kernel):
    """4096 equal weights: the mean is 1 + 2^-12 in float32 and exactly 1 in TF32, which has 10 bits of
    mantissa.
    """
    keys = [torch.zeros(1, 4096, 64, device=DEVICE)]
    values = [torch.full((1, 4096, 64), 1 + 2.0**-12, device=DEVICE)]
    q = queries(1, 1, 64, dtype=torch.float32, device=DEVICE)
    out = kernel(make_pool("native", keys, values), q, 1 if kernel is decoded else [1])
    assert (out - (1 + 2.0**-12)).abs().max() < 1e-6


def test_a11_t4_float32_logits_are_not_tf32():
    """Two keys that differ by 2^-12 in each element, which TF32 rounds away."""
    keys = [torch.ones(1, 2, 64, device=DEVICE)]
    keys[0][:, 1] += 2.0**-12
    values = [torch.tensor([0.0, 1.0], device=DEVICE).view(1, 2, 1).expand(1, 2, 64)]
    q = torch.full((1, 1, 64), 8.0, device=DEVICE)
    pool = make_pool("native", keys, values)
    out = paged_decode(pool.cache, q, pool.table, pool.lengths, 1.0, splits=1)
    wanted = torch.sigmoid(torch.tensor(64 * 8.0 * 2.0**-12, dtype=torch.float64)).item()
    assert (out.double() - wanted).abs().max() < 1e-4  # with TF32: 0.5, which is 0.03 away


def test_a12_t1_the_last_pages_of_a_pool_above_2_to_the_31_elements_are_attended():
    """131,200 INT8 pages of 16 tokens, 8 heads of 128: 2.15 GB of K, and of V."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    pages, used = 131_200, 8
    small = random_pool(
        "int8_sym", torch.bfloat16, (used * 16,), DEVICE, kv_heads=8, head_dim=128, value_dim=128
    )
    q = queries(1, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    prompt = queries(100, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    wanted = decoded(small, q, 2), prefilled(small, prompt, [100])
    big = []
    for codes in (small.cache.k, small.cache.v):
        pool = torch.full((pages, *codes.shape[1:]), 77, dtype=torch.int8, device=DEVICE)
        pool[-used:] = codes[small.table[0, :used].long()]
        big.append(pool)
    assert big[0].numel() > 2**31
    for scale in (small.cache.k_scale, small.cache.v_scale):
        assert scale is not None
        pool = torch.full((pages, *scale.shape[1:]), torch.nan, dtype=scale.dtype, device=DEVICE)
        pool[-used:] = scale[small.table[0, :used].long()]
        big.append(pool)
    table = torch.arange(pages - used, pages, dtype=torch.int32, device=DEVICE)[None]
    moved = Pool(LayerPages(small.cache.fmt, *big), table, small.lengths)
    assert torch.equal(decoded(moved, q, 2), wanted[0])
    assert torch.equal(prefilled(moved, prompt, [100]), wanted[1])


def test_a_captured_decode_follows_lengths_tables_and_scales():
    """Nothing in the wrapper waits for the device, and everything that changes from step to step is read
    there.
    """
    pool = random_pool("int8_static", torch.bfloat16, (300, 40), DEVICE)
    q = queries(2, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    reads = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    decoded(pool, q, 4, reads=reads)  # compiled before the capture
    reads.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoded(pool, q, 4, reads=reads)
    graph.replay()
    first = out.clone()
    assert torch.equal(first, decoded(pool, q, 4))
    pool.lengths.copy_(torch.tensor([77, 0]))
    pool.table.copy_(pool.table.flip(0))
    assert pool.cache.v_scale is not None
    pool.cache.v_scale.mul_(2)
    graph.replay()
    assert torch.equal(out, decoded(pool, q, 4))
    assert not torch.equal(out, first)
    assert reads.tolist() == [340 + 77, 340 + 77]
