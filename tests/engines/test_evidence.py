"""Evidence: what a sound engine shows, and what each injected fault is called."""

from types import SimpleNamespace

import pytest
import torch

from kvbench.engines.reference import attention
from kvbench.engines.reference import engine as core
from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.evidence import attention_values as probes
from kvbench.evidence import examine as evidence
from kvbench.evidence import layer_reads as layerprobe
from kvbench.evidence import probe_values as probecodes
from kvbench.evidence import stored_kv
from kvbench.evidence.native_arm import native_arm, rank
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench.records.record import MISMATCH, UNVERIFIED, VERIFIED, Evidence, Level
from kvbench_kernels.attention.reference import paged_gather_torch
from kvbench_kernels.launches import launched

FORMATS = list(KV_FORMATS)
LAYERS = 4  # of tiny-llama


def take(engine, kv_format="int8_sym", spoil=None, model="tiny-llama", **keys):
    """Measure a little on a fresh engine and take its evidence. `spoil(engine)` breaks every engine that is made."""

    def make(sequences, tokens):
        made = engine(model, kv_format, sequences=sequences, tokens=tokens, **keys)
        if spoil:
            spoil(made)
        return made

    probe = layerprobe.probe_layers(make, len(make(1, 16).layers), 16)
    used = make(2, 48)
    used.prefill(used.add(), list(range(40)))
    return evidence.examine(used, probe, reads_expected=True)


def level(found, name):
    return next(x for x in found.levels if x.name == name)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_sound_engine_is_verified_at_every_level(engine, kv_format):
    found = take(engine, kv_format)
    assert found.state == VERIFIED
    assert found.effective == kv_format
    assert [x.name for x in found.levels] == [
        "E1", "E2", "E3", "E3-layers", "E3-reads", "E4", "E1-weights", "E4-weights"]  # fmt: skip
    assert (found.reads["quantized_tokens"] > 0) == KV_FORMATS[kv_format].quantized


def test_a11_t3_e4_says_that_torch_attended(engine):
    facts = level(take(engine), "E4").facts
    assert facts["backend"] == "torch"
    assert facts["decode"] == dict.fromkeys(
        ("paged_attention_torch", "paged_gather_torch", "paged_write_torch"), 1.0
    )


def test_fused_attention_under_a_torch_request_is_named(engine, monkeypatch):
    monkeypatch.setattr(attention, "launched", lambda name: launched("scaled_dot_product_attention"))
    e4 = level(take(engine), "E4")
    assert e4.state == MISMATCH
    assert "scaled_dot_product_attention in a prompt, and no attention" in e4.sentence


def test_what_is_left_swapped_out_is_given_up_and_its_precision_told(engine):
    used = engine(kv_format="int8_sym", tokens=48)
    away, here = used.add(), used.add()
    used.forward([(away, list(range(40))), (here, list(range(7)))])
    used.swap_out(away)
    found = evidence.examine(used, reads_expected=True)
    assert found.state == VERIFIED
    assert found.precision == {
        "storage": "int8", "transfer": "int8 + float16 scales", "execution": "float32", "weights": "float32",
        "gemm": "native",
    }  # fmt: skip
    assert len(used.store.sequences()) == 1  # the probe's


def test_a01_t1_a_format_dropped_before_the_store_is_named(engine, monkeypatch):
    monkeypatch.setattr(core, "store_format", lambda decision: KV_FORMATS["native"])
    found = take(engine)
    assert found.state == MISMATCH
    assert found.effective == "native"
    assert (
        "kv_format int8_sym did not reach the store: layer 0 K is stored as native (float32)"
        in level(found, "E1").sentence
    )


