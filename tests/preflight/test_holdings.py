"""`kvbench models` and `kvbench data`: what is here, whether it is intact, how to get what is not."""

import gzip
import hashlib
import json
import os

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.data.corpora import WIKITEXT_SHA
from kvbench.models import catalog
from kvbench.models.catalog import ALIASES, SHAPES, TINY, Alias

NAME = "smollm2-135m-instruct"


@pytest.fixture
def call(tmp_path):
    unset = {"KVBENCH_DATA_DIR": "", "KVBENCH_ALLOW_HUB": ""}
    where = {"KVBENCH_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200", **unset}
    return lambda *words, **env: CliRunner().invoke(app, [str(w) for w in words], env=where | env)


@pytest.fixture
def alias(tmp_path, monkeypatch):
    """The alias with 4 bytes for its 98 MB; they are put where `fetch` would."""
    sha = hashlib.sha256(b"GGUF").hexdigest()
    small = Alias("p", "1", "", "x/model.gguf", 4, sha, ALIASES[NAME].config)
    monkeypatch.setitem(catalog.ALIASES, NAME, small)
    path = tmp_path / "cache" / "models" / NAME / "model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_every_name_of_the_catalog_is_listed(call):
    listed = json.loads(call("models", "--json").stdout)
    assert [one["name"] for one in listed] == [*ALIASES, *TINY, *SHAPES]
    first, alias = listed[0], ALIASES[NAME]
    due = ("not here", alias.member_bytes, alias.member_sha256)
    assert (first["state"], first["bytes"], first["sha256"]) == due
    assert first["get"] == f"kvbench models fetch {NAME}, or the first run that names it"
    assert f"{NAME}: not here; " in call("models").stdout
    # Nothing to verify is 0; a named model that is missing is 3.
    assert [call("models", "verify", *name).exit_code for name in ((), (NAME,))] == [0, 3]


def test_a_model_that_is_here_is_verified_by_its_bytes(call, alias):
    path = alias
    assert json.loads(call("models", "--json").stdout)[0]["where"] == str(path)
    assert call("models", "verify").exit_code == 0
    assert call("models", "verify", NAME).stdout.startswith(f"{NAME}: whole; ")
    stat = path.stat()
    path.write_bytes(b"GGUf")  # same size; and the same time, by which a remembered digest would go
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    broken = call("models", "verify")
    assert broken.exit_code == 1
    assert f"rm {path} && kvbench models fetch {NAME}" in broken.stdout


def test_a_folder_is_verified_by_what_can_be_known(call, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert call("models", "verify", folder).exit_code == 1
    (folder / "config.json").write_text(json.dumps(TINY["tiny-llama"]))
    assert call("models", "verify", folder).exit_code == 1  # no weights
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    whole = call("models", "verify", folder)
    assert whole.exit_code == 0
    assert f"{folder}: whole; llama, 4 layers; sha256 " in whole.stdout
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    part = call("models", "verify", folder)
    assert part.exit_code == 1
    assert "gone.safetensors, which is not there" in part.stdout


def test_what_is_here_or_built_in_needs_no_fetching(call, alias):
    result = call("models", "fetch", NAME)
    assert (result.exit_code, result.stdout.startswith(f"{NAME}: here; ")) == (0, True)
    assert call("data", "fetch", "pydoc", "cloze").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("models", "fetch"), f"Name what to fetch: {NAME}"),
        (("models", "fetch", "owner/model"), "hf download owner/model"),
        (("models", "fetch", "tiny-llama"), "needs no fetching"),
        (("models", "fetch", "nosuch"), "neither a folder"),
        (("models", "verify", "owner/model"), "verifies files when they are fetched"),
        (("models", "get"), "use list, fetch, verify"),
        (("data", "get"), "use list, fetch, verify"),
        (("data", "fetch"), "Name what to fetch: pydoc"),
        (("data", "verify", "mmul"), "Unknown data 'mmul'; use one of pydoc"),
    ],
)
def test_a_mistake_is_a_sentence(call, words, said):
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.output


def lines_of(folder, name, rows):
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / name, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


ROW = {"subject": "law", "question": "?", "choices": ["a", "b", "c", "d"], "answer": "B"}


