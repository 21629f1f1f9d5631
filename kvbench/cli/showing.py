"""Models and data shown: what `kvbench models` and `kvbench data` have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer

from kvbench.preflight.assets import BROKEN, NOT_HERE, Held


def show_held(held: Sequence[Held], as_json: bool, named: bool = False) -> None:
    """Exits 1 when something is broken, and 3 when something that was named is not here."""
    if as_json:
        print(json.dumps([one.as_json() for one in held], ensure_ascii=False))
    else:
        print("\n".join(one.as_text() for one in held) or "nothing is here to verify")
    states = {one.state for one in held}
    if BROKEN in states:
        raise typer.Exit(1)
    if named and NOT_HERE in states:
        raise typer.Exit(3)