def test_a01_t3_one_native_layer_is_named(engine):
    def one_layer(made):
        store = made.store
        last = len(store.layers) - 1
        store.layers[last] = allocate_layer(
            KV_FORMATS["native"], store.shapes[last], store.page_size, store.num_pages, torch.float32, "cpu"
        )

    found = take(engine, spoil=one_layer)
    assert found.state == MISMATCH
    assert found.effective == "mixed"
    assert f"layer {LAYERS - 1} K is stored as native" in level(found, "E1").sentence
    assert level(found, "E3-reads").state == MISMATCH


def tinyllama(stored):
    """What E1 looks at, of an engine asked for int8_sym: TinyLlama's shape, 4,096 tokens, pages that nothing fills."""
    shape = KVShape(4, 64, 64)
    store = PagedKVStore(KV_FORMATS[stored], [shape] * 22, 16, 256, torch.bfloat16, "cpu")
    return SimpleNamespace(
        store=store,
        layers=[SimpleNamespace(shape=shape)] * 22,
        model=SimpleNamespace(dtype=torch.bfloat16),
        decision=SimpleNamespace(kv_format=SimpleNamespace(resolved="int8_sym")),
    )


def test_a01_t2_92_274_688_bytes_under_an_int8_request_are_a_mismatch():
    asked, got = tinyllama("int8_sym"), tinyllama("native")
    sound, effective = stored_kv.bytes_level(asked)
    assert (sound.state, effective, sound.facts["bytes"]) == (VERIFIED, "int8_sym", 47_579_136)
    found, effective = stored_kv.bytes_level(got)
    assert (found.state, effective, found.facts["bytes"]) == (MISMATCH, "native", 92_274_688)
    assert sound.facts["bytes"] / found.facts["bytes"] == 0.515625
    assert "layer 0 holds 4194304 B, int8_sym takes 2162688 B" in " ".join(found.facts["first_faults"])


def test_a01_t3_layer_7_of_22_is_named_where_a_tolerance_of_5_percent_sees_nothing():
    made = tinyllama("int8_sym")
    made.store.layers[7] = tinyllama("native").store.layers[7]
    found, effective = stored_kv.bytes_level(made)
    assert (found.state, effective) == (MISMATCH, "mixed")
    assert "layer 7 K is stored as native (bfloat16), asked was int8_sym" in found.sentence
    assert found.facts["bytes"] / 47_579_136 < 1.05
    assert all("layer 7 " in fault for fault in found.facts["first_faults"])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a02_scales_that_are_zero_or_one_are_named(engine, value):
    def fixed(made):
        write = made.store.write

        def broken(layer, slots, k, v):
            write(layer, slots, k, v)
            made.store.layers[layer].k_scale.fill_(value)

        made.store.write = broken

    found = take(engine, spoil=fixed)
    assert level(found, "E2").state == MISMATCH
    said = level(found, "E2").sentence
    assert (
        f"layer 0 K: the stored scale of token 0, head 0, page 3 is {value:g}" in said
    )  # of 6: 3 are in use


def test_a02_scales_never_written_are_named(engine):
    """The memory stays what it was. Fresh memory may hold what an engine before left there, even the right scales."""

    def unwritten(made):
        write = made.store.write
        for pages in made.store.layers:
            pages.v_scale.fill_(7.0)

        def broken(layer, slots, k, v):
            kept = made.store.layers[layer].v_scale.clone()
            write(layer, slots, k, v)
            made.store.layers[layer].v_scale.copy_(kept)

        made.store.write = broken

    found = take(engine, spoil=unwritten)
    assert level(found, "E2").state == MISMATCH
    assert "layer 0 V" in level(found, "E2").sentence


@pytest.mark.parametrize("kv_format", ["int8_static", "fp8_e4m3_static"])
def test_a02_a_given_scale_replaced_by_one_is_named(engine, kv_format):
    def reset(made):
        for pages in made.store.layers:
            pages.k_scale.fill_(1.0)

    found = take(engine, kv_format, spoil=reset)
    assert level(found, "E2").state == MISMATCH
    assert "the stored scale is 1, given was 0.05" in level(found, "E2").sentence


