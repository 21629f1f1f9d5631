"""The state of a device: clocks, temperature, power, throttle reasons; for the CPU its quota and stolen time.

Read before a request is submitted and after its last token, never inside its time. Counters are stored as
read; the growth between two reads is derived later (`kvbench.stats.stability`). A value that cannot be read
is None, never 0, with the reason in `unread`; this is no error, since the times are still valid.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# nvmlClocksEventReasons, formerly nvmlClocksThrottleReasons.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "sw power cap",
    0x8: "hw slowdown",
    0x10: "sync boost",
    0x20: "sw thermal",
    0x40: "hw thermal",
    0x80: "hw power brake",
    0x100: "display",
}

# NVML's own numbers, which drivers keep.
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_GPU_SENSOR = 0  # nvmlTemperatureSensors_t
_POWER, _THERMAL = 0, 1  # nvmlPerfPolicyType_t

# (NVML functions, of which the first existing one is called; arguments after the handle; conversion)
Query = tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], Any]]


def words(mask: int) -> list[str]:
    """The names of a mask's bits, lowest first; an unknown bit is shown as its number."""
    bits = [1 << i for i in range(mask.bit_length()) if mask >> i & 1]
    return [REASONS.get(bit, f"reason {bit:#x}") for bit in bits]


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _ns(status: Any) -> int:
    return int(status.violationTime)


_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")

STATE: dict[str, Query] = {  # read every time
    "reasons": (_REASONS, (), words),
    "sm_mhz": (("nvmlDeviceGetClockInfo",), (_SM,), int),
    "memory_mhz": (("nvmlDeviceGetClockInfo",), (_MEMORY,), int),
    "temperature_c": (("nvmlDeviceGetTemperature",), (_GPU_SENSOR,), int),
    "power_w": (("nvmlDeviceGetPowerUsage",), (), _watts),
    "thermal_ns": (("nvmlDeviceGetViolationStatus",), (_THERMAL,), _ns),
    "power_ns": (("nvmlDeviceGetViolationStatus",), (_POWER,), _ns),
}

FIXED: dict[str, Query] = {  # read once
    "sm_max_mhz": (("nvmlDeviceGetMaxClockInfo",), (_SM,), int),
    "memory_max_mhz": (("nvmlDeviceGetMaxClockInfo",), (_MEMORY,), int),
    "power_limit_w": (("nvmlDeviceGetEnforcedPowerLimit",), (), _watts),
}


