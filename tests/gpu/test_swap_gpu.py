"""A08 on a GPU: pages go to pinned memory and come back bit for bit, scales included, whole or not at all."""

import pytest
import torch

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv import swap
from kvbench.engines.reference.kv.pages import SWAPPED
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.engines.reference.load import load_model
from kvbench.errors import Refused
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Request, resolve

pytestmark = pytest.mark.gpu
FORMATS = list(KV_FORMATS)
SHAPE = KVShape(8, 128, 128)
# One page of one layer: payload, and scales of its own.
PAGE = {
    "native": 65_536,
    "int8_sym": 33_280,
    "int8_static": 32_768,
    "fp8_e4m3": 33_792,
    "fp8_e4m3_static": 32_768,
}


def make(fmt, layers=2, pages=12):
    scale = [(0.03, 0.05)] * layers if KV_FORMATS[fmt].scale_kind == "static" else None
    return PagedKVStore(KV_FORMATS[fmt], [SHAPE] * layers, 16, pages, torch.bfloat16, "cuda", scale)


def filled(store, n, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    seq = store.add()
    store.reserve(seq, n)
    slots = store.slots_for(seq, 0, n)
    for layer in range(len(store.layers)):
        k, v = (
            torch.randn(n, 8, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in "kv"
        )
        store.write(layer, slots, k, v)
    store.commit(seq, n)
    return seq


def stored(store, seq):
    pages = store.table.pages(seq)
    return [t.view(torch.uint8)[pages] for layer in store.layers for t in layer.paged().values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def overwrite(store):
    for layer in store.layers:
        for tensor in layer.paged().values():
            tensor.view(torch.uint8).fill_(0x7F)


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (16, 1), (17, 2), (33, 3)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a08_t1_bytes_of_a_swap_and_pinned_buffers_gpu(fmt, length, pages):
    store = make(fmt)
    seq = filled(store, length)
    assert store.swap_out(seq).layer_bytes == (PAGE[fmt] * pages,) * 2
    for layer in store.on_host(seq).layers:
        assert all(t.device.type == "cpu" for t in layer.values())
    assert store.on_host(seq).pinned
    assert store.swap_in(seq).layer_bytes == (PAGE[fmt] * pages,) * 2


@pytest.mark.parametrize("staging", [1, 100_000, swap.STAGING_BYTES])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a08_t2_swapped_pages_come_back_bit_for_bit_gpu(fmt, staging, monkeypatch):
    monkeypatch.setattr(swap, "STAGING_BYTES", staging)
    store = make(fmt)
    seq, before = filled(store, 100), store.table.pages(0)
    raw = stored(store, seq)
    store.swap_out(seq)
    overwrite(store)
    other = filled(store, 20, seed=1)
    neighbour = stored(store, other)
    store.swap_in(seq)
    assert store.table.pages(seq) != before
    assert same(stored(store, seq), raw)
    assert same(stored(store, other), neighbour)


@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
@pytest.mark.parametrize("fmt", ["int8_sym", "fp8_e4m3"])
def test_a08_t4_payload_and_scales_do_not_overlap_gpu(fmt, name):
    store = make(fmt)
    seq = filled(store, 33)
    raw = stored(store, seq)
    store.swap_out(seq)
    for layer in store.on_host(seq).layers:
        layer[name].view(torch.uint8).fill_(0xAA)
    store.swap_in(seq)
    names = list(store.layers[0].paged()) * 2
    changed = {n for n, a, b in zip(names, raw, stored(store, seq), strict=True) if not torch.equal(a, b)}
    assert changed == {name}


@pytest.mark.parametrize("fmt", ["int8_sym", "fp8_e4m3", "int8_static"])
def test_a08_t4_live_payload_and_scales_do_not_overlap_gpu(fmt):
    """Each region of each layer is filled in turn where it lies on the device, all its pages."""
    store = make(fmt)
    filled(store, 33)
    regions = {(i, n): t for i, layer in enumerate(store.layers) for n, t in layer.tensors().items()}
    assert {name for _, name in regions} == {"k", "v", "k_scale", "v_scale"}
    for name, region in regions.items():
        before = {n: t.view(torch.uint8).clone() for n, t in regions.items()}
        region.view(torch.uint8).fill_(0xAA)
        changed = {n for n, t in regions.items() if not torch.equal(t.view(torch.uint8), before[n])}
        assert changed == {name}


def test_a_device_allocation_that_fails_leaves_the_sequence_swapped_gpu(monkeypatch):
    store = make("int8_sym")
    seq = filled(store, 33)
    raw = stored(store, seq)
    store.swap_out(seq)
    honest = swap._parts

    def broken(host, pages):
        if host.dtype == torch.float16:
            torch.empty(2**50, device="cuda")
        return honest(host, pages)

    with monkeypatch.context() as patched:
        patched.setattr(swap, "_parts", broken)
        with pytest.raises(torch.OutOfMemoryError):
            store.swap_in(seq)
    assert (store.state(seq), len(store.table.free_pages)) == (SWAPPED, 12)
    store.swap_in(seq)
    assert same(stored(store, seq), raw)


def test_swapping_out_gives_memory_to_others_while_the_device_copy_is_bounded_gpu():
    """The staging beside a swap is STAGING_BYTES and what one copy of it needs, however large the sequence
    is.
    """
    store = make("native", layers=1, pages=4096)  # 128 MiB a side
    seq = filled(store, 4096 * 16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    store.swap_out(seq)
    store.swap_in(seq)
    assert torch.cuda.max_memory_allocated() - before <= 3 * swap.STAGING_BYTES


def test_a_store_that_does_not_fit_is_refused_before_it_is_allocated_gpu():
    loaded = load_model({**CELL_KEYS, "model": "tiny-llama"}, "cuda", "bfloat16")
    decision = resolve(Request("int8_sym", "native", "torch", "refuse"), loaded.facts)
    before = torch.cuda.memory_allocated()
    spec = {**CELL_KEYS, "model": "tiny-llama", "kv_format": "int8_sym"}
    with pytest.raises(Refused, match="does not fit") as caught:
        Engine(loaded, decision, spec, sequences=4, tokens=10**9)
    assert caught.value.reason == "kv_does_not_fit"
    assert torch.cuda.memory_allocated() == before
