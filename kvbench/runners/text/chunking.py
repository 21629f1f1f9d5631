"""From token ids to chunks, by perplexity protocol. No token is scored twice. Pure: lists in, chunks out.

stream512   one stream, disjoint chunks of 512, the first token of each unscored, a short last chunk kept
rows512     each row alone, in chunks of 512, the first token of each unscored
llamacpp    one stream with llama.cpp's BOS, only whole chunks of 512, the second half of each scored
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

SIZE = 512
POSITIONS = (0, 64, 128, 256, 512)  # edges of the buckets of positions inside a chunk


@dataclass(frozen=True)
class Chunk:
    """tokens: the model's input; skip: leading tokens that are only context; document: of the first."""

    tokens: tuple[int, ...]
    skip: int
    document: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.skip


@dataclass(frozen=True)
class Chunked:
    """chunks: those with at least one scored token, in order; tokens: all ids that the text became;
    skipped_rows: texts of 0 or 1 token; dropped_tokens: ids in no chunk (one-token tails, llama.cpp's rest).
    """

    chunks: tuple[Chunk, ...]
    tokens: int
    skipped_rows: int
    dropped_tokens: int


def document_of(starts: Sequence[int], offset: int) -> int:
    """Index of the document that holds character `offset`; `starts` are the documents' first characters."""
    return max(0, bisect_right(starts, offset) - 1)


def stream(ids: Sequence[int], documents: Sequence[int], size: int = SIZE) -> Chunked:
    """documents[i] is the document of token i."""
    chunks = tuple(
        Chunk(tuple(ids[i : i + size]), 1, documents[i]) for i in range(0, len(ids), size) if len(ids) - i > 1
    )
    return Chunked(chunks, len(ids), int(len(ids) < 2), len(ids) - sum(len(c.tokens) for c in chunks))


def rows(texts: Sequence[Sequence[int]], documents: Sequence[int], size: int = SIZE) -> Chunked:
    """texts: the ids of each row; documents[r] is the document of row r."""
    parts = [stream(ids, [document] * len(ids), size) for ids, document in zip(texts, documents, strict=True)]
    return Chunked(
        tuple(chunk for part in parts for chunk in part.chunks),
        sum(part.tokens for part in parts),
        sum(part.skipped_rows for part in parts),
        sum(part.dropped_tokens for part in parts),
    )


def llamacpp(ids: Sequence[int], documents: Sequence[int], bos: int | None, size: int = SIZE) -> Chunked:
    """bos: the id that the tokenizer puts first, or None: it heads the stream and replaces each chunk's first
    token. llama.cpp scores the targets from size/2 + 1 on: 255 of 512.
    """
    if bos is not None:
        ids, documents = [bos, *ids], [*documents[:1], *documents]
    head = () if bos is None else (bos,)
    chunks = tuple(
        Chunk((*head, *ids[i + len(head) : i + size]), size // 2 + 1, documents[i])
        for i in range(0, len(ids) - size + 1, size)
    )
    return Chunked(chunks, len(ids), int(len(ids) < 2), len(ids) - len(chunks) * size)
