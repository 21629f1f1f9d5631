"""How a failed command ends: a sentence on stderr and an exit code; no traceback for a user's mistake."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from kvbench.cli.signals import EXIT_CODE
from kvbench.errors import KvbenchError

# What an unreadable record raises while it is judged or compared.
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
NOTHING_WRITTEN = "nothing was written; run the same command to start again"


@contextmanager
def handled(
    kept: str = "the records written so far are kept; run the same command to continue",
) -> Iterator[None]:
    """Turn errors into a sentence and an exit code. kept: what remains after an interrupt, and what to do."""
    try:
        yield
    except KvbenchError as e:
        print(f"kvbench: {e}", file=sys.stderr)
        raise typer.Exit(e.exit_code) from None
    except KeyboardInterrupt as e:
        by = f" by {e}" if str(e) == "SIGTERM" else ""
        print(f"kvbench: interrupted{by}; {kept}.", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except OSError as e:  # a full disk, a name that is too long, a folder without write permission
        where = f"{str(e.filename)[:200]}: " if e.filename else ""
        reason = f"{where}{e.strerror or e}"
        print(
            f"kvbench: {reason}; no partial file was left. Fix it and run the same command again.",
            file=sys.stderr,
        )
        raise typer.Exit(3) from None


def unreadable(run_dir: Path, error: Exception) -> str:
    """The sentence for stored records that look complete but cannot be judged, with the place of the
    error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(frame.filename).name}:{frame.lineno}"
    return (
        f"The records of {run_dir} cannot be judged ({type(error).__name__} at {at}: {error}): one of them "
        f"is damaged "
        "or was edited. Measure them again: kvbench run MATRIX --rerun all."
    )
