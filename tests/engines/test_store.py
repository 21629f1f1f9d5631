"""The paged store: bytes, page arithmetic, sharing, and that nothing but a sequence's own slots is ever read."""

import math

import pytest
import torch

from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.engines.reference.kv.pages import StoreFull
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.errors import UsageError
from kvbench.formats.kv import KV_FORMATS, KVShape, StoredBytes, kv_bytes, pages_for
from kvbench_kernels.kv.layout import flat_offset
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize
from tests.factories.stores import (
    FORMATS,
    SHAPE,
    append,
    attend,
    content,
    filled,
    make,
    make_sized,
    outside,
    poison,
    state,
    tokens,
)

LENGTHS = [1, 15, 16, 17, 31, 32, 33]
WIDE_V = KVShape(kv_heads=2, head_dim=8, value_dim=12)


# What is stored


@pytest.mark.parametrize("shape", [SHAPE, WIDE_V], ids=["square", "wide_v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_read_gives_what_the_quantizer_makes_of_each_side(fmt, dtype, shape):
    store = make(fmt, shape=shape, dtype=dtype, fill="poison")
    k, v = (x.to(dtype) for x in tokens(33, shape))
    seq = store.add()
    append(store, seq, k[:20], v[:20])
    append(store, seq, k[20:], v[20:])
    got = store.read(1, store.tables([seq]), 33, dtype)
    for x, read, scale in zip((k * 2, v * 2), got, (0.03, 0.05), strict=True):
        given = torch.tensor([scale]) if KV_FORMATS[fmt].scale_kind == "static" else None
        result = QUANTIZE[fmt](x, given)
        expected = dequantize(result.codes, given if result.scales is None else result.scales, dtype)
        assert read.dtype == dtype
        assert torch.equal(read[0], expected.transpose(0, 1))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a08_t5_strided_views_store_the_bytes_of_their_copies(fmt):
    base = torch.randn(2, 3, 40, 20, generator=torch.Generator().manual_seed(5))
    k, v = base[0, :, 2:35, 4:12].transpose(0, 1), base[1].transpose(0, 1)[7:, :, ::2][:, :, :8]
    assert not k.is_contiguous()
    assert k.storage_offset() > 0
    views, copies = make(fmt), make(fmt)
    append(views, views.add(), k, v)
    append(copies, copies.add(), k.contiguous(), v.contiguous())
    assert state(views) == state(copies)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a03_t2_t3_zeros_are_stored_and_attended_to_as_exact_zeros(fmt):
    store = make(fmt, fill="poison")
    k, v = (x.clone() for x in tokens(17))
    k[3], v[3] = 0.0, 0.0
    row, no_v = store.add(), store.add()
    append(store, row, k, v)
    append(store, no_v, k, v * 0)
    assert content(store, row).isfinite().all()
    zeros = (content(store, row)[0, :, 3], attend(store, store.tables([no_v]), 17))
    assert [x.contiguous().view(torch.int32).count_nonzero() for x in zeros] == [0, 0]


# A01, A08, A09, A24: bytes of the live tensors


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [SHAPE, WIDE_V], ids=["square", "wide_v"])
def test_live_bytes_equal_the_formula_in_every_layer(fmt, shape):
    store = make(fmt, shape=shape, dtype=torch.bfloat16)
    for layer in range(2):
        assert store.live_bytes(layer) == kv_bytes(KV_FORMATS[fmt], shape, 12 * 16, "bfloat16")


@pytest.mark.parametrize(
    ("fmt", "layers", "heads", "dim", "slots", "payload", "scales"),
    [
        ("native", 22, 4, 64, 4096, 92_274_688, 0),  # TinyLlama 1.1B
        ("int8_sym", 22, 4, 64, 4096, 46_137_344, 1_441_792),  # 0.515625 of native, so 48.4375% are saved
        ("int8_static", 22, 4, 64, 4096, 46_137_344, 22 * 2 * 4),
        ("native", 22, 4, 64, 160, 3_604_480, 0),
        ("native", 30, 3, 64, 4096, 94_371_840, 0),  # SmolLM2-135M
        ("native", 24, 2, 64, 16, 16 * 12_288, 0),  # Qwen2.5-0.5B: bytes of a token count KV heads
        ("native", 36, 8, 128, 16, 16 * 147_456, 0),  # Qwen3-8B
        ("fp8_e4m3", 36, 8, 128, 16, 16 * 73_728, 16 * 2_304),
        ("int8_sym", 1, 8, 128, 16, 32_768, 512),  # a page
    ],
)
def test_a01_t2_a08_t1_a09_t3_a24_t1_a24_t3_bytes_of_models(fmt, layers, heads, dim, slots, payload, scales):
    store = make_sized(fmt, layers, KVShape(heads, dim, dim), slots)
    assert sum(store.live_bytes(i).payload for i in range(layers)) == payload
    assert sum(store.live_bytes(i).scales for i in range(layers)) == scales


def test_a01_t3_one_silently_native_layer_shows_in_bytes_dtype_and_reads():
    store = make("int8_sym", layers=22)
    store.layers[7] = allocate_layer(KV_FORMATS["native"], SHAPE, 16, 12, torch.float32, "cpu")
    expected = kv_bytes(KV_FORMATS["int8_sym"], SHAPE, 12 * 16, "float32")
    assert [i for i in range(22) if store.live_bytes(i) != expected] == [7]
    assert [i for i in range(22) if store.dtype(i) != torch.int8] == [7]
    seq = filled(store, 20)
    for layer in range(22):
        store.read(layer, store.tables([seq]), 20, torch.float32)
    assert store.reads == {"tokens": 22 * 20, "quantized_tokens": 21 * 20}


@pytest.mark.parametrize("fmt", FORMATS)
def test_reads_are_counted_for_each_row_of_the_batch(fmt):
    store = make(fmt)
    a, b = filled(store, 20), filled(store, 33, seed=1)
    store.read(0, store.tables([a, b]), 18, torch.float32)
    quantized = 36 if KV_FORMATS[fmt].quantized else 0
    assert store.reads == {"tokens": 36, "quantized_tokens": quantized}


def test_a24_t2_payload_scales_and_page_tables_are_apart():
    store = make("int8_sym", pages=20)
    assert store.page_table_bytes() == 0
    filled(store, 17)
    filled(store, 33)
    assert store.page_table_bytes() == 5 * 8
    assert store.live_bytes(0) == StoredBytes(payload=2 * 20 * 16 * 3 * 8, scales=2 * 20 * 16 * 3 * 2)
    small = make("int8_sym", pages=1)
    assert small.live_bytes(0).total == store.live_bytes(0).total // 20


# A02: static scales


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-60, 1e60])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("fmt", ["int8_static", "fp8_e4m3_static"])
def test_a02_t3_impossible_scales_are_refused(fmt, side, bad):
    pair = (0.05, bad) if side else (bad, 0.05)
    with pytest.raises(UsageError, match=rf"Static {'kv'[side]} scale .* of layer 1 cannot be used"):
        PagedKVStore(KV_FORMATS[fmt], [SHAPE] * 2, 16, 4, torch.float32, "cpu", [(0.05, 0.05), pair])


