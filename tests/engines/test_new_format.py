"""A new KV format with a known payload takes one descriptor and one quantizer: here INT8 with power-of-two scales."""

from dataclasses import fields, replace

import pytest
import torch

from kvbench.evidence.attention_values import probe_prefill, probe_values
from kvbench.evidence.examine import examine
from kvbench.evidence.page_reads import probe_pages
from kvbench.formats import kv
from kvbench.formats.kv import KV_FORMATS, KnownRow, KVFormat
from kvbench.matrix.resolve_backend import Request, resolve
from kvbench.preflight.capabilities import Shape, format_rows
from kvbench.records.record import MISMATCH, VERIFIED
from kvbench_kernels.kv import layout, quantize
from kvbench_kernels.kv.quantize import QUANTIZE, Quantized

TOY = KVFormat(
    "int8_pow2", "int8", "token-head", "float32", ("torch",), 2.0,
    KnownRow((3.0, -1.5, 0.1), (96, -48, 3), scale=2.0**-5), "INT8, one power of two a token and KV head",
)  # fmt: skip


def quantize_int8_pow2(x, scale=None):
    """s is the smallest power of two of at least amax / 127, at least 2^-126."""
    values, broken = quantize._finite_values(x)
    scales = (values.abs().amax(-1) / 127).clamp(min=2.0**-126).log2().ceil().exp2()
    codes = (values / scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    zero = quantize._zero(x)
    return Quantized(codes, scales, zero, broken.sum(), zero)


def registries():
    """The size of every table of the packages that know formats."""
    tables = {f"{m.__name__}.{name}": x for m in (kv, layout, quantize) for name, x in vars(m).items()}
    return {name: len(x) for name, x in tables.items() if isinstance(x, dict | tuple) and "__" not in name}


@pytest.fixture
def touched(monkeypatch):
    """Adds the format; the tables that grew."""
    before = registries()
    monkeypatch.setitem(KV_FORMATS, TOY.name, TOY)
    monkeypatch.setitem(QUANTIZE, TOY.name, quantize_int8_pow2)
    return [name for name, size in registries().items() if size != before[name]]


def levels(engine):
    def make(sequences=2, tokens=96):
        return engine("tiny-llama", TOY.name, sequences=sequences, tokens=tokens, page_size=8)

    made = make()
    made.prefill(seq := made.add(), list(range(7, 27)))
    made.decode([seq], [3])
    probes = (probe_values(make, 8), probe_prefill(make, 2), probe_pages(make, 8))
    found = examine(made, *probes, reads_expected=True)
    assert found.effective == TOY.name
    return {level.name: level.state for level in found.levels}


def test_a_new_format_is_one_descriptor_and_one_quantizer(touched, engine):
    assert touched == ["kvbench.formats.kv.KV_FORMATS", "kvbench_kernels.kv.quantize.QUANTIZE"]
    states = levels(engine)
    assert {
        states[name] for name in ("E1", "E2", "E3", "E3-reads", "E3-prefill", "E3-pages", "E4", "E5")
    } == {VERIFIED}
    row = next(
        row for row in format_rows(Shape(2, 2, 64, 4).facts, "cpu", "float32") if row["name"] == TOY.name
    )
    assert (row["bytes_per_token"], row["error_bound"]) == (2 * 2 * 2 * (64 + 4), "half its scale")


def test_a_new_format_falls_back_from_triton_until_a_kernel_writes_it(touched):
    facts = Shape(2, 2, 64, 4).facts
    request = Request(TOY.name, "native", "triton", "allow", interpreter=True)
    decision = resolve(request, facts)
    assert (decision.kv_format.resolved, decision.backend.resolved) == (TOY.name, "torch")
    assert dict(decision.backend.rejected) == {"triton": "kv_format"}


@pytest.mark.parametrize("fault", ["code", "scale", "error"])
def test_a_quantizer_that_does_not_fit_the_descriptor_is_found(touched, engine, monkeypatch, fault):
    """The known row holds codes and scales; the bound holds the errors of all rows."""

    def broken(x, scale):
        sound = quantize_int8_pow2(x)
        assert sound.scales is not None
        known = x.shape == (3,)
        if fault == "scale":
            return replace(sound, scales=sound.scales * 2)
        if fault == "error" and known:
            return sound
        return replace(sound, codes=torch.where(sound.codes == sound.codes.amax(-1, True), 0, sound.codes))

    monkeypatch.setitem(QUANTIZE, TOY.name, broken)
    states = levels(engine)
    assert states["E5" if fault == "error" else "E2"] == MISMATCH


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload_dtype": "int4"}, "a payload of PAYLOADS"),
        ({"scale_granularity": "channel"}, "a scale granularity"),
        ({"scale_granularity": "none"}, "scales exactly where"),
        ({"scale_dtype": None}, "a scale dtype"),
        ({"scale_dtype": "float64"}, "a scale dtype"),
        ({"scale_margin": None}, "a scale margin"),
        ({"known_row": KnownRow((), (), scale=1.0)}, "a known row"),
        ({"known_row": KnownRow((1.0,), (1,))}, "a known row"),
        ({"known_row": KnownRow((1.0,), (1,), given=1.0, scale=1.0)}, "a known row"),
        ({"backends": ("triton",)}, "backend torch"),
    ],
)
def test_a_descriptor_that_contradicts_itself_is_an_error(change, words):
    with pytest.raises(ValueError, match=words):
        replace(TOY, **change)


@pytest.mark.parametrize("missing", [field.name for field in fields(KVFormat)])
def test_a_descriptor_without_one_of_its_fields_is_an_error(missing):
    given = {field.name: getattr(TOY, field.name) for field in fields(KVFormat) if field.name != missing}
    with pytest.raises(TypeError, match=missing):
        KVFormat(**given)
