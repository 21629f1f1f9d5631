"""`-k EXPR`: select cells by an expression like pytest's, together with their baselines.

kv_format=int8_sym and not batch=4        key=value: that cell key has that value
int8 or (fp8 and context=128)             a bare word: the cell's name contains it
kv_format=int8_sym,batch=1                a name copied from a report: all of it must hold
"""

import re
from collections.abc import Callable, Sequence

from kvbench.errors import UsageError
from kvbench.matrix.cells import CELL_KEYS, Cell, text
from kvbench.matrix.yaml import scalar
from kvbench.text import suggestion

Predicate = Callable[[Cell], bool]


def select(cells: Sequence[Cell], expression: str) -> tuple[Cell, ...]:
    """The cells for which the expression holds, and their baselines, in their order. Raises UsageError for an
    expression that cannot be read, and for one that selects no cell."""
    holds = _Parser(expression).whole()
    chosen = [cell for cell in cells if holds(cell)]
    if not chosen:
        names = "\n".join(f"  {cell.name}" for cell in cells)
        raise UsageError(f"-k {expression!r} selects no cell; the cells are:\n{names}")
    kept = {cell.id for cell in chosen} | {cell.baseline for cell in chosen}
    return tuple(cell for cell in cells if cell.id in kept)


class _Parser:
    """or_ := and_ ("or" and_)*;  and_ := not_ ("and" not_)*;  not_ := "not" not_ | "(" or_ ")" | word"""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.words = re.findall(r"[()]|[^\s()]+", expression)
        if len(self.words) > 200:  # each may nest one deeper
            raise UsageError(f"-k takes at most 200 words; this expression has {len(self.words)}.")

    def whole(self) -> Predicate:
        predicate = self.or_()
        if self.words:
            raise self.unreadable(f"{self.words[0]!r} is not expected here.")
        return predicate

    def or_(self) -> Predicate:
        parts = [self.and_()]
        while self.take("or"):
            parts.append(self.and_())
        return lambda cell: any(part(cell) for part in parts)

    def and_(self) -> Predicate:
        parts = [self.not_()]
        while self.take("and"):
            parts.append(self.not_())
        return lambda cell: all(part(cell) for part in parts)

    def not_(self) -> Predicate:
        if self.take("not"):
            inner = self.not_()
            return lambda cell: not inner(cell)
        if self.take("("):
            inner = self.or_()
            if not self.take(")"):
                raise self.unreadable("a parenthesis is not closed.")
            return inner
        if not self.words or self.words[0] in (")", "and", "or"):
            found = repr(self.words[0]) if self.words else "the end"
            raise self.unreadable(f"expected key=value or a part of a cell's name, got {found}.")
        return self.word(self.words.pop(0))

    def word(self, word: str) -> Predicate:
        parts = word.split(",")
        if not all("=" in part for part in parts):
            return lambda cell: word.lower() in cell.name.lower()
        wanted = [part.split("=", 1) for part in parts]
        for key in [key for key, _ in wanted if key not in CELL_KEYS]:
            near = suggestion(key, CELL_KEYS)
            raise self.unreadable(f"{key} is not a cell key ({', '.join(CELL_KEYS)}).{near}".rstrip("."))
        return lambda cell: all(_is(cell.spec[key], value) for key, value in wanted)

    def take(self, word: str) -> bool:
        if self.words and self.words[0] == word:
            self.words.pop(0)
            return True
        return False

    def unreadable(self, why: str) -> UsageError:
        return UsageError(
            f"-k {self.expression!r} cannot be read: {why} Write key=value words and parts of cell names, "
            "joined by and, or, not and parentheses."
        )


def _is(value: object, wanted: str) -> bool:
    """By their text (`4`, `int8_sym`), or as numbers written differently (`5e-2` is 0.05)."""
    if text(value) == wanted:
        return True
    try:
        return isinstance(value, float) and bool(scalar(wanted) == value)
    except ValueError:
        return False
