"""The device while latency was measured, as the report shows it: notices first, columns, a line a record."""

from __future__ import annotations

import csv
import io
from typing import Any

from kvbench.gate.evaluate import evaluate
from kvbench.metrics.collect import METRICS
from kvbench.report.console import show
from kvbench.report.csv import long_csv
from kvbench.report.html import render
from kvbench.report.model import JudgedRun
from kvbench.report.view import View, build
from tests.factories.runs.made import MadeRun
from tests.factories.runs.timed import timed

FACTS = {
    "sm_max_mhz": 1980, "memory_max_mhz": None, "power_limit_w": 700.0, "found_by": "uuid",
    "other_processes": {"count": 0, "bytes": 0}, "unread": {"memory_mhz": "Not Supported"},
}  # fmt: skip


def whole(run: MadeRun) -> JudgedRun:
    return JudgedRun(run.run, run.rows(), evaluate(None, run.run, run.rows()))


def view_of(run: MadeRun) -> View:
    return build(whole(run), {name: metric.definition for name, metric in METRICS.items()})


def end(sm: int, degrees: int, watts: float, *reasons: str, **more: Any) -> dict[str, Any]:
    return {
        "reasons": list(reasons), "sm_mhz": sm, "memory_mhz": None, "temperature_c": degrees, "power_w": watts,
        "thermal_ns": 0, "quota_us": 0, "steal_ticks": 0, "cpu_ticks": 0, **more,
    }  # fmt: skip


def measured(**facts: Any) -> MadeRun:
    """B C C B: the last request of the candidate is hot; power is capped in two of the baseline's states."""
    devices = {
        0: {"before": end(1980, 40, 101.0, "idle"), "after": end(1980, 61, 480.4, "sw power cap", cpu_ticks=500, steal_ticks=1)},
        1: {"before": end(1980, 60, 200.0), "after": end(1965, 62, 500.0, quota_us=4_000, cpu_ticks=500, steal_ticks=4)},
        2: {"before": end(1980, 62, 200.0), "after": end(1350, 84, 300.0, "hw slowdown", "hw thermal", cpu_ticks=500)},
        3: {"before": end(1980, 70, 200.0), "after": end(1980, 70, 210.0, cpu_ticks=500, steal_ticks=1)},
    }  # fmt: skip
    return timed([10.0] * 2, [10.0] * 2, devices=devices, device_state={**FACTS, **facts})


def test_a_line_has_the_slowdown_and_the_ranges_of_each_arm() -> None:
    (line,) = view_of(measured()).device
    assert line.label.text == "int8_sym"
    assert line.sentence == (
        "slowed down in 2 of 4 requests under cpu quota, hw slowdown, hw thermal (candidate 2, baseline 0), SM 1980 -> 1350 MHz; "
        "candidate SM 1350-1980 of 1980 MHz, 60-84 °C, 200-500 of 700 W, CPU quota took 4 ms, steal 0.4%; "
        "baseline SM 1980 of 1980 MHz, 40-70 °C, 101-480 of 700 W, sw power cap in 1 of 2, steal 0.2%; "
        "memory_mhz not read: Not Supported"
    )


def test_a_slowdown_is_the_first_notice() -> None:
    notices = view_of(measured()).notices
    assert [n.title for n in notices] == ["The device was slowed down", "No gate was judged"]
    assert (notices[0].tone, notices[0].sentence) == (
        "warn",
        "While latency was measured. int8_sym: 2 of 4 requests under cpu quota, hw slowdown, hw thermal (candidate 2, baseline 0), "
        "SM 1980 -> 1350 MHz. Let it cool, or lift the limit (kvbench doctor names it), and measure latency again.",
    )


def test_other_processes_are_a_notice() -> None:
    run = timed(
        [10.0] * 2, [10.0] * 2, device_state={**FACTS, "other_processes": {"count": 2, "bytes": 5_000}}
    )
    notices = view_of(run).notices
    assert (notices[0].tone, notices[0].title) == ("info", "The GPU was shared")
    assert (
        notices[0].sentence
        == "While latency was measured. int8_sym: 2 other processes on the GPU with 5,000 B."
    )


def test_a_quiet_device_is_no_notice() -> None:
    view = view_of(timed([10.0] * 2, [10.0] * 2, device_state={**FACTS, "unread": {}}))
    assert [n.title for n in view.notices] == ["No gate was judged"]
    assert view.device[0].sentence == (
        "nothing slowed down 4 of 4 requests; candidate SM 1980 of 1980 MHz; baseline SM 1980 of 1980 MHz"
    )


def test_a_cpu_that_says_nothing() -> None:
    nothing = {"before": {"quota_us": None}, "after": {"quota_us": None}}
    facts = {
        "found_by": None,
        "other_processes": None,
        "unread": {"cpu_quota": "no control groups of version 2"},
    }
    run = timed([10.0], [10.0], devices={0: nothing, 1: nothing}, device_state=facts)
    assert view_of(run).device[0].sentence == (
        "whether anything slowed it down could not be read; cpu_quota not read: no control groups of version 2"
    )


def test_records_of_before_have_no_line_and_a_note() -> None:
    run = timed([10.0] * 2, [10.0] * 2, quiet=False)
    assert view_of(run).device == ()
    assert "the device's state was not read" in run.row("throttled_requests").note


def test_the_page_the_console_and_the_csv_have_them() -> None:
    run = measured()
    view = view_of(run)
    html = render(view)
    assert "slowed down in 2 of 4 requests under cpu quota" in html
    for heading in ("Drift over the run", "Outlying requests", "Stalled steps", "Slowed-down requests"):
        assert heading in html
    out = io.StringIO()
    show(view, out)
    assert (
        "The device was slowed down. While latency was measured. int8_sym: 2 of 4 requests" in out.getvalue()
    )
    lines = list(csv.DictReader(io.StringIO(long_csv(whole(run)))))
    (slowed,) = [x for x in lines if (x["metric"], x["kv_format"]) == ("throttled_requests", "int8_sym")]
    assert (slowed["value"], slowed["unit"]) == ("2", "requests")
    assert {"latency_drift_pct", "latency_outliers", "itl_outlier_share"} <= {x["metric"] for x in lines}
