"""Ctrl-C and SIGTERM end a command cleanly; a second one ends it at once."""

import os
import signal
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130  # interrupted by either of the two
ENDING = (signal.SIGINT, signal.SIGTERM)


def end_cleanly() -> None:
    """Make the first SIGINT or SIGTERM raise KeyboardInterrupt in the main thread, so that partial files are
    removed and the command says how to continue; the second one ends the process at once.

    Signals that the caller ignores (nohup, `&` in a script) stay ignored. Only for a process of its own: an
    imported library keeps its caller's handlers.
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
        os.write(2, b"\x1b[?25h\n")  # the progress bar hides the cursor
    os._exit(EXIT_CODE)
