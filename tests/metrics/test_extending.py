"""A metric is one file: a toy one is added to a file of a copy of kvbench. (tests/runners has a toy
runner.)"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

METRIC = """
from kvbench.metrics.declare.units import SECONDS

_without_toy = values


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    yield from _without_toy(record, baseline)
    yield Value("toy_s", record.samples["swaps"][0]["seconds"])


_TOY = Metric("toy_s", SECONDS, "lower", "Toy", "seconds of the first swap")
TABLES = (Table("transfer", "Transfer", (*TABLES[0].metrics, _TOY), TABLES[0].note),)
"""
ASK = """
import json
from pathlib import Path
from types import SimpleNamespace
from kvbench.cli.reference import metrics_page
from kvbench.gate.evaluate import load
from kvbench.metrics.collect import DERIVE, TABLES
swaps = [{"layer_bytes": [8], "seconds": 2.0, "way": way} for way in ("out", "in")]
facts = {"native16_bytes": 1, "expected_layer_bytes": [8]}
record = SimpleNamespace(samples={"swaps": swaps, "warmup": []}, facts=facts)
Path("gate.yaml").write_text("name: toy\\nchecks:\\n  - {metric: toy_s, at_most: 9}\\n")
print(json.dumps({
    "value": [v.value for v in DERIVE["transfer"](record, None) if v.metric == "toy_s"],
    "columns": [m.heading for t in TABLES for m in t.metrics if m.name == "toy_s"],
    "documented": "| `toy_s` |" in metrics_page(),
    "judged": [check.metric for check in load(Path("gate.yaml")).checks],
}))
"""


def test_a_metric_is_one_file(tmp_path):
    package = tmp_path / "kvbench"
    shutil.copytree(ROOT / "kvbench", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "metrics" / "transfer.py").open("a", encoding="utf-8") as file:
        file.write(METRIC)
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "value": [2.0], "columns": ["Toy"], "documented": True, "judged": ["toy_s"],
    }  # fmt: skip
    originals = {p.relative_to(package) for p in package.rglob("*.py")}
    changed = [p for p in originals if (package / p).read_bytes() != (ROOT / "kvbench" / p).read_bytes()]
    assert [str(p) for p in changed] == ["metrics/transfer.py"]
