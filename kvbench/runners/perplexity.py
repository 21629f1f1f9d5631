"""Perplexity through the paged store and, for a candidate, its divergence from a native engine.

The record holds raw sums: for each chunk its NLL, scored tokens, document and sums of divergences, and for a
sample of tokens the divergences themselves.
"""

import random
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kvbench.data.corpora import Corpus, corpus, evenly, offsets
from kvbench.engines.protocol import Engine
from kvbench.errors import KvbenchError, Refused
from kvbench.formats.kv import pages_for
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text import chunking
from kvbench.runners.text.chunking import POSITIONS, SIZE, Chunk, Chunked
from kvbench.runners.text.encode import bos_ids, plain_ids
from kvbench.runners.text.logits import Compared, budget, compare, feed, logprobs, packed

KEPT = 20_000  # most per-token values kept in a record: a seeded sample where there are more
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def chunk_text(protocol: str, text: Corpus, tokenizer: Any) -> tuple[Chunked, dict[str, Any]]:
    """The chunks of a corpus under `protocol`, and the facts of how the text was cut."""
    if protocol == "rows512":
        kept = [(row, i) for i, row in enumerate(text.rows) if row.strip()]
        owners = [chunking.document_of(text.documents, i) for _, i in kept]
        chunked = chunking.rows(plain_ids(tokenizer, [row.strip() for row, _ in kept]), owners)
        empty = len(text.rows) - len(kept)
        return chunked, {"bos": "none", "stride": SIZE, "empty_rows": empty, "text_cut": "rows, stripped"}
    pieces = text.raw if protocol == "llamacpp" else text.stream
    encoded = tokenizer("".join(pieces), add_special_tokens=False, return_offsets_mapping=True)
    starts = offsets(pieces, text.documents)
    owners = [chunking.document_of(starts, begin) for begin, _ in encoded["offset_mapping"]]
    if protocol == "llamacpp":
        bos = bos_ids(tokenizer)
        policy = f"{bos[0]}, first of each chunk" if bos else "none: the tokenizer adds none"
        chunked = chunking.llamacpp(encoded["input_ids"], owners, bos[0] if bos else None)
        return chunked, {"bos": policy, "stride": SIZE, "text_cut": "the file's own characters"}
    chunked = chunking.stream(encoded["input_ids"], owners)
    return chunked, {"bos": "none", "stride": SIZE, "text_cut": "rows joined as the corpus defines"}


@dataclass
class Pass:
    """One engine over all chunks: each chunk's sums, and the seconds of its forwards."""

    engine: Engine
    piece: int
    chunks: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, chunk: Chunk, logprob: Tensor) -> None:
        sums = {"tokens": chunk.scored, "nll": -float(logprob.sum()), "document": chunk.document}
        self.chunks.append({**sums, "by_position": by_position(chunk.skip, logprob)})

    def forward(self, pack: Sequence[Chunk]) -> list[Tensor]:
        """Logits of the positions that predict a scored token, float32 [scored, V] a chunk; timed."""
        engine = self.engine
        seqs = [engine.add() for _ in pack]
        engine.synchronize()
        start = time.perf_counter()
        logits = feed(engine, [(s, c.tokens) for s, c in zip(seqs, pack, strict=True)], self.piece, "all")
        engine.synchronize()
        self.seconds += time.perf_counter() - start
        for seq in seqs:
            engine.free(seq)
        return [rows[c.skip - 1 : -1] for rows, c in zip(logits, pack, strict=True)]


def by_position(skip: int, logprob: Tensor) -> list[list[float]]:
    """[scored tokens, their NLL] in each bucket of positions; logprob [scored] begins at position `skip`."""
    found = []
    for low, high in pairwise(POSITIONS):
        part = logprob[max(low - skip, 0) : max(high - skip, 0)]
        found.append([len(part), -float(part.sum()) if len(part) else 0.0])
    return found


@dataclass
class Divergence:
    """Per-token values of a candidate against native, float64 [tokens] on the host for each chunk."""

    chunks: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)  # KLD, delta p, equal top-1

    def add(self, found: Compared) -> None:
        self.chunks.append((found.kld.cpu(), found.delta_p.cpu(), int(found.top1_equal.sum())))

    def _kept(self) -> Sequence[int]:
        """Indexes of the tokens whose values the record keeps, in order."""
        n = sum(len(kld) for kld, _, _ in self.chunks)
        return sorted(random.Random(0).sample(range(n), KEPT)) if n > KEPT else range(n)

    def by_chunk(self) -> list[dict[str, Any]]:
        """For each chunk: sums over its tokens, and how many tokens the sample keeps."""
        ends = list(accumulate(len(kld) for kld, _, _ in self.chunks))
        kept = Counter(bisect_right(ends, i) for i in self._kept())
        return [
            {"kld": float(kld.sum()), "delta_p": float(delta_p.sum()), "top1_equal": equal, "kept": kept[i]}
            for i, (kld, delta_p, equal) in enumerate(self.chunks)
        ]

    def samples(self) -> dict[str, Any]:
        kld = torch.cat([kld for kld, _, _ in self.chunks])
        delta_p = torch.cat([delta_p for _, delta_p, _ in self.chunks])
        n, kept = len(kld), self._kept()
        levels = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
        quantiles = dict(zip(QUANTILES, torch.quantile(kld, levels).tolist(), strict=True))
        return {
            "kld": {"mean": float(kld.mean()), "n": n, **quantiles, "max": float(kld.max())},
            "kld_tokens": _six_digits(kld, kept),
            "top1_equal": sum(equal for _, _, equal in self.chunks),
            "delta_p": _six_digits(delta_p, kept),
            "delta_p_mean": float(delta_p.mean()),
        }


