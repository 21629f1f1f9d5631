"""kvbench: proves which precision an inference engine really ran in, then judges whether it may ship.

The package root imports nothing heavy: stored runs can be planned, judged and reported without torch. In a
notebook:

    import kvbench

    run = kvbench.load("runs/int8")
    frame = run.frame[run.frame.metric == "itl_ms"]
    frame.pivot_table(index="context", columns="kv_format", values="value")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.render.frame import LoadedRun

__version__ = "0.1.0"


def load(path: Path | str) -> LoadedRun:
    """The run in a folder that `kvbench run` wrote: `.run` (manifest and records), `.rows` and `.frame`
    (pandas).

    Loads no torch. Raises UsageError for another folder, or damaged files.
    """
    from kvbench.render.frame import load as load_run

    return load_run(path)
