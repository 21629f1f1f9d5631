"""How many files a new metric and a new runner take: both are added to a copy of the package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

ASK = """
import json, sys
from pathlib import Path
from kvbench.cli.reference import metrics_page
from kvbench.gate.evaluate import load
from kvbench.matrix.schema import matrix_schema
from kvbench.metrics.collect import DERIVE, METRICS, TABLES
from kvbench.records.record import Record
name = sys.argv[1]
metric = METRICS[name]
record = Record.__new__(Record)
object.__setattr__(record, "samples", json.loads(sys.argv[2]))
object.__setattr__(record, "facts", {"native16_bytes": 1, "expected_layer_bytes": [8]})
Path("gate.yaml").write_text(f"name: toy\\nchecks:\\n  - {{metric: {name}, at_most: 9}}\\n")
print(json.dumps({
    "value": [v.value for v in DERIVE[metric.runner](record, None) if v.metric == name],
    "columns": [m.heading for t in TABLES for m in t.metrics if m.name == name],
    "documented": f"| `{name}` |" in metrics_page(),
    "judged": [check.metric for check in load(Path("gate.yaml")).checks],
    "runner": metric.runner in json.dumps(matrix_schema()),
}))
"""


def asked(folder: Path, edits: Mapping[str, tuple[str, str]], name: str, samples: Any) -> Any:
    """What a copy of the package knows of a metric after each edit (file: old text, new text; "" is the end of the file)."""
    shutil.copytree(ROOT / "kvbench", folder / "kvbench", ignore=shutil.ignore_patterns("__pycache__"))
    for file, (old, new) in edits.items():
        path = folder / "kvbench" / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        assert old in text
        path.write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")
    command = [sys.executable, "-c", ASK, name, json.dumps(samples)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SWAPS = {"swaps": [{"layer_bytes": [8], "seconds": 2.0, "way": "out"}], "warmup": []}
KNOWN = {"value": [2.0], "columns": ["Toy"], "documented": True, "judged": ["toy_s"], "runner": True}
METRIC = 'Metric("toy_s", SECONDS, "lower", "Toy", "seconds of the first swap")'


def test_a_metric_is_one_file(tmp_path: Path) -> None:
    addition = f"""
from kvbench.metrics.declare.units import SECONDS

_transfer_values = values


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    yield from _transfer_values(record, baseline)
    yield Value("toy_s", record.samples["swaps"][0]["seconds"])


TABLES = (Table("transfer", "Transfer", (*TABLES[0].metrics, {METRIC}), TABLES[0].note),)
"""
    edits = {"metrics/transfer.py": ("", addition)}
    assert len(edits) == 1
    samples = {"swaps": [{**SWAPS["swaps"][0], "way": way} for way in ("out", "in")], "warmup": []}
    assert asked(tmp_path, edits, "toy_s", samples) == KNOWN


def test_a_runner_is_three_places(tmp_path: Path) -> None:
    reader = f'''"""A toy."""

from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import SECONDS
from kvbench.metrics.declare.value import Value

FACTS = ()
TABLES = (Table("toy", "Toy", ({METRIC},), "A toy."),)


def values(record, baseline):
    yield Value("toy_s", record.samples["swaps"][0]["seconds"])
'''
    declared = (
        '\nfrom dataclasses import replace\n\nRUNNERS["toy"] = replace(RUNNERS["storage"], name="toy")\n'
    )
    edits = {
        "runners/toy.py": ("", "def run(ctx): ...\n"),
        "metrics/toy.py": ("", reader),
        "matrix/runners.py": ("", declared),
    }
    assert asked(tmp_path, edits, "toy_s", SWAPS) == KNOWN
