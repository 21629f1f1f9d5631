"""Helpers of wording: values as messages show them, and the nearest accepted word."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def show(value: Any) -> str:
    """A value as a message shows it: text in quotes, `true`, `null`, `.nan`."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def suggestion(word: object, options: Iterable[str]) -> str:
    """` Did you mean int8_sym?` with a leading space, or nothing when no option is near."""
    import difflib  # only a mistake needs it

    by_fold = {option.casefold(): option for option in options}
    near = difflib.get_close_matches(str(word).casefold(), list(by_fold), n=1, cutoff=0.6)
    return f" Did you mean {by_fold[near[0]]}?" if near else ""


def and_more(faults: Sequence[str]) -> str:
    """What a sentence puts behind the first of several faults."""
    return f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
