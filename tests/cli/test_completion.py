"""Shell completion: the shell's question is answered; and the examples that end each help are right."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvbench.cli import completion
from kvbench.cli.examples import EXAMPLES
from kvbench.cli.main import COMMANDS, app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    matrix = "name: x\nrunners: {}\n"
    texts = {"m/int8.yaml": matrix, "m/int4.yml": matrix, "m/gate.yaml": "checks: []\n", "m/notes.yaml": "a: 1\n",
             "m/int8.txt": matrix, "m/deep/x": "", "runs/int8/run.json": "{}", "runs/.hidden/x": "",
             "runs/sweep.yaml": matrix, "model/config.json": "{}", "a.gguf": ""}  # fmt: skip
    for name, content in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_completed_by_what_they_are(folder):
    assert completion.matrices("m/") == ["m/deep/", "m/int4.yml", "m/int8.yaml"]
    assert completion.matrices("m/int8") == ["m/int8.yaml"]
    assert completion.gates("m/") == ["m/deep/", "m/gate.yaml"]
    assert completion.policies("m/") == ["m/deep/", "m/gate.yaml", "m/int4.yml", "m/int8.yaml"]
    assert completion.matrices("") == ["m/", "model", "runs/"]
    assert completion.matrices(f"{folder}/m/int4") == [f"{folder}/m/int4.yml"]
    assert completion.matrices("nosuch/") == []
    assert completion.runs("ru") == ["runs/"]
    assert completion.runs("runs/") == ["runs/int8"]
    assert completion.runs("runs/.") == ["runs/.hidden/"]
    assert completion.kv_formats("int8") == ["int8_sym", "int8_static"]
    assert "native" not in completion.kv_formats("")
    assert completion.models("smollm2") == ["smollm2-135m-instruct"]
    assert completion.models("a") == ["a.gguf"]
    assert completion.models("mode") == ["model"]
    assert completion.corpora("w") == ["wikitext2"]


def ask(words, at, cwd):
    """As bash asks: the words of the line, and which of them the cursor is on."""
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "PATH": os.environ["PATH"],
           "_KVBENCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "kvbench"], env=env, cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_shell_is_answered(folder):
    assert set(COMMANDS) == set(ask("kvbench ", 1, folder))
    assert ask("kvbench plan m/int", 2, folder) == ["m/int4.yml", "m/int8.yaml"]
    assert ask("kvbench gate runs/", 2, folder) == ["runs/int8"]
    assert ask("kvbench plan runs/", 2, folder) == ["runs/int8", "runs/sweep.yaml"]
    assert ask("kvbench run m/int8.yaml --gate m/g", 4, folder) == ["m/gate.yaml"]
    assert ask("kvbench init --format fp8", 3, folder) == ["fp8_e4m3", "fp8_e4m3_static"]


def test_every_command_ends_its_help_with_an_example():
    assert set(EXAMPLES) == set(COMMANDS)
    for name, examples in EXAMPLES.items():
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        after = re.split(r"Examples?:", shown)[-1]
        for example in examples:
            assert example in after, f"{name}: {example}"
            assert example.split()[:2] == ["kvbench", name]


ALL = [example for examples in EXAMPLES.values() for example in examples]


@pytest.mark.parametrize("example", ALL)
def test_every_example_is_one_that_the_command_takes(example):
    """Arguments and options are known; nothing is run."""
    words = shlex.split(example.split(" > ")[0])[1:]
    command = get_command(app).commands[words[0]]
    command.make_context(words[0], words[1:])


# What takes a model, a run of its own, or a minute.
DEAR = ("run", "gate", "report", "merge", "compare", "history", "calibrate", "quantize", "doctor", "lm-eval")


CHEAP = [e for e in ALL if e.split()[1] not in DEAR and "fetch" not in e and "--fault" not in e]


@pytest.mark.parametrize(
    "example", [pytest.param(e, marks=[pytest.mark.slow] if " fp8 kv" in e else []) for e in CHEAP]
)
def test_the_cheap_examples_run(example, tmp_path, monkeypatch):
    for name in ("matrices", "gates", "reports/reference"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "DIR").mkdir()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(example.split(" > ")[0])[1:]
    result = CliRunner().invoke(
        app, words, env={"KVBENCH_DATA_DIR": "", "KVBENCH_CACHE_DIR": str(tmp_path / "c")}
    )
    # A published table with a finding ends with 1, data that is named and not in an empty folder with 3.
    expected = 1 if words[0] == "check-table" else 3 if words[:2] == ["data", "verify"] else 0
    assert result.exit_code == expected, result.output
    assert result.stdout
