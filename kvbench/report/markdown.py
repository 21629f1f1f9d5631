"""Text and tables as Markdown, safe for text from outside: nothing of it becomes markup, a link or a row of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvbench.report.fmt import one_line


def text(value: str) -> str:
    """One line in which nothing is markup: HTML as entities, Markdown's signs escaped, no name or address linked by itself."""
    line = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_{}\[\]()#|~!])", r"\\\1", line)
    # GitHub links bare addresses and names of people without any sign around them.
    return line.replace("@", "&#64;").replace("://", "&#58;//").replace("www.", "www&#46;")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, an empty one last."""
    said = [f"| {' | '.join(map(text, heads))} |", f"|{'---|' * len(heads)}"]
    said += [f"| {' | '.join(map(text, row))} |" for row in rows]
    return [*said, ""]
