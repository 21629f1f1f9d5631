"""In CI: a missing device, streams, colours, bars, and the workflow that is there to be copied."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.gate.evaluate import evaluate
from kvbench.machine.ci import device_required, in_ci
from kvbench.matrix.cells import Task
from kvbench.metrics.collect import derive
from kvbench.records.record import REFUSED
from kvbench.records.run import MatrixFile
from kvbench.run.execute import Plan
from kvbench.run.progress import Bar, Lines, Silent, watcher
from tests.factories.runs.made import MadeRun, layers, storage_facts

ROOT = Path(__file__).parents[2]
NO_GPU = {"reason": "no_cuda_device", "message": "device cuda was asked for, and this machine has none."}


@pytest.mark.parametrize("ci", [None, "", "false", "0", "True", "1", "woodpecker"])
def test_who_says_that_this_is_ci(ci):
    environ, found = ({} if ci is None else {"CI": ci}), ci in ("True", "1", "woodpecker")
    assert in_ci(environ) == found
    assert device_required(None, environ) == found
    assert device_required(True, environ)
    assert not device_required(False, environ)
    assert device_required(None, {**environ, "KVBENCH_REQUIRE_GPU": "1"})
    assert not device_required(None, {**environ, "KVBENCH_REQUIRE_GPU": "0"})


def made(without=("cand",)):
    facts = storage_facts(16, 2048)
    run = MadeRun().measure("storage", (layers(2, 512, 64), facts), (layers(2, 2048, 0), facts))
    for cell in without:
        run.change(cell, status=REFUSED, samples={}, facts={}, decision=None, evidence=None, error=NO_GPU)
    return run


@pytest.fixture
def stored(tmp_path):
    return made().on_disk(tmp_path / "run", matrix=MatrixFile("m.yaml"), command=("kvbench",))


def kvbench(*words, **environ):
    return CliRunner().invoke(app, [str(word) for word in words], env=environ)


def fresh(*words, **how):
    """The command in a process of its own."""
    call = [sys.executable, "-m", "kvbench", *map(str, words)]
    return subprocess.run(call, stderr=subprocess.PIPE, check=False, cwd=ROOT, **how)


@pytest.mark.parametrize(("required", "status", "code"), [(False, "not_evaluated", 3), (True, "fail", 1)])
@pytest.mark.parametrize("without", [("cand",), ("base", "cand")])
def test_a_missing_device(without, required, status, code):
    run = made(without)
    verdict = evaluate(None, run.run, derive(run.run), required)
    assert verdict.exit_code == code
    (outcome,) = [o for o in verdict.outcomes if o.check == "device"]
    assert (outcome.status, outcome.cells) == (status, without)
    start = f"{len(without)} of 2 cells could not run: device cuda was asked for, and this machine has none"
    assert outcome.sentence.startswith(start)
    assert ("They are skipped" in outcome.sentence) == (not required)
    assert [o.cells for o in verdict.outcomes if o.check == "skipped"] == [(cell,) for cell in without]
    # No check of such a cell passes, whatever is required.
    assert not [o for o in verdict.outcomes if o.status == "pass" and set(o.cells) & set(without)]


@pytest.mark.parametrize("required", [False, True])
def test_with_the_device_or_with_another_refusal_there_is_no_such_check(required):
    whole, other = made(()), made()
    other.change("cand", error={"reason": "mla_not_validated", "message": "x"})
    whole, other = (evaluate(None, run.run, derive(run.run), required) for run in (whole, other))
    assert (whole.exit_code, other.exit_code) == (0, 3)
    assert not [o for o in whole.outcomes if o.check in ("device", "skipped")]
    assert [o.check for o in other.outcomes if o.cells == ("cand",)] == ["precision", "refused"]


def test_skipped_here_and_failed_in_ci(stored):
    for words, environ, code in (
        ((), {}, 3),
        (("--require-device",), {}, 1),
        ((), {"CI": "true"}, 1),
        ((), {"KVBENCH_REQUIRE_GPU": "1"}, 1),
        (("--no-require-device",), {"CI": "true"}, 3),
        ((), {"CI": "true", "KVBENCH_REQUIRE_GPU": "0"}, 3),
    ):
        result = kvbench("gate", stored.path, *words, **environ)
        assert result.exit_code == code, result.output
        assert "this machine has none" in result.output
        assert "PASS " not in result.stdout
        assert ("<skipped " in (stored.path / "report.junit.xml").read_text()) == (code == 3)


def test_annotations_go_to_stderr_json_stays_whole_and_quiet_is_the_verdict_and_the_paths(stored, tmp_path):
    summary = tmp_path / "summary.md"
    environ = {"CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    result = kvbench("gate", stored.path, "--json", **environ)
    assert json.loads(result.stdout)["exit_code"] == 1
    lines = result.stderr.splitlines()
    assert lines[0].startswith("::error title=kvbench fail%3A device (int8_sym)::1 of 2 cells could not run")
    assert all(line.startswith("::error title=") for line in lines)
    assert summary.read_text().startswith("# kvbench made: FAIL\n")
    summary.unlink()
    result = kvbench("report", stored.path, **environ)  # says nothing to GitHub
    assert (result.exit_code, result.stderr, summary.exists()) == (0, "", False)
    for word in ("--quiet", "-q"):
        result = kvbench("gate", stored.path, word)
        first, *paths = result.stdout.splitlines()
        assert re.fullmatch(r"NOT EVALUATED  .* Exit code 3\.", first)
        assert [Path(line).is_file() for line in paths] == [True] * 8
        assert result.stderr == ""


def test_no_earlier_junit_stands_for_an_error_or_an_interrupted_run(stored, tmp_path, monkeypatch):
    (tmp_path / "bad.yaml").write_text("checks: [{metric: nonsense}]")
    assert kvbench("gate", stored.path).exit_code == 3
    assert stored.junit_path.is_file()
    assert kvbench("gate", stored.path, "--gate", tmp_path / "bad.yaml").exit_code == 2
    assert not stored.junit_path.exists()
    axes = "axes: {kv_format: [native]}\nengine: {device: cpu}\nrunners: {storage: {}}\n"
    (tmp_path / "m.yaml").write_text(f"name: m\nmodel: {{source: tiny-llama, weights: random}}\n{axes}")
    (tmp_path / "report.junit.xml").write_text("<testsuites/>")
    monkeypatch.setattr("kvbench.run.task.measure.execute", Mock(side_effect=KeyboardInterrupt))
    result = kvbench("run", tmp_path / "m.yaml", "--out", tmp_path)
    assert result.exit_code == 130, result.output
    assert (tmp_path / "run.json").is_file()
    assert not (tmp_path / "report.junit.xml").exists()


@pytest.mark.parametrize("ci", [{}, {"CI": "true"}])
def test_a_bar_only_where_it_can_move(monkeypatch, ci):
    monkeypatch.delenv("CI", raising=False)
    for name, value in ci.items():
        monkeypatch.setenv(name, value)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("TERM", "xterm")
        assert type(watcher()) is (Bar if terminal and not ci else Lines)
        assert type(watcher(plain=True)) is Lines
        assert type(watcher(quiet=True)) is Silent
        monkeypatch.setenv("TERM", "dumb")
        assert type(watcher()) is Lines


@pytest.mark.parametrize("kind", [Silent, Lines])
def test_a_silent_watcher_says_nothing(kind, capsys):
    record, each = made(()).records[0], kind()
    task = Task(record.key, "storage", "", record.spec, {}, ("cell",), None)
    each.start(Plan((task,), (task,)))
    each.task(1, task, "cell")
    each.finished(record)
    each.close()
    said = capsys.readouterr()
    assert (said.out, said.err == "") == ("", kind is Silent)


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


def on_terminal(words, environ):
    """What `kvbench` writes to a terminal of its own, both streams."""
    import pty

    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM", "CI")}
    ours, theirs = pty.openpty()
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environ = {**clean, **path, "TERM": "xterm-256color", **environ}
    call, out = [sys.executable, "-m", "kvbench", *words], b""
    with subprocess.Popen(call, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=ROOT) as process:
        os.close(theirs)
        with suppress(OSError):  # the other end is closed
            while read := os.read(ours, 1 << 16):
                out += read
        process.wait()
    os.close(ours)
    return out.decode("utf-8", errors="replace")


@pytest.mark.parametrize("words", [["gate", "RUN"], ["run", "--help"], ["gate", "--nonsense"]], ids=" ".join)
def test_a_terminal_gets_colours_unless_it_says_no(stored, words):
    """Verdicts have colours; help and usage errors are plain text everywhere."""
    coloured = "RUN" in words
    words = [str(stored.path) if word == "RUN" else word for word in words]
    assert bool(COLOUR.search(on_terminal(words, {}))) == coloured
    assert not coloured or not COLOUR.search(on_terminal(words, {"NO_COLOR": "1"}))
    assert "\x1b" not in on_terminal(words, {"TERM": "dumb"})


WORKFLOW = yaml.safe_load((ROOT / "examples" / "github-actions.yml").read_text(encoding="utf-8"))
STEPS = WORKFLOW["jobs"]["gate"]["steps"]


def test_the_workflow_keeps_the_exit_code_and_the_report(stored):
    text = json.dumps(STEPS)
    assert not [word for word in ("|| true", "continue-on-error", "| tee") if word in text]
    run = shlex.split(next(step["run"] for step in STEPS if "kvbench run" in step.get("run", "")))
    out, upload = run[run.index("--out") + 1], STEPS[-1]
    assert upload["uses"].startswith("actions/upload-artifact@")
    assert upload["if"] == "${{ !cancelled() }}"  # after a failure too
    patterns = upload["with"]["path"].split()
    assert all(pattern.startswith(f"{out}/") for pattern in patterns)
    # All that a run leaves, but the lock.
    assert kvbench("gate", stored.path).exit_code == 3
    left = {path.name + "/" * path.is_dir() for path in stored.path.iterdir()} | {"gate.yaml"}
    globs = [pattern.removeprefix(f"{out}/") for pattern in patterns]
    assert not {name for name in left if not any(fnmatch(name, glob) for glob in globs)}
    cache = next(step["with"]["path"] for step in STEPS if step.get("uses", "").startswith("actions/cache@"))
    assert WORKFLOW["jobs"]["gate"]["env"]["KVBENCH_CACHE_DIR"].endswith(f"/{cache}")


def test_the_workflow_runs_commands_that_exist_on_files_that_exist():
    on = WORKFLOW.get(True, WORKFLOW.get("on"))  # YAML 1.1 reads `on` as true
    assert set(on) == {"pull_request", "workflow_dispatch"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for step in STEPS:
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    lines = "\n".join(step.get("run", "") for step in STEPS).replace("\\\n", " ").splitlines()
    commands = [line for line in map(str.strip, lines) if line.startswith("kvbench ")]
    found = [shlex.split(line, comments=True)[1:] for line in commands]
    assert [words[0] for words in found] == ["plan", "run"]
    for words in found:
        parameters = typer.main.get_command(app).commands[words[0]].params
        known = {opt for parameter in parameters for opt in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.split("=")[0] for word in words[1:] if word.startswith("-")} <= known, words
        assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_no_junit_stands_beside_a_result_that_could_not_be_printed(stored, words):
    """Of a pass: the exit code is another one then, and a green suite would say something else."""
    with open("/dev/full", "w") as full:
        ended = fresh("gate", stored.path, *words, stdout=full, text=True)
    assert ended.returncode not in (0, 1, 4), ended.stderr
    assert "Traceback" not in ended.stderr
    assert (stored.path / "report.html").is_file()
    assert not stored.junit_path.exists()


@pytest.mark.slow
def test_a_stream_that_holds_ascii_only_shows_escapes(stored, tmp_path):
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    manifest = stored.manifest()
    first, second = manifest.cells
    stored.write_manifest(replace(manifest, cells=(first, replace(second, name="kv_format=\u00fc"))))
    matrix = tmp_path / "m.yaml"
    axes = "axes: {kv_format: [native]}\nrunners: {storage: {}}\n"
    matrix.write_text(f'name: "\\ud800"\nmodel: tiny-llama\n{axes}')
    for words in (["gate", stored.path], ["validate", matrix], ["validate", matrix, "--json"]):
        ended = fresh(*words, stdout=subprocess.PIPE, env=plain)
        assert b"Traceback" not in ended.stderr, (words, ended.stderr)
        assert ended.stdout.isascii()
        assert ended.returncode != 1, (words, ended)
