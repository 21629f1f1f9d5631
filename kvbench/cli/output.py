"""What a command prints on stdout: JSON with --json, else text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import typer

from kvbench.preflight.assets import BROKEN, NOT_HERE, Held


def show(as_json: bool, value: Any, text: str | Callable[[], str]) -> None:
    """Print `value` as strict JSON on one line, or the text (a function where it takes work)."""
    if as_json:
        print(json.dumps(value, ensure_ascii=False, allow_nan=False))
    else:
        print(text if isinstance(text, str) else text())


def show_held(held: Sequence[Held], as_json: bool, named: bool = False) -> None:
    """Models or data. Exits 1 when one is broken, and 3 when one that was named is missing."""
    lines = "\n".join(one.as_text() for one in held) or "nothing is here to verify"
    show(as_json, [one.as_json() for one in held], lines)
    states = {one.state for one in held}
    if BROKEN in states:
        raise typer.Exit(1)
    if named and NOT_HERE in states:
        raise typer.Exit(3)
