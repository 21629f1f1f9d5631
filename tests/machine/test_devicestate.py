"""The device's state from a made-up NVML, since no GPU is here, and from made-up /proc and control groups.

tests/gpu/test_device_state_gpu.py reads a real one.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

from kvbench.machine.device_state import REASONS, DeviceState, words
from kvbench.stats.stability import SLOWDOWNS

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
IDS = {"uuid": "aa-bb", "pci": "00000000:3b:00.0"}
CLOCK_REASONS, PROCESSES = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetComputeRunningProcesses"


class NVMLError(Exception):
    """As pynvml's: its text is the driver's."""


class MadeNvml:
    """A driver with one GPU, known by UUID and bus; `answers` are returned, exceptions raised."""

    def __init__(self, uuid="GPU-aa-bb", bus="00000000:3b:00.0", **answers):
        self.names, self.inits = {uuid: "by uuid", bus: "by bus"}, 0
        violations = {kind: SimpleNamespace(violationTime=ns) for kind, ns in ((1, 5_000), (0, 77))}
        self.answers = {
            CLOCK_REASONS: 0x4,
            "nvmlDeviceGetClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 3201},
            "nvmlDeviceGetTemperature": {0: 61},
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetViolationStatus": violations,
            PROCESSES: [process(os.getpid(), 10)],
            **answers,
        }

    def __getattr__(self, name):
        if name not in self.answers:
            raise AttributeError(name)

        def query(handle, *rest):
            assert handle in ("by uuid", "by bus", "whole GPU")
            answer = self.answers[name]
            if isinstance(answer, dict):
                answer = answer[rest[0]]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return query

    def nvmlInit(self):  # noqa: N802
        self.inits += 1

    def nvmlShutdown(self):  # noqa: N802
        self.inits -= 1

    def _find(self, name):
        if name not in self.names:
            raise NVMLError("Not Found")
        return self.names[name]

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByPciBusId = _find  # noqa: N815

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):  # noqa: N802
        assert handle == "by uuid"
        return "whole GPU"


def process(pid, memory):
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


def state(nvml=None, **ids):
    nowhere = Path("/nowhere")
    return DeviceState(CUDA, nvml or MadeNvml(), ids or IDS, nowhere, nowhere)


def lost(function, error):
    """A driver that answers a query with an error, or without the query at all."""
    nvml = MadeNvml(**{function: error})
    if error is None:
        del nvml.answers[function]
    return nvml


def test_a_whole_state_and_this_machines_own():
    found = state()
    read = {k: v for k, v in found.read().items() if not k.startswith(("quota", "steal", "cpu_t"))}
    clocks = {"reasons": ["sw power cap"], "sm_mhz": 1980, "memory_mhz": 3201}
    limits = {"temperature_c": 61, "power_w": 412.5, "thermal_ns": 5000, "power_ns": 77}
    assert read == clocks | limits
    assert found.fixed() == {"sm_max_mhz": 1980, "memory_max_mhz": 3201, "power_limit_w": 700.0}
    assert set(found.unread) == {"cpu_quota", "cpu_steal"}  # there is no /nowhere
    found = DeviceState(CPU)
    read = found.read()
    assert set(read) == {"quota_us", "quota_periods", "steal_ticks", "cpu_ticks"}
    for fact, key in (("cpu_quota", "quota_us"), ("cpu_steal", "steal_ticks")):
        assert (read[key] is None) == (fact in found.unread)


def test_the_words_of_a_mask_have_the_bits_of_the_library():
    names = {
        "idle": "GpuIdle",
        "application clocks": "ApplicationsClocksSetting",
        "sw power cap": "SwPowerCap",
        "hw slowdown": "HwSlowdown",
        "sync boost": "SyncBoost",
        "sw thermal": "SwThermalSlowdown",
        "hw thermal": "HwThermalSlowdown",
        "hw power brake": "HwPowerBrakeSlowdown",
        "display": "DisplayClockSetting",
    }
    bits = {word: getattr(pynvml, f"nvmlClocksEventReason{name}") for word, name in names.items()}
    assert {word: bit for bit, word in REASONS.items()} == bits
    assert set(SLOWDOWNS) < set(names) - {"sw power cap"}
    assert words(0) == []
    assert words(0x48) == ["hw slowdown", "hw thermal"]
    assert words(0x204) == ["sw power cap", "reason 0x200"]
    assert words(0x1FF) == [*REASONS.values()]


def test_an_older_library_or_driver_is_asked_by_the_older_name():
    for error in (None, NVMLError("Function Not Found")):
        old = lost(CLOCK_REASONS, error)
        old.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x20
        found = state(old)
        assert found.read()["reasons"] == ["sw thermal"]
        assert "reasons" not in found.unread


FUNCTIONS = {
    "reasons": CLOCK_REASONS,
    "sm_mhz": "nvmlDeviceGetClockInfo",
    "temperature_c": "nvmlDeviceGetTemperature",
    "power_w": "nvmlDeviceGetPowerUsage",
    "thermal_ns": "nvmlDeviceGetViolationStatus",
}


@pytest.mark.parametrize(("fact", "function"), FUNCTIONS.items())
@pytest.mark.parametrize("error", [NVMLError("Not Supported"), OSError("gone"), None], ids=str)
def test_what_is_not_supported_is_none_with_the_reason(fact, function, error):
    found = state(lost(function, error))
    read = found.read()
    assert read[fact] is None
    assert found.unread[fact] == (str(error) if error else "this NVML has no such query")
    others = {key: value for key, value in {"sm_mhz": 1980, "power_w": 412.5}.items() if key != fact}
    assert others.items() <= read.items()


def test_a_driver_that_goes_away_costs_facts_and_the_library_is_left_as_it_was(monkeypatch):
    nvml = MadeNvml()
    found = state(nvml)
    first = found.read()
    nvml.answers = {name: NVMLError("GPU is lost") for name in nvml.answers}
    last = found.read()
    assert (first["sm_mhz"], last["sm_mhz"], last["reasons"]) == (1980, None, None)
    assert found.others() is None
    assert found.unread["sm_mhz"] == found.unread["other_processes"] == "GPU is lost"
    nvml = MadeNvml()
    found = state(nvml)
    assert nvml.inits == 1
    for _ in range(2):
        found.close()
        assert nvml.inits == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml" in DeviceState(CUDA, None, IDS).unread["gpu"]


@pytest.mark.parametrize("error", [NVMLError("Driver Not Loaded"), NVMLError()], ids=["said", "silent"])
def test_no_driver(error):
    nvml = MadeNvml()
    nvml.nvmlInit = Mock(side_effect=error)
    found = state(nvml)
    assert found.unread == {"gpu": str(error) or "NVMLError"}
    assert found.read()["sm_mhz"] is None
    assert found.fixed() == dict.fromkeys(("sm_max_mhz", "memory_max_mhz", "power_limit_w"))
    assert (found.others(), found.found_by) == (None, "")
    found.close()
    assert set(found.unread) == {"gpu", "cpu_quota", "cpu_steal"}


def test_the_gpu_is_found_by_uuid_then_by_bus_and_never_by_index():
    assert state().found_by == "uuid"
    assert state(pci="00000000:3b:00.0").found_by == "pci"
    assert state(uuid="another", pci="00000000:3b:00.0").found_by == "pci"
    lost = state(uuid="another", pci="00000000:99:00.0")
    assert lost.unread["gpu"] == "NVML does not find the device of this process (Not Found)"
    assert (lost.found_by, lost.read()["temperature_c"]) == ("", None)
    mig = state(MadeNvml(uuid="MIG-aa-bb"))  # an instance has the state of its GPU
    assert (mig.found_by, mig._handle, mig.read()["sm_mhz"]) == ("uuid", "whole GPU", 1980)


def test_other_processes_are_counted():
    own, other = process(os.getpid(), 10), process(-5, 3_000)
    for listed, count, size in (
        ([], 0, 0),
        ([process(-6, 4_000), other], 2, 7_000),
        ([other, process(-6, None)], 2, None),
    ):
        found = state(MadeNvml(**{PROCESSES: [*listed, own]})).others()
        assert found == {"count": count, "bytes": size}
    # In a container the driver's process ids may not be ours: then each of them may be this one.
    for listed in ([], [other]):
        found = state(MadeNvml(**{PROCESSES: listed}))
        assert found.others() is None
        assert "not in the driver's list" in found.unread["other_processes"]


def made(tmp_path, cgroup, stat, **groups):
    """groups: folder under the control groups, "/" as "__" -> its cpu.stat."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/stat").write_text(stat)
    for name, text in groups.items():
        folder = tmp_path / "cgroup" / name.strip("_").replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.stat").write_text(text)
    return DeviceState(CPU, None, None, tmp_path / "proc", tmp_path / "cgroup")


