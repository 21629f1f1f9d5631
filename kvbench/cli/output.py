"""What a command prints and how it ends: JSON or text on stdout; a failure is a sentence on stderr and an
exit code, without a traceback for a user's mistake."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from kvbench.cli.signals import EXIT_CODE
from kvbench.errors import KvbenchError, UsageError

# What an unreadable record raises while it is judged or compared.
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
NOTHING_WRITTEN = "nothing was written; run the same command to start again"
_KEPT = "the records written so far are kept; run the same command to continue"


def show(as_json: bool, value: Any, text: str | Callable[[], str]) -> None:
    """Print `value` as strict JSON on one line, or the text (a function where it takes work)."""
    if as_json:
        print(json.dumps(value, ensure_ascii=False, allow_nan=False))
    else:
        print(text if isinstance(text, str) else text())


@contextmanager
def handled(kept: str = _KEPT) -> Iterator[None]:
    """Turn errors into a sentence and an exit code. kept: what remains after an interrupt, and what to do."""
    try:
        yield
    except KvbenchError as e:
        said, code = str(e), e.exit_code
    except KeyboardInterrupt as e:
        by = f" by {e}" if str(e) == "SIGTERM" else ""
        said, code = f"interrupted{by}; {kept}.", EXIT_CODE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as e:  # a full disk, a name that is too long, a folder without write permission
        where = f"{str(e.filename)[:200]}: " if e.filename else ""
        reason = f"{where}{e.strerror or e}"
        said, code = f"{reason}; no partial file was left. Fix it and run the same command again.", 3
    else:
        return
    print(f"kvbench: {said}", file=sys.stderr)
    raise typer.Exit(code)


def unreadable(run_dir: Path, error: Exception) -> UsageError:
    """The error for stored records that look complete but cannot be judged, with the place of the fault."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(frame.filename).name}:{frame.lineno}"
    return UsageError(
        f"The records of {run_dir} cannot be judged ({type(error).__name__} at {at}: {error}): one of them "
        "is damaged or was edited. Measure them again: kvbench run MATRIX --rerun all."
    )
