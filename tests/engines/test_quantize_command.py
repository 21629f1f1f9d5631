"""`kvbench quantize`: what it writes, what transformers makes of that, and that OUT is there whole or not at all."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights import quantize_checkpoint as module
from kvbench.errors import KvbenchError
from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.models.catalog import ALIASES
from kvbench_kernels.gemm.blockwise import dequantize_blocks, quantize_blocks
from tests.factories import checkpoints
from tests.factories.checkpoints import load, logits, raw

EVEN = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
RAGGED = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1}


def native(folder, dtype=torch.bfloat16, **changes):
    return checkpoints.native(folder, dtype, **changes)


def quantize(model, out, *options):
    return CliRunner().invoke(app, ["quantize", str(model), str(out), *options])


def written(model, out, *options):
    result = quantize(model, out, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run_python(code, *args):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_dequantizes_to_the_same_values(tmp_path, dtype, tied):
    """Every dimension is a multiple of 128, or one block: see the next test for the others."""
    source, out = native(tmp_path / "in", tie_word_embeddings=tied, **EVEN), tmp_path / "out"
    data = written(source, out)
    theirs, info = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load(out, str(dtype).removeprefix("torch."))
    assert ours.weights.modules == tuple(data["converted"])
    assert len(data["converted"]) == 14
    for name in data["converted"]:
        layer = ours.model.get_submodule(name)
        expected = dequantize_blocks(layer.weight, layer.weight_scale_inv, dtype)
        assert torch.equal(theirs.get_submodule(name).weight, expected), name
    near = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    expected = logits(theirs)
    torch.testing.assert_close(logits(ours.model), expected, atol=near * expected.abs().max().item(), rtol=0)
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied


def test_a15_t4_tails_are_told_of_and_read_back_and_bytes_count_the_native_remainder(tmp_path):
    source, out = native(tmp_path / "in", torch.float32, **RAGGED), tmp_path / "out"
    data = written(source, out)
    (warning,) = data["warnings"]
    assert "(192 of model.layers.0.self_attn.q_proj, 320 of model.layers.0.mlp.gate_proj)" in warning
    held, stored = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {k for k in stored if k not in held} == {f"{n}.weight_scale_inv" for n in data["converted"]}
    loaded = load(out).model.state_dict()
    for name in data["converted"]:
        codes, scales = quantize_blocks(held[f"{name}.weight"])
        for tensors in (stored, loaded):
            assert torch.equal(raw(tensors[f"{name}.weight"]), raw(codes))
            assert torch.equal(tensors[f"{name}.weight_scale_inv"], scales)
    rest = [k for k in stored if k in held and k.removesuffix(".weight") not in data["converted"]]
    assert rest
    assert all(torch.equal(stored[k], held[k]) for k in rest)
    assert data["bytes_after"] == sum(t.nbytes for t in stored.values())
    assert data["bytes_before"] == sum(t.nbytes for t in held.values())
    shapes = [stored[f"{n}.weight"].shape for n in data["converted"]]
    converted = sum(weight_bytes(WEIGHT_FORMATS["fp8_block128"], *shape, "float32").total for shape in shapes)
    assert data["bytes_after"] == converted + (2 * 258 * 192 + 3 * 192) * 4  # embedding, output layer, norms
    assert data["ratio"] == data["bytes_after"] / data["bytes_before"] > 0.25


def test_the_folder_has_all_that_a_model_needs(tmp_path):
    source, out = native(tmp_path / "in", tie_word_embeddings=True), tmp_path / "out"
    written(source, out)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert config["dtype"] == "bfloat16"
    assert "kvbench" not in json.dumps(config)
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 7
    assert (out / "tokenizer.json").is_file()
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert {p.stat().st_mode & 0o777 for p in out.iterdir()} == {(out / "config.json").stat().st_mode & 0o777}
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("in", "out")] == []


@pytest.mark.parametrize(
    ("own", "option", "expected"),
    [("float16", None, "float16"), ("float32", None, "float32"), ("float32", "bfloat16", "bfloat16")],
)
def test_the_rest_keeps_its_dtype_and_codes_come_of_the_stored_values(tmp_path, own, option, expected):
    source, out = native(tmp_path / "in", getattr(torch, own)), tmp_path / "out"
    data = written(source, out, *(["--dtype", option] if option else []))
    held, stored = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert data["dtype"] == expected
    rest = {str(t.dtype) for k, t in stored.items() if "_proj" not in k}
    assert rest == {f"torch.{expected}"}
    for name in data["converted"]:
        codes, scales = quantize_blocks(held[f"{name}.weight"])
        assert torch.equal(raw(stored[f"{name}.weight"]), raw(codes))
        assert torch.equal(stored[f"{name}.weight_scale_inv"], scales)


def test_a_folder_of_shards_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", "50KB")
    written(native(tmp_path / "in"), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert len(load(tmp_path / "out", "bfloat16").weights.modules) == 28


def test_what_it_prints(tmp_path):
    result = quantize(native(tmp_path / "in", **EVEN), tmp_path / "out")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines == [
        f"{tmp_path / 'out'}: 14 linear layers in FP8 (E4M3, one float32 scale a 128x128 block), the rest bfloat16.",
        "Weights: 2,232,832 B before, 1,250,032 B after, ratio 0.5598.",
    ]


@pytest.mark.parametrize("where", ["empty", "link to an empty one", "."])
def test_an_empty_folder_is_taken(tmp_path, monkeypatch, where):
    source, out, link = native(tmp_path / "in"), tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to("out")
    monkeypatch.chdir(out)
    same = out.stat().st_ino
    data = written(source, {"empty": out, ".": Path()}.get(where, link))
    assert data["folder"] == str(out)
    assert (out / "config.json").is_file()
    assert out.stat().st_ino == same
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "link", "out"]
    assert link.is_symlink()


def test_an_out_that_cannot_be_is_known_before_anything_is_loaded(tmp_path, monkeypatch):
    source = native(tmp_path / "in")
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "back").symlink_to("in")
    monkeypatch.setattr(module, "load_model", lambda *args: pytest.fail("loaded"))
    cases = [
        (tmp_path / "link", "link is a link to nowhere, which is not there; give a folder"),
        (tmp_path / "loop", "loop is a link to loop, which is not there"),
        (file / "sub", "cannot be written (Not a directory); give a folder that does not exist yet"),
        (file / "sub" / "deep", "cannot be written (Not a directory)"),
        (Path("/proc/xx"), "/proc/xx cannot be written (No such file or directory)"),
        (Path("~no-such-user/x"), "~no-such-user/x cannot be written ("),
        (source, f"is the folder of the model {source}, or lies in it; give a folder outside"),
        (source / "deep" / "out", f"is the folder of the model {source}, or lies in it"),
        (tmp_path / "back" / "out", f"is the folder of the model {source}, or lies in it"),
    ]
    before = sorted(p.name for p in [*tmp_path.iterdir(), *source.iterdir()])
    for out, sentence in cases:
        result = quantize(source, out)
        assert (result.exit_code, result.stdout) == (2, ""), out
        assert sentence in result.stderr
    assert sorted(p.name for p in [*tmp_path.iterdir(), *source.iterdir()]) == before


def test_what_is_refused_before_anything_is_written(tmp_path):
    source = native(tmp_path / "in")
    full, file, fp8 = tmp_path / "full", tmp_path / "file", tmp_path / "fp8"
    written(source, fp8)
    full.mkdir()
    (full / "x").write_text("mine")
    file.write_text("mine")
    out = tmp_path / "out"
    cases = [
        (
            source,
            full,
            (),
            f"{full} is there already; give a folder that does not exist yet, or an empty one.",
        ),
        (source, file, (), f"{file} is there already"),
        (
            source,
            out,
            ("--dtype", "int8"),
            "dtype 'int8' is unknown; choose one of float32, bfloat16, float16.",
        ),
        ("tiny-llama", out, (), "The model tiny-llama is a config with random weights"),
        ("tiny-lama", out, (), "Did you mean tiny-llama?"),
        (tmp_path, out, (), "has no config.json"),
        (fp8, out, (), "already quantized (fp8, 128x128 blocks), so there is nothing to do; use it as it is"),
    ]
    for model, target, options, sentence in cases:
        result = quantize(model, target, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
    assert (full / "x").read_text() == file.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "fp8", "full", "in"]


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device", str(path))

    source = native(tmp_path / "in")
    monkeypatch.setattr(module, "_sync", full)
    result = quantize(source, tmp_path / "out")
    assert result.exit_code == 3
    assert "No space left on device" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["deep/er/out", "empty"])
@pytest.mark.parametrize("limit", [10_000, 300_000], ids=["tokenizer or config", "weights"])
def test_files_that_may_not_grow_leave_nothing(tmp_path, limit, where):
    """As on a full disk: safetensors and tokenizers have errors of their own for it."""
    source = native(tmp_path / "in", vocab_size=2048)
    (tmp_path / "empty").mkdir()
    code = (
        "import resource, sys\n"
        "from kvbench.engines.reference.weights import quantize_checkpoint as q\n"
        "count = q._bytes\n"
        "def small(*args):\n"
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"
        "    return count(*args)\n"
        "q._bytes = small\n"
        "from kvbench.cli.main import main\n"
        "main()"
    )
    done = run_python(code, "quantize", str(source), str(tmp_path / where))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"kvbench: {tmp_path / where} could not be written (")
    assert "File too large" in done.stderr
    assert "nothing was left of it. Fix it and run the same command again." in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.iterdir()) == ["empty", "in"]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(("last", "there"), [("load_model", False), ("_sync", False), ("_sync", True)])
def test_an_interrupt_leaves_nothing_and_says_so(tmp_path, monkeypatch, last, there):
    source, out = native(tmp_path / "in"), tmp_path / "out"
    real = getattr(module, last)

    def interrupted(*args):
        if last == "load_model" or args[0] == tmp_path:  # the very last thing that is done
            raise KeyboardInterrupt
        return real(*args)

    if there:
        out.mkdir()
    monkeypatch.setattr(module, last, interrupted)
    result = quantize(source, out)
    assert (result.exit_code, result.stdout) == (130, "")
    assert (
        result.stderr == "kvbench: interrupted; nothing was written; run the same command to start again.\n"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == (["in", "out"] if there else ["in"])
    assert not there or list(out.iterdir()) == []


@pytest.mark.slow
def test_a_killed_process_leaves_no_folder_of_that_name(tmp_path):
    source, out = native(tmp_path / "in"), tmp_path / "out"
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from kvbench.engines.reference.weights import quantize_checkpoint as q\n"
        "q._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"q.quantize_checkpoint({str(source)!r}, Path({str(out)!r}))"
    )
    done = run_python(code)
    assert done.returncode == -9
    assert not out.exists()
    assert [p.name.rpartition("-")[0] for p in tmp_path.iterdir() if p != source] == ["out.part"]
    others = [f"out.part-{os.getppid()}", "out.part-x", "other.part-99999999", "out.part-99999999"]
    for name in others:
        (tmp_path / name).mkdir()
    with module._locked(tmp_path / others[-1]):  # by a process whose number means nothing here
        written(source, out)
    assert (out / "model.safetensors").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in", "out", *others])


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def unknown(*args):
        raise OSError(9, "Bad file descriptor")  # a folder on NFS

    left = tmp_path / "out.part-99999999"
    left.mkdir()
    monkeypatch.setattr(module.fcntl, "flock", unknown)
    written(native(tmp_path / "in"), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    assert left.is_dir()


BROKEN = {
    "hidden_size": ({"hidden_size": -1}, "for hidden_size, got -1"),
    "hidden_size text": ({"hidden_size": "64"}, "for hidden_size, got '64'"),
    "hidden_size null": ({"hidden_size": None}, "'hidden_size'"),
    "vocab_size": ({"vocab_size": 0}, "for vocab_size, got 0"),
    "heads": ({"num_attention_heads": 0}, "for num_attention_heads, got 0"),
    "head_dim": ({"head_dim": 0}, "for head_dim, got 0"),
    "rope": ({"rope_parameters": "x"}, "'rope_parameters'"),
    "eps": ({"rms_norm_eps": "x"}, "'rms_norm_eps'"),
    "tied": ({"pad_token_id": 10**6}, "could not be loaded (AssertionError: Padding_idx"),
    "quantization": ({"quantization_config": "fp8"}, "quantization_config is fp8, expected a mapping"),
    "quantizations": ({"quantization_config": [1]}, "quantization_config is [1], expected a mapping"),
    "quantization number": ({"quantization_config": 1}, "quantization_config is 1, expected a mapping"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_is_a_sentence(tmp_path, name):
    changes, sentence = BROKEN[name]
    source = native(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    refused_alike(source, sentence)
    with pytest.raises(KvbenchError) as e:  # random weights of it
        load_model({"model": str(source), "model_weights": "random"}, "cpu", "float32")
    assert "quantization" in name or sentence in str(e.value)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        *(
            ("model.safetensors.index.json", text, "has no weight_map of tensor names to file names")
            for text in (
                '{"weight_map": null}',
                '{"weight_map": ["a"]}',
                '{"weight_map": {"a": 3}}',
                "[]",
                "{}",
            )
        ),
        ("model.safetensors.index.json", "{bad", "is not valid JSON"),
        ("config.json", "{bad", "is not valid JSON"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_not_what_it_should_be_is_a_sentence(tmp_path, file, text, said):
    source = native(tmp_path / "in")
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / file).write_text(text)
    shown = refused_alike(source, said)
    assert str(source / file) in shown
    assert "JSON" not in said or "fetch the checkpoint again, or export it again." in shown


def refused_alike(source, sentence):
    """By the command and, as a cell of a matrix, by the loader; the command's words."""
    for weights in ("native", "fp8_block128"):
        with pytest.raises(KvbenchError) as e:
            load(source, weights=weights)
        assert sentence in str(e.value)
        assert str(source) in str(e.value)
        assert "the matrix again" not in str(e.value)
    result = quantize(source, source.parent / "out")
    assert result.exit_code in (2, 3), result.exception
    assert sentence in result.stderr
    assert not (source.parent / "out").exists()
    return result.stderr


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_speaks_in_fp8(tmp_path):
    out = tmp_path / "out"
    data = written("smollm2-135m-instruct", out)
    assert (len(data["converted"]), data["dtype"]) == (210, "bfloat16")
    assert (data["bytes_before"], data["bytes_after"]) == (269_030_016, 162_891_696)
    loaded, on_load = load(out), load("smollm2-135m-instruct")
    assert loaded.weights.modules == on_load.weights.modules
    for name in data["converted"]:
        ours, other = (m.model.get_submodule(name) for m in (loaded, on_load))
        assert torch.equal(raw(ours.weight.data), raw(other.weight.data))
        assert torch.equal(ours.weight_scale_inv, other.weight_scale_inv)
    loaded.model.set_attn_implementation("eager")
    ids = torch.tensor([loaded.tokenizer("The capital of France is")["input_ids"]])
    with torch.inference_mode():
        found = loaded.model(ids, use_cache=False).logits[0]
    assert loaded.tokenizer.decode([found[-1].argmax().item()]) == " Paris"

    # transformers cannot dequantize blocks of 576 columns by itself, so its model is given what the file stands for.
    stored = load_file(out / "model.safetensors")
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ALIASES["smollm2-135m-instruct"].config))
    values = {k: v.float() for k, v in stored.items() if not k.endswith("weight_scale_inv")}
    for name in data["converted"]:
        scales, (n, k) = stored[f"{name}.weight_scale_inv"], stored[f"{name}.weight"].shape
        for row, column in itertools.product(range(-(-n // 128)), range(-(-k // 128))):
            block = values[f"{name}.weight"][128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            block *= scales[row, column]
    missing = theirs.load_state_dict(values, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])  # tied
    with torch.inference_mode():
        expected = theirs.eval()(ids, use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
