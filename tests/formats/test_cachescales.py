"""Scales of a KV cache in a checkpoint: names that exporters write, exact values in every dtype, refusals."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from kvbench.errors import Refused
from kvbench.formats.checkpoint_scales import cache_only, check_scheme, of_cache, part_of, stored_scales
from kvbench.formats.fp8_checkpoint import fp8_config

AT = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{AT}.k_proj.k_scale", (3, "k")), (f"{AT}.v_proj.v_scale", (3, "v")), (f"{AT}.k_scale", (3, "k")),
        (f"{AT}.v_scale", (3, "v")), (f"{AT}.attn.k_scale", (3, "k")), (f"{AT}.attn.v_scale", (3, "v")),
        (f"{AT}.k_proj.output_scale", (3, "k")), (f"{AT}.v_proj.output_scale", (3, "v")),
        (f"{AT}.kv_scale", (3, "kv")),
        ("layers.12.self_attn.k_scale", (12, "k")),
        ("model.language_model.layers.0.self_attn.v_scale", (0, "v")),
        (f"{AT}.k_proj.v_scale", None), (f"{AT}.q_scale", None), (f"{AT}.q_proj.output_scale", None),
        (f"{AT}.k_proj.weight_scale", None), (f"{AT}.k_proj.input_scale", None), (f"{AT}.k_scale.more", None),
        ("model.mylayers.3.self_attn.k_scale", None),
        ("language_model.model.layers.7.self_attn.k_scale", (7, "k")),
        ("vision_tower.layers.3.self_attn.k_scale", None), ("draft.layers.3.self_attn.k_scale", None),
        ("language_model.layers.3.self_attn.k_scale", None), ("model.layers.01.self_attn.k_scale", None),
        (f"model.layers.{'9' * 5000}.self_attn.k_scale", None), ("model.layers.3.cross_attn.k_scale", None),
        (f"{AT}.kk_scale", None),
    ],
)  # fmt: skip
def test_a14_t2_names_of_real_checkpoints_are_read_and_no_others(name, part):
    assert part_of(name) == part
    if part:
        assert of_cache(name)  # or it would be taken for a weight's


def write(folder, tensors, name="model.safetensors"):
    """A file with the tensors; a number becomes a float32 tensor."""
    made = {key: x if isinstance(x, torch.Tensor) else torch.tensor(x) for key, x in tensors.items()}
    save_file(made, folder / name, metadata={"format": "pt"})
    return [folder / name]


def refuse(folder, tensors):
    with pytest.raises(Refused) as caught:
        stored_scales(write(folder, tensors), 4)
    assert caught.value.reason == "checkpoint_scale_unusable"
    return str(caught.value)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a14_t3_every_dtype_is_widened_exactly(tmp_path, dtype, shape):
    """1/448 stays 0.0022321430 in float32 and is 0.0022277832 in bfloat16."""
    scale = torch.tensor(1 / 448, dtype=torch.float64).to(dtype).reshape(shape)
    found = stored_scales(write(tmp_path, {f"{AT}.k_scale": scale}), 4)
    assert found[3, "k"].value == scale.double().item()
    known = {torch.float32: 0.0022321429569274187, torch.bfloat16: 0.002227783203125}
    assert found[3, "k"].value == known.get(dtype, found[3, "k"].value)


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_all_codes_of_a_narrow_dtype_are_those_of_torch(tmp_path, dtype):
    wide = dtype == torch.bfloat16
    codes = torch.arange(0, 65536 if wide else 256, 257 if wide else 1)
    for scale in codes.to(torch.uint16 if wide else torch.uint8).view(dtype):
        files, value = write(tmp_path, {f"{AT}.k_scale": scale.reshape(1)}), scale.double().item()
        if 0 < value < float("inf"):
            assert stored_scales(files, 4)[3, "k"].value == value
        else:
            with pytest.raises(Refused, match=r"k_scale of .* holds"):
                stored_scales(files, 4)


def test_one_number_for_both_sides_equal_ones_twice_and_all_shards(tmp_path):
    at, beyond = "model.layers.0.self_attn", "model.layers.7.self_attn"  # the model has two layers
    again = torch.tensor([0.5], dtype=torch.bfloat16)
    files = write(tmp_path, {f"{at}.kv_scale": 0.5, f"{at}.k_scale": again, f"{beyond}.k_scale": -1.0})
    found = stored_scales(files, 2)
    assert {key: held.value for key, held in found.items()} == {(0, "k"): 0.5, (0, "v"): 0.5}
    assert len(found[0, "k"].tensors) == 2
    files = write(tmp_path, {"layers.0.self_attn.k_scale": 0.25}, "a.safetensors")
    files += write(tmp_path, {"layers.1.self_attn.k_scale": 0.75}, "b.safetensors")
    found = [stored_scales(files, 2)[i, "k"] for i in range(2)]
    assert [(held.value, held.file) for held in found] == [(0.25, "a.safetensors"), (0.75, "b.safetensors")]


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.tensor(0.0), "holds 0,"), (torch.tensor(-1.0), "holds -1,"),
        (torch.tensor(float("nan")), "holds nan"),
        (torch.tensor([float("inf")]), "holds inf"), (torch.tensor([0.5, 0.5]), "has shape [2]"),
        (torch.tensor([]), "has shape [0]"), (torch.tensor(1), "is I64, expected one of F64, F32"),
        *((torch.tensor(x, dtype=torch.float64), f"holds {x:.6g}, expected a number that float32 holds")
          for x in (1e200, 1e-60, 3.4028235e38 * 1.0001)),
    ],
)  # fmt: skip
def test_a02_t3_a_scale_that_is_none_is_refused_with_tensor_and_file(tmp_path, tensor, words):
    message = refuse(tmp_path, {f"{AT}.k_scale": tensor})
    assert f"{AT}.k_scale of model.safetensors {words}" in message


def test_two_values_for_one_side_are_refused(tmp_path):
    message = refuse(tmp_path, {f"{AT}.kv_scale": 0.5, f"{AT}.v_proj.v_scale": 0.25})
    found = (
        "V of layer 3",
        f"{AT}.kv_scale of model.safetensors is 0.5",
        f"{AT}.v_proj.v_scale of ",
        "is 0.25",
    )
    assert [words for words in found if words not in message] == []


SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}


def config(scheme):
    return {"quantization_config": {"kv_cache_scheme": scheme}}


def test_the_scheme_says_of_which_format_the_scales_are():
    for given in ({}, config(None), config(SCHEME), config({"num_bits": 8, "type": "float"})):
        check_scheme(given, "fp8_e4m3_static", "m")
    ints = config({**SCHEME, "type": "int", "observer": "minmax", "group_size": None})
    check_scheme(ints, "int8_static", "m")


@pytest.mark.parametrize(
    ("config_json", "fmt", "meant"),
    [({}, "int8_static", "fp8_e4m3_static"), (config(SCHEME), "int8_static", "fp8_e4m3_static"),
     (config({**SCHEME, "type": "int"}), "fp8_e4m3_static", "int8_static")],
)  # fmt: skip
def test_a_format_that_the_scales_are_not_for_is_refused_with_the_reason(config_json, fmt, meant):
    with pytest.raises(Refused, match=rf"checkpoint m are for {meant} .* this cell stores {fmt}") as e:
        check_scheme(config_json, fmt, "m")
    assert e.value.reason == "scale_of_another_format"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"symmetric": False}, "symmetric: False"), ({"dynamic": True}, "dynamic: True"),
        ({"symmetric": 1}, "symmetric: 1"),
        ({"dynamic": "local"}, "dynamic: local"), ({"strategy": "channel"}, "strategy: channel"),
        ({"strategy": "attn_head"}, "strategy: attn_head"), ({"num_bits": 4}, "num_bits: 4"),
        ({"group_size": 64}, "group_size: 64"), ({"type": None}, "type: None"),
        ({"rotation": "hadamard"}, "rotation: hadamard"), (None, "kv_cache_scheme: fp8"),
    ],
)  # fmt: skip
def test_a_scheme_that_is_not_read_is_refused_by_name(change, words):
    scheme = "fp8" if change is None else {**SCHEME, **change}
    with pytest.raises(Refused, match=f"The checkpoint m has {words} in its kv_cache_scheme, expected") as e:
        check_scheme(config(scheme), "fp8_e4m3_static", "m")
    assert e.value.reason == "kv_cache_scheme_unsupported"


CACHE_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense",
              "kv_cache_scheme": SCHEME,
              "ignore": [], "quantization_status": "compressed", "version": "0.9"}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, {"kv_cache_scheme": None},
        {"quant_method": "modelopt"}, {"sparsity_config": {"format": "sparse-24"}},
        {"transform_config": {"config_groups": {"R1": {}}}}, {"unheard_of": 1},
    ],
)  # fmt: skip
def test_weights_are_native_only_where_the_cache_alone_is_quantized(change):
    assert cache_only(CACHE_ONLY)
    assert fp8_config({"quantization_config": CACHE_ONLY}, "m") is None
    assert not cache_only({**CACHE_ONLY, **change})


def test_a_file_is_read_by_its_header_alone(tmp_path):
    """As the format is published, written here byte by byte: length, JSON, content."""
    scale, other = ({"dtype": "F32", "shape": [], "data_offsets": at} for at in ([4, 8], [0, 4]))
    header = json.dumps({f"{AT}.k_scale": scale, "other": other}).encode()
    file = tmp_path / "m.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<ff", 9.0, 0.125))
    assert stored_scales([file], 4)[3, "k"].value == 0.125


OTHERS = ("attn.k_proj.k_scale", "k_cache_scale", "kv_cache_scale", "k_proj.kscale", "attn._k_scale",
          "k_proj.cache_scale", "encoder.layers.0.self_attn.k_scale")  # fmt: skip


@pytest.mark.parametrize("name", ["k_cache_scale", *(f"model.layers.0.self_attn.{name}" for name in OTHERS)])
def test_a14_t2_a_scale_of_the_cache_under_a_name_that_is_not_read_is_refused(tmp_path, name):
    """1.0 by default must not stand for one that is there."""
    message = refuse(tmp_path, {name: 0.5, "model.layers.0.self_attn.v_proj.v_scale": 0.5})
    assert f"holds {name} of model.safetensors," in message


@pytest.mark.parametrize(
    "prefix", ["vision_tower.", "draft.", "model.vision_tower.encoder.", "language_model."]
)
def test_scales_of_another_tower_or_of_queries_are_neither_read_nor_refused(tmp_path, prefix):
    others = {"k_scale": 0.5, "k_cache_scale": 0.5, "v_scale": float("nan")}
    tensors = {f"{prefix}layers.0.self_attn.{name}": x for name, x in others.items()}
    queries = ("q_scale", "prob_scale", "attn.q_scale", "q_proj.q_scale")
    tensors |= {f"model.layers.0.self_attn.{name}": 0.5 for name in queries}
    assert stored_scales(write(tmp_path, tensors), 2) == {}
    found = stored_scales(write(tmp_path, tensors | {"model.layers.0.self_attn.v_scale": 0.25}), 2)
    assert {part: held.value for part, held in found.items()} == {(0, "v"): 0.25}
