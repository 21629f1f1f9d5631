"""How a command ends that went wrong: a sentence on stderr and an exit code, never a traceback for a user's
mistake."""

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


@contextmanager
def handled(
    kept: str = "the records written so far are kept, run the same command to go on",
) -> Iterator[None]:
    """A user's mistake is a sentence and an exit code, not a traceback. kept: what is there after an
    interrupt."""
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
    except OSError as e:  # a full disk, a name that is too long, a folder that may not be written
        where = f"{str(e.filename)[:200]}: " if e.filename else ""
        print(
            f"kvbench: {where}{e.strerror or e}; nothing half-written was left behind. Mend that and run "
            f"the same "
            "command again.",
            file=sys.stderr,
        )
        raise typer.Exit(3) from None


def unreadable(run_dir: Path, error: Exception) -> str:
    """Of stored records that pass for whole and cannot be judged: a sentence, with where kvbench stumbled
    over what."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(frame.filename).name}:{frame.lineno}"
    return (
        f"The records of {run_dir} cannot be judged ({type(error).__name__} at {at}: {error}): one of them "
        f"is damaged, or was changed by "
        "hand. Measure them anew: kvbench run MATRIX --rerun all."
    )
