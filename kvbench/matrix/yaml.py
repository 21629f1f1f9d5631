"""Strict YAML: YAML 1.2 core scalars, no duplicate keys, and a place for every value.

Only PyYAML's parse events are used, so its YAML 1.1 types (`no` is False, `1e-5` is text, `010` is 8) reach
no matrix or gate. A plain scalar gets its type by these rules:

    null     ~ null Null NULL, or nothing          bool     true True TRUE false False FALSE
    int      12, -3, 010 (ten), 0o10, 0xff         float    1e-5 1e5 1e+5 1.0e5 .5 .inf -.inf .nan
    text     all else: yes no on off, 12:30, 1_000, 2026-01-31

Refused, with the place: duplicate keys, keys that are not text, tags, aliases and merge keys, a second
document, an empty file, a number too large for a float, tabs in place of spaces.

A reader collects all mistakes before it raises:

    document = read(path)                  # raises for what cannot be parsed at all
    problems = Problems(document)          # starts with what the loader itself found
    problems.add(("axes", "batch", 1), 'batch: expected a whole number, got "8".', "wrong_type")
    problems.raise_if_any()                # one ConfigError, a line for each mistake
"""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UsageError
from kvbench.matrix.document import DataPath, Document, Fault, Mark, Problems

__all__ = ["Document", "Problems", "load", "parse", "read", "scalar"]

MAX_DEPTH = 20  # a matrix needs 5; a much deeper file would exhaust the stack

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def load(path: Path | str) -> Document:
    """The document. Raises ConfigError with every mistake."""
    document = read(path)
    Problems(document).raise_if_any()
    return document


