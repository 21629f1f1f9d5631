"""What is read before the numbers: notices, and the word of a run without a gate."""

import csv
import io
from dataclasses import replace

import pytest

from kvbench.gate.evaluate import evaluate
from kvbench.records.run import MergedFrom
from kvbench.records.shards import Shard, Share
from kvbench.report.html import render
from kvbench.report.json import result_json
from kvbench.report.model import JudgedRun
from kvbench.report.tables import as_csv, long_table
from kvbench.report.view import build
from tests.factories.runs.made import BASE
from tests.factories.runs.timed import timed
from tests.report.test_sentences import runs


def titles(made):
    return [notice.title for notice in build(made.judged).notices]


def test_every_warning_has_a_remedy():
    found = [notice for _, made in runs() for notice in build(made.judged).notices if notice.tone == "warn"]
    assert len({notice.title for notice in found}) >= 8
    assert all(notice.remedy and notice.sentence.endswith(notice.remedy) for notice in found)


def test_a_run_without_a_gate_is_no_pass(passing):
    unjudged = passing.with_outcomes(change=lambda o: None if o.metric else o).judged
    view = build(unjudged)
    assert (view.word, view.tone, view.exit_code) == ("NOT JUDGED", "incomplete", 0)
    assert [notice.title for notice in view.notices] == ["No gate was applied"]
    assert [result_json(run)["verdict"] for run in (unjudged, passing.judged)] == ["not_judged", "pass"]
    failed = passing.with_outcomes(change=lambda o: None if o.metric else replace(o, status="fail"))
    assert (build(failed.judged).word, build(failed.judged).tone) == ("FAIL", "fail")


@pytest.mark.parametrize(("of", "found"), [("abc", True), ("other", False)])
def test_scales_calibrated_on_the_text_they_are_measured_on(passing, of, found):
    scale = {"k": [0.1], "v": [0.1], "calibrated": {"file": "s.json", "data_sha256": of}}

    def on(record):
        if record.runner != "perplexity":
            return record
        facts = {**record.facts, "data_sha": "abc"}
        return replace(record, spec={**record.spec, "scale": scale}, options={"data": "pydoc"}, facts=facts)

    made = build(passing.with_records(on).judged).notices
    assert [n.found.startswith("s.json by perplexity pydoc:") for n in made] == [True] * found


def test_busy_machines_and_partial_runs_are_marked(passing):
    for after, found in ((3.0, []), (3.1, ["The machine was busy"])):
        load = {"latency": {"host_load": {"before": 0.5, "after": after, "cpus": 2}}}
        busy = passing.with_records(lambda r, load=load: replace(r, facts=r.facts | load.get(r.runner, {})))
        assert titles(busy) == found
    why = "limited: first 6 chunks"
    made = passing.with_records(lambda r: replace(r, partial=why) if r.runner == "perplexity" else r)
    made = made.with_rows(lambda r: replace(r, partial=why) if r.metric.startswith("ppl") else r)
    view = build(made.judged)
    partial = {table.key: {line.partial for line in table.lines} for table in view.tables}
    assert (partial["quality"], partial["latency"], titles(made)) == ({why}, {""}, ["Partial run"])


def judged(run, **manifest):
    whole = run.run_with(**manifest)
    return JudgedRun(whole, run.rows(), evaluate(None, whole, run.rows()))


def view_of(run, **manifest):
    return build(judged(run, **manifest))


def test_a_shard_is_no_pass_and_merged_shards_that_differ_and_times_of_several_hosts_are_notices():
    run = timed([1.0] * 2, [1.0] * 2)
    records = run.records
    run.records = [r for r in records if r.key.endswith(BASE)]
    view = view_of(run, shard=Share(Shard(1, 2), frozenset(r.key for r in run.records)))
    assert (view.word, view.tone, view.exit_code) == ("NOT EVALUATED", "incomplete", 0)
    found = {n.title: n.tone for n in view.notices}
    assert (found["Shard 1 of 2"], "Unfinished run" in found) == ("info", False)

    def notices(*hosts, **manifest):
        run.records = [replace(r, environment={"host": hosts[r.key.endswith(BASE)]}) for r in records]
        return {notice.title: notice for notice in view_of(run, **manifest).notices}

    differ = notices("a", "a", merged=MergedFrom((), tuple(f"task {i} differs." for i in range(6))))
    assert differ["Shards differ"].tone == "warn"
    assert [f"task {i} " in differ["Shards differ"].found for i in range(6)] == [True] * 4 + [False] * 2
    assert "Times of several hosts" not in differ
    assert "b: native; <i>a</i>: int8_sym." in notices("<i>a</i>", "b")["Times of several hosts"].found


