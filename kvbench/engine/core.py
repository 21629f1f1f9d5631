"""The engine: a loaded model over its own paged KV store, in the format that the decision resolved.

Quantize-then-attend: every query attends to the stored K/V of all earlier tokens and of its own chunk, in prefill
and in decode alike, so a quality number is measured on what the pages hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.decision import Decision, LayerFacts
from kvbench.engine.binding import Group, Step
from kvbench.engine.layer import dtype_name
from kvbench.engine.load import LoadedModel
from kvbench.engine.memory import check_fits, free_bytes
from kvbench.engine.store import PagedKVStore
from kvbench.engine.swap import Transfer
from kvbench.errors import KvbenchError, Refused
from kvbench.formats import KV_FORMATS, KVFormat, pages_for

Logits = Literal["all", "last", "none"]


def store_format(decision: Decision) -> KVFormat:
    """The hop from decision to store: the resolved KV format's descriptor."""
    return KV_FORMATS[decision.kv_format.resolved]


def static_scales(scale: Any, layers: int) -> list[tuple[float, float]] | None:
    """The matrix's `scale` as one (k, v) pair a layer: a number, or {"k", "v"} of numbers or of lists a layer.

    Raises Refused when a list does not have one value a layer.
    """
    if scale is None:
        return None
    sides = scale if isinstance(scale, Mapping) else {"k": scale, "v": scale}
    columns = []
    for side in ("k", "v"):
        value = sides[side]
        column = list(value) if isinstance(value, (list, tuple)) else [value] * layers
        if len(column) != layers:
            raise Refused(
                "scale_count",
                f"scale.{side} has {len(column)} values and the model has {layers} layers; give one a layer or one number.",
            )
        columns.append([float(x) for x in column])
    return list(zip(*columns, strict=True))


