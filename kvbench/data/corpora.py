"""Text for perplexity, KLD and token agreement: found, read and hashed. No torch here.

    wikitext2   WikiText-2 raw v1 below the data directory, or from the hub when that is allowed
    pydoc       CPython's own `pydoc_data.topics`, always there; recorded by hash and Python version
    instructions  what one asks of a chat model, one a document; for generate
    a path      any UTF-8 text file

What was asked for and is not here raises NotAvailable with the command that gets it; nothing is put in its place.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.data.instructions import INSTRUCTIONS
from kvbench.errors import KvbenchError, NotAvailable, UsageError
from kvbench.models.hub import quiet

ALLOW_HUB = "KVBENCH_ALLOW_HUB"  # "1": what is not below the data directory may be fetched from the hub
HUB = "hub"  # given as the data directory: fetch everything from the hub
NAMED = ("wikitext2", "pydoc", "instructions")
ABSENT = "absent"

WIKITEXT_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")
WIKITEXT_FILES = {"test": "wiki.test.raw", "validation": "wiki.valid.raw"}
WIKITEXT_SHA = {  # of the published bytes; the hub's rows must give back the same
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "validation": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
}


@dataclass(frozen=True)
class Corpus:
    """A text in the three cuts that protocols take.

    rows: the units that `rows512` scores one by one; stream: pieces that join to the text that is tokenized as a
    whole; raw: pieces that join to the file's own characters. The three have the same length, piece for row.
    documents: rows at which a document (article, topic, paragraph) starts; the first is 0.
    sha256: of the raw text's UTF-8 bytes. source, license: a sentence and a licence name for the report.
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


def corpus(name: str, data_dir: Path | None, split: str = "test") -> Corpus:
    """Read the corpus `name`; `split` counts for wikitext2 only.

    Raises NotAvailable when it is not here, UsageError for a path that is no UTF-8 text file.
    """
    if name == "wikitext2":
        return _wikitext(data_dir, split)
    if name == "pydoc":
        return _pydoc()
    if name == "instructions":
        return _instructions()
    return _text_file(Path(name))


def first_ids(name: str, text: str, tokenizer: Any, wanted: int) -> list[int]:
    """The first `wanted` ids of a text, tokenized as the tokenizer does by default (its own BOS policy).

    Raises UsageError, with the corpus' name, for a text that has fewer.
    """
    # No tokenizer makes tokens that long.
    ids: list[int] = tokenizer(text.lstrip()[: 64 * wanted])["input_ids"]
    if len(ids) < wanted:
        raise UsageError(
            f"Corpus {name!r} has {len(ids)} tokens, and {wanted} are asked for; give a longer text or ask for fewer."
        )
    return ids[:wanted]


def corpus_fingerprint(name: str, data_dir: Path | None, split: str = "test") -> str:
    """sha256 of the corpus' raw bytes, or "absent"."""
    if name == "wikitext2":
        path = _wikitext_path(data_dir, split)
        if path is not None:
            return file_sha(path)
        return WIKITEXT_SHA[_known_split(split)] if hub_allowed(data_dir) else ABSENT
    if name in ("pydoc", "instructions"):
        return corpus(name, None).sha256
    return file_sha(Path(name)) if Path(name).is_file() else ABSENT


