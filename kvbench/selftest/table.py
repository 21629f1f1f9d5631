"""All faults by name, and the known holes. A fault is one entry in the file of its kind; a new kind is a file
and its place here.
"""

from __future__ import annotations

from kvbench.selftest import codes, graphs, hops, numbers, pages, scales, weights
from kvbench.selftest.fault import Fault
from kvbench.selftest.holes import HOLES

__all__ = ["FAULTS", "HOLES"]

FAULTS: dict[str, Fault] = {
    **hops.FAULTS, **scales.FAULTS, **codes.FAULTS, **pages.FAULTS, **weights.FAULTS, **numbers.FAULTS,
    **graphs.FAULTS,
}  # fmt: skip