class DeviceState:
    """The state of one device and of the host CPU.

    nvml: the module pynvml, or a substitute; ids: of the GPU ({"uuid": ..., "pci": ...}, see `ids_of`); None:
    look them up. An index would be wrong: CUDA_VISIBLE_DEVICES and MIG number devices differently from NVML.
    """

    def __init__(
        self,
        device: torch.device,
        nvml: Any = None,
        ids: Mapping[str, str] | None = None,
        proc: Path = Path("/proc"),
        groups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self.unread: dict[str, str] = {}
        self.found_by = ""  # "uuid" or "pci" where NVML knows the GPU
        self._proc, self._groups = proc, groups
        self._cuda = device.type == "cuda"
        self._nvml: Any = None
        self._handle: Any = None
        if self._cuda:
            self._open(nvml, ids if ids is not None else ids_of(device))

    def read(self) -> dict[str, Any]:
        """The state now; a GPU's facts only for a GPU.

        reasons: throttle reasons in words; clocks in MHz; power in W (the driver's mean over up to a second);
        thermal_ns, power_ns: time with reduced clocks since the driver started; quota_us, quota_periods: how
        long and how often the process's control groups were throttled; steal_ticks of cpu_ticks: CPU time
        taken by other machines.
        """
        gpu = {fact: self._ask(fact, query) for fact, query in STATE.items()} if self._cuda else {}
        return gpu | self._quota() | self._steal()

    def fixed(self) -> dict[str, Any]:
        """The facts that do not change in a run: highest clocks and enforced power limit; none for a CPU."""
        return {fact: self._ask(fact, query) for fact, query in FIXED.items()} if self._cuda else {}

    def others(self) -> dict[str, int | None] | None:
        """{"count", "bytes"} of other compute processes on the GPU; bytes None where the driver gives none.

        None where the driver's list lacks this process (a container with its own ids): it may be any of them.
        """
        query: Query = (("nvmlDeviceGetComputeRunningProcesses",), (), list)
        processes = self._ask("other_processes", query)
        if processes is None:
            return None
        foreign = [p for p in processes if p.pid != os.getpid()]
        if len(foreign) == len(processes):
            reason = "this process is not in the driver's list, so it cannot be distinguished from others"
            self.unread.setdefault("other_processes", reason)
            return None
        sizes = [p.usedGpuMemory for p in foreign]
        return {"count": len(foreign), "bytes": None if None in sizes else sum(sizes)}

    def close(self) -> None:
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except Exception as e:
                self.unread.setdefault("gpu", _reason(e))
            self._nvml = None

    def _open(self, nvml: Any, ids: Mapping[str, str]) -> None:
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception as e:  # no library, no driver, or a driver that does not answer
            self.unread["gpu"] = _reason(e)
            return
        self._nvml = nvml
        by_uuid, kinds = nvml.nvmlDeviceGetHandleByUUID, ("GPU", "MIG") if "uuid" in ids else ()
        tries = [("uuid", by_uuid, f"{kind}-{ids['uuid']}") for kind in kinds]
        tries += [("pci", nvml.nvmlDeviceGetHandleByPciBusId, ids["pci"])] if "pci" in ids else []
        reason = "torch names neither its UUID nor its PCI bus"
        for by, find, name in tries:
            try:
                handle = find(name)
                if name.startswith("MIG"):  # an instance has no clocks of its own
                    handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            except Exception as e:
                reason = _reason(e)
                continue
            self._handle, self.found_by = handle, by
            return
        self.unread["gpu"] = f"NVML does not find the device of this process ({reason})"

    def _ask(self, fact: str, query: Query) -> Any:
        """NVML's answer, or None; then `unread` has the reason."""
        if self._handle is None:
            return None  # `unread` has the reason for the whole GPU
        names, arguments, convert = query
        reason = "this NVML has no such query"
        for name in names:
            function = getattr(self._nvml, name, None)
            if function is None:
                continue
            try:
                return convert(function(self._handle, *arguments))
            except Exception as e:  # not supported, no permission, or no driver: only this fact is missing
                reason = _reason(e)
        self.unread.setdefault(fact, reason)
        return None

    def _quota(self) -> dict[str, int | None]:
        """Throttling of the process's control group and its ancestors, added up."""
        try:
            lines = (self._proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
            own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
            if own is None:
                raise ValueError("no control groups of version 2")
            folder = self._groups / own.lstrip("/")
            groups = [at for at in (folder, *folder.parents) if at.is_relative_to(self._groups)]
            known = [s for s in (_cpu_stat(at / "cpu.stat") for at in groups) if "nr_throttled" in s]
            if not known:
                raise ValueError("no control group of version 2 of this process counts throttling")
            return {
                "quota_us": sum(stat["throttled_usec"] for stat in known),
                "quota_periods": sum(stat["nr_throttled"] for stat in known),
            }
        except (OSError, ValueError, KeyError) as e:
            self.unread.setdefault("cpu_quota", _reason(e))
            return {"quota_us": None, "quota_periods": None}

    def _steal(self) -> dict[str, int | None]:
        """Stolen ticks of all CPUs, the eighth number of /proc/stat, and the sum of eight (with guests)."""
        try:
            with (self._proc / "stat").open(encoding="ascii") as f:
                name, *ticks = f.readline().split()
            if name != "cpu" or len(ticks) < 8:
                raise ValueError("/proc/stat has no steal time")
            return {"steal_ticks": int(ticks[7]), "cpu_ticks": sum(map(int, ticks[:8]))}
        except (OSError, ValueError) as e:
            self.unread.setdefault("cpu_steal", _reason(e))
            return {"steal_ticks": None, "cpu_ticks": None}


def ids_of(device: torch.device) -> dict[str, str]:
    """{"uuid", "pci"} of a CUDA device, as far as this version of torch gives them."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)
    ids = {"uuid": str(found.uuid)} if hasattr(found, "uuid") else {}
    if hasattr(found, "pci_bus_id"):
        ids["pci"] = f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return ids


def _cpu_stat(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split() for line in lines)}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