@pytest.mark.parametrize(
    ("fmt", "given", "said"),
    [
        *(
            ("int8_static", given, "each of the 2 layers")
            for given in (None, [(0.05, 0.05)], [(0.05, 0.05)] * 3)
        ),
        *((fmt, [(0.05, 0.05)] * 2, "takes no scale") for fmt in ("native", "int8_sym", "fp8_e4m3")),
    ],
)
def test_a02_t3_a_scale_that_is_missing_or_would_go_unused_is_refused(fmt, given, said):
    with pytest.raises(UsageError, match=said):
        PagedKVStore(KV_FORMATS[fmt], [SHAPE] * 2, 16, 4, torch.float32, "cpu", given)


@pytest.mark.parametrize("fmt", ["int8_static", "fp8_e4m3_static"])
def test_a02_t4_static_scales_outlive_everything_done_to_the_store(fmt):
    store = make(fmt)
    seq = filled(store, 20)
    child = store.fork(seq)
    store.truncate(child, 5)
    append(store, child, *tokens(30, seed=3))
    content(store, child)
    store.swap_out(seq)
    store.swap_in(seq)
    store.free(seq)
    for layer in store.layers:
        assert layer.k_scale is not None
        assert layer.v_scale is not None
        assert torch.equal(layer.k_scale, torch.tensor([0.03]))
        assert torch.equal(layer.v_scale, torch.tensor([0.05]))


