"""Ctrl-C and SIGTERM on a real process: exit code 130, nothing half-written, the way to go on, and the same again that goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}

MATRIX = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes: {kv_format: [native, int8_sym]}
engine: {context: 20}
runners:
  storage: {}
  agreement: {steps: 64, prompt_tokens: 12, continuation: 4}
"""


def started(*command, cwd):
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
        cwd=cwd,
        text=True,
    )


def wait_for(process, there):
    deadline = time.monotonic() + 120
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "by"), [(signal.SIGINT, "interrupted;"), (signal.SIGTERM, "interrupted by SIGTERM;")]
)
def test_a_run_that_is_interrupted_goes_on_where_it_was(tmp_path, number, by):
    (tmp_path / "m.yaml").write_text(MATRIX)
    command = ("-m", "kvbench", "run", "m.yaml", "--out", "out")
    process = started(*command, cwd=tmp_path)
    kept = tmp_path / "out" / "records"
    wait_for(process, lambda: kept.is_dir() and any(kept.glob("*.json")))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == (
        f"kvbench: {by} the records written so far are kept; run the same command to continue."
    )
    assert not list(tmp_path.rglob("*.tmp"))
    before = {p.name: p.stat().st_mtime_ns for p in kept.glob("*.json")}
    tasks = json.loads((tmp_path / "out" / "run.json").read_text())["tasks"]
    assert 0 < len(before) < len(tasks)
    again = started(*command, cwd=tmp_path)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"{len(before)} of {len(tasks)} tasks are already measured and are reused" in err
    after = {p.name: p.stat().st_mtime_ns for p in kept.glob("*.json")}
    assert len(after) == len(tasks)
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_quantize_leaves_nothing_beside_its_output(tmp_path, number):
    """It stops where it would put the finished folder in place, the latest moment at which something can be left."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvbench.engines.reference.byte_tokenizer import byte_tokenizer
    from kvbench.models.catalog import TINY

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY["tiny-llama"])).save_pretrained(
        tmp_path / "in"
    )
    byte_tokenizer().save_pretrained(tmp_path / "in")
    code = (
        "import time\nfrom kvbench.cli.main import main\nfrom kvbench.engines.reference.weights import quantize_checkpoint as q\n"
        "q._place = lambda part, out: (open('reached', 'w').close(), time.sleep(60))\nmain()"
    )
    process = started("-c", code, "quantize", "in", "deep/out", cwd=tmp_path)
    wait_for(process, (tmp_path / "reached").exists)
    assert list((tmp_path / "deep").iterdir()), "the folder in the making"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "nothing was written; run the same command to start again." in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "reached"]


ENDLESS = """
import pathlib, time
from kvbench.cli.signals import end_cleanly
end_cleanly()
try:
    pathlib.Path("first").touch()
    time.sleep(60)
finally:
    pathlib.Path("tidying").touch()
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(tmp_path, second):
    process = started("-c", ENDLESS, cwd=tmp_path)
    wait_for(process, (tmp_path / "first").exists)
    process.send_signal(signal.SIGINT)
    wait_for(process, (tmp_path / "tidying").exists)
    process.send_signal(second)
    process.communicate(timeout=30)  # the tidying would take 60 s
    assert process.returncode == 130


def test_what_the_caller_ignores_stays_ignored(tmp_path):
    """nohup and `&` in a script ignore SIGINT for what they start."""
    code = (
        "import signal\nfrom kvbench.cli.signals import end_cleanly\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "end_cleanly()\nsignal.raise_signal(signal.SIGINT)\nprint('still here')"
    )
    process = started("-c", code, cwd=tmp_path)
    assert process.communicate(timeout=30)[0] == "still here\n"