def file_sha(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def hub_allowed(data_dir: Path | None) -> bool:
    return str(data_dir) == HUB or os.environ.get(ALLOW_HUB) == "1"


def local(data_dir: Path | None, *parts: str) -> Path | None:
    """The file below the data directory, or None when it is not there."""
    if data_dir is None or str(data_dir) == HUB:
        return None
    path = data_dir.joinpath(*parts)
    return path if path.is_file() else None


def not_available(what: str, data_dir: Path | None, files: str) -> NotAvailable:
    """The one sentence for missing data: what, where it was looked for, and the commands that get it."""
    where = "no data directory was given" if data_dir is None else f"{files} is not below {data_dir}"
    return NotAvailable(
        f"{what} is not here: {where}. Give --data-dir a folder that holds {files}, or set "
        f"{ALLOW_HUB}=1 to fetch it from the hub."
    )


def _known_split(split: str) -> str:
    if split not in WIKITEXT_FILES:
        raise UsageError(f"wikitext2 has no split {split!r}; use one of {', '.join(WIKITEXT_FILES)}.")
    return split


def _wikitext_path(data_dir: Path | None, split: str) -> Path | None:
    return local(data_dir, "wikitext-2-raw", WIKITEXT_FILES[_known_split(split)])


def _wikitext(data_dir: Path | None, split: str) -> Corpus:
    path = _wikitext_path(data_dir, split)
    if path is not None:
        data, where = path.read_bytes(), "local file"
    elif hub_allowed(data_dir):
        data, where = _wikitext_from_hub(split), "hub"
    else:
        raise not_available(
            f"wikitext2 (split {split})", data_dir, f"wikitext-2-raw/{WIKITEXT_FILES[_known_split(split)]}"
        )
    sha = hashlib.sha256(data).hexdigest()
    same = "the published bytes" if sha == WIKITEXT_SHA[split] else "NOT the published bytes"
    return wikitext_from_raw(
        data.decode("utf-8"), split, sha, f"WikiText-2 raw v1, {split} split, {where}, {same}"
    )


def wikitext_from_raw(text: str, split: str, sha: str, source: str) -> Corpus:
    """Cut WikiText-2 as its usual recipe does: a row a line, a blank line as the empty string, rows joined by two
    newlines. A document is an article: a ` = Title = ` line between blank ones.
    """
    raw = tuple(line + "\n" for line in text.split("\n"))
    raw = raw[:-1] if text.endswith("\n") else (*raw[:-1], raw[-1][:-1])
    rows = tuple(line if line.strip() else "" for line in raw)
    return Corpus(
        name="wikitext2",
        split=split,
        rows=rows,
        stream=(*(row + "\n\n" for row in rows[:-1]), rows[-1]),
        raw=raw,
        documents=_from_first(i for i in range(len(rows)) if _is_title(rows, i)),
        sha256=sha,
        source=source,
        license="CC BY-SA 3.0, GFDL",
    )


def _is_title(rows: tuple[str, ...], i: int) -> bool:
    """Blank neighbours tell a title from a formula's line such as ` = 1 rad / s and k = `."""
    if not re.fullmatch(r" = [^=].* = \n", rows[i]):
        return False
    return (i == 0 or not rows[i - 1]) and (i + 1 == len(rows) or not rows[i + 1])


def _from_first(documents: Iterable[int]) -> tuple[int, ...]:
    """What stands before the first document belongs to it; a text without any is one document."""
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


def _pydoc() -> Corpus:
    from pydoc_data import topics

    rows = tuple(topics.topics[key] for key in sorted(topics.topics))
    stream = (*(row + "\n\n" for row in rows[:-1]), rows[-1])
    return Corpus(
        name="pydoc",
        split="whole",
        rows=rows,
        stream=stream,
        raw=stream,
        documents=tuple(range(len(rows))),
        sha256=hashlib.sha256("".join(stream).encode()).hexdigest(),
        source=f"pydoc_data.topics of Python {platform.python_version()}, topics in key order",
        license="PSF-2.0",
    )


def _instructions() -> Corpus:
    rows = tuple(f"{text}\n" for text in INSTRUCTIONS)
    return Corpus(
        name="instructions",
        split="whole",
        rows=rows,
        stream=rows,
        raw=rows,
        documents=tuple(range(len(rows))),
        sha256=hashlib.sha256("".join(rows).encode()).hexdigest(),
        source="kvbench's own instructions",
        license="that of kvbench",
    )


def _text_file(path: Path) -> Corpus:
    """Rows are lines; a document is a paragraph, that is, what follows a blank line."""
    if not path.is_file():
        raise UsageError(
            f"There is no corpus {str(path)!r}; use {', '.join(NAMED)}, or the path of a UTF-8 text file."
        )
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8 text ({e}); convert it or give another file.") from None
    rows = tuple(re.findall(r"[^\n]*\n|[^\n]+", text))
    starts = (i for i in range(len(rows)) if rows[i].strip() and (i == 0 or not rows[i - 1].strip()))
    return Corpus(
        name=path.name,
        split="whole",
        rows=rows,
        stream=rows,
        raw=rows,
        documents=_from_first(starts),
        sha256=hashlib.sha256(data).hexdigest(),
        source=f"text file {path.name}",
        license="not stated",
    )
