"""Made-up runs for the tests of metrics and gates: a native cell, a candidate, and records written by
hand.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbench.matrix.cells import CELL_KEYS, Cell, Task
from kvbench.matrix.resolve_backend import Choice, Decision
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import Row, derive
from kvbench.records.record import LEVELS, OK, VERIFIED, Evidence, Level, Record
from kvbench.records.run import Manifest, Run, RunDir

BASE, CAND = "base", "cand"


def decision(kv_format: str, resolved: str | None = None, reason: str = "as asked") -> dict[str, Any]:
    native = Choice("native", "native", "as asked")
    return asdict(
        Decision(
            Choice(kv_format, resolved or kv_format, reason), native, Choice("torch", "torch", "as asked")
        )
    )


def evidence(effective: str, *levels: Level, weights: str = "native") -> dict[str, Any]:
    shown = levels or tuple(Level(name, VERIFIED, "it is as it should be") for name in LEVELS)
    precision = {
        "storage": effective,
        "transfer": "not measured",
        "execution": "float32",
        "weights": "float32",
        "gemm": "native",
    }
    reads = {"tokens": 1, "quantized_tokens": 1, "calls": 1}
    return asdict(Evidence(effective, weights, shown, precision, reads))


def record(runner: str, samples: dict[str, Any], facts: dict[str, Any], **fields: Any) -> Record:
    """The record of a measurement, without a run."""
    plain: dict[str, Any] = {"key": "key", "protocol": 1, "status": OK, "spec": {}, "options": {}}
    absent = dict.fromkeys(("decision", "evidence", "partial", "error"))
    own = {"samples": samples, "facts": facts, "environment": {}, "started_at": "", "seconds": 0.0}
    return Record(**{**plain, **absent, **own, "runner": runner, **fields})


class MadeRun:
    """A run in the making: cells `base` (native) and `cand`; `measure` adds a runner's task and record on
    both.
    """

    def __init__(self, kv_format: str = "int8_sym", **spec: Any) -> None:
        shared = {**CELL_KEYS, "model": "m", "device": "cpu", "dtype": "float32", **spec}
        formats = {BASE: "native", CAND: kv_format}
        self.cells = [
            Cell(cell, f"kv_format={fmt}", {**shared, "kv_format": fmt}, ("kv_format",), BASE, 1)
            for cell, fmt in formats.items()
        ]
        self.tasks: list[Task] = []
        self.records: list[Record] = []

    def measure(
        self,
        runner: str,
        candidate: tuple[dict[str, Any], dict[str, Any]],
        native: tuple[dict[str, Any], dict[str, Any]],
        variant: str = "",
        **options: Any,
    ) -> MadeRun:
        """candidate, native: (samples, facts)."""
        keys = {cell: f"{runner}-{variant}-{cell}" for cell in (BASE, CAND)}
        whole = {name: o.default for name, o in RUNNERS[runner].options.items()} | options
        for cell, (samples, facts) in zip(self.cells, (native, candidate), strict=True):
            baseline = None if cell.id == BASE else keys[BASE]
            task = Task(keys[cell.id], runner, variant, cell.spec, whole, (cell.id,), baseline)
            self.tasks.append(task)
            kv_format = cell.spec["kv_format"]
            self.records.append(
                Record(
                    key=task.key, runner=runner, protocol=1, status=OK, spec=task.spec, options=task.options,
                    decision=decision(kv_format), evidence=evidence(kv_format), samples=samples, facts=facts,
                    environment={}, partial=None, error=None, started_at="2026-01-01T00:00:00+00:00", seconds=1.0,
                )
            )  # fmt: skip
        return self

    def change(self, cell: str, runner: str = "", **fields: Any) -> MadeRun:
        """Replace fields of the records of a cell (of one runner)."""
        self.records = [
            replace(r, **fields) if r.key.endswith(cell) and r.key.startswith(runner) else r
            for r in self.records
        ]
        return self

    def run_with(self, **manifest: Any) -> Run:
        """The run, with other fields of its manifest."""
        own = Manifest("made", tuple(self.cells), tuple(self.tasks), created_at="2026-01-01T00:00:00+00:00")
        return Run(replace(own, **manifest), tuple(self.records))

    @property
    def run(self) -> Run:
        return self.run_with()

    @property
    def manifest(self) -> Manifest:
        return self.run.manifest

    def on_disk(self, folder: Path, **manifest: Any) -> RunDir:
        """The run as `kvbench run` leaves it."""
        return written(self.run_with(**manifest), folder)

    def add_cell(self, like: int, cell: str, name: str) -> None:
        """Another cell with the spec of one."""
        self.cells.append(replace(self.cells[like], id=cell, name=name))

    def share(self, task: int, cell: str) -> None:
        """Let one more cell share a task."""
        self.tasks[task] = replace(self.tasks[task], cells=(*self.tasks[task].cells, cell))

    def rows(self) -> list[Row]:
        return derive(self.run)

    def row(self, metric: str, cell: str = CAND) -> Row:
        """The one row of a metric on a cell."""
        (row,) = [row for row in self.rows() if row.metric == metric and row.cell == cell]
        return row


def written(run: Run, folder: Path) -> RunDir:
    """The run's files, as `kvbench run` leaves them."""
    files = RunDir(folder)
    files.write_manifest(run.manifest)
    for record in run.records:
        files.write(record)
    return files


def layers(n: int, payload: int, scales: int, extra: int = 0) -> dict[str, Any]:
    """Storage samples of n equal layers; extra: payload bytes that layer 7 has beyond the formula."""
    rows = [
        {
            "layer": i,
            "payload": payload,
            "scales": scales,
            "expected_payload": payload,
            "expected_scales": scales,
            "dtype": "int8",
        }
        for i in range(n)
    ]
    if extra:
        rows[7]["payload"] = payload + extra
    return {"layers": rows}


def storage_facts(tokens: int, native16: int, **more: Any) -> dict[str, Any]:
    facts = {
        "tokens": tokens,
        "native16_bytes": native16,
        "weights_bytes": 100,
        "page_table_bytes": 8,
        "held_bytes": None,
        "workspace_bytes": None,
    }
    return {**facts, "native_dtype": "float32", "device_peak_bytes": None, **more}


def chunks(*nll_and_tokens: tuple[float, int], documents: list[int] | None = None) -> dict[str, Any]:
    """Perplexity samples: one chunk a (sum of NLL, scored tokens)."""
    documents = documents or list(range(len(nll_and_tokens)))
    return {
        "chunks": [
            {"nll": nll, "tokens": n, "document": d}
            for (nll, n), d in zip(nll_and_tokens, documents, strict=True)
        ]
    }


def text_facts(scored: int, **more: Any) -> dict[str, Any]:
    facts = {
        "protocol": "stream512",
        "split": "test",
        "bos": "none",
        "scored": scored,
        "tokens": scored + 1,
        "chunk": 512,
    }
    return {**facts, "text": "raw", "data_sha": "d", "skipped_rows": 0, **more}
