"""The statistics know nothing of kvbench, and import scipy and numpy only where they use them."""

import subprocess
import sys

CODE = """
import pkgutil, sys, importlib, kvbench.stats
for module in pkgutil.iter_modules(kvbench.stats.__path__):
    importlib.import_module(f"kvbench.stats.{module.name}")
print(*sorted(m for m in sys.modules if m.split(".")[0] in ("kvbench", "scipy", "numpy")))
"""


def test_stats_imports_nothing_else_of_kvbench():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert [m for m in done.stdout.split() if m != "kvbench" and not m.startswith("kvbench.stats")] == []
