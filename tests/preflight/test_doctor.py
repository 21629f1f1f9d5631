"""`kvbench doctor`: invented machines through the pure part, made-up /proc, control groups and NVML through
the collecting one, and this machine through both."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app
from kvbench.preflight import checkup
from kvbench.preflight.doctor import OK, PROBLEM, WARNING, Facts, Gpu, Package, lines

ENVIRONMENT = {
    "kvbench": "0.1.0", "python": "3.12.1", "os": "Linux 6.1", "machine": "x86_64", "cpu": "AMD EPYC",
    "cpu_cores": 8, "cpu_cores_usable": 8, "memory_bytes": 64 * 10**9, "omp_num_threads": "4", "gpus": [], "device": "cpu",
    "device_reason": "no NVIDIA driver", "packages": {"triton": "3.6.0"},
}  # fmt: skip
STATE = {"reasons": ["idle"], "sm_mhz": 345, "sm_max_mhz": 1980, "memory_mhz": 3201, "memory_max_mhz": 3201,
         "power_w": 75.4, "power_limit_w": 700.0, "temperature_c": 31}  # fmt: skip
GPU = Gpu("GPU 0 H200", "570.1", STATE, mig=False, ecc_errors=0, others=0, unread={})
SOUND = Facts(
    environment=ENVIRONMENT, packages=(Package("torch", "2.11.0", ">=2.11,<2.14", True),), torch_fault="",
    gpus=(), load=0.3, free_cores=7.6, quota_cores=None, stolen=0.0, throttled=False,
    cache={"path": "/c", "writable": True, "free": 50 * 10**9, "bytes": 5, "left_over": 0},
    data=("/d", 12, 12), hub_allowed=False, hub_offline=False, interpreter=False,
)  # fmt: skip


def on(**changes):
    """The sound machine with a GPU."""
    env = {**ENVIRONMENT, "device": "cuda", "device_reason": "1 GPU(s) visible", "gpus": [{"name": "H200"}]}
    return replace(SOUND, environment=env, gpus=(replace(GPU, **changes),))


def env(**changes):
    return replace(SOUND, environment={**ENVIRONMENT, **changes})


LEAST = {"cache": {**SOUND.cache, "free": 2 * 10**9}, "load": 9.0, "stolen": 0.01}
LIMITS = [replace(env(memory_bytes=4 * 10**9), **LEAST), on(state={**STATE, "temperature_c": 85})]


@pytest.mark.parametrize("facts", [SOUND, on(), *LIMITS], ids=["cpu", "gpu", "cpu limits", "gpu limits"])
def test_a_sound_machine_has_nothing_to_mend(facts):
    assert [line for line in lines(facts) if line.state != OK or line.remedy] == []


def package(name, version, wanted, fits):
    return replace(SOUND, packages=(Package(name, version, wanted, fits),))


def cache(**changes):
    return replace(SOUND, cache={**SOUND.cache, **changes})


CPU_BUILD = {"gpus": [{"name": "H200"}], "device_reason": "torch 2.11+cpu is built for the CPU"}
THROTTLED = {**STATE, "reasons": ["sw thermal", "sw power cap"]}
NO_TRITON = replace(on(), environment={**on().environment, "packages": {"triton": None}})
NO_THREADS = replace(env(omp_num_threads=None), free_cores=6.6)
CASES = {
    "too new": (package("torch", "2.14.0", "<2.14", False), "torch", PROBLEM, "pip install 'torch<2.14'"),
    "missing": (package("scipy", None, ">=1.13", None), "scipy", PROBLEM, "pip install 'scipy>=1.13'"),
    "broken": (replace(SOUND, packages=(), torch_fault="OSError"), "torch", PROBLEM, "install it again"),
    "cpu build": (env(**CPU_BUILD), "device", WARNING, "CUDA build"),
    "hot": (on(state={**STATE, "temperature_c": 86}), "GPU 0 H200 temperature", WARNING, "cool"),
    "throttled": (on(state=THROTTLED), "GPU 0 H200 throttling", WARNING, "power limit"),
    "mig": (on(mig=True), "GPU 0 H200 MIG", WARNING, "whole one"),
    "ecc": (on(ecc_errors=3), "GPU 0 H200 ECC", PROBLEM, "faulty"),
    "shared": (on(others=2), "GPU 0 H200 processes", WARNING, "CUDA_VISIBLE_DEVICES"),
    "unread": (on(unread={"power_ns": "Not Supported"}), "GPU 0 H200 power_ns", WARNING, "driver"),
    "no triton": (NO_TRITON, "triton", PROBLEM, "pip install triton"),
    "interpreter": (replace(SOUND, interpreter=True), "triton", WARNING, "unset TRITON_INTERPRET"),
    "threads": (replace(SOUND, free_cores=2.4), "threads", WARNING, "export OMP_NUM_THREADS=2:"),
    "threads unset": (NO_THREADS, "threads", WARNING, "export OMP_NUM_THREADS=7:"),
    "threads by quota": (replace(SOUND, quota_cores=1.5), "threads", WARNING, "export OMP_NUM_THREADS=2:"),
    "threads of nothing": (env(omp_num_threads="all"), "threads", WARNING, "export OMP_NUM_THREADS=8"),
    "load": (replace(SOUND, load=9.1), "load", WARNING, "wait"),
    "quota": (replace(SOUND, throttled=True), "quota", WARNING, "CPU limit"),
    "steal": (replace(SOUND, stolen=0.02), "steal", WARNING, "host of your own"),
    "memory": (env(memory_bytes=4 * 10**9 - 1), "memory", WARNING, "free some"),
    "read-only cache": (cache(writable=False), "cache", PROBLEM, "KVBENCH_CACHE_DIR"),
    "full disk": (cache(free=10**9), "cache", WARNING, "KVBENCH_CACHE_DIR"),
    "left over": (cache(left_over=2), "cache", WARNING, "next fetch"),
    "empty data": (replace(SOUND, data=("/d", 0, 12)), "data", WARNING, "kvbench data"),
    "hub both ways": (replace(SOUND, hub_allowed=True, hub_offline=True), "hub", WARNING, "unset one"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_one_line_with_its_remedy(case):
    facts, name, state, remedy = CASES[case]
    (line,) = [line for line in lines(facts) if line.state != OK]
    assert (line.name, line.state) == (name, state)
    assert remedy in line.remedy


@pytest.mark.parametrize(
    ("facts", "free", "state"),
    [(SOUND, 3.5, OK), (SOUND, 3.4, WARNING), (env(omp_num_threads="1"), 0.0, OK)],  # one is the fewest
)
def test_a_core_that_is_mostly_free_counts(facts, free, state):
    (line,) = [line for line in lines(replace(facts, free_cores=free)) if line.name == "threads"]
    assert line.state == state


def test_unknown_is_not_said_to_be_fine():
    gpu = on(mig=None, ecc_errors=None, others=None, state={"reasons": None})
    found = lines(replace(gpu, stolen=None, throttled=None, free_cores=None))
    words = {line.name.removeprefix("GPU 0 H200 ") for line in found}
    assert not words & {"MIG", "ECC", "processes", "throttling", "steal", "quota"}


def test_the_quota_of_control_groups_and_idle_ticks(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cg"
    (proc / "self").mkdir(parents=True)
    (groups / "a" / "b").mkdir(parents=True)
    for path, text, cores in (
        (proc / "self" / "cgroup", "", None),
        (proc / "self" / "cgroup", "1:cpu:/old\n0::/a/b\n", None),
        (groups / "a" / "b" / "cpu.max", "max 100000\n", None),
        (groups / "a" / "cpu.max", "150000 100000\n", 1.5),
        (groups / "a" / "b" / "cpu.max", "300000 100000\n", 1.5),
    ):
        if text:
            path.write_text(text)
        assert checkup.quota_cores(proc, groups) == cores
    (proc / "stat").write_text("cpu  10 0 5 70 7 1 1 2 0 0\ncpu0 1 1\n")
    assert checkup.idle_ticks(proc) == 77  # waiting for the disk counts


def test_packages_are_those_of_the_project():
    found = {p.name: p for p in checkup.packages()}
    assert {"torch", "transformers", "typer", "scipy"} <= set(found)
    assert "pytest" not in found  # an extra
    assert found["torch"].wanted
    assert all(p.fits for p in found.values() if p.installed)


def test_a_gpu_is_read_without_a_context():
    def refuses(*_):
        raise RuntimeError("Not Supported")

    answers = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda i: f"handle {i}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-aa": "handle 3"}[uuid],
        "nvmlDeviceGetUUID": lambda handle: "GPU-aa", "nvmlDeviceGetName": lambda handle: "H200",
        "nvmlDeviceGetTemperature": lambda handle, sensor: 40,
        "nvmlDeviceGetPowerUsage": lambda handle: 75_000,
        "nvmlDeviceGetMigMode": lambda handle: [1, 1],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, since: {(1, 0): 5}[kind, since],
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [1, 2],
        "nvmlDeviceGetViolationStatus": refuses,
    }  # fmt: skip
    gpu = checkup.gpu_facts(SimpleNamespace(**answers), 3, "570.1")
    assert (gpu.name, gpu.mig, gpu.ecc_errors, gpu.others) == ("GPU 3 H200", True, 5, 2)
    assert (gpu.state["temperature_c"], gpu.state["power_w"]) == (40, 75.0)
    assert (gpu.unread or {})["thermal_ns"] == "Not Supported"
    bare = {k: v for k, v in answers.items() if "Mig" not in k} | {"nvmlDeviceGetTotalEccErrors": refuses}
    gpu = checkup.gpu_facts(SimpleNamespace(**bare), 3, "570.1")
    assert (gpu.mig, gpu.ecc_errors) == (None, None)


def test_this_machine(tmp_path):
    """Real facts: the exit code follows the lines, and the cache that is not there yet can be made."""
    where = {"KVBENCH_CACHE_DIR": str(tmp_path / "not" / "yet"), "KVBENCH_DATA_DIR": str(tmp_path)}
    result = CliRunner().invoke(app, ["doctor", "--json"], env=where)
    answer = json.loads(result.stdout)
    states = {line["name"]: line["state"] for line in answer["lines"]}
    assert result.exit_code == answer["exit_code"] == (1 if PROBLEM in states.values() else 0)
    assert (states["torch"], states["cache"], states["data"]) == (OK, OK, WARNING)
    assert not (tmp_path / "not").exists()
    text = CliRunner().invoke(app, ["doctor"], env=where).stdout
    assert f"warning   data: {tmp_path} holds none of the 10 files\n          -> " in text


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/below"])
def test_a_cache_that_is_no_folder_is_a_problem(path):
    """Anybody may write into /dev/null, and nothing can be kept there."""
    result = CliRunner().invoke(app, ["doctor", "--json"], env={"KVBENCH_CACHE_DIR": path})
    line = next(line for line in json.loads(result.stdout)["lines"] if line["name"] == "cache")
    assert (line["state"], line["found"], result.exit_code) == (PROBLEM, f"{path} cannot be written", 1)
