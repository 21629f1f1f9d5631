"""Swapping pages to the host and back: exact bytes, bit for bit, whole or not at all, and nothing used in between."""

import pytest
import torch

from kvbench.engines.reference.kv import store as store_module
from kvbench.engines.reference.kv import swap
from kvbench.engines.reference.kv.pages import RESIDENT, SWAPPED, StoreFull
from kvbench.errors import KvbenchError
from kvbench.formats.kv import KV_FORMATS, KVShape, pages_for
from tests.factories.stores import FORMATS, append, attend, content, filled, make, make_sized, tokens

LENGTHS = [1, 16, 17, 33]
PRECISIONS = {
    "native": "float32",
    "int8_sym": "int8 + float16 scales",
    "int8_static": "int8",
    "fp8_e4m3": "float8_e4m3fn + float32 scales",
    "fp8_e4m3_static": "float8_e4m3fn",
}


def overwrite(store, byte=0x7F):
    for layer in store.layers:
        for tensor in layer.paged().values():
            tensor.view(torch.uint8).fill_(byte)


def stored(store, seq):
    """The raw bytes of a sequence's pages in their order, tensor by tensor: slots beyond its length included."""
    used = store.table.pages(seq)[: pages_for(store.length(seq), store.page_size)]
    return [
        t.view(torch.uint8)[used].numpy().tobytes() for layer in store.layers for t in layer.paged().values()
    ]


def snapshot(store):
    """All that a failed swap must leave as it was; which free page is taken next does not matter."""
    table, seqs = store.table, store.sequences()
    resident = [seq for seq in seqs if store.state(seq) == RESIDENT]
    return (
        [(seq, store.state(seq), store.length(seq)) for seq in seqs],
        {seq: (list(table.pages(seq)), stored(store, seq)) for seq in resident},
        sorted(table.free_pages),
        list(table.refs),
        sorted(store._host),
        len(store.transfers),
    )


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a08_t1_a_swap_moves_33280_bytes_a_page_and_layer(length, pages):
    shape = KVShape(8, 128, 128)
    for fmt, page in (
        ("int8_sym", 33_280),
        ("native", 65_536),
        ("int8_static", 32_768),
        ("fp8_e4m3", 33_792),
    ):
        store = make_sized(fmt, layers=2, shape=shape, slots=16 * 5)
        seq = filled(store, length)
        store.reserve(seq, 20)  # a page that holds no token is not moved
        out = store.swap_out(seq)
        back = store.swap_in(seq)
        assert (out.way, out.layer_bytes, out.bytes) == ("out", (page * pages,) * 2, 2 * page * pages)
        assert (back.way, back.layer_bytes) == ("in", out.layer_bytes)
        assert store.transfers == [out, back]
        assert len(store.table.pages(seq)) == pages


