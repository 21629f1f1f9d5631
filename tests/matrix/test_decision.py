"""Resolver: what is asked for runs, falls back with a reason, or is refused; nothing is dropped."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from kvbench.errors import Refused, UsageError
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import TORCH, TRITON, Choice, Request, check_context, request_of, resolve
from kvbench.models.attention_facts import LayerFacts, ModelFacts, facts_from_config
from kvbench_kernels.support import Accepted, Rejected

SHAPE = KVShape(2, 16, 16)
PLAIN = LayerFacts("full", 4, SHAPE)
REQUEST = Request("int8_sym", "native", "torch", "allow")
STRICT = replace(REQUEST, fallback="refuse")
EITHER = pytest.mark.parametrize("fallback", ["allow", "refuse"])


def facts(*layers, **changes):
    return ModelFacts("test", layers or (PLAIN,) * 2, 2048, **changes)


def refused(request, model, match=""):
    """The reason of a refusal."""
    with pytest.raises(Refused, match=match) as caught:
        resolve(request, model)
    return caught.value.reason


FULL = facts()
ODD = facts(PLAIN, LayerFacts("full", 4, KVShape(2, 24, 24)))  # a head dim no kernel has
MLA = facts(*[LayerFacts("mla", 4, KVShape(4, 24, 16))] * 2)
DISTILL = {
    "model_type": "qwen2", "_name_or_path": "DeepSeek-R1-Distill-Qwen-1.5B", "num_hidden_layers": 2,
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
}  # fmt: skip
STANDARD = [
    PLAIN, LayerFacts("sliding", 4, SHAPE, sliding_window=24), replace(PLAIN, softcap=50.0),
    replace(PLAIN, sinks=True),
]  # fmt: skip


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("layer", STANDARD, ids=["full", "sliding", "softcap", "sinks"])
def test_torch_runs_every_format_on_standard_attention(kv_format, layer):
    decision = resolve(replace(STRICT, kv_format=kv_format), facts(layer, layer))
    assert decision.kv_format == Choice(kv_format, kv_format, "requested", (), "It runs as asked.")
    assert decision.backend.reason == decision.weights.reason == "requested"
    assert not decision.fell_back


@pytest.mark.parametrize("model", [MLA, facts_from_config(DEEPSEEK)], ids=["facts", "deepseek_v2"])
def test_a10_t1_mla_falls_back_to_native_and_a_distill_named_deepseek_keeps_int8(model):
    choice = resolve(REQUEST, model).kv_format
    assert (choice.requested, choice.resolved, choice.reason) == ("int8_sym", "native", "mla_not_validated")
    assert choice.rejected == (("int8_sym", "mla_not_validated"),)
    assert "int8_sym" in choice.sentence
    assert refused(STRICT, model, "int8_sym on backend torch") == "mla_not_validated"
    assert resolve(replace(STRICT, kv_format="native"), model).kv_format.reason == "requested"
    assert resolve(STRICT, facts_from_config(DISTILL)).kv_format.resolved == "int8_sym"


@EITHER
def test_a10_t3_what_is_not_known_is_refused_even_natively(fallback):
    hybrid = facts(PLAIN, LayerFacts("linear_attention", 4, SHAPE))
    for kv_format in ("native", "int8_sym"):
        request = replace(REQUEST, fallback=fallback, kv_format=kv_format)
        assert refused(request, hybrid, r"Layer 1 .*'linear_attention'") == "layer_kind_unsupported"
    strange = facts(unsupported=(("alibi", "The model adds position biases."),))
    with pytest.raises(Refused, match=r"position biases.*attribute alibi") as e:
        resolve(replace(REQUEST, fallback=fallback), strange)
    assert e.value.reason == "attention_unsupported"
    assert "fallback: allow" not in str(e.value)  # it would not help


@pytest.mark.parametrize(("model", "kv_format"), [(FULL, "int8_sym"), (MLA, "native")])
def test_a_backend_that_is_not_there_falls_back_apart_from_the_format(model, kv_format):
    decision = resolve(replace(REQUEST, backend="triton"), model)
    assert (decision.backend.resolved, decision.backend.reason) == ("torch", "no_gpu")
    assert decision.backend.rejected == (("triton", "no_gpu"),)
    rejected = () if model is FULL else (("int8_sym", "mla_not_validated"),)
    assert (decision.kv_format.resolved, decision.kv_format.rejected) == (kv_format, rejected)


def test_a_backend_that_lacks_a_format_gives_way_before_the_format_does():
    def native_alone(request, facts):
        return Accepted() if request.kv_format == "native" else Rejected("no_int8", "It has none.")

    backends = {
        "fast": replace(TRITON, name="fast", supports=native_alone),
        "torch": replace(TORCH, supports=lambda request, facts: Accepted()),
    }
    decision = resolve(replace(REQUEST, backend="fast"), FULL, backends)
    assert (decision.backend.resolved, decision.backend.reason) == ("torch", "no_int8")
    assert decision.kv_format.resolved == "int8_sym"


FP8 = replace(REQUEST, weights="fp8_block128")
ON_GPU = {"backend": "triton", "device": "cuda", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "resolved", "reason", "rejected"),
    [
        ({}, "reference", "best_available", ()),
        ({"gemm": "reference"}, "reference", "requested", ()),
        ({"gemm": "w8a16"}, "reference", "gemm_needs_triton", (("w8a16", "gemm_needs_triton"),)),
        ({"weights": "native"}, "native", "native_weights", ()),
        (ON_GPU, "by_shape", "best_available", ()),
        *((ON_GPU | {"gemm": path}, path, "requested", ()) for path in ("w8a16", "w8a8", "reference")),
    ],
)
def test_the_path_of_fp8_products_is_decided(changes, resolved, reason, rejected):
    decision = resolve(replace(FP8, **changes), FULL)
    weights, gemm = decision.weights, decision.gemm
    assert (weights.resolved, weights.reason) == (changes.get("weights", "fp8_block128"), "requested")
    assert (gemm.resolved, gemm.reason, gemm.rejected) == (resolved, reason, rejected)
    assert gemm.fell_back == bool(rejected)


def test_strict_mode_refuses_every_fallback_and_w8a8_in_float32():
    assert refused(replace(STRICT, backend="triton"), FULL, "fallback: allow") == "no_gpu"
    w8a8 = replace(FP8, gemm="w8a8", fallback="refuse")
    assert refused(w8a8, FULL, "fallback: allow") == "gemm_needs_triton"
    request = replace(STRICT, **ON_GPU, weights="fp8_block128", gemm="w8a8")
    narrow = replace(request, dtype="float32")
    assert refused(narrow, FULL, "dtype is float32") == "gemm_needs_16_bits"
    assert resolve(request, FULL).gemm.resolved == "w8a8"
    fallen = resolve(replace(narrow, fallback="allow"), FULL).gemm
    assert (fallen.resolved, fallen.fell_back) == ("reference", True)


@EITHER
@pytest.mark.parametrize(
    ("model", "device", "resolved", "reason"),
    [(FULL, "cpu", "torch", "no_gpu"), (FULL, "cuda", "triton", "best_available"), (ODD, "cuda", "torch", "head_dim")],
)  # fmt: skip
def test_auto_takes_the_best_backend_and_is_no_fallback(model, device, resolved, reason, fallback):
    rejected = () if resolved == "triton" else (("triton", reason),)
    for interpreted in (False, True):  # never the best
        request = replace(REQUEST, backend="auto", device=device, interpreter=interpreted, fallback=fallback)
        decision = resolve(request, model)
        assert decision.backend == Choice("auto", resolved, reason, rejected, decision.backend.sentence)
        assert decision.kv_format == Choice("int8_sym", "int8_sym", "requested", (), "It runs as asked.")
        assert not decision.fell_back


def test_what_no_kernel_has_is_a_fallback():
    no_kernel = ("triton", ODD, "backend", "torch", "head_dim")
    no_format = ("auto", MLA, "kv_format", "native", "mla_not_validated")
    for backend, model, aspect, resolved, reason in (no_kernel, no_format):
        request = replace(REQUEST, backend=backend, device="cuda")
        decision = resolve(request, model)
        choice = getattr(decision, aspect)
        assert (choice.resolved, choice.reason, decision.fell_back) == (resolved, reason, True)
        assert refused(replace(request, fallback="refuse"), model, f"on backend {backend}") == "head_dim"
        assert model is MLA or "head_dim 24" in choice.sentence


def test_triton_runs_on_the_interpreter_where_it_is_asked_for_by_name_and_reads_as_stored():
    decision = resolve(replace(STRICT, backend="triton", interpreter=True), FULL)
    assert (decision.backend.resolved, decision.backend.reason) == ("triton", "requested")
    assert (decision.decode.resolved, decision.compile.resolved) == ("eager", "off")
    request = replace(STRICT, backend="auto", device="cuda", prefill_reads="fresh")
    assert resolve(request, FULL).backend.rejected == (("triton", "fresh_reads"),)


@pytest.mark.parametrize(
    "where", [{"backend": "torch"}, {"backend": "torch", "device": "cuda"}, {"backend": "triton", "interpreter": True}],
    ids=["cpu", "torch on cuda", "interpreter"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("aspect", "fast", "plain"), [("decode", "graph", "eager"), ("compile", "layer", "off")]
)
def test_speed_is_taken_where_triton_runs_on_a_gpu_else_a_fallback_by_name(aspect, fast, plain, where):
    def found(request, asked):
        decision = resolve(replace(request, **{aspect: asked}), FULL)
        choice = getattr(decision, aspect)
        return choice.resolved, choice.reason, choice.rejected, decision.fell_back

    on_gpu = replace(STRICT, backend="auto", device="cuda")
    assert found(on_gpu, "auto") == (fast, "best_available", (), False)
    assert found(on_gpu, fast) == (fast, "requested", (), False)
    assert found(on_gpu, plain) == (plain, "requested", (), False)
    elsewhere, reason = replace(REQUEST, **where), f"{fast}_needs_triton_on_gpu"
    for asked in ("auto", fast):
        assert found(elsewhere, asked) == (plain, reason, ((fast, reason),), asked == fast)
    assert found(replace(elsewhere, fallback="refuse"), plain)[1] == "requested"
    assert refused(replace(STRICT, **where, **{aspect: fast}), FULL, f"{aspect} {fast}") == reason


def test_the_request_of_a_cell_has_all_that_decides(monkeypatch):
    asked = {
        "kv_format": "fp8_e4m3", "weights": "fp8_block128", "backend": "auto", "fallback": "allow",
        "device": "cuda", "dtype": "bfloat16", "page_size": 64, "prefill_reads": "fresh", "decode": "eager",
        "compile": "off", "gemm": "w8a8",
    }  # fmt: skip
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert request_of({**CELL_KEYS, **asked}) == Request(**asked)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert request_of({**CELL_KEYS, **asked}).interpreter


def test_without_facts_it_is_decided_at_load():
    decision = resolve(replace(STRICT, backend="triton"), None)
    choices = decision.kv_format, decision.weights, decision.backend
    resolved = [(name, "decided_at_load") for name in ("int8_sym", "native", "triton")]
    assert [(choice.resolved, choice.reason) for choice in choices] == resolved


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("kv_format", "int8_sim", "native, int8_sym"), ("weights", "fp4", "native, fp8_block128"),
        ("backend", "cuda", "torch, triton, auto"), ("gemm", "fp8", "auto, reference, w8a16, w8a8"),
        ("decode", "on", "auto, graph, eager"), ("compile", "model", "auto, layer, off"),
        ("fallback", "off", "allow, refuse"),
    ],
)  # fmt: skip
def test_unknown_names_are_usage_errors(key, value, accepted):
    with pytest.raises(UsageError, match=f"{key} '{value}' is unknown; choose one of {accepted}"):
        resolve(replace(REQUEST, **{key: value}), FULL)


@pytest.mark.parametrize(("context", "new_tokens", "fits"), [
    (2048, 0, True), (2048, 1, True), (2048, 2, False), (2033, 16, True), (2034, 16, False), (2049, 0, False),
])  # fmt: skip
def test_a19_t4_a_context_beyond_the_model_is_refused(context, new_tokens, fits):
    sentence = rf"A context of {context} tokens.*\(test\) has 2048.*at most {2048 - max(new_tokens - 1, 0)}"
    with nullcontext() if fits else pytest.raises(Refused, match=sentence) as e:
        check_context(FULL, context, new_tokens)
    assert fits or e.value.reason == "invalid_context"
    check_context(replace(FULL, max_context=None), context, new_tokens)


@EITHER
def test_splits_where_nothing_splits_are_refused_not_dropped(fallback):
    request = replace(REQUEST, kv_splits=4, fallback=fallback)
    assert refused(request, FULL, "kv_splits: 4 .* backend torch") == "splits_need_triton"
