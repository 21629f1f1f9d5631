"""What `kvbench doctor` says of a machine: from facts that were collected elsewhere, so that a test can invent any machine.

A problem is what ends a run or makes its numbers wrong; a warning is what may disturb times, or what is missing for some of the work.
Each says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.stats.stability import SLOWDOWNS

OK, WARNING, PROBLEM = "ok", "warning", "problem"
HOT_C = 85  # above it, devices of this kind begin to take clocks away
FREE_SHARE = 0.5  # a core that is busy for more than the other half is not free
STOLEN = 0.01  # share of the CPUs' time
LEAST_DISK, LEAST_MEMORY = 2 * 10**9, 4 * 10**9  # bytes: the default model, its prepared copy and a run


@dataclass(frozen=True)
class Line:
    """One thing that was looked at. remedy: what to do about it, "" where nothing is to be done."""

    name: str
    state: str
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    def as_text(self) -> str:
        remedy = f"\n{'':10}-> {self.remedy}" if self.remedy else ""
        return f"{self.state:<8}  {self.name}: {self.found}{remedy}"


@dataclass(frozen=True)
class Package:
    """installed, wanted: versions and their accepted range ("" for any); fits: whether it is in it, None where it is not installed."""

    name: str
    installed: str | None
    wanted: str
    fits: bool | None


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. state: as `DeviceState.read()` gives it with its `fixed()`; what could not be read is None or left out.

    mig, ecc_errors: None where they are not read; others: compute processes on it; unread: fact -> why it was not read.
    """

    name: str
    driver: str
    state: Mapping[str, Any]
    mig: bool | None = None
    ecc_errors: int | None = None
    others: int | None = None
    unread: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Facts:
    """environment: that of `kvbench.machine.host.host()`. free_cores: idle ones, by a short look at them, None where that is unknown;
    quota_cores: CPUs that the control group grants, None for no quota; stolen: share of the CPUs' time; throttled: whether the quota
    stopped this process while it looked. cache: {"path", "writable", "free", "bytes", "left_over"}; data: (folder, files that are
    there, all). hub: what is allowed, in words. triton: why it cannot be used, "" where it can. interpreter: TRITON_INTERPRET.
    """

    environment: Mapping[str, Any]
    packages: tuple[Package, ...]
    torch_fault: str
    gpus: tuple[Gpu, ...]
    load: float
    free_cores: float | None
    quota_cores: float | None
    stolen: float | None
    throttled: bool | None
    cache: Mapping[str, Any]
    data: tuple[str, int, int]
    hub_allowed: bool
    hub_offline: bool
    interpreter: bool


def lines(facts: Facts) -> list[Line]:
    """Everything that was looked at, in the order in which it is shown."""
    return [
        *_packages(facts),
        *_device(facts),
        *(line for gpu in facts.gpus for line in _gpu(gpu)),
        *_triton(facts),
        *_cpu(facts),
        *_memory(facts),
        *_cache(facts),
        *_data(facts),
    ]


def exit_code(found: list[Line]) -> int:
    return 1 if any(line.state == PROBLEM for line in found) else 0


def _packages(facts: Facts) -> Iterator[Line]:
    env = facts.environment
    yield Line("python", OK, f"{env['python']} on {env['os']} {env['machine']}; kvbench {env['kvbench']}")
    for package in facts.packages:
        if package.installed is None:
            yield Line(
                package.name, PROBLEM, "not installed", f"pip install '{package.name}{package.wanted}'"
            )
        elif not package.fits:
            yield Line(
                package.name, PROBLEM, f"{package.installed}, and kvbench takes {package.wanted}",
                f"pip install '{package.name}{package.wanted}'",
            )  # fmt: skip
        else:
            yield Line(
                package.name,
                OK,
                package.installed + (f" (accepted: {package.wanted})" if package.wanted else ""),
            )
    if facts.torch_fault:
        yield Line(
            "torch",
            PROBLEM,
            f"it cannot be imported: {facts.torch_fault}",
            "install it again for this machine: https://pytorch.org",
        )