def read(path: Path | str) -> Document:
    """The document, with the mistakes that could be stepped over in `faults`, to be reported with others.
    Raises UsageError when there is no such file, when it is not UTF-8, empty, or not YAML."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give the path of a YAML file.") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; give the path of a YAML file in it.") from None
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read ({e}); give the path of a YAML file.") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        before = raw[: e.start].decode("utf-8", errors="replace")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        sentence = f"the byte 0x{raw[e.start]:02x} is not UTF-8; save the file as UTF-8."
        raise UsageError(f"{path}:{line}:{column}: {sentence}") from None
    return parse(text, str(path), hashlib.sha256(raw).hexdigest())


def parse(text: str, name: str, sha: str = "") -> Document:
    """The document in `text`. Raises UsageError when it is empty or not YAML."""
    builder = _Builder(name, iter(yaml.parse(text, Loader=yaml.SafeLoader)))
    try:
        data = builder.document()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise UsageError(f"{name}:{line}:{column}: {_syntax_sentence(e, text, line, column)}") from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        column = e.position - (text.rfind("\n", 0, e.position) + 1) + 1
        sentence = f"the character U+{ord(text[e.position]):04X} is not allowed in YAML; remove it."
        raise UsageError(f"{name}:{line}:{column}: {sentence}") from None
    if data is None and not builder.faults:
        raise UsageError(f"{name} is empty; expected a mapping of keys.")
    places = builder.marks, builder.keys
    return Document(name, data, sha, *places, tuple(builder.faults), frozenset(builder.broken))


def scalar(text: str) -> Any:
    """The value of a plain scalar by the rules above. ValueError (a sentence) for a number out of range."""
    if text in NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        if len(text) > 400:  # Python refuses to read ints of thousands of digits; nothing here needs them
            raise ValueError(f"the number {text[:12]}... has {len(text)} digits; write a smaller one.")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        value = float(text)
        if math.isinf(value):
            raise ValueError(f"the number {text} is too large for a float; write a smaller one, or .inf.")
        return value
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def _syntax_sentence(error: yaml.MarkedYAMLError, text: str, line: int, column: int) -> str:
    lines = text.split("\n")
    if lines[min(line, len(lines)) - 1][column - 1 : column] == "\t":
        return "YAML does not allow a tab here; replace it with spaces."
    words = ", ".join(part for part in (error.context, error.problem) if part)
    return f"this is not YAML: {words}."


class _Builder:
    """Builds plain data from PyYAML's parse events, and keeps marks, faults and broken paths."""

    def __init__(self, name: str, events: Iterator[Any]) -> None:
        self.name, self.events = name, events
        self.marks: dict[DataPath, Mark] = {}
        self.keys: dict[DataPath, Mark] = {}
        self.faults: list[Fault] = []
        self.broken: set[DataPath] = set()

    def document(self) -> Any:
        """The data of the stream's only document; None when there is none."""
        data: Any = None
        starts = (event for event in self.events if isinstance(event, yaml.DocumentStartEvent))
        for documents, event in enumerate(starts):
            if documents:
                sentence = "a second document starts here; put it into its own file."
                self.fault(event, sentence, "second_document")
                break
            data = self.value(next(self.events), ())
        return data

    def value(self, event: Any, path: DataPath) -> Any:
        self.marks.setdefault(path, _mark(event))
        if len(path) > MAX_DEPTH:
            line, column = self.marks[path]
            sentence = f"this is nested deeper than {MAX_DEPTH} levels, the limit."
            raise UsageError(f"{self.name}:{line}:{column}: {sentence}")
        if isinstance(event, yaml.AliasEvent):
            sentence = f"*{event.anchor} is an alias; aliases are not supported, write the value out."
            return self.refuse(event, path, sentence, "alias")
        if event.tag is not None:
            sentence = f"the tag {_tag(event)} is not supported; remove it (use quotes for text)."
            self.refuse(event, path, sentence, "tag")
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(path)
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(path)
        return self.scalar(event, path)

    def scalar(self, event: Any, path: DataPath) -> Any:
        if not event.implicit[0]:  # quoted, or a block of text
            return event.value
        try:
            return scalar(event.value)
        except ValueError as e:
            return self.refuse(event, path, str(e), "not_finite")

    def sequence(self, path: DataPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.value(event, (*path, len(items))))
        return items

    def mapping(self, path: DataPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.key(event)
            if key is not None and key not in data:
                self.keys[(*path, key)] = _mark(event)
                data[key] = self.value(next(self.events), (*path, key))
                continue
            if key is not None:
                first = self.keys[(*path, key)][0]
                sentence = f"duplicate key {key} (first in line {first}); keep one of them."
                self.fault(event, sentence, "duplicate_key")
            # A refused entry is parsed too, for the mistakes in it; `#` and its index make its path unique.
            self.value(next(self.events), (*path, f"#{event.start_mark.index}"))
        return data

    def key(self, event: Any) -> str | None:
        """The key's text, or None where it is refused."""
        if not isinstance(event, yaml.ScalarEvent):
            self.fault(event, "a list or a mapping cannot be a key; write a name.", "key_type")
            if not isinstance(event, yaml.AliasEvent):
                self.value(event, (f"#{event.start_mark.index}",))
            return None
        if event.tag is not None:
            self.fault(event, f"the tag {_tag(event)} is not supported; remove it.", "tag")
        if not event.implicit[0]:
            return str(event.value)
        if event.value == "<<":
            sentence = "<< is a merge key; merge keys are not supported, write the keys out."
            self.fault(event, sentence, "merge_key")
            return None
        try:
            value = scalar(event.value)
        except ValueError:
            value = 0
        if isinstance(value, str):
            return value
        sentence = f"the key {event.value or '(nothing)'} is not text; write a name, or quote it."
        self.fault(event, sentence, "key_type")
        return None

    def refuse(self, event: Any, path: DataPath, sentence: str, code: str) -> None:
        self.broken.add(path)
        self.fault(event, sentence, code)

    def fault(self, event: Any, sentence: str, code: str) -> None:
        line, column = _mark(event)
        self.faults.append(Fault(line, column, f"{self.name}:{line}:{column}", sentence, code))


def _mark(event: Any) -> Mark:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _tag(event: Any) -> str:
    return str(event.tag).replace("tag:yaml.org,2002:", "!!")
