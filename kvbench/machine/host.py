"""Where a run happens: versions, machine, device. Read without torch.

`host()` gives the facts for the manifest, and the `identity` among them that enters every task's key: results
are reused only with the same measuring code, torch, transformers and device. The host's name is recorded
outside of the identity, so that times of different hosts are never pooled (`kvbench.machine.same_machine`).
User names are not recorded.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import kvbench
from kvbench_kernels.support import interpreting

PACKAGES = [
    "torch",
    "transformers",
    "triton",
    "accelerate",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface-hub",
    "datasets",
]
PACKAGES += ["numpy", "scipy", "pandas"]

# Packages of kvbench that decide what a task measures; the kernels count as a whole. A change of their source
# makes stored results stale. The rest reads records, or its whole effect on a task is in the task's spec and
# options, which the key holds.
MEASURING = ["formats", "models", "data", "matrix", "engines", "evidence", "runners", "run/task"]
MEASURING += ["machine/device_state.py"]  # latency samples the device's state between requests


@dataclass(frozen=True)
class Host:
    """device: "cpu" or "cuda" (what `device: auto` means here). identity: part of every task's key.

    environment: all recorded facts, with the identity; JSON.
    """

    device: str = "cpu"
    identity: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


@cache
def host() -> Host:
    """The facts of this process's machine; read once."""
    versions = {name: _version(name) for name in PACKAGES}
    gpus, gpu_reason = _gpus()
    device, device_reason = _device(gpus, gpu_reason, versions["torch"])
    cpu = _cpu_model()
    identity = {
        "kvbench": source_digest(measuring_only=True),
        "torch": versions["torch"] or "absent",
        "transformers": versions["transformers"] or "absent",
        "triton": (versions["triton"] or "absent") + (", interpreted" if interpreting() else ""),
        "device": f"{device}: {gpus[0]['name'] if device == 'cuda' else cpu}",
    }
    environment = {
        "host": platform.node() or None,
        "boot_id": _text("/proc/sys/kernel/random/boot_id") or None,  # distinguishes machines of one name
        "identity": identity,
        "kvbench": kvbench.__version__,
        "kvbench_source": source_digest(),
        "python": platform.python_version(),
        "packages": versions,
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": cpu,
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": _usable_cores(),
        "memory_bytes": _memory_bytes(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": gpus,
        "device": device,
        "device_reason": device_reason,
    }
    return Host(device, identity, environment)


def source_digest(measuring_only: bool = False, roots: Sequence[Path] = ()) -> str:
    """sha256 (first 24 hex digits) over the names and bytes of kvbench's own Python files.

    measuring_only: of `MEASURING` and of the kernels. roots: by default the installed packages.
    """
    digest = hashlib.sha256()
    for root in roots or _roots():
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if measuring_only and root.name == "kvbench" and not any(map(inside.is_relative_to, MEASURING)):
                continue
            digest.update(f"{root.name}/{inside.as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _roots() -> list[Path]:
    spec = importlib.util.find_spec("kvbench_kernels")
    kernels = [Path(p) for p in spec.submodule_search_locations or []] if spec else []
    return [Path(kvbench.__file__).parent, *kernels]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device(gpus: list[dict[str, Any]], gpu_reason: str, torch_version: str | None) -> tuple[str, str]:
    """("cuda" or "cpu", why)."""
    if not gpus:
        return "cpu", gpu_reason
    if torch_version is None or "+cpu" in torch_version:
        return "cpu", f"there is a GPU, but torch {torch_version} is built for the CPU"
    return "cuda", f"{len(gpus)} GPU(s) visible"


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """(the visible GPUs by the driver, "" or why there are none)."""
    if sys.platform == "linux":
        try:
            # The library that pynvml loads: to import pynvml takes a tenth of the time of `plan`.
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as e:
            return [], f"no NVIDIA driver ({e})"
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed, so GPUs cannot be found"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        return [], f"no NVIDIA driver ({e})"
    try:
        uuids = gpu_uuids(pynvml)
        gpus = [_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i), uuids[i]) for i in visible(uuids)]
        return gpus, "" if gpus else f"{len(uuids)} GPU(s), all hidden by CUDA_VISIBLE_DEVICES"
    except pynvml.NVMLError as e:
        return [], f"the NVIDIA driver did not answer ({e})"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, uuid: str) -> dict[str, Any]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        "name": str(nvml.nvmlDeviceGetName(handle)),
        "uuid": uuid,
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "compute_capability": f"{major}.{minor}",
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
    }


def gpu_uuids(nvml: Any) -> list[str]:
    """The ids of all GPUs, in the driver's order. nvml: the module pynvml, initialised."""
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]


def visible(uuids: Sequence[str]) -> list[int]:
    """Indexes of the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all if it names parts (MIG)."""
    every, chosen = list(range(len(uuids))), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return every
    found: list[int] = []
    for word in (word.strip() for word in chosen.split(",") if word.strip()):
        if word.startswith("GPU-"):
            named = [i for i in every if uuids[i].startswith(word)]
        elif word.lstrip("-").isdigit():
            named = [int(word)] if 0 <= int(word) < len(uuids) else []
        else:
            return every
        if len(named) != 1:
            break  # CUDA stops at the first one that does not exist
        found += named
    return found


def _text(path: str) -> str:
    """What a file of the kernel says, "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cpu_model() -> str:
    lines = _text("/proc/cpuinfo").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "unknown"


def _usable_cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _memory_bytes() -> int | None:
    """Physical memory, or the control group's limit if lower; None if neither can be read."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    limit = _text("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total