def _device(facts: Facts) -> Iterator[Line]:
    env = facts.environment
    device, reason = env["device"], env["device_reason"]
    if env["gpus"] and device == "cpu":
        yield Line(
            "device",
            WARNING,
            f"cpu: {reason}",
            "install a CUDA build of torch to use the GPU: https://pytorch.org",
        )
    else:
        yield Line("device", OK, f"{device}: {reason}; {env['cpu']}")


def _gpu(gpu: Gpu) -> Iterator[Line]:
    state, name = gpu.state, gpu.name
    for fact, reason in (gpu.unread or {}).items():
        yield Line(
            f"{name} {fact}",
            WARNING,
            f"not read: {reason}",
            "latency checks then know less of the device's state; update the driver",
        )
    shown = [
        f"{words} {state[fact]:g}{f' of {state[limit]:g}' if state.get(limit) is not None else ''} {unit}"
        for fact, words, limit, unit in (
            ("sm_mhz", "SM", "sm_max_mhz", "MHz"), ("memory_mhz", "memory", "memory_max_mhz", "MHz"),
            ("power_w", "power", "power_limit_w", "W"), ("temperature_c", "temperature", "", "C"),
        )
        if state.get(fact) is not None
    ]  # fmt: skip
    yield Line(name, OK, ", ".join([f"driver {gpu.driver}", *shown]))
    reasons = state.get("reasons") or ()
    slow = [word for word in reasons if word in SLOWDOWNS]
    if slow:
        yield Line(
            f"{name} throttling",
            WARNING,
            ", ".join(slow),
            "let it cool or lift its power limit: nvidia-smi -q -d PERFORMANCE",
        )
    elif state.get("reasons") is not None:
        yield Line(f"{name} throttling", OK, ", ".join(reasons) or "none")
    if (heat := state.get("temperature_c")) is not None and heat > HOT_C:
        yield Line(
            f"{name} temperature",
            WARNING,
            f"{heat} C at rest",
            f"let it cool below {HOT_C} C: times drift while it does",
        )
    if gpu.mig:
        yield Line(
            f"{name} MIG",
            WARNING,
            "on: this is a part of a GPU",
            "its clocks and times are shared with the other instances; measure on a whole one",
        )
    elif gpu.mig is False:
        yield Line(f"{name} MIG", OK, "off")
    if gpu.ecc_errors:
        yield Line(
            f"{name} ECC",
            PROBLEM,
            f"{gpu.ecc_errors:,} uncorrected errors",
            "its memory is faulty: reset or replace it before you believe a number",
        )
    elif gpu.ecc_errors == 0:
        yield Line(f"{name} ECC", OK, "no uncorrected errors")
    if gpu.others:
        many = f"{gpu.others} process{'es' if gpu.others > 1 else ''}"
        yield Line(
            f"{name} processes",
            WARNING,
            f"{many} on it already",
            "wait for them, or take another GPU with CUDA_VISIBLE_DEVICES: times are shared",
        )
    elif gpu.others == 0:
        yield Line(f"{name} processes", OK, "none on it")


def _triton(facts: Facts) -> Iterator[Line]:
    cuda, version = facts.environment["device"] == "cuda", facts.environment["packages"].get("triton")
    if facts.interpreter:
        yield Line("triton", WARNING, "TRITON_INTERPRET is set: kernels run in its interpreter, on the CPU",
                   "unset TRITON_INTERPRET unless you test kernels: its times mean nothing")  # fmt: skip
    elif cuda and not version:
        yield Line(
            "triton", PROBLEM, "not installed, so nothing runs on the fast backend", "pip install triton"
        )
    elif cuda:
        yield Line("triton", OK, "usable: backend triton runs here")
    else:
        yield Line("triton", OK, "not used without a GPU: cells run on backend torch (kvbench backends)")


