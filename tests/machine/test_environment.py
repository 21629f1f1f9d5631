"""Host facts: complete, torch-free, and honest about what could not be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import kvbench
from kvbench.machine import host as environment
from kvbench.machine.host import host, source_digest

GPU = {"name": "GPU", "memory_bytes": 1, "compute_capability": "9.0", "driver": "1"}


def test_host_is_json_and_names_the_machine_but_not_in_the_identity() -> None:
    facts = host()
    text = json.dumps({"device": facts.device, "identity": dict(facts.identity), **facts.environment})
    import socket

    assert json.loads(text)["host"] == socket.gethostname()
    assert socket.gethostname() not in facts.identity.values()
    assert facts.environment["identity"] == facts.identity
    assert facts.environment["boot_id"] is None or len(facts.environment["boot_id"]) == 36
    assert facts.device in ("cpu", "cuda")
    assert facts.environment["kvbench"] == kvbench.__version__
    assert facts.environment["cpu"]
    assert facts.environment["cpu_cores"] >= 1
    assert facts.environment["memory_bytes"] > 2**28
    assert facts.environment["packages"]["torch"] == facts.identity["torch"]
    assert facts.environment["device_reason"]


def test_identity_holds_code_libraries_and_device() -> None:
    assert set(host().identity) == {"kvbench", "torch", "transformers", "triton", "device"}
    assert all(isinstance(value, str) and value for value in host().identity.values())


def test_an_absent_package_is_null_and_not_left_out() -> None:
    assert environment._version("kvbench-no-such-package") is None


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "kvbench"
    shutil.copytree(Path(kvbench.__file__).parent, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "_roots", lambda: [root])
    return root


def test_source_digest_follows_measuring_code_only_where_asked(copied: Path) -> None:
    everything, measuring = source_digest(), source_digest(measuring_only=True)
    (copied / "report" / "new.py").write_text("x = 1\n")
    assert source_digest() != everything
    assert source_digest(measuring_only=True) == measuring
    (copied / "formats.py").write_text("x = 1\n")
    assert source_digest(measuring_only=True) != measuring


def test_source_digest_covers_the_kernels() -> None:
    assert [root.name for root in environment._roots()] == ["kvbench", "kvbench_kernels"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("1, 0", [1, 0]),
        ("0,7,1", [0]),
        ("GPU-abc", []),
        ("GPU-b", [1]),
        ("GPU-c2,GPU-a", [2, 0]),
        ("0,GPU-x,1", [0]),
        ("MIG-abc", [0, 1, 2]),
    ],
)
def test_cuda_visible_devices(
    chosen: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
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
def test_device_needs_a_gpu_and_a_torch_that_can_use_it(
    gpus: list[dict[str, object]], torch: str | None, device: str, reason: str
) -> None:
    found, why = environment._device(gpus, "no driver", torch)
    assert found == device
    assert reason in why


def test_a11_t3_the_interpreter_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU too, where the device's name alone would let its records be taken for compiled ones."""
    found = set()
    for value in ("1", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        host.cache_clear()
        found.add(host().identity["triton"])
    host.cache_clear()
    assert len(found) == 2
    assert sum(name.endswith(", interpreted") for name in found) == 1
