"""The device while latency was measured: notices first, columns, a line a record."""

import csv
import io

from kvbench.gate.evaluate import evaluate
from kvbench.report.html import render
from kvbench.report.model import JudgedRun
from kvbench.report.tables import as_csv, long_table
from kvbench.report.view import build
from tests.factories.runs.timed import timed

FACTS = {
    "sm_max_mhz": 1980,
    "memory_max_mhz": None,
    "power_limit_w": 700.0,
    "found_by": "uuid",
    "other_processes": {"count": 0, "bytes": 0},
    "unread": {"memory_mhz": "Not Supported"},
}


def whole(run):
    return JudgedRun(run.run, run.rows(), evaluate(None, run.run, run.rows()))


def view_of(run):
    return build(whole(run))


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


def test_a_line_has_the_throttling_and_the_ranges_of_each_arm():
    (line,) = view_of(measured()).device
    assert line.label.text == "int8_sym"
    assert line.slowed.startswith("2 of 4 requests under cpu quota, hw slowdown, hw thermal")
    assert line.sentence.split("; ")[1:] == [
        "candidate SM 1350-1980 of 1980 MHz, 60-84 °C, 200-500 of 700 W, CPU quota took 4 ms, steal 0.4%",
        "baseline SM 1980 of 1980 MHz, 40-70 °C, 101-480 of 700 W, sw power cap in 1 of 2, steal 0.2%",
        "memory_mhz not read: Not Supported",
    ]
    assert line.sentence in render(view_of(measured())).replace("-&gt;", "->")


def test_throttling_and_other_processes_are_notices_and_a_quiet_device_is_none():
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


def test_a_device_that_cannot_be_read_and_a_record_without_its_state():
    nothing = {"before": {"quota_us": None}, "after": {"quota_us": None}}
    facts = {"found_by": None, "other_processes": None, "unread": {"cpu_quota": "no control groups"}}
    (line,) = view_of(timed([10.0], [10.0], devices={0: nothing, 1: nothing}, device_state=facts)).device
    assert "could not be read" in line.sentence
    assert line.sentence.endswith("cpu_quota not read: no control groups")
    assert view_of(timed([10.0] * 2, [10.0] * 2, quiet=False)).device == ()


def test_the_csv_has_the_stability_metrics():
    lines = list(csv.DictReader(io.StringIO(as_csv(long_table(whole(measured()))))))
    (slowed,) = [x for x in lines if (x["metric"], x["kv_format"]) == ("throttled_requests", "int8_sym")]
    assert (slowed["value"], slowed["unit"]) == ("2", "requests")
    assert {"latency_drift_pct", "latency_outliers", "itl_outlier_share"} <= {x["metric"] for x in lines}
