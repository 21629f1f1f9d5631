"""Calibrated scales are the magnitudes of K and V over the largest code, exactly; a file is written whole or not at all."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.data.corpora import corpus, first_ids
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv import calibrate as module
from kvbench.engines.reference.kv.calibrate import Top, calibrate, scales_of, share_of
from kvbench.engines.reference.load import load_model
from kvbench.errors import KvbenchError, UsageError
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import request_of, resolve

SPEC = {**CELL_KEYS, "model": "tiny-llama", "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def loaded():
    return load_model(SPEC, "cpu", "float32")


@pytest.fixture(scope="module")
def taps(loaded):
    """|K| and |V| of each layer on the first 40 tokens of pydoc, by one plain forward."""
    ids = first_ids("pydoc", corpus("pydoc", None).text, loaded.tokenizer, 40)
    engine = Engine(loaded, resolve(request_of(SPEC), loaded.facts), SPEC, sequences=1, tokens=40)
    engine.tap_layers = frozenset(range(4))
    engine.forward([(engine.add(), ids)], "none")
    return [tuple(x.float().abs().flatten() for x in engine.taps[layer]) for layer in range(4)]


@pytest.fixture
def measured(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *a: loaded)

    def make(**options):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        written = calibrate("tiny-llama", out, **{"tokens": 40, **options})
        assert json.loads(out.read_text()) == written.content
        return written.content

    return make


def nine(x):
    return float(f"{x:.9g}")


@pytest.mark.parametrize(("fmt", "qmax"), [("int8_static", 127.0), ("fp8_e4m3_static", 448.0)])
def test_amax_over_the_largest_code_in_each_layer(measured, taps, fmt, qmax):
    found = measured(fmt=fmt)
    assert found["k"] == [nine(k.max().item() / qmax) for k, _ in taps]
    assert found["v"] == [nine(v.max().item() / qmax) for _, v in taps]
    assert len(set(found["k"])) == 4


def test_one_scale_for_all_of_k_and_one_for_all_of_v(measured, taps):
    found = measured(per="tensor")
    assert found["k"] == [nine(max(k.max().item() for k, _ in taps) / 127)] * 4
    assert found["v"] == [nine(max(v.max().item() for _, v in taps) / 127)] * 4


@pytest.mark.parametrize("per", ["layer", "tensor"])
def test_a_percentile_is_the_nearest_rank(measured, taps, per):
    found = measured(method="p99.5", per=per)
    values = [k for k, _ in taps] if per == "layer" else [torch.cat([k for k, _ in taps])] * 4
    n = len(values[0])
    rank = {1280: 1274, 5120: 5095}[n]  # ceil(0.995 n)
    assert found["k"] == [nine(v.sort().values[rank - 1].item() / 127) for v in values]


def test_windows_add_up(measured, monkeypatch, taps):
    """Two windows: the first is the text's own head, so its magnitudes are a lower bound."""
    monkeypatch.setattr(module, "WINDOW", 40)
    one, two = measured(), measured(tokens=80)
    assert one["v"] == [nine(v.max().item() / 127) for _, v in taps]
    assert all(a <= b for a, b in zip(one["v"], two["v"], strict=True))
    assert one["v"] != two["v"]


def test_top_keeps_what_its_quantile_needs():
    top = Top(0.9, 10)
    for part in ([1.0, -9.0, 3.0], [10.0, 2.0, 4.0, 5.0], [8.0, 7.0, 6.0]):
        top.add(torch.tensor(part))
    assert top.value() == 9.0  # the 9th of 10
    assert len(top.kept) == 2


def test_where_the_scales_come_from_stands_in_the_file(measured, loaded):
    found = measured(method="p99", per="tensor")
    assert found["model_digest"] == loaded.sha
    assert (found["method"], found["per"], found["tokens"], found["data"]) == ("p99", "tensor", 40, "pydoc")
    assert found["data_sha256"] == corpus("pydoc", None).sha256
    assert found == measured(method="p99", per="tensor")