# Health


def test_clips_are_counted_in_their_layer():
    store = make("int8_static")
    k, v = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)
    # K clips beyond 127 * 0.03, V beyond 127 * 0.05; layer 1 writes the double
    k[0, 0, 0], v[1, 2, :2] = 3.0, -5.0
    seq = store.add()
    append(store, seq, k, v)
    base = {"elements": 2 * 2 * 3 * 8, "nonfinite": 0, "overflow": 0}
    assert store.health() == [{"layer": 0, "clipped": 0, **base}, {"layer": 1, "clipped": 3, **base}]


@pytest.mark.parametrize("shape", [SHAPE, WIDE_V], ids=["square", "wide_v"])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if KV_FORMATS[f].quantized])
def test_a06_t3_nonfinite_values_are_counted_on_both_sides(fmt, shape):
    store = make(fmt, shape=shape)
    k, v = (x.clone() for x in tokens(3, shape))
    k[0, 0, 0], v[1, 1, 1], v[2, 1, 1] = math.nan, math.inf, -math.inf
    append(store, store.add(), k, v)
    assert [entry["nonfinite"] for entry in store.health()] == [3, 3]


def test_a04_t4_overflowing_rows_are_counted_and_no_infinite_scale_is_stored():
    store = make("int8_sym")
    k, v = (x.clone() for x in tokens(3))
    k[1, 2, 0], v[0, 0, 0] = 1e7, 5e6  # the second overflows only in layer 1, which writes the double
    append(store, store.add(), k, v)
    assert [entry["overflow"] for entry in store.health()] == [1, 2]
    assert all(
        s.isfinite().all() for layer in store.layers for s in (layer.k_scale, layer.v_scale) if s is not None
    )


# A07: pages


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)])
def test_a07_t1_page_arithmetic(length, pages):
    store = make("native")
    seq = filled(store, length)
    assert store.tables([seq]).shape == (1, pages) == (1, pages_for(length, 16))
    assert int(store.slots_for(seq, length - 1, 1)) % 16 == (length - 1) % 16
    assert len(store.table.free_pages) == 12 - pages


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t2_poison_outside_the_sequence_never_reaches_the_result(fmt, length):
    clean = make(fmt)
    seq = filled(clean, length)
    expected, expected_out = content(clean, seq), attend(clean, clean.tables([seq]), length)
    assert expected.isfinite().all()

    before = make(fmt, fill="poison")
    assert torch.equal(content(before, filled(before, length)), expected)

    after = make(fmt)
    seq = filled(after, length)
    poison(after, outside(after, seq))
    assert torch.equal(content(after, seq), expected)
    assert torch.equal(attend(after, after.tables([seq]), length), expected_out)


@pytest.mark.parametrize("extra", [11, -1])
@pytest.mark.parametrize("length", [16, 17])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t3_an_extra_table_column_changes_nothing(fmt, length, extra):
    store = make(fmt, fill="poison")
    seq = filled(store, length)
    table = store.tables([seq])
    wider = torch.cat((table, torch.full((1, 1), extra)), dim=1)
    assert torch.equal(attend(store, wider, length), attend(store, table, length))


