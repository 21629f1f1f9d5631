"""Evidence: what a sound engine shows, and what each injected fault is called."""

import re
from types import SimpleNamespace

import pytest
import torch

from kvbench.engines.reference import attention
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.evidence import examine as evidence
from kvbench.evidence import probe_values as probecodes
from kvbench.evidence import stored_kv
from kvbench.evidence.attention_values import probe_prefill, probe_values
from kvbench.evidence.layer_reads import probe_layers
from kvbench.evidence.native_arm import native_arm, rank
from kvbench.evidence.page_reads import probe_pages
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench.records.record import MISMATCH, UNVERIFIED, VERIFIED, Evidence, Level
from kvbench.selftest.table import FAULTS
from kvbench_kernels.launches import launched

FORMATS = list(KV_FORMATS)
LAYERS = 4  # of tiny-llama


def take(make, *probes):
    """Measure a little on a fresh engine and take its evidence."""
    used = make(2, 48)
    used.prefill(used.add(), list(range(40)))
    found = [probe(make, 16) for probe in probes]
    return evidence.examine(used, probe_layers(make, LAYERS, 16), *found, reads_expected=True)


def level(found, name):
    return next(x for x in found.levels if x.name == name)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_sound_engine_is_verified_at_every_level(maker, kv_format):
    found = take(maker(kv_format=kv_format))
    assert (found.state, found.effective) == (VERIFIED, kv_format)
    names = [x.name for x in found.levels]
    assert names == ["E1", "E2", "E3", "E3-layers", "E3-reads", "E4", "E1-weights", "E4-weights"]
    assert (found.reads["quantized_tokens"] > 0) == KV_FORMATS[kv_format].quantized


def test_a11_t3_e4_says_that_torch_attended(maker, monkeypatch):
    facts = level(take(maker()), "E4").facts
    kernels = ("paged_attention_torch", "paged_gather_torch", "paged_write_torch")
    assert (facts["backend"], facts["decode"]) == ("torch", dict.fromkeys(kernels, 1.0))
    monkeypatch.setattr(attention, "launched", lambda name: launched("scaled_dot_product_attention"))
    e4 = level(take(maker()), "E4")
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


HOPS = {"format_lost_engine_to_store": "native", "one_layer_native": "mixed"}  # what is effective then
SILENT = [name for name, fault in FAULTS.items() if fault.silent and fault.cell in FORMATS]
NAMED = [
    *HOPS,
    *(name for name in SILENT if name not in ("page_stale", "metric_missing", "format_lost_matrix_to_cell")),
]


@pytest.mark.parametrize("name", NAMED)
def test_a05_t4_a_fault_of_the_self_test_is_named(maker, name):
    fault = FAULTS[name]
    make = maker(kv_format=fault.cell)
    with fault.inject():
        found = take(make, probe_values, probe_pages)
    said = [f"{x.name}: {x.sentence}" for x in found.levels if x.state == MISMATCH]
    assert re.search(fault.says, " ".join(said), re.S), said
    assert found.effective == HOPS.get(name, fault.cell)


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
    for warm_up in (made, engine(kv_format=kv_format)):  # the same engine, and a new one on the same model
        other = warm_up.add()
        warm_up.prefill(other, list(range(30, 60)))
        warm_up.decode([other], [3])
        warm_up.free(other)
    assert all(probecodes.same_bits(a, b) for a, b in zip(scales(), kept, strict=True))


def test_a07_reading_past_the_sequence_is_named(maker):
    """A read that masks by multiplication lets the NaN of an unused slot through."""

    def leaky(sequences, tokens):
        made = maker()(sequences, tokens)
        read, layers = made.store.read, made.store.layers
        for layer in layers:
            layer.v_scale.zero_()  # a fresh pool hides it

        def beyond(layer, table, length, dtype):
            k, v = read(layer, table, length, dtype)
            return k, v + 0 * layers[layer].v_scale[-1].sum().to(dtype)

        made.store.read = beyond
        return made

    assert "poison outside the sequence reaches the logits" in level(take(leaky), "E3").sentence


def test_of_several_engines_the_one_that_shows_least_speaks():
    """A gate that asks for E3 must not be told of an arm that is silent on E4 where another is silent on E2."""

    def made(**states):
        return Evidence("native", "native", tuple(Level(name, s, "-") for name, s in states.items()), {}, {})

    sound, high, wrong = made(E1=VERIFIED), made(E4=UNVERIFIED), made(E5=MISMATCH)
    low = made(E2=UNVERIFIED, E5=UNVERIFIED)
    for found in ([sound, high, low, wrong], [wrong, low, high, sound]):
        assert sorted(found, key=rank) == [wrong, low, high, sound]


def test_a_native_arm_in_another_format_contradicts_whatever_else_of_it_is_unverified():
    """On a rung that a gate leaves out it would pass."""

    def made(effective, **states):
        levels = tuple(Level(name, state, f"{name} says so.") for name, state in states.items())
        return Evidence(effective, "native", levels, {}, {}), ("native", "native")

    silent, sound = made("native", E2=UNVERIFIED), made("native", E1=VERIFIED)
    quantized = made("int8_sym", E1=VERIFIED, E4=UNVERIFIED)
    for arms in ([silent, quantized, sound], [sound, quantized], [quantized]):
        found = native_arm(arms, 8, 8)
        assert (found.state, found.facts) == (MISMATCH, {})
        assert found.sentence == "The native arm is not native: it stores int8_sym and native weights."
    found = native_arm([sound, silent], 8, 8)
    assert (found.state, found.facts) == (UNVERIFIED, {"unverified": ["E2"]})
    assert native_arm([sound], 8, 8).state == VERIFIED
    assert native_arm([sound], 7, 8).state == MISMATCH


@pytest.mark.parametrize("scale", [(0.05, 100.0), (100.0, 0.05), (100.0, 100.0)])
def test_a_scale_that_stores_zeros_is_no_cache_that_is_not_read(maker, scale):
    make = maker(kv_format="int8_static", scale={"k": scale[0], "v": scale[1]})
    found = take(make)
    assert found.state == VERIFIED, [x.sentence for x in found.levels if x.state == MISMATCH]
    assert probe_prefill(make, LAYERS).state == VERIFIED