def test_a_side_of_zeros_gives_no_scale():
    with pytest.raises(KvbenchError, match="Layer 1: that magnitude of V is 0"):
        scales_of([(1.0, 1.0), (1.0, 0.0)], 127.0)


@pytest.mark.parametrize("method", ["max", "p49.9", "p100.1", "p", "99", "p99.9%"])
def test_an_unknown_method_is_refused(method):
    with pytest.raises(UsageError, match=f"--method {method} is not known; use amax"):
        share_of(method)


def test_methods_are_shares():
    assert [share_of(m) for m in ("amax", "p50", "p99.9", "p100")] == [1.0, 0.5, pytest.approx(0.999), 1.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "int8_sym"], "--format int8_sym is not known; use int8_static or fp8_e4m3_static."),
        (["--per", "head"], "--per head is not known; use layer or tensor."),
        (["--dtype", "fp8"], "--dtype fp8 is not known"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--method", "mse"], "--method mse is not known"),
    ],
)
def test_a_bad_option_is_said_before_anything_is_loaded(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(module, "load_model", lambda *a: pytest.fail("a model was loaded"))
    found = CliRunner().invoke(app, ["calibrate", "tiny-llama", str(tmp_path / "s.json"), *words])
    assert found.exit_code == 2
    assert said in found.output
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays_as_it_is(tmp_path):
    out = tmp_path / "s.json"
    out.write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        calibrate("tiny-llama", out)
    assert out.read_text() == "mine"
    with pytest.raises(UsageError, match=r"does not end with \.json"):
        calibrate("tiny-llama", tmp_path / "scales.yaml")


def test_a_short_text_or_a_fault_leaves_no_file(measured, tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("short")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="has 5 tokens"):
        measured(data=str(path))
    monkeypatch.setattr(module, "scales_of", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured()
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_writes_what_a_matrix_takes(tmp_path):
    out = tmp_path / "s.json"
    words = ["calibrate", "tiny-llama", str(out), "--tokens", "40", "--json"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["file"] == str(out)
    (tmp_path / "m.yaml").write_text(
        "model: {source: tiny-llama, plumbing: true}\naxes: {kv_format: int8_static, scale: s.json}\n"
        "runners: {generate: {prompts: 2, new_tokens: 40, prompt_tokens: 8}, perplexity: {limit_chunks: 1}}\n"
    )
    ran = CliRunner().invoke(app, ["run", str(tmp_path / "m.yaml"), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    kept = [json.loads(p.read_text()) for p in (tmp_path / "out" / "records").iterdir()]
    own = [r for r in kept if r["spec"]["kv_format"] == "int8_static"]
    assert len(own) == 2
    for record in own:
        assert record["facts"]["scale_kind"] == "calibrated"
        assert record["facts"]["scale_source"].startswith("file s.json (")
        assert "amax per layer over 40 tokens of pydoc" in record["facts"]["scale_source"]
    assert "scale_kind" not in next(r for r in kept if r["spec"]["kv_format"] == "native")["facts"]
    assert "calibrated" in ran.output


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"model_digest": "sha256:other"}, "scale_of_another_model"), ({"k": [0.1] * 3, "v": [0.1] * 3}, "scale_count")],
)  # fmt: skip
def test_a_run_refuses_the_file_of_another_model_by_name(measured, tmp_path, change, reason):
    (tmp_path / "s.json").write_text(json.dumps(measured() | change))
    (tmp_path / "m.yaml").write_text(
        "model: {source: tiny-llama, plumbing: true}\naxes: {kv_format: int8_static, scale: s.json}\n"
        "runners: {storage: {}}\n"
    )
    ran = CliRunner().invoke(app, ["run", str(tmp_path / "m.yaml"), "--out", str(tmp_path / "out"), "--json"])
    assert ran.exit_code == 3, ran.output
    kept = [json.loads(p.read_text()) for p in (tmp_path / "out" / "records").iterdir()]
    refused = next(r for r in kept if r["spec"]["kv_format"] == "int8_static")
    assert (refused["status"], refused["error"]["reason"]) == ("refused", reason)
    assert "The scale file s.json" in refused["error"]["message"]