@pytest.mark.parametrize("kv_format", [name for name in FORMATS if name != "native"])
def test_a02_t4_scales_survive_a_second_engine_and_a_second_warm_up(engine, kv_format):
    made = engine(kv_format=kv_format, sequences=3)
    seq = made.add()
    made.prefill(seq, list(range(20)))

    def scales():
        slots = made.store.slots_for(seq, 0, 20)
        live = [s for p in made.store.layers for s in (p.k_scale, p.v_scale)]
        return [s.clone() if s.numel() == 1 else probecodes.stored(made.store, s, slots) for s in live]

    kept = scales()
    assert len(kept) == 2 * LAYERS
    for warm_up in (
        made,
        engine(kv_format=kv_format),
    ):  # the same engine again, and a new one on the same model
        other = warm_up.add()
        warm_up.prefill(other, list(range(30, 60)))
        warm_up.decode([other], [3])
        warm_up.free(other)
    assert all(probecodes.same_bits(a, b) for a, b in zip(scales(), kept, strict=True))


def test_a05_t4_a_bad_layer_among_good_ones_is_named(engine):
    """Every layer is compared, so that one of many does not vanish in a mean."""

    def one_step_off(made):
        write = made.store.write

        def broken(layer, slots, k, v):
            write(layer, slots, k, v)
            if layer == 2:
                made.store.layers[2].v.clamp_(max=126).add_(1)

        made.store.write = broken

    found = level(take(engine, spoil=one_step_off), "E2")
    assert found.state == MISMATCH
    (fault,) = found.facts["first_faults"]
    assert fault.startswith(
        "layer 2 V: stored codes differ from the reference quantizer: in token 0, head 0, page "
    )