def _six_digits(values: Tensor, kept: Sequence[int]) -> list[float]:
    return [float(f"{x:.6g}") for x in values[torch.tensor(kept)].tolist()]


def run(ctx: Context) -> Measurement:
    """Raises Refused("invalid_context"), NotAvailable, and KvbenchError for a text with nothing to score."""
    options, protocol = ctx.options, ctx.options["protocol"]
    text = corpus(options["data"], ctx.data_dir, options["split"])
    chunked, facts = chunk_text(protocol, text, ctx.model.tokenizer)
    if not chunked.chunks:
        raise KvbenchError(f"{text.name} has nothing to score under {protocol}; use a longer text.")
    total, limit = len(chunked.chunks), ctx.model.facts.max_context
    places = evenly(total, options["limit_chunks"])
    chunks = [chunked.chunks[i] for i in places]
    longest = max(len(c.tokens) for c in chunks)
    if limit is not None and longest > limit:
        raise Refused(
            "invalid_context",
            f"The protocol's chunks have {longest} tokens, but the model has {limit} positions; use a model "
            "with a longer context. Shorter chunks would be another protocol.",
        )
    passes, divergence = _measure(ctx, chunks)
    candidate, native = passes["candidate"], passes.get("native")
    samples: dict[str, Any] = {"chunks": candidate.chunks}
    facts |= {"data_sha": text.sha256, "data_source": text.source, "data_license": text.license}
    facts |= {"protocol": protocol, "split": text.split, "text": "raw", "chunk": SIZE}
    facts |= {
        "scored": sum(c.scored for c in chunks),
        "tokens": chunked.tokens,
        "positions": list(POSITIONS),
        "chunks_total": total,
        "chunk_places": places,
        "documents": len({c.document for c in chunks}),
        "skipped_rows": chunked.skipped_rows,
        "dropped_tokens": chunked.dropped_tokens,
        "tokens_per_forward": budget(ctx.model.device),
        "seconds_candidate": candidate.seconds,
        "seconds_native": native.seconds if native else None,
    }
    if native and divergence and ctx.baseline:
        own = [a | b for a, b in zip(candidate.chunks, divergence.by_chunk(), strict=True)]
        samples = {"chunks": own, "native_chunks": native.chunks, **divergence.samples()}
        facts["native_rerun_max_abs_nll"] = rerun_difference(ctx.baseline.samples["chunks"], native.chunks)
    partial = f"{len(chunks)} of {total} chunks, spread evenly" if len(chunks) < total else None
    return Measurement(samples, facts, partial)


def _measure(ctx: Context, chunks: Sequence[Chunk]) -> tuple[dict[str, Pass], Divergence | None]:
    """The passes by name: "candidate", and "native" for a candidate with `kld`; they alternate (A B B A)."""
    page, device = ctx.spec["page_size"], ctx.model.device
    packs = [[chunks[i] for i in pack] for pack in packed([len(c.tokens) for c in chunks], budget(device))]
    slots = max(sum(pages_for(len(c.tokens), page) for c in pack) for pack in packs) * page
    passes = {"candidate": Pass(ctx.engine(sequences=1, tokens=slots), ctx.spec["prefill_chunk"])}
    divergence = Divergence() if ctx.options["kld"] and not ctx.is_baseline else None
    if divergence:
        passes["native"] = Pass(ctx.native(sequences=1, tokens=slots), ctx.spec["prefill_chunk"])
    done = 0
    for index, pack in enumerate(packs):
        order = sorted(passes, reverse=index % 2 == 0)
        logits = {name: passes[name].forward(pack) for name in order}
        for i, chunk in enumerate(pack):
            targets = torch.tensor(chunk.tokens[chunk.skip :], device=device)
            if divergence is None:
                passes["candidate"].add(chunk, logprobs(logits["candidate"][i], targets))
                continue
            found = compare(logits["native"][i], logits["candidate"][i], targets)
            passes["native"].add(chunk, found.native)
            passes["candidate"].add(chunk, found.candidate)
            divergence.add(found)
        done += len(pack)
        ctx.progress(done, len(chunks), "chunks")
    return passes, divergence


def rerun_difference(record: Sequence[dict[str, Any]], rerun: Sequence[dict[str, Any]]) -> float:
    """Largest |NLL difference| of a chunk between the baseline's record and its re-run."""
    places = [[(c["tokens"], c["document"]) for c in chunks] for chunks in (record, rerun)]
    if places[0] != places[1]:
        raise KvbenchError("The baseline's record scored other chunks than this task; use --rerun all.")
    return float(max(abs(a["nll"] - b["nll"]) for a, b in zip(record, rerun, strict=True)))