@pytest.mark.parametrize("order", [[7, 0, 11, 3, 5, 1], [11, 10, 9, 8, 7, 6]])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t4_physical_page_order_does_not_matter(fmt, order):
    plain = make(fmt)
    expected = attend(plain, plain.tables([filled(plain, 33)]), 33)

    shuffled = make(fmt, fill="poison")
    shuffled.table.free_pages.clear()
    shuffled.table.free_pages.extend(order)
    seq = filled(shuffled, 33)
    assert shuffled.tables([seq]).tolist() == [order[:3]]
    assert torch.equal(attend(shuffled, shuffled.tables([seq]), 33), expected)

    other = filled(shuffled, 40, seed=4)  # the rest of the pages
    shuffled.free(seq)
    shuffled.free(other)
    shuffled.table.free_pages.rotate(2)
    again = filled(shuffled, 33)
    assert shuffled.tables([again]).tolist() != [order[:3]]
    assert torch.equal(attend(shuffled, shuffled.tables([again]), 33), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a07_t5_each_row_of_a_changing_batch_equals_its_solo_run(fmt):
    lengths = {1: 33, 2: 5, 3: 16, 4: 33, 5: 20}
    solo = {}
    for seed, length in lengths.items():
        alone = make(fmt)
        solo[seed] = attend(alone, alone.tables([filled(alone, length, seed)]), length)

    store = make(fmt, fill="poison")
    seqs = {seed: filled(store, lengths[seed], seed) for seed in (1, 2, 3, 4)}

    def check(present):
        table = store.tables([seqs[seed] for seed in present])
        for row, seed in enumerate(present):
            length = lengths[seed]
            used = pages_for(length, 16)
            assert (table[row, used:] == -1).all()
            assert torch.equal(attend(store, table[row : row + 1], length), solo[seed])
        same = [seed for seed in present if lengths[seed] == 33]
        together = attend(store, store.tables([seqs[seed] for seed in same]), 33)
        assert torch.equal(together, torch.cat([solo[seed] for seed in same]))

    check([1, 2, 3, 4])
    store.free(seqs.pop(2))
    store.free(seqs.pop(1))
    check([4, 3])
    seqs[5] = filled(store, lengths[5], 5)
    check([5, 4, 3])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_page_size_does_not_change_what_is_read(fmt, page_size):
    store, reference = make(fmt, page_size=page_size, pages=40, fill="poison"), make(fmt)
    assert torch.equal(content(store, filled(store, 33)), content(reference, filled(reference, 33)))


def test_reading_none_or_too_many_tokens_and_a_store_that_holds_nothing():
    store = make("native")
    for fmt in FORMATS:
        empty = make(fmt)
        k, v = empty.read(0, empty.tables([empty.add()]), 0, torch.float32)
        assert k.shape == v.shape == (1, 3, 0, 8)
    seq = filled(store, 16)
    with pytest.raises(ValueError, match="17 tokens need 2 pages; the page table has 1"):
        store.read(0, store.tables([seq]), 17, torch.float32)
    for pages, page_size in ((0, 16), (4, 0)):
        with pytest.raises(UsageError, match="holds nothing"):
            make("native", page_size=page_size, pages=pages)


# A08: where payload and scales lie (moving them: test_swap.py)


@pytest.mark.parametrize("fmt", ["int8_sym", "fp8_e4m3", "int8_static"])
def test_a08_t4_payload_and_scales_do_not_overlap(fmt):
    store = make(fmt)
    filled(store, 33)
    for name in ("k", "v", "k_scale", "v_scale"):
        before = state(store)
        for layer in store.layers:
            layer.tensors()[name].view(torch.uint8).fill_(0xAA)
        names = list(store.layers[0].tensors()) * 2
        changed = {n for n, old, new in zip(names, before, state(store), strict=True) if old != new}
        assert changed == {name}


# Sharing


@pytest.mark.parametrize("change", ["parent", "child"])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
@pytest.mark.parametrize("fmt", FORMATS)
def test_fork_shares_full_pages_and_copies_a_partial_one(fmt, length, change):
    store = make(fmt, fill="poison")
    parent = filled(store, length)
    before = content(store, parent)
    child = store.fork(parent)
    full = length // 16
    a, b = store.tables([parent])[0].tolist(), store.tables([child])[0].tolist()
    assert a[:full] == b[:full]
    assert not set(a[full:]) & set(b[full:])
    assert torch.equal(content(store, child), before)

    writer, other = (parent, child) if change == "parent" else (child, parent)
    append(store, writer, *tokens(5, seed=6))
    assert torch.equal(content(store, other), before)
    assert torch.equal(content(store, writer)[:, :, :length], before)
    store.free(writer)
    assert torch.equal(content(store, other), before)
    store.free(other)
    assert sorted(store.table.free_pages) == list(range(12))


@pytest.mark.parametrize("fmt", FORMATS)
def test_truncating_into_a_shared_page_copies_it_before_it_is_written(fmt):
    store = make(fmt, fill="poison")
    parent = filled(store, 32)
    child = store.fork(parent)
    before = content(store, parent)
    store.truncate(child, 20)
    assert store.tables([child])[0, 0] == store.tables([parent])[0, 0]
    assert store.tables([child])[0, 1] != store.tables([parent])[0, 1]
    append(store, child, *tokens(12, seed=7))
    assert torch.equal(content(store, parent), before)
    assert torch.equal(content(store, child)[:, :, :20], before[:, :, :20])
    page = int(store.tables([child])[0, 1])
    store.truncate(child, 17)  # its own page now: no further copy
    assert int(store.tables([child])[0, 1]) == page


def test_truncate_frees_whole_pages_and_reserved_ones():
    store = make("native")
    seq = filled(store, 33)
    store.reserve(seq, 40)
    assert len(store.table.free_pages) == 12 - 5
    for length, free in ((33, 9), (32, 10), (1, 11), (0, 12)):
        store.truncate(seq, length)
        assert (store.length(seq), len(store.table.free_pages)) == (length, free)
    for length in (-1, 1):
        with pytest.raises(ValueError, match="cannot be truncated"):
            store.truncate(seq, length)


def test_a_full_store_says_what_it_lacks_and_takes_nothing():
    store = make("int8_sym", pages=3)
    seq = filled(store, 20)
    before = store.tables([seq]).tolist()
    with pytest.raises(
        StoreFull, match=r"29 more tokens of sequence 0 needs 2 more page\(s\) of 16.* 1 of 3 are free"
    ):
        store.reserve(seq, 29)
    assert (store.tables([seq]).tolist(), store.length(seq)) == (before, 20)
    child = store.fork(seq)
    with pytest.raises(StoreFull, match="a fork of sequence 0"):
        store.fork(seq)
    assert store.sequences() == [seq, child]
    store.free(seq)
    store.free(child)
    assert sorted(store.table.free_pages) == [0, 1, 2]
    assert store.table.refs == [0, 0, 0]


@pytest.mark.parametrize("use", ["length", "fork", "free"])
def test_a_freed_sequence_is_gone(use):
    store = make("native")
    seq = filled(store, 3)
    store.free(seq)
    for call in (getattr(store, use), lambda seq: store.tables([seq])):
        with pytest.raises(KeyError, match=f"no sequence {seq}"):
            call(seq)
    assert store.add() != seq


def test_tokens_without_pages_have_no_slots_and_cannot_be_committed():
    store = make("native")
    seq = filled(store, 10)
    assert store.slots_for(seq, 8, 8).tolist() == list(range(8, 16))
    for start, n in ((8, 9), (-1, 2)):
        with pytest.raises(ValueError, match="have no slots"):
            store.slots_for(seq, start, n)
    with pytest.raises(ValueError, match="reserve them first"):
        store.commit(seq, 7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a12_t2_t3_offsets_and_slots_are_64_bit(dtype):
    offset = flat_offset(torch.tensor([131_072, 131_071], dtype=dtype), 16_384, torch.tensor([0, 16_383]))
    assert offset.dtype == torch.int64
    assert offset.tolist() == [2_147_483_648, 2_147_483_647]
    store = make("native")
    seq = store.add()
    store.reserve(seq, 16)
    store.table.pages(seq)[0] = 2**31 // 16
    assert store.slots_for(seq, 3, 1).tolist() == [2**31 + 3]
