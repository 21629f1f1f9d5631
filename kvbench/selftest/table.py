"""All faults by name, and what nothing catches."""

from __future__ import annotations

from kvbench.selftest import hops
from kvbench.selftest.fault import Fault

FAULTS: dict[str, Fault] = {**hops.FAULTS}
