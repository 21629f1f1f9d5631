"""Times of different hosts are never joined into one number; each fault changes the host of one record."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import kvbench
from kvbench.machine import host as environment
from kvbench.machine.host import host, source_digest
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


def test_what_sets_machines_apart():
    for other, said in (
        ({}, ""),
        ({"host": "two"}, "on different hosts (one, two), whose times are never pooled"),
        ({"host": None}, "on different hosts (one, unnamed), whose times are never pooled"),
        ({"boot_id": "b2"}, "in different boots of one (b1, b2), which may be two machines of one name"),
        ({"gpus": OTHER_GPU}, "on different GPUs of one (GPU-1, GPU-2), whose times are never pooled"),
        ({"gpus": OTHER_GPU, "host": "two"}, "on different hosts (one, two), whose times are never pooled"),
    ):
        assert apart([HERE, HERE, {**HERE, **other}]) == (f"were measured {said}" if said else "")
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


def test_a_gate_on_such_a_line_names_the_hosts_and_what_takes_times_says_so():
    run = on_hosts("a", "b", "a")
    outcomes = judge(run, check("itl_slope_to_bytes", low=0.5)).outcomes
    own = [o for o in outcomes if o.metric == "itl_slope_to_bytes" and CAND in o.cells[0]]
    assert [o.status for o in own] == ["not_evaluated"] * 3
    assert all("different hosts (a, b)" in o.sentence for o in own)
    # By the units of its metrics: such a runner has its device to itself.
    times = ("ms", "us/token", "tok/s", "GB/s", "us")
    units = {metric.runner for metric in METRICS.values() if metric.unit.name in times}
    assert {name for name, runner in RUNNERS.items() if runner.timed} >= units


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


# Host facts: complete, torch-free, and honest about what could not be read.


GPU = {"name": "GPU", "memory_bytes": 1, "compute_capability": "9.0", "driver": "1"}


def test_host_is_json_and_names_the_machine_but_not_in_the_identity():
    facts, env = host(), host().environment
    assert json.loads(json.dumps(env))["host"] == socket.gethostname()
    assert socket.gethostname() not in facts.identity.values()
    assert env["identity"] == facts.identity
    assert env["boot_id"] is None or len(env["boot_id"]) == 36
    assert facts.device in ("cpu", "cuda")
    assert (env["kvbench"], env["packages"]["torch"]) == (kvbench.__version__, facts.identity["torch"])
    assert env["cpu"]
    assert env["cpu_cores"] >= 1
    assert env["memory_bytes"] > 2**28
    assert env["device_reason"]
    assert set(facts.identity) == {"kvbench", "torch", "transformers", "triton", "device"}
    assert all(isinstance(value, str) and value for value in facts.identity.values())
    assert environment._version("kvbench-no-such-package") is None


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """A copy of the installed source: kvbench and the kernels."""
    folder = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    return [Path(shutil.copytree(root, folder / root.name, ignore=ignore)) for root in environment._roots()]


MEASURES = """formats/kv models/source data/corpora matrix/resolve_backend engines/protocol engines/reference/kv/store
evidence/examine runners/perplexity runners/text/logits run/task/measure machine/device_state"""
READS = """cli/main cli/reference compare/two_runs gate/evaluate machine/host metrics/perplexity
preflight/validate records/record report/html run/merge run/progress selftest/suite stats/intervals"""
FILES = {
    f"kvbench/{name}.py": stale for own, stale in ((MEASURES, True), (READS, False)) for name in own.split()
}
FILES |= dict.fromkeys(("kvbench_kernels/kv/quantize.py", "kvbench_kernels/gemm/w8a8.py"), True)


@pytest.mark.parametrize(("name", "stale"), FILES.items())
def test_an_edit_of_what_measures_makes_stored_results_stale_and_no_other(roots, name, stale):
    everything, measuring = source_digest(roots=roots), source_digest(measuring_only=True, roots=roots)
    path = roots[0].parent / name
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}# edited\n", encoding="utf-8")
    try:
        assert source_digest(roots=roots) != everything
        assert (source_digest(measuring_only=True, roots=roots) != measuring) == stale
    finally:
        path.write_text(text, encoding="utf-8")
    assert source_digest(measuring_only=True, roots=roots) == measuring


def test_what_measures_is_there_and_is_looked_at_by_folder(roots):
    assert all((roots[0] / name).exists() for name in environment.MEASURING)
    before = source_digest(measuring_only=True, roots=roots)
    (roots[0] / "data_page.py").write_text("x = 1\n")  # a name that only begins like a measuring package
    assert source_digest(measuring_only=True, roots=roots) == before
    (roots[0] / "data" / "more.py").write_text("x = 1\n")
    assert source_digest(measuring_only=True, roots=roots) != before


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("2", [2]), ("1, 0", [1, 0]), ("0,7,1", [0]), ("GPU-abc", []),
     ("GPU-b", [1]), ("GPU-c2,GPU-a", [2, 0]), ("0,GPU-x,1", [0]), ("MIG-abc", [0, 1, 2])],
)  # fmt: skip
def test_cuda_visible_devices(chosen, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen or "")
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment.visible(["GPU-a1", "GPU-b1", "GPU-c2"]) == expected


def test_device_needs_a_gpu_and_a_torch_that_can_use_it():
    for torch in ("2.13.0", "2.13.0+cu130"):
        assert environment._device([GPU], "no driver", torch) == ("cuda", "1 GPU(s) visible")
    unfit = "torch 2.13.0+cpu is built for the CPU"
    for gpus, torch, reason in (
        ([GPU], "2.13.0+cpu", unfit),
        ([GPU], None, "torch None"),
        ([], "2.13.0", "no driver"),
    ):
        found, why = environment._device(gpus, "no driver", torch)
        assert (found, reason in why) == ("cpu", True)


def test_a11_t3_the_interpreter_is_part_of_the_identity(monkeypatch):
    """Also with a GPU, where the device's name is that of compiled records."""
    found = set()
    for value in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        host.cache_clear()
        found.add(host().identity["triton"])
    host.cache_clear()
    assert len(found) == 2
    assert sum(name.endswith(", interpreted") for name in found) == 1