def _cpu(facts: Facts) -> Iterator[Line]:
    env = facts.environment
    cores = env["cpu_cores_usable"] or env["cpu_cores"] or 1
    granted = min(cores, facts.quota_cores) if facts.quota_cores is not None else float(cores)
    quota = f", {facts.quota_cores:g} by quota" if facts.quota_cores is not None else ""
    yield Line("cores", OK, f"{cores} usable of {env['cpu_cores']}{quota}")
    free = min(granted, facts.free_cores) if facts.free_cores is not None else granted
    threads, whole = _threads(env, cores), max(1, int(free + 1 - FREE_SHARE))
    if threads is None:
        yield Line(
            "threads",
            WARNING,
            f"OMP_NUM_THREADS is {env['omp_num_threads']!r}, no number",
            f"export OMP_NUM_THREADS={whole}",
        )
    elif threads > whole:
        said = "unset, which is" if env["omp_num_threads"] is None else "of"
        yield Line(
            "threads", WARNING, f"OMP_NUM_THREADS {said} {threads} threads, and {free:.1f} cores are free",
            f"export OMP_NUM_THREADS={whole}: threads that wait for a core make a task many times slower",
        )  # fmt: skip
    else:
        yield Line("threads", OK, f"{threads}, and {free:.1f} cores are free")
    if facts.load > cores + 1:
        yield Line(
            "load",
            WARNING,
            f"{facts.load:.1f} on {cores} cores",
            "wait for the other work to end: times are of a machine that does both",
        )
    else:
        yield Line("load", OK, f"{facts.load:.1f} on {cores} cores")
    if facts.throttled:
        yield Line(
            "quota",
            WARNING,
            "the CPU quota stopped this process while it looked",
            "raise the container's CPU limit, or set OMP_NUM_THREADS to what it grants",
        )
    if facts.stolen is not None and facts.stolen > STOLEN:
        yield Line(
            "steal",
            WARNING,
            f"{facts.stolen:.1%} of the CPUs went to other machines",
            "measure on a host of your own, or later: latency is not yours alone",
        )


def _threads(env: Mapping[str, Any], cores: int) -> int | None:
    """What torch will take; None for a value that is no number. OpenMP reads the first of a list."""
    said = env["omp_num_threads"]
    if said is None:
        return cores
    first = said.split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _memory(facts: Facts) -> Iterator[Line]:
    memory = facts.environment["memory_bytes"]
    if memory is not None and memory < LEAST_MEMORY:
        yield Line(
            "memory",
            WARNING,
            f"{memory:,} B",
            f"the default model takes about {LEAST_MEMORY:,} B; free some, or take a smaller one",
        )
    elif memory is not None:
        yield Line("memory", OK, f"{memory:,} B")


def _cache(facts: Facts) -> Iterator[Line]:
    cache = facts.cache
    if not cache["writable"]:
        yield Line(
            "cache",
            PROBLEM,
            f"{cache['path']} cannot be written",
            "set KVBENCH_CACHE_DIR to a folder that can be written",
        )
        return
    here = f"{cache['path']}, {cache['bytes']:,} B, {cache['free']:,} B free"
    if cache["free"] < LEAST_DISK:
        yield Line(
            "cache",
            WARNING,
            here,
            f"free some, or set KVBENCH_CACHE_DIR: a model needs about {LEAST_DISK:,} B; the cache can be deleted",
        )
    elif cache["left_over"]:
        yield Line(
            "cache",
            WARNING,
            f"{here}; {cache['left_over']} unfinished downloads in it",
            "nothing to do: the next fetch removes them",
        )
    else:
        yield Line("cache", OK, here)


def _data(facts: Facts) -> Iterator[Line]:
    folder, there, all_ = facts.data
    if not folder:
        yield Line(
            "data", OK, "no folder is set: built-in corpora serve (kvbench data lists what else there is)"
        )
    elif not there:
        yield Line(
            "data",
            WARNING,
            f"{folder} holds none of the {all_} files",
            "kvbench data names them and what gets them",
        )
    else:
        yield Line("data", OK, f"{folder} holds {there} of {all_} files")
    if facts.hub_allowed and facts.hub_offline:
        yield Line(
            "hub",
            WARNING,
            "allowed by KVBENCH_ALLOW_HUB, and forbidden by HF_HUB_OFFLINE",
            "unset one of the two",
        )
    elif facts.hub_allowed:
        yield Line("hub", OK, "data may be fetched from the hub")
    else:
        yield Line("hub", OK, "data is not fetched from the hub (KVBENCH_ALLOW_HUB=1 allows it)")