class Engine:
    """Sequences of tokens over paged storage. Not thread-safe; several engines may share one LoadedModel.

    sequences, tokens: capacity; the store holds `sequences * ceil(tokens / page_size)` pages. Raises
    Refused("kv_does_not_fit"), before it is allocated, when the device has no room for it.
    """

    def __init__(
        self, model: LoadedModel, decision: Decision, spec: Mapping[str, Any], *, sequences: int, tokens: int
    ) -> None:
        self.model, self.decision, self.spec = model, decision, spec
        self.layers: tuple[LayerFacts, ...] = model.layers
        fmt = store_format(decision)
        scales = static_scales(spec["scale"], len(self.layers)) if fmt.scale_kind == "static" else None
        shapes = [layer.shape for layer in self.layers]
        free = free_bytes(model.device)
        if free is not None:
            dtype = dtype_name(model.dtype)
            check_fits(fmt, shapes, spec["page_size"], dtype, sequences, tokens, free)
        self.store = PagedKVStore(
            fmt,
            shapes,
            spec["page_size"],
            sequences * pages_for(tokens, spec["page_size"]),
            model.dtype,
            model.device,
            scales,
        )
        self.tap_layers: frozenset[int] = frozenset()
        self.taps: dict[int, tuple[Tensor, Tensor]] = {}
        self.computed_tokens = 0
        self.due_reads = 0  # K/V tokens, over all layers, that the forwards so far must have read from pages

    def add(self) -> int:
        """A new empty sequence."""
        return self.store.add()

    def fork(self, seq: int) -> int:
        """A copy of `seq` that shares its full pages; the partly filled last page is copied."""
        return self.store.fork(seq)

    def free(self, seq: int) -> None:
        self.store.free(seq)

    def truncate(self, seq: int, length: int) -> None:
        self.store.truncate(seq, length)

    def swap_out(self, seq: int) -> Transfer:
        """Move a sequence's pages to the host; until `swap_in` nothing else can be done with it."""
        return self.store.swap_out(seq)

    def swap_in(self, seq: int) -> Transfer:
        return self.store.swap_in(seq)

    def discard_swapped(self, seq: int) -> None:
        """Give up a swapped sequence, which `free` refuses to do."""
        self.store.discard_swapped(seq)

    def length(self, seq: int) -> int:
        return self.store.length(seq)

    def forward(self, work: Sequence[tuple[int, Sequence[int]]], logits: Logits = "last") -> list[Tensor]:
        """Append tokens to sequences in one packed forward.

        work: (sequence, its new tokens) pairs, each sequence once, at least one token each. Returns one float32
        tensor a pair: [n, V] for "all", [1, V] for "last", [0, V] for "none". Raises Refused past the model's
        context, KvbenchError when the store is full.
        """
        counts = [len(tokens) for _, tokens in work]
        if not work or min(counts) < 1:
            raise KvbenchError("A forward needs at least one token for each of its sequences.")
        starts = [self.store.length(seq) for seq, _ in work]
        limit = self.model.facts.max_context
        longest = max(start + n for start, n in zip(starts, counts, strict=True))
        if limit is not None and longest > limit:
            raise Refused(
                "invalid_context",
                f"A sequence of {longest} tokens exceeds the model's limit of {limit}; shorten it.",
            )
        for (seq, _), n in zip(work, counts, strict=True):
            self.store.reserve(seq, n)
        device = self.model.device
        ids = torch.tensor([t for _, tokens in work for t in tokens], dtype=torch.long)
        positions = torch.cat(
            [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        )
        slots = torch.cat(
            [
                self.store.slots_for(seq, start, n)
                for (seq, _), start, n in zip(work, starts, counts, strict=True)
            ]
        )
        step = Step(
            self.store, slots, self._groups([seq for seq, _ in work], starts, counts),
            self.spec["prefill_reads"] == "fresh", self.tap_layers, {},
        )  # fmt: skip
        ends = torch.tensor(counts).cumsum(0) - 1
        keep: Tensor | int = 0 if logits == "all" else ends.to(device) if logits == "last" else 1
        binding = self.model.binding
        binding.step = step
        try:
            with torch.inference_mode():
                output = self.model.model(
                    input_ids=ids[None].to(device),
                    position_ids=positions[None].to(device),
                    use_cache=False,
                    logits_to_keep=keep,
                )
        finally:
            binding.step = None
        for (seq, _), n in zip(work, counts, strict=True):
            self.store.commit(seq, n)
        own = 0 if self.spec["prefill_reads"] == "fresh" else 1
        self.due_reads += len(self.layers) * sum(
            start + (n if n == 1 else own * n) for start, n in zip(starts, counts, strict=True)
        )
        self.taps = step.taps
        self.computed_tokens += sum(counts)
        rows: Tensor = output.logits[0].float()
        if logits == "none":
            return [rows[:0]] * len(work)
        return list(torch.split(rows, counts if logits == "all" else 1))

    def _groups(self, seqs: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> list[Group]:
        device = self.model.device
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (start, n) in enumerate(zip(starts, counts, strict=True)):
            members[n, start + n].append(index)
        offsets = [0]
        for n in counts:
            offsets.append(offsets[-1] + n)
        groups = []
        for (n, length), indexes in members.items():
            tokens = None
            if len(members) > 1:
                tokens = torch.cat([torch.arange(offsets[i], offsets[i] + n) for i in indexes]).to(device)
            groups.append(Group(tokens, self.store.tables([seqs[i] for i in indexes]), n, length))
        return groups

    def prefill(self, seq: int, tokens: Sequence[int], logits: Logits = "last") -> Tensor:
        """`tokens` in chunks of the cell's `prefill_chunk`; logits of all chunks joined for "all"."""
        chunk: int = self.spec["prefill_chunk"]
        out = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            last = start + chunk >= len(tokens)
            want: Logits = "all" if logits == "all" else logits if last else "none"
            out.append(self.forward([(seq, part)], want)[0])
        return torch.cat(out) if logits == "all" else out[-1]

    def decode(self, seqs: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One token for each sequence; float32 logits [B, V]."""
        return torch.cat(self.forward([(s, [t]) for s, t in zip(seqs, tokens, strict=True)], "last"))

    def synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def check_health(self) -> None:
        """Raises KvbenchError when a non-finite or unrepresentable K/V was written: such a cell has no result."""
        for entry in self.store.health():
            for kind in ("nonfinite", "overflow"):
                if entry[kind]:
                    raise KvbenchError(
                        f"Layer {entry['layer']}: {entry[kind]} {kind} K/V values were written in "
                        f"{self.store.fmt.name}; the format cannot hold them, so the cell has no valid result."
                    )
