"""Attention of one forward over the paged store: store the new K/V of a layer, then attend to the pages.

Each backend makes of a `Chunk` what its kernels take, once a forward, and then serves every layer through

    attend(layer, q [N, Hq, D], k [N, H, D], v [N, H, Dv], scaling, mask) -> [N, Hq, Dv]

where N counts the new tokens of all sequences in packed order. Any strides will do.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kvbench_kernels.attention.hopper_plan import Plan
from kvbench_kernels.attention.reference import paged_attention_torch
from kvbench_kernels.kv.layout import attention_needs
from kvbench_kernels.launches import launched
from kvbench_kernels.support import AttentionNeeds

if TYPE_CHECKING:
    from kvbench.engines.reference.kv.store import PagedKVStore


class Mask(NamedTuple):
    """How a layer's attention differs from full softmax attention."""

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """seqs: in packed order; starts: tokens that each holds before; counts: new tokens of each."""

    seqs: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]

    @property
    def lengths(self) -> list[int]:
        return [start + n for start, n in zip(self.starts, self.counts, strict=True)]


class Attention(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Mask) -> Tensor: ...


class TorchAttention:
    """The reference: gathers and dequantizes the pages, then attends in torch. fresh (`prefill_reads:
    fresh`): a prompt's own chunk is taken as computed, and only earlier tokens come from the pages."""

    def __init__(self, store: PagedKVStore, chunk: Chunk, *, splits: int | None, fresh: bool = False) -> None:
        self.store, self.fresh = store, fresh
        self.slots = chunk_slots(store, chunk)
        self.groups = _groups(store, chunk)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Mask) -> Tensor:
        self.store.write(layer, self.slots, k, v)
        tokens, heads = q.shape[:2]
        out: Tensor | None = None
        for group in self.groups:
            rows = group.pages.shape[0]
            mine = q if group.tokens is None else q[group.tokens]
            mine = mine.reshape(rows, group.new, heads, -1).transpose(1, 2)
            past_k, past_v = self._read(layer, group, k, v)
            past = group.length - group.new
            result = paged_attention_torch(mine, past_k, past_v, scaling, past, *mask)
            launched("paged_attention_torch")
            flat = result.transpose(1, 2).reshape(rows * group.new, heads, -1)
            if group.tokens is None:
                return flat
            if out is None:
                out = flat.new_empty(tokens, heads, flat.shape[-1])
            out[group.tokens] = flat
        assert out is not None
        return out

    def _read(self, layer: int, group: _Group, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, H, L, D] and V [B, H, L, Dv] of a group."""
        if not (self.fresh and group.new > 1):
            return self.store.read(layer, group.pages, group.length, k.dtype)
        old_k, old_v = self.store.read(layer, group.pages, group.length - group.new, k.dtype)
        rows = group.pages.shape[0]

        def own(x: Tensor) -> Tensor:
            x = x if group.tokens is None else x[group.tokens]
            return x.reshape(rows, group.new, *x.shape[1:]).transpose(1, 2)

        return torch.cat([old_k, own(k)], dim=2), torch.cat([old_v, own(v)], dim=2)


@dataclass(frozen=True)
class TritonAttention:
    """Kernels over the pages: one launch quantizes and scatters, then decode or prefill attends.

    slots [N] int64, -1 for an absent row; pages [B, P] and lengths [B] int32, new tokens included (0: an
    absent row); query_starts [B + 1] int32; new: the largest count; longest, mean: of the lengths; past:
    tokens that every sequence held before where all counts and starts are equal, else None. splits: programs
    along a sequence in a decode, None to choose from the shape. workspaces: where a CUDA graph keeps the
    kernels' memory, None to share it with all other forwards."""

    store: PagedKVStore
    slots: Tensor
    pages: Tensor
    lengths: Tensor
    query_starts: Tensor
    new: int
    longest: int
    mean: int
    past: int | None
    splits: int | None
    workspaces: dict[AttentionNeeds, Any] | None = None

    @classmethod
    def of(
        cls, store: PagedKVStore, chunk: Chunk, *, splits: int | None, fresh: bool = False
    ) -> TritonAttention:
        assert not fresh, "the resolver refuses prefill_reads: fresh on this backend"
        device, lengths = store.device, chunk.lengths
        starts = torch.tensor([0, *chunk.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(
            store,
            chunk_slots(store, chunk),
            store.tables(chunk.seqs).to(torch.int32),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            starts.to(device),
            new=max(chunk.counts),
            longest=max(lengths),
            mean=sum(lengths) // len(lengths),
            past=chunk.starts[0] if len(set(zip(chunk.starts, chunk.counts, strict=True))) == 1 else None,
            splits=splits,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Mask) -> Tensor:
        store = self.store
        store.write(layer, self.slots, k, v)
        if self.new > 1 and mask == Mask() and self.past is not None:
            return self._alike(layer, q, scaling, self.past)
        cache, batch = store.layers[layer], (self.pages, self.lengths)
        q = q if q.stride(-1) == 1 else q.contiguous()
        extras: dict[str, Any] = {"sliding_window": mask.window, "softcap": mask.softcap, "sinks": mask.sinks}
        extras["reads"] = store.device_reads
        if self.new > 1:
            from kvbench_kernels.attention.prefill import paged_prefill  # Triton, where it is needed

            return paged_prefill(cache, q, *batch, self.query_starts, self.new, scaling, **extras)
        from kvbench_kernels.attention import route

        needs = attention_needs(cache, q, mask.window, mask.softcap, mask.sinks is not None)
        plan = route.plan(needs, len(self.lengths), self.longest, self.mean, self.splits)
        space = self.workspace(layer, needs, plan)
        if space is not None:
            extras["workspace"] = space
        return route.decode_kernel(needs)(cache, q, *batch, scaling, splits=plan, **extras)

    def workspace(self, layer: int, needs: AttentionNeeds, plan: int | Plan) -> Any:
        """This forward's own memory of the kernel, one for all layers that need as much; None to share."""
        if self.workspaces is None:
            return None
        if needs not in self.workspaces:
            from kvbench_kernels.attention import route

            self.workspaces[needs] = route.workspace(needs, len(self.lengths), plan, self.store.device)
        return self.workspaces[needs]

    def _alike(self, layer: int, q: Tensor, scaling: float, past: int) -> Tensor:
        """Chunks of equal length and start: dequantizes the pages once, then calls a library's attention."""
        rows, length = len(self.lengths), past + self.new
        k, v = self.store.read(layer, self.pages, length, q.dtype)
        queries = q.reshape(rows, self.new, *q.shape[1:]).transpose(1, 2)
        with sdpa_kernel(_FUSED, set_priority=True):
            bias, grouped = causal_lower_right(self.new, length), q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=bias, scale=scaling, enable_gqa=grouped
            )
        launched("scaled_dot_product_attention")
        return out.transpose(1, 2).reshape(rows * self.new, q.shape[1], -1)


# In the order in which they are tried: cuDNN's is the fastest on Hopper.
_BY_SPEED = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
_FUSED = [getattr(SDPBackend, name) for name in _BY_SPEED]


def chunk_slots(store: PagedKVStore, chunk: Chunk) -> Tensor:
    """[N] int64 slots of the new tokens, in packed order."""
    parts = zip(chunk.seqs, chunk.starts, chunk.counts, strict=True)
    return torch.cat([store.slots_for(seq, start, n) for seq, start, n in parts])


@dataclass(frozen=True)
class _Group:
    """Sequences with equal counts and lengths. tokens: their places in the packed row, int64 [B * T], or None
    when they are the whole row in order; pages: int64 [B, P]; new: T; length: L, new tokens included."""

    tokens: Tensor | None
    pages: Tensor
    new: int
    length: int


def _groups(store: PagedKVStore, chunk: Chunk) -> list[_Group]:
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (n, length) in enumerate(zip(chunk.counts, chunk.lengths, strict=True)):
        members[n, length].append(index)
    offsets = [0, *itertools.accumulate(chunk.counts)]
    groups = []
    for (n, length), indexes in members.items():
        tokens = None
        if len(members) > 1:
            tokens = torch.cat([torch.arange(offsets[i], offsets[i] + n) for i in indexes]).to(store.device)
        groups.append(_Group(tokens, store.tables([chunk.seqs[i] for i in indexes]), n, length))
    return groups
