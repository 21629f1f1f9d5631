"""Texts for perplexity, KLD and token agreement: found, read and hashed.

    wikitext2     WikiText-2 raw v1 below the data directory, or from the hub when that is allowed
    pydoc         CPython's own `pydoc_data.topics`, always available; recorded by hash and Python version
    instructions  requests to a chat model, one a document; for the runner generate
    a path        any UTF-8 text file

A corpus that is not available raises NotAvailable with the command that gets it.
"""

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, NotAvailable, UsageError
from kvbench.models.download import quiet

ALLOW_HUB = "KVBENCH_ALLOW_HUB"  # "1": data that is not below the data directory may be fetched from the hub
HUB = "hub"  # given as the data directory: fetch everything from the hub
NAMED = ("wikitext2", "pydoc", "instructions")
ABSENT = "absent"

WIKITEXT_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
WIKITEXT_FILES = {"test": "wiki.test.raw", "validation": "wiki.valid.raw"}
WIKITEXT_SHA = {  # of the published bytes; the hub's rows must give back the same
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "validation": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
}

# A small model soon repeats itself when it continues reference prose. Answers to these requests stay varied
# for some hundred tokens, which leaves room to see a cache that makes the model repeat itself sooner.
INSTRUCTIONS = (
    "Tell me a story about a fox and a river.",
    "Explain how rain forms.",
    "Write a letter to a friend about a journey by train.",
    "What is a library, and how does one use it?",
    "Describe the four seasons in a small town by the sea.",
    "How does a bicycle keep its balance? Explain it to a child.",
    "Write a short speech for the opening of a new school.",
    "Compare life on a farm with life in a large city.",
)


@dataclass(frozen=True)
class Corpus:
    """A text in the three cuts that protocols take.

    rows: the units that `rows512` scores one by one; stream: pieces that join to the text that is tokenized
    as a whole; raw: pieces that join to the file's own characters. The three have the same length, piece for
    row. documents: rows at which a document (article, topic, paragraph) starts; the first is 0. sha256: of
    the raw text's UTF-8 bytes. source, license: a sentence and a licence name for the report.
    """

    name: str
    split: str
    rows: tuple[str, ...]
    stream: tuple[str, ...]
    raw: tuple[str, ...]
    documents: tuple[int, ...]
    sha256: str
    source: str
    license: str

    @cached_property
    def text(self) -> str:
        return "".join(self.stream)

    def document(self, i: int) -> str:
        end = self.documents[i + 1] if i + 1 < len(self.documents) else len(self.rows)
        return "".join(self.stream[self.documents[i] : end])


def offsets(pieces: tuple[str, ...], documents: tuple[int, ...]) -> list[int]:
    """Character at which each document starts in the joined `pieces`."""
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return [starts[row] for row in documents]


