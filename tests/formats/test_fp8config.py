"""What the quantization_config of a checkpoint says, what is refused, and which modules it converts."""

import pytest

from kvbench.errors import UsageError
from kvbench.formats.fp8_checkpoint import Fp8Config, converted_modules, fp8_config, matches

MLP = [
    f"model.layers.{i}.mlp.{part}" for i in range(2) for part in ("gate", "gate_proj", "up_proj", "down_proj")
]


def read(**given):
    base = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    merged = {k: v for k, v in {**base, **given}.items() if v != "absent"}
    return fp8_config({"quantization_config": merged}, "owner/name")


@pytest.mark.parametrize(
    "given",
    [
        {}, {"activation_scheme": "absent"},
        {"activation_scheme": None, "fmt": None, "modules_to_convert": None},
        {"fmt": "e4m3", "scale_fmt": "float", "expert_dtype": "fp8", "dequantize": False,
         "modules_to_convert": []},
        {"weight_block_size": (128, 128), "is_checkpoint_fp8_serialized": True},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"kv_cache_scheme": {"anything": "of the cache, for cells that read its scales"}},
    ],
)  # fmt: skip
def test_the_layout_that_is_read_under_all_its_spellings(given):
    assert read(**given) == Fp8Config()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method is compressed-tensors, expected fp8"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method is fbgemm_fp8"),
        ({"quant_method": "absent"}, "quant_method is not given"),
        ({"weight_block_size": "absent"}, r"_size is not given, expected \[128, 128\] \(without a block"),
        *(({"weight_block_size": size}, f"weight_block_size is {words}") for size, words in (
            (None, "not given"), ([64, 128], r"\[64, 128\]"), ([128], r"\[128\]"), (128, "128"))),
        ({"activation_scheme": "static"}, "activation_scheme is static, expected dynamic or no value"),
        ({"fmt": "e4m3fnuz"}, "fmt is e4m3fnuz, expected e4m3 or e4m3fn or no value"),
        ({"fmt": "e5m2"}, "fmt is e5m2"), ({"expert_dtype": "fp4"}, "expert_dtype is fp4"),
        ({"scale_fmt": "e8m0"}, "scale_fmt is e8m0, expected float or ue8m0"),
        ({"modules_to_convert": ["embed_tokens"]}, "modules_to_convert is"),
        *(({"is_checkpoint_fp8_serialized": x}, f"is_checkpoint_fp8_serialized is {x}") for x in (False, 1)),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is lm_head, expected a list"),
        *(({"modules_to_not_convert": x}, "modules_to_not_convert is") for x in (["lm_head", 3], [""])),
        ({"modules_to_not_convert": ["a"], "ignored_layers": ["b"]}, "expected the same list as"),
        ({"modules_not_to_convert": ["lm_head"]}, "modules_not_to_convert is .* only the keys quant_method"),
        ({"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo is FP8"),
    ],
)  # fmt: skip
def test_every_other_quantization_is_refused_by_name(given, words):
    with pytest.raises(UsageError, match=rf"The checkpoint owner/name is already quantized .*{words}") as e:
        read(**given)
    assert "kvbench quantize" in str(e.value)


def test_what_is_written_is_what_is_read_and_the_list_goes_by_two_names():
    for native in ({"model_type": "llama"}, {"quantization_config": None}, {"quantization_config": {}}):
        assert fp8_config(native, "x") is None
    with pytest.raises(UsageError, match="quantization_config is fp8, expected a mapping"):
        fp8_config({"quantization_config": "fp8"}, "x")
    assert read(scale_fmt="ue8m0").ue8m0
    config = Fp8Config(("lm_head", "model.layers.0.mlp.gate"))
    assert fp8_config({"quantization_config": config.as_dict()}, "x") == config
    names = ("ignored_layers", "modules_to_not_convert")
    for given in (names[:1], names[1:], names):
        assert read(**{name: ["lm_head"] for name in given}) == Fp8Config(("lm_head",))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate", "layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True), ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False), ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("ate", "model.layers.0.mlp.gate", False), ("layers.1", "model.layers.1.mlp.gate", True),
        ("layers.1", "model.layers.11.mlp.gate", False), ("model.layers.1", "model.layers.11", False),
        ("model", "model.layers.1.mlp.up_proj", True), ("model", "lm_head", False),
        ("lm_head", "lm_head", True), ("lm", "lm_head", False),
        ("layers.*.gate", "model.layers.0.gate", False), ("layers?0", "model.layers.0", False),
    ],
)  # fmt: skip
def test_a15_t1_whole_components_only(pattern, name, expected):
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("pattern", [MLP[0], "layers.0.mlp.gate", "mlp.gate", "lm_head", "gate"])
def test_a15_t1_transformers_reads_such_a_list_the_same(pattern):
    from transformers.quantizers.quantizers_utils import should_convert_module

    for name in [*MLP, "lm_head"]:
        assert matches(pattern, name) is not should_convert_module(name, [pattern])


def test_a15_t1_gate_is_not_gate_proj_and_t2_a_pattern_that_matches_nothing_is_a_warning():
    config = Fp8Config(("layers.0.mlp.gate", "lm_head"))
    linears = [*MLP[:4], "lm_head"]
    assert converted_modules(config, linears, linears, "lm_head", ["lm_head"]) == (tuple(MLP[1:4]), ())
    config = Fp8Config(("language_model.layers.0.mlp.gate", "model.norm", "lm_head"))
    names = [*MLP, "lm_head", "model.norm"]
    converted, warnings = converted_modules(config, [*MLP, "lm_head"], names, "lm_head", [])
    assert converted == tuple(MLP)
    (warning,) = warnings
    assert "'language_model.layers.0.mlp.gate'" in warning


@pytest.mark.parametrize(
    ("skipped", "stored", "converts"),
    [((), [], False), ((), ["lm_head"], True), (("lm_head",), ["lm_head"], False)],
)
def test_an_empty_list_stays_empty_and_the_head_is_what_the_file_holds(skipped, stored, converts):
    config = read(modules_to_not_convert=list(skipped))
    assert config == Fp8Config(skipped)
    converted, _ = converted_modules(config, [MLP[1], "lm_head"], [MLP[1], "lm_head"], "lm_head", stored)
    assert converted == ((MLP[1], "lm_head") if converts else (MLP[1],))
