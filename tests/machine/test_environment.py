"""Host facts: complete, torch-free, and honest about what could not be read."""

import json
import shutil
import socket
from pathlib import Path

import pytest

import kvbench
from kvbench.machine import host as environment
from kvbench.machine.host import host, source_digest

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


MEASURES = [
    "formats/kv",
    "models/source",
    "data/corpora",
    "matrix/resolve",
    "engines/protocol",
    "engines/reference/kv/store",
    "evidence/examine",
    "runners/perplexity",
    "runners/text/logits",
    "run/task/measure",
    "machine/device_state",
]
READS = [
    "cli/main",
    "cli/reference",
    "compare/two_runs",
    "gate/evaluate",
    "machine/host",
    "metrics/perplexity",
    "preflight/validate",
    "records/record",
    "report/html",
    "run/merge",
    "run/progress",
    "selftest/suite",
    "stats/intervals",
]
FILES = {f"kvbench/{name}.py": name in MEASURES for name in MEASURES + READS}
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


@pytest.mark.parametrize(
    ("gpus", "torch", "device", "reason"),
    [
        ([GPU], "2.13.0", "cuda", "1 GPU(s) visible"),
        ([GPU], "2.13.0+cu130", "cuda", "1 GPU(s) visible"),
        ([GPU], "2.13.0+cpu", "cpu", "torch 2.13.0+cpu is built for the CPU"),
        ([GPU], None, "cpu", "torch None"),
        ([], "2.13.0", "cpu", "no driver"),
    ],
)
def test_device_needs_a_gpu_and_a_torch_that_can_use_it(gpus, torch, device, reason):
    found, why = environment._device(gpus, "no driver", torch)
    assert found == device
    assert reason in why


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
