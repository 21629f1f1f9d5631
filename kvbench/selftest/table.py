"""All faults by name, and what nothing catches."""

from __future__ import annotations

from kvbench.selftest import codes, hops, numbers, pages, scales, weights
from kvbench.selftest.fault import Fault

FAULTS: dict[str, Fault] = {
    **hops.FAULTS, **scales.FAULTS, **codes.FAULTS, **pages.FAULTS, **weights.FAULTS, **numbers.FAULTS,
}  # fmt: skip
