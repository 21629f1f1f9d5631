"""Judges from facts whether a machine is fit to measure on, so that a test can invent any machine.

A problem ends a run or makes its numbers wrong; a warning may disturb times, or says what is missing for some
of the work. Each has a remedy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.stats.stability import SLOWDOWNS

OK, WARNING, PROBLEM = "ok", "warning", "problem"
HOT_C = 85  # above it, GPUs begin to lower their clocks
FREE_SHARE = 0.5  # a core that is busy for more than this share of the time is not free
STOLEN = 0.01  # share of the CPUs' time
LEAST_DISK, LEAST_MEMORY = 2 * 10**9, 4 * 10**9  # bytes: the default model, its prepared copy and a run


@dataclass(frozen=True)
class Line:
    """One thing that was examined. remedy: what to do about it, "" for nothing."""

    name: str
    state: str
    found: str
    remedy: str = ""

    def as_text(self) -> str:
        remedy = f"\n{'':10}-> {self.remedy}" if self.remedy else ""
        return f"{self.state:<8}  {self.name}: {self.found}{remedy}"


@dataclass(frozen=True)
class Package:
    name: str
    installed: str | None
    wanted: str  # the accepted range, "" for any
    fits: bool | None  # None where it is not installed


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. None: not read."""

    name: str
    driver: str
    state: Mapping[str, Any]  # `DeviceState.read()` and `.fixed()`
    mig: bool | None = None
    ecc_errors: int | None = None
    others: int | None = None  # compute processes on it
    unread: Mapping[str, str] | None = None  # fact -> why it was not read


@dataclass(frozen=True)
class Facts:
    """What is known of a machine."""

    environment: Mapping[str, Any]  # that of `kvbench.machine.host.host()`
    packages: tuple[Package, ...]
    torch_fault: str
    gpus: tuple[Gpu, ...]
    load: float
    free_cores: float | None  # idle cores, None where unknown
    quota_cores: float | None  # CPUs that the control group grants, None for no quota
    stolen: float | None  # share of the CPUs' time
    throttled: bool | None  # whether the quota stopped this process during the look
    cache: Mapping[str, Any]  # {"path", "writable", "free", "bytes", "left_over"}
    data: tuple[str, int, int]  # (folder, files present, files known)
    hub_allowed: bool
    hub_offline: bool
    interpreter: bool  # whether TRITON_INTERPRET is set


def lines(facts: Facts) -> list[Line]:
    """Everything that was examined, in the order in which it is shown."""
    gpus = (line for gpu in facts.gpus for line in _gpu(gpu))
    last = (*_cpu(facts), _cache(facts), *_data(facts))
    return [*_packages(facts), _device(facts), *gpus, _triton(facts), *last]


def _packages(facts: Facts) -> Iterator[Line]:
    env = facts.environment
    yield Line("python", OK, f"{env['python']} on {env['os']} {env['machine']}; kvbench {env['kvbench']}")
    for package in facts.packages:
        pip = f"pip install '{package.name}{package.wanted}'"
        if package.installed is None:
            yield Line(package.name, PROBLEM, "not installed", pip)
        elif not package.fits:
            yield Line(package.name, PROBLEM, f"{package.installed}; kvbench needs {package.wanted}", pip)
        else:
            accepted = f" (accepted: {package.wanted})" if package.wanted else ""
            yield Line(package.name, OK, package.installed + accepted)
    if facts.torch_fault:
        remedy = "install it again for this machine: https://pytorch.org"
        yield Line("torch", PROBLEM, f"it cannot be imported: {facts.torch_fault}", remedy)


def _device(facts: Facts) -> Line:
    env = facts.environment
    found = f"{env['device']}: {env['device_reason']}"
    if env["gpus"] and env["device"] == "cpu":
        remedy = "install a CUDA build of torch to use the GPU: https://pytorch.org"
        return Line("device", WARNING, found, remedy)
    return Line("device", OK, f"{found}; {env['cpu']}")


def _gpu(gpu: Gpu) -> Iterator[Line]:
    state, name = gpu.state, gpu.name
    for fact, reason in (gpu.unread or {}).items():
        remedy = "update the driver; without it, latency checks know less of the device's state"
        yield Line(f"{name} {fact}", WARNING, f"not read: {reason}", remedy)
    shown = [
        f"{words} {state[fact]:g}{f' of {state[limit]:g}' if state.get(limit) is not None else ''} {unit}"
        for fact, words, limit, unit in (
            ("sm_mhz", "SM", "sm_max_mhz", "MHz"),
            ("memory_mhz", "memory", "memory_max_mhz", "MHz"),
            ("power_w", "power", "power_limit_w", "W"),
            ("temperature_c", "temperature", "", "C"),
        )
        if state.get(fact) is not None
    ]
    yield Line(name, OK, ", ".join([f"driver {gpu.driver}", *shown]))
    if (reasons := state.get("reasons")) is not None:
        slow = [word for word in reasons if word in SLOWDOWNS]
        remedy = "let it cool or raise its power limit: nvidia-smi -q -d PERFORMANCE"
        yield _checked(f"{name} throttling", not slow, ", ".join(slow or reasons) or "none", remedy)
    if (heat := state.get("temperature_c")) is not None and heat > HOT_C:
        remedy = f"let it cool below {HOT_C} C: times drift until then"
        yield Line(f"{name} temperature", WARNING, f"{heat} C at rest", remedy)
    if gpu.mig is not None:
        remedy = "measure on a whole one: a MIG instance shares clocks and memory bandwidth with the others"
        found = "on: this is a part of a GPU" if gpu.mig else "off"
        yield _checked(f"{name} MIG", not gpu.mig, found, remedy)
    if gpu.ecc_errors is not None:
        found = f"{gpu.ecc_errors:,} uncorrected errors" if gpu.ecc_errors else "no uncorrected errors"
        remedy = "its memory is faulty: reset or replace the GPU before you trust a number"
        yield _checked(f"{name} ECC", not gpu.ecc_errors, found, remedy, PROBLEM)
    if gpu.others is not None:
        several = f"{gpu.others} process{'es' if gpu.others > 1 else ''} on it already"
        found = several if gpu.others else "none on it"
        remedy = "wait until they end, or use another GPU (CUDA_VISIBLE_DEVICES): they slow each other down"
        yield _checked(f"{name} processes", not gpu.others, found, remedy)


