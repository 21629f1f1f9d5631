"""`kvbench formats` and `kvbench backends`: the byte formulas' numbers, and the resolver's own reasons."""

import json

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.formats.kv import KV_FORMATS, PAYLOADS, WEIGHT_FORMATS
from kvbench.machine.host import Host
from kvbench.matrix.resolve_backend import BACKENDS
from kvbench.preflight.capabilities import Shape, backend_rows


def call(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TRITON_INTERPRET": ""})


def by_name(rows):
    return {row["name"]: row for row in rows}


def listed(*words):
    return by_name(json.loads(call(*words, "--json").stdout)["kv_formats"])


def test_bytes_of_the_published_shape():
    """Qwen3-8B: 147,456 B a token in 16 bits; 73,728 + 2,304 with one F32 scale a token and head."""
    rows = listed("formats")
    assert list(rows) == list(KV_FORMATS)
    assert rows["native"]["bytes_per_token"] == 147_456
    assert rows["fp8_e4m3"]["bytes_per_token"] == 73_728 + 2_304
    assert rows["int8_sym"]["ratio_16bit"] == 0.5078125
    assert (rows["int8_static"]["bytes_per_token"], rows["int8_static"]["fixed_bytes"]) == (73_728, 288)


def test_a_model_gives_its_own_shape_and_native_in_32_bits_is_twice_16():
    row = listed("formats", "--model", "smollm2-135m-instruct")["int8_sym"]
    assert (row["bytes_per_token"], row["ratio_16bit"]) == (11_880, 0.515625)
    row = listed("formats", "--dtype", "float32")["native"]
    assert (row["ratio_16bit"], row["payload"]) == (2.0, "float32")


def test_the_text_says_the_same(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    lines = call("formats", "--head-dim", "72", "--layers", "1", "--device", "cuda").stdout.splitlines()
    row = next(line for line in lines if line.startswith("int8_static"))
    assert row.split()[-1] == "torch"
    assert "1,152 + 8 once" in row
    (no,) = [line for line in lines if line.startswith("not triton")]
    assert no.endswith(
        "head_dim: The Triton kernels have no head_dim 72; they take multiples of 16 from 16 to 256."
    )
    good = call("formats", "--device", "cuda").stdout
    assert "not triton" not in good
    assert good.count("torch, triton") == len(KV_FORMATS)


def test_every_payload_has_a_bound_and_every_backend_a_scope():
    assert {f.payload_dtype for f in (*KV_FORMATS.values(), *WEIGHT_FORMATS.values())} == {None, *PAYLOADS}
    rows = backend_rows(Shape(1, 1, 16, 1).facts, Host(), "3.0")
    assert [row["name"] for row in rows] == list(BACKENDS)


def test_the_bounds_are_those_that_the_probes_hold_stores_to():
    """At the largest element of a row of scale 1, and next to zero."""
    import torch

    from kvbench.evidence.attention_values import element_error

    big, small = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[1e-4]], dtype=torch.float64)
    eps = 1e-6  # what the probes add for their own rounding
    int8, fp8 = KV_FORMATS["int8_static"], KV_FORMATS["fp8_e4m3_static"]
    for fmt, x, bound in ((int8, big, 1 / 2), (fp8, big, 1 / 16), (fp8, small, 1 / 1024)):
        share, _ = element_error(fmt, x, 1.0, x + bound + eps)
        assert share == pytest.approx(1.0), fmt.name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_machine_can_do_and_why_not(device, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "")
    torch_row, triton = backend_rows(Shape(2, 2, 64, 4).facts, Host(device), "3.0")
    assert torch_row["formats"] == list(KV_FORMATS)
    assert triton["usable"] == (device == "cuda")
    if device == "cpu":
        assert triton["why_not"][0]["reason"].startswith("no_gpu: The Triton kernels need a CUDA device")
    assert not triton["interpreted"]


def test_a_triton_that_is_not_installed_takes_nothing_and_the_interpreter_is_named(monkeypatch):
    triton = by_name(backend_rows(Shape(2, 2, 64, 4).facts, Host("cuda"), None))["triton"]
    assert (triton["usable"], triton["formats"]) == (False, [])
    (why,) = triton["why_not"]
    assert (why["formats"], why["reason"].startswith("not_installed: ")) == (list(KV_FORMATS), True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = by_name(backend_rows(Shape(2, 2, 64, 4).facts, Host("cpu"), "3.0"))["triton"]
    assert (triton["usable"], triton["interpreted"]) == (True, True)


def test_mla_is_taken_natively_only():
    result = call("backends", "--model", "tiny-deepseek-v2", "--json")
    torch_row = by_name(json.loads(result.stdout)["backends"])["torch"]
    assert torch_row["formats"] == ["native"]
    assert [no["formats"] for no in torch_row["why_not"]] == [[f] for f in KV_FORMATS if f != "native"]


@pytest.mark.parametrize(
    "words",
    ["formats --head-dim 0", "formats --dtype int4", "formats --device tpu", "backends --model nosuch"],
)
def test_what_is_none_is_a_usage_error(words):
    assert call(*words.split()).exit_code == 2