@pytest.mark.parametrize("staging", [1, swap.STAGING_BYTES], ids=["page_by_page", "at_once"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a08_t2_swapped_pages_come_back_bit_for_bit(fmt, length, staging, monkeypatch):
    monkeypatch.setattr(swap, "STAGING_BYTES", staging)
    store = make(fmt)
    seq = filled(store, length)
    expected, raw, pages = attend(store, store.tables([seq]), length), stored(store, seq), store.tables([seq])
    store.swap_out(seq)
    assert (store.state(seq), store.length(seq)) == (SWAPPED, length)
    assert sorted(store.table.free_pages) == list(range(12))
    overwrite(store)
    filled(store, 5, seed=8)  # takes a page, so that the sequence comes back to other ones
    store.swap_in(seq)
    assert store.state(seq) == RESIDENT
    assert store.tables([seq]).tolist() != pages.tolist()
    assert stored(store, seq) == raw
    assert torch.equal(attend(store, store.tables([seq]), length), expected)
    before = content(store, seq)
    append(store, seq, *tokens(7, seed=3))  # it grows like any other
    assert torch.equal(content(store, seq)[:, :, :length], before)
    assert store.transfers[-1].precision == PRECISIONS[fmt]


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_pages_of_any_size_are_swapped(fmt, page_size):
    """Rows of 3 heads, 3 tokens and 5 elements are no multiple of any wider integer."""
    store = make(fmt, shape=KVShape(3, 5, 7), page_size=page_size, pages=40)
    seq = filled(store, 17)
    raw = stored(store, seq)
    store.swap_out(seq)
    overwrite(store)
    store.swap_in(seq)
    assert stored(store, seq) == raw


@pytest.mark.parametrize("fmt", FORMATS)
def test_a08_t3_truncation_cuts_the_scales_that_are_swapped(fmt):
    store = make(fmt)
    seq = filled(store, 40)
    store.truncate(seq, 17)
    raw, read = stored(store, seq), content(store, seq)
    store.swap_out(seq)
    dynamic = {"k_scale", "v_scale"} if KV_FORMATS[fmt].scale_kind == "dynamic" else set()
    for layer in store.on_host(seq).layers:
        assert set(layer) == {"k", "v"} | dynamic
        assert {len(tensor) for tensor in layer.values()} == {2}
    overwrite(store)
    store.swap_in(seq)
    assert (store.length(seq), len(store.table.free_pages)) == (17, 10)
    assert stored(store, seq) == raw
    assert torch.equal(content(store, seq), read)


@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
@pytest.mark.parametrize("fmt", ["int8_sym", "fp8_e4m3"])
def test_a08_t4_host_buffers_of_payload_and_scales_do_not_overlap(fmt, name):
    store = make(fmt)
    seq = filled(store, 33)
    raw = stored(store, seq)
    store.swap_out(seq)
    for layer in store.on_host(seq).layers:
        layer[name].view(torch.uint8).fill_(0xAA)
    store.swap_in(seq)
    names = list(store.layers[0].paged()) * 2
    changed = {n for n, old, new in zip(names, raw, stored(store, seq), strict=True) if old != new}
    assert changed == {name}


# The state machine


USES = {
    "append": lambda store, seq: store.reserve(seq, 1),
    "commit": lambda store, seq: store.commit(seq, 0),
    "fork": lambda store, seq: store.fork(seq),
    "truncate": lambda store, seq: store.truncate(seq, 3),
    "tables": lambda store, seq: store.tables([seq]),
    "slots": lambda store, seq: store.slots_for(seq, 0, 1),
    "swap_out": lambda store, seq: store.swap_out(seq),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_a_swapped_sequence_cannot_be_used(use):
    store = make("int8_sym")
    seq = filled(store, 17)
    filled(store, 20, seed=4)
    store.swap_out(seq)
    before = snapshot(store)
    with pytest.raises(KvbenchError, match=rf"Sequence {seq} is swapped out: .* Swap it in first\."):
        use(store, seq)
    assert snapshot(store) == before


def test_swapped_pages_are_not_freed_but_discarded_on_purpose():
    store = make("int8_sym")
    seq, other = filled(store, 17), filled(store, 20, seed=4)
    store.swap_out(seq)
    before = snapshot(store)
    with pytest.raises(KvbenchError, match="Refusing to free swapped pages: sequence 0 has its 17 tokens"):
        store.free(seq)
    assert snapshot(store) == before
    store.discard_swapped(seq)
    assert (store.sequences(), store._host) == ([other], {})
    for gone in (store.state, store.length, store.free, store.swap_in, store.discard_swapped):
        with pytest.raises(KeyError, match=f"no sequence {seq}"):
            gone(seq)


@pytest.mark.parametrize("name", ["swap_in", "discard_swapped", "on_host"])
def test_a_resident_sequence_has_nothing_to_bring_back_or_discard(name):
    store = make("int8_sym")
    seq = filled(store, 17)
    before = snapshot(store)
    with pytest.raises(KvbenchError, match=f"Sequence {seq} is resident"):
        getattr(store, name)(seq)
    assert snapshot(store) == before


def test_a_sequence_without_tokens_is_swapped_like_any_other():
    store = make("int8_sym")
    seq = store.add()
    store.reserve(seq, 3)
    assert store.swap_out(seq).layer_bytes == (0, 0)
    assert len(store.table.free_pages) == 12
    assert store.swap_in(seq).layer_bytes == (0, 0)
    append(store, seq, *tokens(3))
    assert store.length(seq) == 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_pages_that_another_sequence_holds_stay_with_it(fmt):
    store = make(fmt)
    parent = filled(store, 40)
    child = store.fork(parent)  # shares two pages, has a copy of the third
    raw, shared = stored(store, parent), store.table.pages(child)[:2]
    assert store.swap_out(child).layer_bytes == tuple(len(b"".join(part)) for part in halves(raw))
    assert stored(store, parent) == raw
    assert [store.table.refs[page] for page in shared] == [1, 1]
    assert len(store.table.free_pages) == 12 - 3
    store.swap_in(child)  # into pages of its own
    assert not set(store.table.pages(child)) & set(store.table.pages(parent))
    assert stored(store, child) == stored(store, parent) == raw
    store.free(parent)
    assert stored(store, child) == raw


def halves(raw):
    """The tensors of the first and of the second of two layers."""
    return raw[: len(raw) // 2], raw[len(raw) // 2 :]


# Whole or not at all


@pytest.mark.parametrize("fmt", ["native", "int8_sym"])
def test_a_store_that_is_full_takes_nothing_back(fmt):
    store = make(fmt, pages=4)
    seq = filled(store, 40)
    raw = stored(store, seq)
    store.swap_out(seq)
    other = filled(store, 20, seed=2)
    before = snapshot(store)
    with pytest.raises(StoreFull, match=r"swapping in sequence 0 needs 3 more page\(s\).* 2 of 4 are free"):
        store.swap_in(seq)
    assert snapshot(store) == before
    store.free(other)
    overwrite(store)
    store.swap_in(seq)
    assert stored(store, seq) == raw


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_copy_that_fails_half_way_changes_nothing(error, monkeypatch):
    store = make("int8_sym")
    seq = filled(store, 33)
    filled(store, 20, seed=2)
    raw = stored(store, seq)

    def fails(swap_one):
        before, parts, honest = snapshot(store), 0, swap._parts

        def broken(*arguments):
            nonlocal parts
            parts += 1
            if parts == 6:  # of 2 layers of 4 tensors
                raise error
            return honest(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(swap, "_parts", broken)
            with pytest.raises(error):
                swap_one(seq)
        assert parts == 6
        assert snapshot(store) == before

    fails(store.swap_out)
    store.swap_out(seq)
    overwrite(store)
    fails(store.swap_in)
    store.swap_in(seq)
    assert stored(store, seq) == raw


def test_the_precision_of_a_transfer_is_that_of_the_buffers(monkeypatch):
    """A swap that widens its payload says so, whatever the store's format is."""
    store = make("int8_sym")
    seq = filled(store, 17)

    def widened(layers, pages):
        host = swap.copy_out(layers, pages)
        return swap.HostPages(tuple({n: t.half() for n, t in layer.items()} for layer in host.layers))

    monkeypatch.setattr(store_module, "copy_out", widened)
    out = store.swap_out(seq)
    assert out.precision == "float16 + float16 scales"
    assert out.layer_bytes == (2 * (2 * 2 * 3 * 16 * 8 + 2 * 2 * 3 * 16),) * 2
