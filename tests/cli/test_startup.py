"""What a command has imported when it prints its first text: nothing that measures, draws or builds tables."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.runs.compared import latency, on_disk, stored

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "triton",
    "pandas",
    "pyarrow",
    "matplotlib",
    "scipy.stats",
    "jinja2",
)
HEAVY += ("ray",)
INTERVALS = ("scipy", "numpy")  # a run with intervals needs them

CODE = f"""
import io, sys

class Watched(io.TextIOWrapper):
    loaded = None

    def write(self, text):
        if text.strip() and self.loaded is None:
            self.loaded = [name for name in {(*HEAVY, *INTERVALS)!r} if name in sys.modules]
        return super().write(text)

sys.stdout = watched = Watched(sys.stdout.buffer, encoding="utf-8")
from kvbench.cli.main import main
try:
    main()
finally:
    print(*watched.loaded or ["none"], file=sys.stderr)
"""


def loaded(*arguments):
    """Which of the heavy modules were imported at the command's first output."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip(), done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    [("gate", "--help"), ("plan", "matrices/smoke.yaml"), ("validate", "matrices/int8.yaml"), ("formats",)],
)
def test_what_reads_no_records_starts_without_numerics(arguments):
    assert loaded(*arguments) == {"none"}


@pytest.mark.parametrize("command", ["gate", "report", "compare"])
def test_stored_records_are_judged_before_anything_is_drawn(command, tmp_path):
    run = on_disk(stored(latency(), gate=None), tmp_path)
    runs = [str(run)] * (2 if command == "compare" else 1)
    assert loaded(command, *runs) <= {*INTERVALS, "none"}
