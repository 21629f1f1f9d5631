"""Steps as CUDA graphs. A decode step: forward, sampling and the advance to the next token, without the host.

Token ids, lengths and page tables live in static tensors on the device. A replay appends each row's token,
attends, takes the argmax and leaves everything as the next step needs it. Absent rows have length -1: they
store and attend to nothing. A graph belongs to one engine, batch and division of the work, not to a length.
Short prompts and chunks have graphs too, one a shape, where a caller asks for it: their launches take the
host longer than the device.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.engines.reference.attention import TritonAttention
from kvbench.formats.kv import pages_for
from kvbench_kernels.launches import Launch, record
from kvbench_kernels.support import AttentionNeeds

if TYPE_CHECKING:
    from kvbench.engines.reference.engine import Engine

WARMUP = 3  # steps before the capture, in which kernels are compiled and libraries allocate their workspaces


def about(length: int) -> int:
    """The power of two nearest to a length: what the division of the work in a graph is chosen for."""
    return 1 << round(math.log2(max(length, 1)))


def bucket(batch: int, capacity: int) -> int:
    """Rows of the graph for `batch` sequences: the next power of two, at most the engine's capacity."""
    return max(batch, min(1 << (batch - 1).bit_length(), capacity))


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: freeing the graphs of an earlier engine would end the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraph:
    """A captured step. launches: a replay's launches of our kernels; replays: how many so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.replays = engine, 0
        self.logits = torch.empty(0)
        self.launches: tuple[Launch, ...] = ()
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, step: Callable[[], Tensor]) -> None:
        """step: rows that are absent, or not to be stored, may change only the counters of the store."""
        store, device = self.engine.store, self.engine.store.device
        with torch.inference_mode(), store.not_counting():
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARMUP):
                    step()
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            graph = torch.cuda.graph(self._graph, pool=self.engine.graph_pool)
            with _no_collection(), graph, record() as launches:
                self.logits = step()
        self.launches = tuple(launches)

    def replay(self) -> None:
        self._graph.replay()
        self.replays += 1


class DecodeGraph(StepGraph):
    """One token for `batch` sequences. logits [batch, V]; longest, mean: about how many tokens they hold."""

    def __init__(self, engine: Engine, batch: int, longest: int, mean: int) -> None:
        super().__init__(engine)
        store, device = engine.store, engine.store.device
        self._longest, self._mean, self._workspaces = longest, mean, dict[AttentionNeeds, Any]()
        columns = min(store.num_pages, pages_for(engine.tokens, store.page_size))
        self._ids = torch.zeros(1, batch, dtype=torch.long, device=device)
        # Tokens that each row holds before the step; -1: the row is not there.
        self._lengths = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self._pages = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._chosen = torch.empty(batch, dtype=torch.long, pin_memory=True)
        self._expects: tuple[object, ...] | None = None
        self.capture(self._step)

    def _step(self) -> Tensor:
        store = self.engine.store
        there = self._lengths >= 0
        held = self._lengths.clamp(min=0)
        page = self._pages.gather(1, (held // store.page_size).long()[:, None])[:, 0].long()
        slots = torch.where(there, page * store.page_size + held % store.page_size, -1)
        tensors = store, slots, self._pages, self._lengths + 1, self._starts
        work = 1, self._longest, self._mean, None, self.engine.spec["kv_splits"]  # new .. splits
        attention = TritonAttention(*tensors, *work, self._workspaces)
        logits = self.engine.run_model(attention, self._ids, held.long()[None], 0, "decode")[0]
        self._ids.copy_(logits.argmax(dim=-1)[None])
        self._lengths.copy_(torch.where(there, self._lengths + 1, -1))
        return logits

    def load(self, seqs: Sequence[int], starts: Sequence[int], tokens: Sequence[int]) -> None:
        """Make the next replay append `tokens` to `seqs`, which hold `starts` tokens and have the pages."""
        rows, table = len(seqs), self.engine.store.tables(seqs)
        self._ids[0, :rows].copy_(torch.tensor(tokens))
        self._lengths.fill_(-1)
        self._lengths[:rows].copy_(torch.tensor(starts))
        self._pages[:rows, : table.shape[1]].copy_(table)
        self._expects = None

    def continues(self, seqs: Sequence[int], starts: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the last replay left everything as this step needs it."""
        return self._expects == (list(seqs), list(starts), list(tokens), self.engine.store.table.version)

    def replay(self) -> None:
        super().replay()
        self._expects = None

    def chosen(self, seqs: Sequence[int], starts: Sequence[int]) -> list[int]:
        """The tokens that the last replay sampled, on the host."""
        self._chosen.copy_(self._ids[0], non_blocking=True)
        torch.cuda.current_stream(self.engine.store.device).synchronize()
        tokens: list[int] = self._chosen[: len(seqs)].tolist()
        after = [start + 1 for start in starts]
        self._expects = (list(seqs), after, tokens, self.engine.store.table.version)
        return tokens


class PromptGraph(StepGraph):
    """`length` tokens for `batch` sequences that hold `start` each. logits [batch, V], of the last tokens."""

    def __init__(self, engine: Engine, batch: int, start: int, length: int) -> None:
        super().__init__(engine)
        store, device = engine.store, engine.store.device
        self._start, self._length, end = start, length, start + length
        token = torch.arange(start, end, device=device)
        self._column, self._offset = token // store.page_size, token % store.page_size
        self._positions = token.repeat(batch)[None]
        self._ids = torch.zeros(1, batch * length, dtype=torch.long, device=device)
        self._stored = torch.zeros((), dtype=torch.bool, device=device)
        self._pages = torch.zeros(batch, pages_for(end, store.page_size), dtype=torch.int32, device=device)
        self._lengths = torch.full((batch,), end, dtype=torch.int32, device=device)
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        self._last = torch.arange(1, batch + 1, device=device) * length - 1
        reads = store.device_reads.clone()
        self.capture(self._step)
        store.device_reads.copy_(reads)  # the runs before the capture were none of a sequence
        self._stored.fill_(True)

    def _step(self) -> Tensor:
        store, end = self.engine.store, self._start + self._length
        slots = self._pages[:, self._column].long() * store.page_size + self._offset
        slots = torch.where(self._stored, slots.flatten(), -1)
        tensors = store, slots, self._pages, self._lengths, self._starts
        attention = TritonAttention(*tensors, self._length, end, end, self._start, None)
        return self.engine.run_model(attention, self._ids, self._positions, self._last, "prefill")[0]

    def load(self, seqs: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Make the next replay append to `seqs`, which hold `start` tokens each and have the pages."""
        self._ids.copy_(torch.tensor(prompts).reshape(1, -1))
        self._pages.copy_(self.engine.store.tables(seqs)[:, : self._pages.shape[1]])
