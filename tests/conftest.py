"""One thread a test process: the tests run side by side, and tiny tensors gain nothing from more.

Where there is no GPU, Triton kernels run in its interpreter, and tests of the marker `gpu` are skipped; with
KVBENCH_REQUIRE_GPU=1, as on a CI machine that is to have one, they fail.
"""

import itertools
import json
import os
import shutil
import signal

import pytest
import torch

from kvbench.machine.ci import REQUIRE_GPU, says_yes

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported, in every test process
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# What a CI system says to its own job is not for the runs inside the tests.
for _name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
    os.environ.pop(_name, None)
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and `&` ignore it for all that they start


@pytest.hookimpl(tryfirst=True)  # before the marks `skipif` are looked at
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if says_yes(os.environ.get(REQUIRE_GPU)):
            pytest.fail(f"{REQUIRE_GPU} is set, and there is no CUDA device here", pytrace=False)
        pytest.skip("needs a CUDA device")


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# As root, without a GPU, and without a word to anyone.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium, one a process: Playwright starts once in each.

    Skipped where none is found, unless KVBENCH_REQUIRE_BROWSER=1: then its absence is a failure.
    """
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None and os.environ.get("KVBENCH_REQUIRE_BROWSER") != "1":
        pytest.skip(f"needs a Chromium on the PATH ({', '.join(CHROMIUM)}); Debian: apt install chromium")
    assert path, f"KVBENCH_REQUIRE_BROWSER=1, and none of {', '.join(CHROMIUM)} is on the PATH"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


# A runner's context on a tiny model with real engines, real resolver and real baseline records.


@pytest.fixture(scope="session")
def _tiny_models():
    return {}


@pytest.fixture
def runner_context(_tiny_models):
    """make(runner, baseline=None, model="tiny-llama", **keys): keys of the cell's spec and the runner's
    options.
    """
    from kvbench.engines.reference.engine import Engine
    from kvbench.engines.reference.load import load_model
    from kvbench.matrix.cells import CELL_KEYS
    from kvbench.matrix.resolve_backend import request_of, resolve
    from kvbench.matrix.runners import RUNNERS
    from kvbench.run.task.prepare import emulator_of, native_of
    from kvbench.runners.context import Context

    torch.set_num_threads(1)

    def make(runner, baseline=None, model="tiny-llama", **keys):
        options = {name: option.default for name, option in RUNNERS[runner].options.items()}
        options |= {k: keys.pop(k) for k in list(keys) if k in options}
        spec = (
            CELL_KEYS
            | {"model": model, "model_weights": "random", "device": "cpu", "dtype": "float32"}
            | keys
        )
        name = f"{model} {spec['dtype']}"
        if name not in _tiny_models:
            _tiny_models[name] = load_model(spec, spec["device"], spec["dtype"])
        loaded = _tiny_models[name]
        decision = resolve(request_of(spec), loaded.facts)

        def engine(sequences, tokens):
            return Engine(loaded, decision, spec, sequences=sequences, tokens=tokens)

        def native(sequences, tokens):
            return Engine(loaded, native_of(decision), spec, sequences=sequences, tokens=tokens)

        def emulator(sequences, tokens):
            choice, own = emulator_of(decision, spec)
            return Engine(loaded, choice, own, sequences=sequences, tokens=tokens)

        return Context(spec, options, "", loaded, engine, native, emulator, baseline, baseline is None, None)

    return make


@pytest.fixture(scope="session")
def looping_model(tmp_path_factory):
    """A folder with the config of tiny-llama with small random weights: its greedy text soon repeats
    itself.
    """
    from kvbench.models.catalog import TINY

    folder = tmp_path_factory.mktemp("looping")
    (folder / "config.json").write_text(json.dumps({**TINY["tiny-llama"], "initializer_range": 0.05}))
    return str(folder)


@pytest.fixture
def as_baseline():
    """The record that a baseline's measurement becomes."""
    from tests.factories.runs.made import record

    def make(ctx, measured):
        return record("runner", measured.samples, measured.facts, spec=ctx.spec, options=ctx.options)

    return make


@pytest.fixture
def backwards(monkeypatch):
    """A wall clock that goes back an hour whenever it is asked."""
    moments = itertools.count(10**9, -3600)
    monkeypatch.setattr("time.time", lambda: float(next(moments)))
