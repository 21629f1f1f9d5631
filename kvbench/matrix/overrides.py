"""`--set a.b=value`: values of the command line that replace those of a loaded file.

The value is read by the rules of `kvbench.matrix.yaml`: `axes.kv_format=[native,int8_sym]` sets a list,
`1e-5` is a number. The checker of the document finds a mistyped path.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvbench.errors import UsageError
from kvbench.matrix import yaml as yamlstrict
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.document import DataPath, Document, Fault
from kvbench.text import suggestion


def apply(document: Document, overrides: Sequence[str]) -> Document:
    """The document with every `a.b=value` applied, or with a fault for one that cannot be applied. A cell key
    set under `axes` replaces one fixed under `engine` (or `model`), and vice versa."""
    for words in overrides if isinstance(document.data, dict) else ():
        try:
            document = _apply(document, words)
        except UsageError as e:
            fault = Fault(0, 0, f"--set {words}", str(e), "override")
            document = replace(document, faults=(*document.faults, fault))
    return document


def _apply(document: Document, words: str) -> Document:
    """Raises UsageError with the sentence alone, without its place."""
    dotted, equals, text = words.partition("=")
    keys = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(keys):
        raise UsageError("expected a path, '=' and a value, as in --set axes.batch=[1,4].")
    if not text.strip():
        raise UsageError("expected a value after '='; write null for null.")
    data = copy.deepcopy(document.data)
    _place(data, keys, _value(text))
    gone = {keys}
    twin = _twin(keys)
    if twin and isinstance(section := data if len(twin) == 1 else data.get(twin[0]), dict):
        section.pop(twin[-1], None)
        gone.add(twin)
    # A section that the override had to add has no place in the file: its place is the override too.
    known = {*document.marks, *document.origins}
    made = next(keys[:end] for end in range(1, len(keys) + 1) if end == len(keys) or keys[:end] not in known)
    return replace(
        document,
        data=data,
        marks=_without(document.marks, gone),
        keys=_without(document.keys, gone),
        broken=frozenset(path for path in document.broken if path[: len(keys)] != keys),
        origins={**_without(document.origins, gone), made: f"--set {words}"},
    )


def _twin(keys: tuple[str, ...]) -> tuple[str, ...] | None:
    """The other place where the same cell key may be given."""
    if keys in (("model",), ("axes", "model")):
        return ("model",) if len(keys) == 2 else ("axes", "model")
    if len(keys) == 2 and keys[1] in CELL_KEYS and keys[0] in ("axes", "engine"):
        return ("engine" if keys[0] == "axes" else "axes", keys[1])
    return None


def _value(text: str) -> Any:
    if text.strip() in yamlstrict.NULLS:
        return None
    document = yamlstrict.parse(text, "value")
    if document.faults:
        raise UsageError(" ".join(f"{fault.where}: {fault.sentence}" for fault in document.faults))
    return document.data


def _place(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    here: Any = data
    for depth, key in enumerate(keys[:-1], start=1):
        if here.get(key) is None:
            if depth > 1:
                section = ".".join(keys[: depth - 1])
                raise UsageError(
                    f"{section} has no {key}; it has: {', '.join(here) or 'nothing'}.{suggestion(key, here)} "
                    f"To add it, write --set {section}.{key}={{{keys[depth]}: ...}}."
                )
            here[key] = {}
        if not isinstance(here[key], dict):
            raise UsageError(
                f"{'.'.join(keys[:depth])} is not a mapping, so it has no keys to set; set it as a whole."
            )
        here = here[key]
    here[keys[-1]] = value


def _without(paths: Any, gone: Iterable[DataPath]) -> dict[DataPath, Any]:
    return {path: value for path, value in paths.items() if not any(path[: len(g)] == g for g in gone)}
