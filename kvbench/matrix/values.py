"""A cell value as text."""

from __future__ import annotations

from typing import Any

from kvbench.formats.scales import short
from kvbench.text import show


def text(value: Any) -> str:
    """A value as names and `-k` write it: int8_sym, 4, true, null, 0.05; scales by side or layer as
    `scales.short` does."""
    if isinstance(value, dict):
        return short(value)
    return value if isinstance(value, str) else show(value)
