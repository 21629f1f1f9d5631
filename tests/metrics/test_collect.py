"""The collected metrics and the rows of a run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS, READERS, TABLES, derive, implausible
from kvbench.metrics.declare.units import UNITS
from kvbench.records.run import Run
from tests.factories.runs.made import BASE, CAND, MadeRun, chunks, text_facts
from tests.metrics.test_latency import AA, ABBA, latency

# Names are written in gates, CSV and JSON, so they never change.
NAMES = Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split()


def test_the_names_are_fixed():
    assert sorted(METRICS) == sorted(NAMES)


def test_every_metric_is_complete():
    assert {m.runner for m in METRICS.values()} == set(READERS) == set(RUNNERS)
    assert [m.name for t in TABLES for m in t.metrics if METRICS[m.name] != m] == []
    for metric in METRICS.values():
        assert metric.better in ("lower", "higher", ""), metric.name
        assert metric.definition, metric.name
        assert metric.heading, metric.name
        assert UNITS[metric.unit.name] is metric.unit, metric.name
        assert metric.none is None or metric.sampled, metric.name
        assert metric.counted or not metric.sampled, metric.name
        low, high = metric.range
        assert low <= high, metric.name
        assert implausible(metric, math.nan), metric.name
        assert implausible(metric, math.inf), metric.name


def text_run():
    sides = ((chunks((nll, 5)), text_facts(5)) for nll in (9.0, 8.0))
    return MadeRun().measure("perplexity", *sides, variant="wikitext2 stream512")


def test_a_task_is_spread_over_its_cells():
    run = text_run()
    run.add_cell(1, "cand2", "batch=4")
    run.share(1, "cand2")
    first, second = run.row("ppl"), run.row("ppl", "cand2")
    assert (replace(first, cell="cand2"), run.row("ppl_delta_pct", "cand2").baseline) == (second, BASE)


def test_baseline_cells_have_no_rows_of_differences():
    own = {row.metric for row in text_run().rows() if row.cell == BASE}
    assert own == {m.name for m in METRICS.values() if m.runner == "perplexity" and not m.paired}


@pytest.mark.parametrize(
    ("status", "note"),
    [("error", "error: why"), ("refused", "refused: why"), ("not_evaluated", "not evaluated: why")],
)
def test_a23_a_task_without_a_result_has_rows_without_a_value(status, note):
    run = text_run().change(CAND, status=status, error={"message": "why"}, samples={}, facts={})
    rows = [row for row in run.rows() if row.cell == CAND]
    assert [row.metric for row in rows] == [m.name for m in METRICS.values() if m.runner == "perplexity"]
    assert {(row.value, row.note, row.variant) for row in rows} == {(None, note, "wikitext2 stream512")}


def test_what_is_missing_is_named():
    run = text_run().change(BASE, status="error", error={"message": "no room"})
    assert run.row("ppl").value is not None
    row = run.row("ppl_delta_pct")
    assert (row.value, row.note) == (None, "the baseline has no result (error: no room)")
    assert "lacks 'chunks'" in text_run().change(CAND, samples={}).row("ppl").note
    assert "cannot be read" in text_run().change(CAND, samples={"chunks": 7}).row("ppl").note
    run.records.pop()
    assert (run.row("ppl").value, run.row("ppl").note) == (None, "not run")


def test_partial_comes_from_the_record_and_for_differences_from_the_baseline_too():
    run = text_run().change(BASE, partial="6 chunks")
    assert (run.row("ppl").partial, run.row("ppl_delta_pct").partial) == (None, "6 chunks")
    assert run.change(CAND, partial="3 chunks").row("ppl").partial == "3 chunks"


def test_derive_is_pure():
    run = text_run().measure("latency", latency(*ABBA), AA)
    before = json.dumps([run.manifest.to_dict(), [r.samples for r in run.records]])
    assert derive(run.run) == derive(Run(run.manifest, tuple(reversed(run.records))))
    assert json.dumps([run.manifest.to_dict(), [r.samples for r in run.records]]) == before