STAT = "cpu  100 1 50 900 10 0 3 36 7 8\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
QUOTA = "usage_usec 9\nnr_periods 20\nnr_throttled 3\nthrottled_usec 45000\n"
NO_QUOTA = "usage_usec 9\nuser_usec 5\n"


def test_quota_and_steal_of_a_cpu(tmp_path):
    found = made(tmp_path, "1:name=systemd:/x\n0::/a/b\n", STAT, a__b=QUOTA, a=QUOTA, _=NO_QUOTA)
    assert found.read() == {
        "quota_us": 90_000, "quota_periods": 6,  # of its own group and of the one above; the root has none
        "steal_ticks": 36, "cpu_ticks": 1100,  # guests are in user and nice
    }  # fmt: skip
    assert (found.fixed(), found.others(), found.unread) == ({}, None, {})


@pytest.mark.parametrize("group", ["/", "/of/the/host", "/../../up"])
def test_a_container_sees_its_own_group_as_the_root(tmp_path, group):
    assert made(tmp_path, f"0::{group}\n", STAT, _=QUOTA).read()["quota_us"] == 45_000


UNCOUNTED = "no control group of version 2 of this process counts throttling"


@pytest.mark.parametrize(
    ("cgroup", "stat", "groups", "fact", "reason"),
    [
        ("1:cpu:/\n", STAT, {"_": QUOTA}, "cpu_quota", "no control groups of version 2"),
        ("0::/\n", STAT, {"_": NO_QUOTA}, "cpu_quota", UNCOUNTED),
        ("0::/\n", STAT, {}, "cpu_quota", UNCOUNTED),
        ("0::/\n", STAT, {"_": "nr_throttled many\n"}, "cpu_quota",
         "invalid literal for int() with base 10: 'many'"),
        ("0::/\n", STAT, {"_": "nr_throttled 3\n"}, "cpu_quota", "'throttled_usec'"),
        ("0::/\n", "cpu 1 2 3 4\n", {"_": QUOTA}, "cpu_steal", "/proc/stat has no steal time"),
        ("0::/\n", "", {"_": QUOTA}, "cpu_steal", "not enough values to unpack (expected at least 1, got 0)"),
    ],
)  # fmt: skip
def test_what_a_cpu_does_not_say_is_none_with_the_reason(tmp_path, cgroup, stat, groups, fact, reason):
    found = made(tmp_path, cgroup, stat, **groups)
    read = found.read()
    assert found.unread == {fact: reason}
    missing = {"cpu_quota": {"quota_us", "quota_periods"}, "cpu_steal": {"steal_ticks", "cpu_ticks"}}
    assert {key for key, value in read.items() if value is None} == missing[fact]
