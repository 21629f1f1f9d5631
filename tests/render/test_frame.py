"""`kvbench.load`: a stored run as typed values and as one tidy DataFrame."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

import kvbench
from kvbench.errors import UsageError
from kvbench.matrix.cells import CELL_KEYS
from kvbench.render.frame import rows_frame
from tests.factories.runs.made import MadeRun, chunks, layers, storage_facts, text_facts


@pytest.fixture
def folder(tmp_path):
    facts, text = storage_facts(16, 2048), (chunks((30.0, 10), (31.0, 10)), text_facts(20))
    made = MadeRun().measure("storage", (layers(2, 512, 64), facts), (layers(2, 2048, 0), facts))
    return made.measure("perplexity", text, text, "pydoc stream512").on_disk(tmp_path / "run").path


def test_the_frame_has_a_line_per_row_with_the_cells_keys_and_types(folder):
    loaded = kvbench.load(folder)
    frame = loaded.frame
    assert len(frame) == len(loaded.rows) > 0
    columns = {*CELL_KEYS, "cell", "metric", "variant", "value", "low", "high", "n", "unit"}
    assert columns <= set(frame.columns)
    found = frame[(frame.metric == "kv_ratio") & (frame.kv_format == "int8_sym")]
    row = next(row for row in loaded.rows if row.metric == "kv_ratio")
    assert found.value.tolist() == [row.value]
    assert found.unit.tolist() == [row.unit.name]
    table = frame.pivot_table(index="kv_format", columns="metric", values="value")
    assert table.loc["int8_sym", "kv_bytes_total"] == 2 * (512 + 64)
    loaded = kvbench.load(folder)
    values = {"kv_bytes_total": None, "kv_ratio": math.nan, "kv_bytes_scales": 0.0}
    rows = [replace(row, value=values.get(row.metric, row.value)) for row in loaded.rows]
    frame = rows_frame(loaded.run, rows)
    kinds = {"value": "double", "metric": "string", "trust_remote_code": "bool"}
    kinds |= dict.fromkeys(("n", "batch"), "int64")
    assert {name: str(frame[name].dtype).split("[")[0] for name in kinds} == kinds
    assert frame.loc[frame.metric == "kv_bytes_total", "value"].isna().all()
    ratio = frame.loc[frame.metric == "kv_ratio", "value"].iloc[0]
    assert isinstance(ratio, float)
    assert math.isnan(ratio)
    heavy = "{'torch', 'matplotlib'} & {*sys.modules}"
    code = f"import sys, kvbench; kvbench.load({str(folder)!r}).frame; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    with pytest.raises(UsageError, match="is not a run directory"):
        kvbench.load(folder / "nothing")
