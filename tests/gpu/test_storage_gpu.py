"""A24 T2 on a GPU: each cell's peak is its own, and its columns add up."""

import json

import pytest

from kvbench.matrix.cells import CELL_KEYS, Task
from kvbench.run.task.measure import execute
from kvbench.run.task.prepare import Session

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
}  # fmt: skip


@pytest.mark.parametrize("kv_format", ["native", "int8_sym"])
def test_a24_t2_the_big_cell_first_and_the_columns_add_up(tmp_path, kv_format):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fixed = {"model": str(tmp_path), "model_weights": "random", "device": "cuda", "dtype": "bfloat16"}
    session = Session(None, {})
    peaks = []
    for context in (8192, 64, 64):
        spec = {**CELL_KEYS, **fixed, "kv_format": kv_format, "context": context, "batch": 1}
        task = Task(key="k", runner="storage", variant="", spec=spec, options={}, cells=("c",), baseline=None)
        record = execute(task, session, None, lambda done, total, note: None)
        assert record.error is None
        layers, facts = record.samples["layers"], record.facts
        parts = sum(x["payload"] + x["scales"] for x in layers)
        parts += facts["weights_bytes"] + facts["held_bytes"] + facts["workspace_bytes"]
        assert parts == pytest.approx(facts["device_peak_bytes"], rel=0.01)
        peaks.append(facts["device_peak_bytes"])
    assert peaks[1] == peaks[2] < peaks[0]
