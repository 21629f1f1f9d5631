"""All faults by name, and what nothing catches."""

from __future__ import annotations

from kvbench.selftest import codes, hops, pages, scales
from kvbench.selftest.fault import Fault

FAULTS: dict[str, Fault] = {**hops.FAULTS, **scales.FAULTS, **codes.FAULTS, **pages.FAULTS}