def evenly(total: int, limit: int | None) -> list[int]:
    """Indexes of at most `limit` of `total` items (None: all), evenly spread over them.

    The head of a text alone would be few documents, and intervals count documents.
    """
    n = total if limit is None else min(limit, total)
    return [i * total // n for i in range(n)]


def corpus(name: str, data_dir: Path | None, split: str = "test") -> Corpus:
    """Read the corpus `name`; only wikitext2 has a `split`.

    Raises NotAvailable when it is not here, UsageError for a path that is no UTF-8 text file.
    """
    if name == "wikitext2":
        return _wikitext(data_dir, split)
    if name == "pydoc":
        return _pydoc()
    return _instructions() if name == "instructions" else _text_file(Path(name))


def first_ids(name: str, text: str, tokenizer: Any, wanted: int) -> list[int]:
    """The first `wanted` ids of a text, tokenized as the tokenizer does by default (its own BOS policy).

    Raises UsageError, with the corpus' name, for a text that has fewer.
    """
    ids: list[int] = tokenizer(text.lstrip()[: 64 * wanted])[
        "input_ids"
    ]  # no token is longer than 64 characters
    if len(ids) < wanted:
        raise UsageError(
            f"Corpus {name!r} has {len(ids)} tokens, but {wanted} are needed; use a longer text or ask for "
            "fewer."
        )
    return ids[:wanted]


def corpus_fingerprint(name: str, data_dir: Path | None, split: str = "test") -> str:
    """sha256 of the corpus' raw bytes, or "absent"."""
    if name == "wikitext2":
        path = _wikitext_path(data_dir, split)
        if path is not None:
            return file_sha(path)
        return WIKITEXT_SHA[split] if hub_allowed(data_dir) else ABSENT
    if name in NAMED:
        return corpus(name, None).sha256
    return file_sha(Path(name)) if Path(name).is_file() else ABSENT


def file_sha(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def hub_allowed(data_dir: Path | None) -> bool:
    return str(data_dir) == HUB or os.environ.get(ALLOW_HUB) == "1"


def local(data_dir: Path | None, *parts: str) -> Path | None:
    """The file below the data directory, or None when it does not exist."""
    if data_dir is None or str(data_dir) == HUB:
        return None
    path = data_dir.joinpath(*parts)
    return path if path.is_file() else None


def not_available(what: str, data_dir: Path | None, files: str) -> NotAvailable:
    """The error for missing data: what is missing, where it was looked for, and how to get it."""
    where = "no data directory was given" if data_dir is None else f"{files} is not below {data_dir}"
    return NotAvailable(
        f"{what} is not available: {where}. Give --data-dir a folder that holds {files}, or set "
        f"{ALLOW_HUB}=1 to fetch it from the hub."
    )


def _wikitext_path(data_dir: Path | None, split: str) -> Path | None:
    if split not in WIKITEXT_FILES:
        raise UsageError(f"wikitext2 has no split {split!r}; use one of {', '.join(WIKITEXT_FILES)}.")
    return local(data_dir, "wikitext-2-raw", WIKITEXT_FILES[split])


def _wikitext(data_dir: Path | None, split: str) -> Corpus:
    path = _wikitext_path(data_dir, split)
    if path is not None:
        data, where = path.read_bytes(), "local file"
    elif hub_allowed(data_dir):
        data, where = _wikitext_from_hub(split), "hub"
    else:
        files = f"wikitext-2-raw/{WIKITEXT_FILES[split]}"
        raise not_available(f"wikitext2 (split {split})", data_dir, files)
    sha = hashlib.sha256(data).hexdigest()
    same = "the published bytes" if sha == WIKITEXT_SHA[split] else "NOT the published bytes"
    source = f"WikiText-2 raw v1, {split} split, {where}, {same}"
    return wikitext_from_raw(data.decode("utf-8"), split, sha, source)


def wikitext_from_raw(text: str, split: str, sha: str, source: str) -> Corpus:
    """WikiText-2 cut by its usual recipe: one row a line, a blank line as the empty string, rows joined by
    two newlines. A document is an article: a ` = Title = ` line between blank ones.
    """
    raw = tuple(line + "\n" for line in text.split("\n"))
    raw = raw[:-1] if text.endswith("\n") else (*raw[:-1], raw[-1][:-1])
    rows = tuple(line if line.strip() else "" for line in raw)
    documents = _from_first(i for i in range(len(rows)) if _is_title(rows, i))
    license_ = "CC BY-SA 3.0, GFDL"
    return Corpus("wikitext2", split, rows, _by_blank_line(rows), raw, documents, sha, source, license_)


def _by_blank_line(rows: Sequence[str]) -> tuple[str, ...]:
    return (*(row + "\n\n" for row in rows[:-1]), rows[-1])


def _is_title(rows: tuple[str, ...], i: int) -> bool:
    """Blank neighbours distinguish a title from a formula's line such as ` = 1 rad / s and k = `."""
    if not re.fullmatch(r" = [^=].* = \n", rows[i]):
        return False
    return (i == 0 or not rows[i - 1]) and (i + 1 == len(rows) or not rows[i + 1])


def _from_first(documents: Iterable[int]) -> tuple[int, ...]:
    """Rows before the first document belong to it; a text without any is one document."""
    return (0, *list(documents)[1:])


def _wikitext_from_hub(split: str) -> bytes:
    quiet()
    from datasets import load_dataset  # takes seconds to import

    rows = load_dataset(*WIKITEXT_HUB, split=split)["text"]
    data = "".join(row or " \n" for row in rows).encode()
    sha = hashlib.sha256(data).hexdigest()
    if sha != WIKITEXT_SHA[split]:
        raise KvbenchError(
            f"The hub's {'/'.join(WIKITEXT_HUB)} {split} gives text of sha256 {sha}, not the published "
            f"{WIKITEXT_SHA[split]}; use a local copy with --data-dir."
        )
    return data


def _whole(name: str, rows: tuple[str, ...], documents: Iterable[int], source: str, license_: str) -> Corpus:
    """A corpus without splits whose rows join to its text."""
    sha = hashlib.sha256("".join(rows).encode()).hexdigest()
    return Corpus(name, "whole", rows, rows, rows, tuple(documents), sha, source, license_)


def _pydoc() -> Corpus:
    from pydoc_data import topics

    rows = tuple(topics.topics[key] for key in sorted(topics.topics))
    source = f"pydoc_data.topics of Python {platform.python_version()}, topics in key order"
    joined = _whole("pydoc", _by_blank_line(rows), range(len(rows)), source, "PSF-2.0")
    return replace(joined, rows=rows)


def _instructions() -> Corpus:
    rows = tuple(f"{text}\n" for text in INSTRUCTIONS)
    return _whole("instructions", rows, range(len(rows)), "kvbench's own instructions", "that of kvbench")


def _text_file(path: Path) -> Corpus:
    """Rows are lines; a document is a paragraph, that is, the lines after a blank line."""
    if not path.is_file():
        raise UsageError(
            f"There is no corpus {str(path)!r}; use {', '.join(NAMED)}, or the path of a UTF-8 text file."
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8 text ({e}); convert it or give another file.") from None
    rows = tuple(re.findall(r"[^\n]*\n|[^\n]+", text))
    starts = (i for i in range(len(rows)) if rows[i].strip() and (i == 0 or not rows[i - 1].strip()))
    return _whole(path.name, rows, _from_first(starts), f"text file {path.name}", "not stated")