@pytest.mark.parametrize("only", [None, 1])
def test_a_native_shadow_that_is_read_instead_of_the_pages_is_named(engine, only):
    """Payload and scales are written right; attention reads a native copy kept beside them."""

    def shadow(made):
        store = made.store
        copies = [
            allocate_layer(KV_FORMATS["native"], s, store.page_size, store.num_pages, torch.float32, "cpu")
            for s in store.shapes
        ]
        for copy in copies:
            copy.k.zero_()
            copy.v.zero_()
        write, read = store.write, store.read

        def both(layer, slots, k, v):
            write(layer, slots, k, v)
            page, offset = slots // store.page_size, slots % store.page_size
            copies[layer].k[page, :, offset] = k
            copies[layer].v[page, :, offset] = v

        def from_shadow(layer, pages, length, dtype):
            k, v = read(layer, pages, length, dtype)  # keeps the counters looking right
            if only is not None and layer != only:
                return k, v
            copy, needed = copies[layer], pages[:, : -(-length // store.page_size)]
            return paged_gather_torch(copy, needed, length, dtype)

        store.write, store.read = both, from_shadow

    found = take(engine, spoil=shadow)
    assert found.state == MISMATCH
    named = f"layer {only or 0}: the stored K payload is not read"
    assert named in level(found, "E3-layers").sentence
    if only is None:
        assert "changing every stored K payload changes no logit" in level(found, "E3").sentence


def test_a07_reading_past_the_sequence_is_named(engine):
    """A read that masks by multiplication lets the NaN of an unused slot through."""

    def leaky(made):
        read = made.store.read
        for pages in made.store.layers:
            pages.v_scale.zero_()  # a fresh pool hides it

        def beyond(layer, pages, length, dtype):
            k, v = read(layer, pages, length, dtype)
            live = made.store.layers[layer]
            return k, v + 0 * live.v_scale[-1].sum().to(dtype)

        made.store.read = beyond

    found = take(engine, spoil=leaky)
    assert "poison outside the sequence reaches the logits" in level(found, "E3").sentence


def test_numbers_that_never_read_the_store_are_named(engine):
    made = engine(kv_format="int8_sym")
    probe = layerprobe.probe_layers(
        lambda s, t: engine(kv_format="int8_sym", sequences=s, tokens=t), LAYERS, 16
    )
    found = evidence.examine(made, probe, reads_expected=True)
    assert level(found, "E3-reads").state == MISMATCH
    assert "never read the KV store" in level(found, "E3-reads").sentence


def strided(x):
    """x [N, H, D] as a transposed view of every other element of wider rows, from an offset on."""
    view = x.new_zeros(x.shape[1], x.shape[0] + 1, 2 * x.shape[2])[:, 1:, ::2].transpose(0, 1)
    return view.copy_(x)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a08_t5_strided_keys_store_what_contiguous_ones_do(engine, kv_format):
    """K and V reach the store of one engine as strided views, and that of the other as contiguous tensors."""
    plain, made = engine(kv_format=kv_format), engine(kv_format=kv_format)
    write = made.store.write
    made.store.write = lambda layer, slots, k, v: write(layer, slots, strided(k), strided(v))
    for one in (plain, made):
        evidence._write_probe(one)
    assert stored_kv.codes_level(made).state == VERIFIED
    slots = torch.arange(15)
    for live, copy in zip(made.store.layers, plain.store.layers, strict=True):
        for name, tensor in live.paged().items():
            theirs = probecodes.stored(plain.store, copy.tensors()[name], slots)
            assert probecodes.same_bits(probecodes.stored(made.store, tensor, slots), theirs)


def test_of_several_engines_the_one_that_shows_least_speaks():
    """A gate that asks for E3 must not be told of an arm that is silent on E4 where another is silent on E2."""

    def made(**states):
        return Evidence("native", "native", tuple(Level(name, s, "-") for name, s in states.items()), {}, {})

    sound, high, low, wrong = (
        made(E1=VERIFIED),
        made(E4=UNVERIFIED),
        made(E2=UNVERIFIED, E5=UNVERIFIED),
        made(E5=MISMATCH),
    )
    for found in ([sound, high, low, wrong], [wrong, low, high, sound]):
        assert sorted(found, key=rank) == [wrong, low, high, sound]


def test_a_native_arm_in_another_format_contradicts_whatever_else_of_it_is_unverified():
    """On a rung that a gate leaves out it would pass."""

    def made(effective, **states):
        levels = tuple(Level(name, state, f"{name} says so.") for name, state in states.items())
        return Evidence(effective, "native", levels, {}, {}), ("native", "native")

    quantized, silent, sound = (
        made("int8_sym", E1=VERIFIED, E4=UNVERIFIED),
        made("native", E2=UNVERIFIED),
        made("native", E1=VERIFIED),
    )
    for arms in ([silent, quantized, sound], [sound, quantized], [quantized]):
        found = native_arm(arms, 8, 8)
        assert (found.state, found.facts) == (MISMATCH, {})
        assert found.sentence == "The native arm is not native: it stores int8_sym and native weights."
    found = native_arm([sound, silent], 8, 8)
    assert (found.state, found.facts) == (UNVERIFIED, {"unverified": ["E2"]})
    assert native_arm([sound], 8, 8).state == VERIFIED
    assert native_arm([sound], 7, 8).state == MISMATCH


@pytest.mark.parametrize("scale", [(0.05, 100.0), (100.0, 0.05), (100.0, 100.0)])
def test_a_scale_that_stores_zeros_is_no_cache_that_is_not_read(engine, scale):
    keys = {"scale": {"k": scale[0], "v": scale[1]}}
    found = take(engine, "int8_static", **keys)
    assert found.state == VERIFIED, [x.sentence for x in found.levels if x.state == MISMATCH]

    def make(sequences, tokens):
        return engine("tiny-llama", "int8_static", sequences=sequences, tokens=tokens, **keys)

    assert probes.probe_prefill(make, LAYERS).state == VERIFIED
