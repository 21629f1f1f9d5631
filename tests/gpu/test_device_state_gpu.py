"""The state of a real GPU: found by what torch calls it, clocks, temperature and throttle reasons read."""

import subprocess
import sys

import pytest
import torch

from kvbench.machine.device_state import REASONS, DeviceState, ids_of
from kvbench.runners.timing import measure
from kvbench.stats.stability import slowdown

pytestmark = pytest.mark.gpu


def test_the_gpu_is_found_by_its_uuid():
    device = torch.device("cuda", torch.cuda.current_device())
    found = DeviceState(device)
    assert found.found_by == "uuid", found.unread
    assert {"uuid", "pci"} <= set(ids_of(device))
    import pynvml

    uuid = pynvml.nvmlDeviceGetUUID(found._handle)
    assert uuid.partition("-")[2] == ids_of(device)["uuid"]
    found.close()


def test_it_is_found_by_its_bus_too():
    device = torch.device("cuda")
    ids = ids_of(device)
    assert DeviceState(device, ids={"pci": ids["pci"]}).found_by == "pci"


def test_a_state_at_work():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        x = (x @ x).clamp(-1, 1)
    found = DeviceState(torch.device("cuda"))
    before = found.read()
    torch.cuda.synchronize()
    after = found.read()
    for state in (before, after):
        assert state["sm_mhz"] > 0
        assert state["memory_mhz"] > 0
        assert 0 < state["temperature_c"] < 120
        assert state["power_w"] > 0
        assert isinstance(state["reasons"], list)
        assert {word for word in state["reasons"] if not word.startswith("reason ")} <= set(REASONS.values())
    fixed = found.fixed()
    assert fixed["sm_max_mhz"] >= after["sm_mhz"]
    assert fixed["power_limit_w"] > 0
    # What a driver does not say is None, and has a reason.
    missing = {key for key, value in (after | fixed).items() if value is None}
    assert len(missing) <= len(found.unread)
    assert "gpu" not in found.unread


def test_another_process_is_seen_or_it_is_said_why_not():
    torch.zeros(1, device="cuda")
    alone = DeviceState(torch.device("cuda"))
    first = alone.others()
    code = "import sys, torch; x = torch.zeros(2**26, device='cuda'); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        second = alone.others()
        other.stdin.close()
    if first is None or second is None:
        assert alone.unread["other_processes"]
    else:
        assert second["count"] == (first["count"] or 0) + 1


class Products:
    """An arm that multiplies matrices."""

    def __init__(self):
        self.x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def submit(self):
        self.step()

    def step(self):
        self.x = (self.x @ self.x).clamp(-1, 1)

    def synchronize(self):
        torch.cuda.synchronize()

    def ran(self):
        return {}

    def close(self): ...


def test_measured_requests_have_the_state_of_the_gpu():
    found = DeviceState(torch.device("cuda"))
    timings = measure([("candidate", Products())], new_tokens=4, repeats=3, warmup=1, read_state=found.read)
    for timing in timings.measured:
        assert timing.device is not None
        arm = {"device": timing.device, "itl_ms": timing.itl_ms, "total_ms": timing.total_ms}
        assert slowdown(arm) is not None
        assert timing.device["before"]["sm_mhz"] > 0