def _triton(facts: Facts) -> Line:
    cuda, version = facts.environment["device"] == "cuda", facts.environment["packages"].get("triton")
    if facts.interpreter:
        found = "TRITON_INTERPRET is set: kernels run in its interpreter, on the CPU"
        remedy = "unset TRITON_INTERPRET unless you test kernels: its times mean nothing"
        return Line("triton", WARNING, found, remedy)
    if not cuda:
        return Line("triton", OK, "not used without a GPU: cells run on backend torch (kvbench backends)")
    if not version:
        return Line("triton", PROBLEM, "not installed, so the fast backend cannot run", "pip install triton")
    return Line("triton", OK, "usable: backend triton runs here")


def _cpu(facts: Facts) -> Iterator[Line]:
    env = facts.environment
    cores = env["cpu_cores_usable"] or env["cpu_cores"] or 1
    granted = min(cores, facts.quota_cores) if facts.quota_cores is not None else float(cores)
    quota = f", {facts.quota_cores:g} by quota" if facts.quota_cores is not None else ""
    yield Line("cores", OK, f"{cores} usable of {env['cpu_cores']}{quota}")
    yield _threads(env, cores, min(granted, facts.free_cores) if facts.free_cores is not None else granted)
    remedy = "wait until the other work ends: it makes times longer"
    yield _checked("load", facts.load <= cores + 1, f"{facts.load:.1f} on {cores} cores", remedy)
    if facts.throttled:
        remedy = "raise the container's CPU limit, or set OMP_NUM_THREADS to the number of CPUs it grants"
        yield Line("quota", WARNING, "the CPU quota stopped this process during the look", remedy)
    if facts.stolen is not None and facts.stolen > STOLEN:
        found = f"{facts.stolen:.1%} of the CPUs' time went to other virtual machines"
        yield Line("steal", WARNING, found, "measure on a host of your own, or later")
    if (memory := env["memory_bytes"]) is not None:
        remedy = f"the default model needs about {LEAST_MEMORY:,} B; free some, or use a smaller model"
        yield _checked("memory", memory >= LEAST_MEMORY, f"{memory:,} B", remedy)


def _threads(env: Mapping[str, Any], cores: int, free: float) -> Line:
    """Whether torch uses no more threads than there are free cores. OpenMP reads a list's first number."""
    setting, enough = env["omp_num_threads"], max(1, int(free + 1 - FREE_SHARE))
    first = str(cores) if setting is None else setting.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        found = f"OMP_NUM_THREADS is {setting!r}, not a number"
        return Line("threads", WARNING, found, f"export OMP_NUM_THREADS={enough}")
    if int(first) <= enough:
        return Line("threads", OK, f"{first}, and {free:.1f} cores are free")
    unset = " is unset, so torch uses" if setting is None else ":"
    found = f"OMP_NUM_THREADS{unset} {first} threads, and {free:.1f} cores are free"
    remedy = f"export OMP_NUM_THREADS={enough}: threads that wait for a core make a task many times slower"
    return Line("threads", WARNING, found, remedy)


def _cache(facts: Facts) -> Line:
    cache = facts.cache
    if not cache["writable"]:
        remedy = "set KVBENCH_CACHE_DIR to a folder that can be written"
        return Line("cache", PROBLEM, f"{cache['path']} cannot be written", remedy)
    found = f"{cache['path']}, {cache['bytes']:,} B, {cache['free']:,} B free"
    if cache["free"] < LEAST_DISK:
        remedy = f"delete the cache, or set KVBENCH_CACHE_DIR: a model needs about {LEAST_DISK:,} B"
        return Line("cache", WARNING, found, remedy)
    if cache["left_over"]:
        found = f"{found}; {cache['left_over']} unfinished downloads in it"
        return Line("cache", WARNING, found, "nothing to do: the next fetch removes them")
    return Line("cache", OK, found)


def _data(facts: Facts) -> Iterator[Line]:
    folder, present, known = facts.data
    if not folder:
        found = "no folder is set: the built-in texts are used (kvbench data lists the other sets)"
        yield Line("data", OK, found)
    else:
        found = f"{folder} holds {present or 'none'} of {'' if present else 'the '}{known} files"
        yield _checked("data", bool(present), found, "kvbench data names them and how to get them")
    if facts.hub_allowed and facts.hub_offline:
        found = "allowed by KVBENCH_ALLOW_HUB, but forbidden by HF_HUB_OFFLINE"
        yield Line("hub", WARNING, found, "unset one of the two")
    elif facts.hub_allowed:
        yield Line("hub", OK, "data may be fetched from the hub")
    else:
        yield Line("hub", OK, "data is not fetched from the hub (KVBENCH_ALLOW_HUB=1 allows it)")


def _checked(name: str, good: bool, found: str, remedy: str, otherwise: str = WARNING) -> Line:
    """A line that is OK, or has the state `otherwise` and its remedy."""
    return Line(name, OK, found) if good else Line(name, otherwise, found, remedy)