def test_data_is_listed_file_by_file(call, tmp_path):
    lines_of(tmp_path / "d" / "mmlu", "test.jsonl.gz", [ROW])
    listed = json.loads(call("data", "--data-dir", tmp_path / "d", "--json").stdout)
    tasks = [name for task in ("mmlu", "ceval", "arc_easy", "arc_challenge") for name in (task, task)]
    texts = ["pydoc", "instructions", "cloze", "wikitext2", "wikitext2"]
    assert [one["name"] for one in listed] == [*texts, *tasks]
    assert [one["state"] for one in listed[:5]] == ["built in"] * 3 + ["not here"] * 2
    here, missing = listed[5:7]
    path = tmp_path / "d" / "mmlu" / "test.jsonl.gz"
    assert (here["state"], here["where"], here["bytes"]) == ("here", str(path), path.stat().st_size)
    assert here["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (missing["state"], missing["bytes"]) == ("not here", None)
    assert missing["get"].startswith(
        "mmlu/dev.jsonl.gz below --data-dir, or KVBENCH_ALLOW_HUB=1 kvbench data"
    )


def test_a_set_is_read_whole(call, tmp_path):
    for name in ("test", "dev"):
        lines_of(tmp_path / "d" / "mmlu", f"{name}.jsonl.gz", [ROW, {**ROW, "subject": "art"}])
    where = ("--data-dir", tmp_path / "d")
    assert "mmlu: whole; 2 questions, 2 subjects" in call("data", "verify", "mmlu", *where).stdout
    assert call("data", "verify", *where).exit_code == 0  # what is not here is not broken
    whole = (tmp_path / "d" / "mmlu" / "test.jsonl.gz").read_bytes()
    for cut in (whole[:-9], whole[: len(whole) // 2], b"no gzip"):
        (tmp_path / "d" / "mmlu" / "test.jsonl.gz").write_bytes(cut)
        broken = call("data", "verify", *where)
        assert broken.exit_code == 1
        assert "mmlu: broken; it cannot be read" in broken.stdout


def test_wikitext_is_held_to_the_published_bytes(call, tmp_path, monkeypatch):
    folder = tmp_path / "d" / "wikitext-2-raw"
    folder.mkdir(parents=True)
    (folder / "wiki.test.raw").write_text(" = A = \n")
    broken = call("data", "verify", "wikitext2", "--data-dir", tmp_path / "d")
    assert broken.exit_code == 1
    assert f"not the published bytes, sha256 {WIKITEXT_SHA['test']}" in broken.stdout
    monkeypatch.setitem(WIKITEXT_SHA, "test", hashlib.sha256(b" = A = \n").hexdigest())
    assert call("data", "verify", "wikitext2", "--data-dir", tmp_path / "d").exit_code == 0
    (folder / "wiki.valid.raw").write_text(" = B = \n")
    assert call("data", "verify", "wikitext2", "--data-dir", tmp_path / "d").exit_code == 1


def test_without_leave_nothing_is_fetched_and_verifying_never_does(call, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "kvbench.data.hub.rows_of", lambda task, part: asked.append(f"{task} {part}") or [ROW]
    )
    refused = call("data", "fetch", "mmlu")
    assert refused.exit_code == 3
    assert "KVBENCH_ALLOW_HUB=1 kvbench data fetch mmlu" in refused.output
    verified = call("data", "verify", "mmlu", KVBENCH_ALLOW_HUB="1")
    assert (verified.exit_code, asked) == (0, [])
    assert verified.stdout.startswith("mmlu: from the hub; ")
    fetched = call("data", "fetch", "mmlu", KVBENCH_ALLOW_HUB="1")
    assert fetched.exit_code == 0
    assert "mmlu: whole; 1 questions, 1 subjects" in fetched.stdout
    assert asked == ["mmlu scored", "mmlu shown"]


def test_a_hub_that_does_not_answer_is_a_sentence(call, monkeypatch):
    def gone(task, part):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("kvbench.data.hub.rows_of", gone)
    result = call("data", "fetch", "ceval", "--data-dir", "hub")
    assert result.exit_code == 3
    assert "(ConnectionError: no route to host)" in result.output
    assert "ceval/val.jsonl.gz, ceval/dev.jsonl.gz" in result.output