# The device while latency was measured: notices first, columns, a line a record.


FACTS = {"sm_max_mhz": 1980, "memory_max_mhz": None, "power_limit_w": 700.0, "found_by": "uuid"}
FACTS |= {"other_processes": {"count": 0, "bytes": 0}, "unread": {"memory_mhz": "Not Supported"}}


def end(sm, degrees, watts, *reasons, **more):
    counters = dict.fromkeys(("thermal_ns", "quota_us", "steal_ticks", "cpu_ticks"), 0)
    state = {"reasons": list(reasons), "sm_mhz": sm, "memory_mhz": None}
    return {**state, "temperature_c": degrees, "power_w": watts, **counters, **more}


def measured():
    """B C C B: the last request of the candidate is hot; power is capped in two of the baseline's states."""
    pairs = [
        (end(1980, 40, 101.0, "idle"), end(1980, 61, 480.4, "sw power cap", cpu_ticks=500, steal_ticks=1)),
        (end(1980, 60, 200.0), end(1965, 62, 500.0, quota_us=4_000, cpu_ticks=500, steal_ticks=4)),
        (end(1980, 62, 200.0), end(1350, 84, 300.0, "hw slowdown", "hw thermal", cpu_ticks=500)),
        (end(1980, 70, 200.0), end(1980, 70, 210.0, cpu_ticks=500, steal_ticks=1)),
    ]
    devices = {i: {"before": before, "after": after} for i, (before, after) in enumerate(pairs)}
    return timed([10.0] * 2, [10.0] * 2, devices=devices, device_state=FACTS)


def test_a_line_of_throttling_and_ranges_of_each_arm_and_metrics_in_the_csv():
    (line,) = view_of(measured()).device
    assert line.label.text == "int8_sym"
    assert line.slowed.startswith("2 of 4 requests under cpu quota, hw slowdown, hw thermal")
    assert line.sentence.split("; ")[1:] == [
        "candidate SM 1350-1980 of 1980 MHz, 60-84 °C, 200-500 of 700 W, CPU quota took 4 ms, steal 0.4%",
        "baseline SM 1980 of 1980 MHz, 40-70 °C, 101-480 of 700 W, sw power cap in 1 of 2, steal 0.2%",
        "memory_mhz not read: Not Supported",
    ]
    assert line.sentence in render(view_of(measured())).replace("-&gt;", "->")
    lines = list(csv.DictReader(io.StringIO(as_csv(long_table(judged(measured()))))))
    (slowed,) = [x for x in lines if (x["metric"], x["kv_format"]) == ("throttled_requests", "int8_sym")]
    assert (slowed["value"], slowed["unit"]) == ("2", "requests")
    assert {"latency_drift_pct", "latency_outliers", "itl_outlier_share"} <= {x["metric"] for x in lines}


def test_throttling_and_other_processes_are_notices_and_what_cannot_be_read_is_said():
    hot = view_of(measured()).notices
    assert (hot[0].title, hot[0].tone) == ("The device was throttled", "warn")
    others = {**FACTS, "other_processes": {"count": 2, "bytes": 5_000}}
    shared = view_of(timed([10.0] * 2, [10.0] * 2, device_state=others)).notices
    assert (shared[0].title, shared[0].tone) == ("The GPU was shared", "info")
    assert "5,000 B" in shared[0].found
    quiet = view_of(timed([10.0] * 2, [10.0] * 2, device_state=FACTS | {"unread": {}}))
    assert [n.title for n in quiet.notices] == ["No gate was applied"]
    assert quiet.device[0].slowed == quiet.device[0].others == ""
    assert quiet.device[0].sentence.startswith("not throttled in 4 of 4 requests;")
    nothing = {"before": {"quota_us": None}, "after": {"quota_us": None}}
    facts = {"found_by": None, "other_processes": None, "unread": {"cpu_quota": "no control groups"}}
    (line,) = view_of(timed([10.0], [10.0], devices={0: nothing, 1: nothing}, device_state=facts)).device
    assert "could not be read" in line.sentence
    assert line.sentence.endswith("cpu_quota not read: no control groups")
    assert view_of(timed([10.0] * 2, [10.0] * 2, quiet=False)).device == ()
