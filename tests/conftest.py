"""One thread a test process: the tests run side by side, and tiny tensors gain nothing from more.

Where there is no GPU, Triton kernels run in its interpreter, and tests of the marker `gpu` are skipped; with
KVBENCH_REQUIRE_GPU=1, as on a CI machine that is to have one, they fail.
"""

import os
import shutil
from collections.abc import Iterator
from typing import Any

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


@pytest.hookimpl(tryfirst=True)  # before the marks `skipif` are looked at
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        if says_yes(os.environ.get(REQUIRE_GPU)):
            pytest.fail(f"{REQUIRE_GPU} is set, and there is no CUDA device here", pytrace=False)
        pytest.skip("needs a CUDA device")


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# As root, without a GPU, and without a word to anyone.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
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
