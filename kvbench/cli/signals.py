"""Ctrl-C and SIGTERM end a command cleanly, and a second one at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130  # interrupted, by whichever of the two
ENDING = (signal.SIGINT, signal.SIGTERM)


def end_cleanly() -> None:
    """From here on the first SIGINT or SIGTERM raises KeyboardInterrupt in the main thread, so that
    half-written files go and the command says how to go on; the next one ends the process without any of
    that. What the caller ignores (nohup, `&` in a script) stays ignored. For the process that is a command: a
    library that is imported keeps its caller's handlers.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _first)


def _first(number: int, frame: FrameType | None) -> None:
    for ending in ENDING:
        if signal.getsignal(ending) is _first:
            signal.signal(ending, _second)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _second(number: int, frame: FrameType | None) -> NoReturn:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # the bar hides the cursor
    os._exit(EXIT_CODE)
