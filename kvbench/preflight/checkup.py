"""The facts of this machine, which `kvbench.preflight.doctor` judges. Takes half a second."""

import importlib
import os
import shutil
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import kvbench
from kvbench.data.corpora import HUB, hub_allowed
from kvbench.files import cache_dir
from kvbench.machine.host import gpu_uuids, host, visible
from kvbench.models.download import offline
from kvbench.preflight.assets import HERE, data
from kvbench.preflight.doctor import Facts, Gpu, Package
from kvbench.stats.stability import grown
from kvbench_kernels.support import interpreting

LOOK_S = 0.5

# NVML's own numbers, which drivers keep.
_UNCORRECTED, _SINCE_BOOT = 1, 0


def collect(data_dir: Path | None) -> Facts:
    environment, fault = host().environment, ""
    try:
        importlib.import_module("torch")
    except Exception as e:  # a missing library, a build for another machine: all of them end every run
        fault = f"{type(e).__name__}: {e}"
    looked, held = {} if fault else _look(), ("", 0, 0)
    if data_dir is not None and str(data_dir) != HUB:
        files = [one for one in data(data_dir) if one.where or one.get]
        held = str(data_dir), sum(one.state == HERE for one in files), len(files)
    return Facts(
        environment=environment,
        packages=tuple(packages()),
        torch_fault=fault,
        gpus=() if fault or not environment["gpus"] else tuple(_gpus(importlib.import_module("pynvml"))),
        load=os.getloadavg()[0],
        free_cores=looked.get("free"),
        quota_cores=quota_cores(),
        stolen=looked.get("stolen"),
        throttled=looked.get("throttled"),
        cache=_cache(cache_dir()),
        data=held,
        hub_allowed=hub_allowed(data_dir),
        hub_offline=offline(),
        interpreter=interpreting(),
    )


def packages() -> Iterator[Package]:
    """What kvbench requires, extras left out, and what is installed of it."""
    from packaging.requirements import Requirement

    # A source tree's own list, which an editable installation does not follow.
    project = Path(kvbench.__file__).parents[1] / "pyproject.toml"
    said = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}) if project.is_file() else {}
    own = said["dependencies"] if said.get("name") == "kvbench" else metadata.requires("kvbench") or []
    for wanted in map(Requirement, own):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield Package(wanted.name, None, str(wanted.specifier), None)
            continue
        fits = wanted.specifier.contains(installed, prereleases=True)
        yield Package(wanted.name, installed, str(wanted.specifier), fits)


def _look() -> dict[str, Any]:
    """Idle cores, stolen time and throttling while this process sleeps."""
    import torch

    from kvbench.machine.device_state import DeviceState

    cpu = DeviceState(torch.device("cpu"))
    before, idle = cpu.read(), idle_ticks()
    time.sleep(LOOK_S)
    after, then = cpu.read(), idle_ticks()
    ticks, stolen = grown(before, after, "cpu_ticks"), grown(before, after, "steal_ticks")
    periods = grown(before, after, "quota_periods")
    return {
        "free": (then - idle) / ticks * (os.cpu_count() or 1) if ticks and None not in (idle, then) else None,
        "stolen": stolen / ticks if ticks and stolen is not None else None,
        "throttled": None if periods is None else periods > 0,
    }


def idle_ticks(proc: Path = Path("/proc")) -> int:
    """Of all CPUs: idle, and idle while the disk is waited for."""
    _, *ticks = (proc / "stat").read_text(encoding="ascii").splitlines()[0].split()
    return int(ticks[3]) + int(ticks[4])


def quota_cores(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that this process's control groups (version 2) grant it; None without a limit, or if unknown."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if own is None:
        return None
    folder, found = groups / own.lstrip("/"), []
    for at in (folder, *folder.parents):
        if at.is_relative_to(groups) and (at / "cpu.max").is_file():
            quota, period = (at / "cpu.max").read_text(encoding="ascii").split()
            found += [int(quota) / int(period)] if quota != "max" else []
    return min(found, default=None)


def _gpus(nvml: Any) -> Iterator[Gpu]:
    nvml.nvmlInit()
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        for index in visible(gpu_uuids(nvml)):
            yield gpu_facts(nvml, index, driver)
    finally:
        nvml.nvmlShutdown()


def gpu_facts(nvml: Any, index: int, driver: str) -> Gpu:
    """nvml: pynvml, or a module like it. No CUDA context is made: every process on the GPU is another's."""
    import torch

    from kvbench.machine.device_state import DeviceState

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    device = DeviceState(torch.device("cuda"), nvml, {"uuid": uuid.removeprefix("GPU-")})
    state = {**device.read(), **device.fixed()}
    unread = dict(device.unread)
    device.close()

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except Exception:  # many devices have no MIG and no ECC, and say so by an error
            return None

    mig = ask("nvmlDeviceGetMigMode")
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    return Gpu(
        name=f"GPU {index} {nvml.nvmlDeviceGetName(handle)}",
        driver=driver,
        state=state,
        mig=None if mig is None else bool(mig[0]),
        ecc_errors=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_BOOT),
        others=None if processes is None else len(processes),
        unread={k: v for k, v in unread.items() if not k.startswith("cpu_")},
    )


def _cache(path: Path) -> dict[str, Any]:
    there = next(at for at in (path, *path.parents) if at.exists())
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else []
    return {
        "path": str(path),
        "writable": there.is_dir() and os.access(there, os.W_OK),
        "free": shutil.disk_usage(there).free,
        "bytes": sum(f.stat().st_size for f in files),
        "left_over": len(list(path.rglob(".part-*"))) if path.is_dir() else 0,
    }
