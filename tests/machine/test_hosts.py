"""Times of different hosts are never joined into one number; each fault changes the host of one record."""

from dataclasses import replace

import pytest

from kvbench.machine.same_machine import apart, names
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS, derive
from kvbench.records.run import Run
from tests.factories.runs.contexts import Contexts
from tests.factories.runs.made import BASE, CAND
from tests.factories.runs.timed import timed
from tests.factories.verdicts import check, judge

HERE = {"host": "one", "boot_id": "b1", "device": "cuda", "gpus": [{"name": "G", "uuid": "GPU-1"}]}
OTHER_GPU = [{"name": "G", "uuid": "GPU-2"}]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, ""),
        ({"host": "two"}, "on different hosts (one, two), whose times are never pooled"),
        ({"host": None}, "on different hosts (one, unnamed), whose times are never pooled"),
        ({"boot_id": "b2"}, "in different boots of one (b1, b2), which may be two machines of one name"),
        ({"gpus": OTHER_GPU}, "on different GPUs of one (GPU-1, GPU-2), whose times are never pooled"),
        ({"gpus": OTHER_GPU, "host": "two"}, "on different hosts (one, two), whose times are never pooled"),
    ],
)
def test_what_sets_machines_apart(other, said):
    assert apart([HERE, HERE, {**HERE, **other}]) == (f"were measured {said}" if said else "")


def test_old_records_are_of_one_machine_and_a_gpu_that_is_not_used_does_not_count():
    assert apart([{}, {"cpu": "x"}]) == apart([]) == ""
    assert apart([{**HERE, "device": "cpu"}, {**HERE, "device": "cpu", "gpus": OTHER_GPU}]) == ""
    assert names([{"host": "b"}, {}, {"host": "a"}, {"host": "b"}]) == ["b", "a"]


def on_hosts(*hosts):
    """A sweep over contexts whose candidate's records are of these hosts, in turn."""
    run = Contexts(contexts=(1024, 4096, 16384))
    of = iter(hosts)
    run.records = [
        replace(r, environment={"host": next(of) if r.key.startswith("latency--cand") else "a"})
        for r in run.records
    ]
    return run


LINE = [x for x in METRICS if x.startswith(("itl_slope", "itl_intercept_ms", "itl_break_even_tokens"))]


@pytest.mark.parametrize("metric", LINE)
def test_a_sweep_whose_contexts_are_of_two_hosts_has_no_line(metric):
    assert on_hosts("a", "a", "a").row(metric).value is not None
    row = on_hosts("a", "b", "a").row(metric)
    assert (row.value, row.low, row.high) == (None, None, None)
    assert row.note == "its contexts were measured on different hosts (a, b), whose times are never pooled"
    own = on_hosts("a", "b", "a").row("itl_slope_us_per_token", f"{BASE}1024")  # of one host still
    assert own.value == pytest.approx(0.8)


def test_a_gate_on_such_a_line_is_not_evaluated_and_names_the_hosts():
    run = on_hosts("a", "b", "a")
    outcomes = judge(run, check("itl_slope_to_bytes", low=0.5)).outcomes
    own = [o for o in outcomes if o.metric == "itl_slope_to_bytes" and CAND in o.cells[0]]
    assert [o.status for o in own] == ["not_evaluated"] * 3
    assert all("different hosts (a, b)" in o.sentence for o in own)


def test_no_time_is_derived_from_two_records():
    """A ratio comes from arms of one process, so another host's slow baseline record changes nothing."""
    run = timed([1.0, 1.1, 1.2], [2.0, 2.1, 2.2])
    alone, beside = run.records
    slow = [
        {**arm, "itl_ms": [10 * gap for gap in arm["itl_ms"]], "ttft_ms": 10 * arm["ttft_ms"]}
        for arm in alone.samples["arms"]
    ]
    other = replace(alone, samples={**alone.samples, "arms": slow}, environment={"host": "b"})
    before, after = (derive(Run(run.manifest, (first, beside))) for first in (alone, other))
    own = [row for row in before if row.cell != BASE and METRICS[row.metric].runner == "latency"]
    assert own == [row for row in after if row.cell != BASE and METRICS[row.metric].runner == "latency"]
    assert next(row for row in own if row.metric == "itl_ratio").value is not None
    assert before != after


def test_what_takes_times_says_so():
    """By the units of its metrics: such a runner has its device to itself."""
    times = ("ms", "us/token", "tok/s", "GB/s", "us")
    units = {metric.runner for metric in METRICS.values() if metric.unit.name in times}
    assert {name for name, runner in RUNNERS.items() if runner.timed} >= units
