"""The engine: a loaded model over its own paged KV store, in the format that the decision resolved.

Quantize-then-attend: every query attends to the stored K/V of all earlier tokens and of its own chunk, in
prefill and in decode alike, so a quality number is measured on what the pages hold.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvbench.engines.protocol import Logits
from kvbench.engines.reference.attention import Attention, Chunk
from kvbench.engines.reference.backends import BACKENDS
from kvbench.engines.reference.binding import Step
from kvbench.engines.reference.graph import DecodeGraph, PromptGraph, about, bucket
from kvbench.engines.reference.kv.layer import check_fits, free_bytes
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.engines.reference.load import LoadedModel
from kvbench.engines.reference.weights.fp8_linear import using
from kvbench.errors import KvbenchError, Refused
from kvbench.formats.kv import KV_FORMATS, KVFormat, pages_for
from kvbench.formats.scales import from_checkpoint, settle
from kvbench.matrix.resolve_backend import Decision
from kvbench.models.attention_facts import LayerFacts
from kvbench_kernels.launches import Launch, record

Product = tuple[int, int, int]

# Longest prompts, in tokens of a forward, that are captured: beyond it the device takes longer than the host.
GRAPH_TOKENS = 4096


def store_format(decision: Decision) -> KVFormat:
    """The hop from decision to store: the resolved KV format's descriptor."""
    return KV_FORMATS[decision.kv_format.resolved]


def path_asked(resolved: str) -> str:
    """The path that a resolved `gemm` asks of each product, or "auto" where the shape decides."""
    return "auto" if resolved in ("native", "by_shape") else resolved


def products_of(launches: Sequence[Launch]) -> Counter[tuple[str, Product]]:
    """(kernel, (M, N, K)) -> launches for FP8 linear layers."""
    return Counter((launch.name, launch.product) for launch in launches if launch.product is not None)


def static_scales(scale: Any, model: LoadedModel) -> list[tuple[float, float]] | None:
    """A cell's `scale` as one (k, v) pair a layer. Refused for another number of layers or no scales."""
    if scale is None:
        return None
    stored = model.cache_scales if from_checkpoint(scale) else {}
    return [(k.value, v.value) for k, v in settle(scale, len(model.layers), stored)]


class Engine:
    """Sequences of tokens over paged storage. Not thread-safe; several engines may share one LoadedModel.
    sequences, tokens: capacity; the store holds `sequences * ceil(tokens / page_size)` pages. Raises
    Refused("kv_does_not_fit"), before it is allocated, when the device has no room for it."""

    def __init__(
        self, model: LoadedModel, decision: Decision, spec: Mapping[str, Any], *, sequences: int, tokens: int
    ) -> None:
        self.model, self.decision, self.spec = model, decision, spec
        self.layers: tuple[LayerFacts, ...] = model.layers
        fmt, size = store_format(decision), spec["page_size"]
        scales = static_scales(spec["scale"], model) if fmt.scale_kind == "static" else None
        shapes = [layer.shape for layer in self.layers]
        if (free := free_bytes(model.device)) is not None:
            check_fits(fmt, shapes, size, model.dtype_name, sequences, tokens, free)
        self.backend, pages = BACKENDS[decision.backend.resolved], sequences * pages_for(tokens, size)
        store = self.store = PagedKVStore(
            fmt, shapes, size, pages, model.dtype, model.device, scales, self.backend
        )
        self.add, self.fork, self.free, self.truncate = store.add, store.fork, store.free, store.truncate
        self.length, self.swap_out, self.swap_in = store.length, store.swap_out, store.swap_in
        self.discard_swapped = store.discard_swapped
        self.sequences, self.tokens = sequences, tokens
        self.decode_mode, self.compile_mode = decision.decode.resolved, decision.compile.resolved
        self.gemm = decision.gemm.resolved
        self.graphs: dict[tuple[int, int, int], DecodeGraph] = {}
        self.prompt_graphs: dict[tuple[int, int, int], PromptGraph] = {}
        # Of forwards that were no graph's replay.
        self._launches: Counter[tuple[int, str, int | None]] = Counter()
        self._products: Counter[tuple[str, Product]] = Counter()
        self._splits: int | None = spec["kv_splits"]
        self._watch: Callable[[Attention], Attention] | None = None
        self.graph_pool = torch.cuda.graph_pool_handle() if self.decode_mode == "graph" else None
        self.tap_layers: frozenset[int] = frozenset()
        self.taps: dict[int, tuple[Tensor, Tensor]] = {}
        self.computed_tokens, self.forwards = 0, 0
        self.due_reads = 0  # K/V tokens, over all layers, that the forwards so far must have read from pages

    def forward(self, work: Sequence[tuple[int, Sequence[int]]], logits: Logits = "last") -> list[Tensor]:
        """Append tokens to sequences in one packed forward: one float32 tensor a pair of `work`. work:
        (sequence, its new tokens) pairs, each sequence once. logits: [n, V] for "all", [1, V] for "last", [0,
        V] for "none". Raises Refused past the model's context, KvbenchError on a full store."""
        seqs, counts = [seq for seq, _ in work], [len(tokens) for _, tokens in work]
        if not work or min(counts) < 1:
            raise KvbenchError("A forward needs at least one token for each of its sequences.")
        starts = self._make_room(seqs, counts)
        plain = self.decode_mode == "graph" and not self.tap_layers
        alike = plain and logits == "last" and len(set(zip(starts, counts, strict=True))) == 1
        prompts = self.prompt_graphs.get((len(work), starts[0], counts[0])) if alike else None
        if prompts is not None:
            prompts.load(seqs, [tokens for _, tokens in work])
            prompts.replay()
            self.store.wrote(sum(counts))
            rows = prompts.logits.to(torch.float32, copy=True)
        elif plain and max(counts) == 1:
            rows = self._replay(seqs, starts, [tokens[0] for _, tokens in work])
        else:
            rows = self._eager(work, Chunk(seqs, starts, counts), logits)
        self._appended(seqs, starts, counts)
        if logits == "none":
            return [rows[:0]] * len(work)
        return list(torch.split(rows, counts if logits == "all" else 1))

    def _make_room(self, seqs: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Pages for so many more tokens of each sequence; what each holds now."""
        starts = [self.store.length(seq) for seq in seqs]
        limit = self.model.facts.max_context
        longest = max(start + n for start, n in zip(starts, counts, strict=True))
        if limit is not None and longest > limit:
            sentence = f"A sequence of {longest} tokens exceeds the model's limit of {limit}; shorten it."
            raise Refused("invalid_context", sentence)
        for seq, n in zip(seqs, counts, strict=True):
            self.store.reserve(seq, n)
        return starts

    def _appended(self, seqs: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Count a forward: the tokens that it wrote in every layer, and the reads that they need."""
        self.forwards += 1
        for seq, n in zip(seqs, counts, strict=True):
            self.store.commit(seq, n)
        own = 0 if self.spec["prefill_reads"] == "fresh" else 1
        self.due_reads += len(self.layers) * sum(
            start + (n if n == 1 else own * n) for start, n in zip(starts, counts, strict=True)
        )
        self.computed_tokens += sum(counts)

    def _eager(self, work: Sequence[tuple[int, Sequence[int]]], chunk: Chunk, logits: Logits) -> Tensor:
        """One packed forward, kernel by kernel: float32 logits of all tokens, or of each sequence's last."""
        device = self.model.device
        ids = torch.tensor([t for _, tokens in work for t in tokens], dtype=torch.long)
        spans = zip(chunk.starts, chunk.lengths, strict=True)
        positions = torch.cat([torch.arange(start, length) for start, length in spans])
        fresh = self.spec["prefill_reads"] == "fresh"
        attention = self.backend.attention(self.store, chunk, splits=self._splits, fresh=fresh)
        if self._watch is not None:
            attention = self._watch(attention)
        ends = torch.tensor(chunk.counts).cumsum(0) - 1
        keep: Tensor | int = 0 if logits == "all" else ends.to(device) if logits == "last" else 1
        form = "prefill" if max(chunk.counts) > 1 else "decode"
        with record() as launches:
            kept = self.run_model(attention, ids[None].to(device), positions[None].to(device), keep, form)
        self._launches.update((x.layer, x.name, x.splits) for x in launches if x.layer is not None)
        self._products.update(products_of(launches))
        return kept[0].float()

    @property
    def launches(self) -> Counter[tuple[int, str, int | None]]:
        """(layer, kernel, splits) -> calls, in all forwards so far, replays of graphs included."""
        calls = Counter(self._launches)
        for graph in (*self.graphs.values(), *self.prompt_graphs.values()):
            for launch in graph.launches:
                if launch.layer is not None:
                    calls[launch.layer, launch.name, launch.splits] += graph.replays
        return calls

    @property
    def products(self) -> Counter[tuple[str, Product]]:
        """(kernel, (M, N, K)) -> calls of FP8 linear layers in all forwards, replays of graphs included."""
        calls = Counter(self._products)
        for graph in (*self.graphs.values(), *self.prompt_graphs.values()):
            for key, count in products_of(graph.launches).items():
                calls[key] += count * graph.replays
        return calls

    def run_model(
        self, attention: Attention, ids: Tensor, positions: Tensor, keep: Tensor | int, form: str
    ) -> Tensor:
        """Logits [1, kept, V] on packed ids and positions [1, N]. form: of compiled layers."""
        binding = self.model.binding
        step = binding.step = Step(attention, self.tap_layers, {})
        layers = self.model.compiled.running(form) if self.compile_mode == "layer" else nullcontext()
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False, "logits_to_keep": keep}
        try:
            with torch.inference_mode(), layers, using(path_asked(self.gemm)):
                logits: Tensor = self.model.model(**given).logits
        finally:
            binding.step = None
        self.taps = step.taps
        return logits

    def _replay(self, seqs: Sequence[int], starts: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One token for each sequence by a CUDA graph, captured when needed: float32 logits [B, V]."""
        graph = self._graph(starts)
        graph.load(seqs, starts, tokens)
        graph.replay()
        self.store.wrote(len(seqs))
        # A copy for float32 models too: the next replay overwrites the graph's own.
        return graph.logits[: len(seqs)].to(torch.float32, copy=True)

    def capture_prompts(self, batch: int, start: int, length: int) -> None:
        """Make forwards of this shape one CUDA graph from now on, where decode is one and they are short.
        batch sequences that hold `start` tokens take `length` more each."""
        short = length > 1 and batch * length <= GRAPH_TOKENS
        if self.decode_mode == "graph" and short and (batch, start, length) not in self.prompt_graphs:
            self.prompt_graphs[batch, start, length] = PromptGraph(self, batch, start, length)

    def _graph(self, lengths: Sequence[int]) -> DecodeGraph:
        """The graph for sequences that hold so many tokens, captured where there is none yet."""
        mean = sum(lengths) // len(lengths)
        key = bucket(len(lengths), self.sequences), about(max(lengths) + 1), about(mean + 1)
        if key not in self.graphs:
            self.graphs[key] = DecodeGraph(self, *key)
        return self.graphs[key]

    def greedy_step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Append one token to each sequence; the argmax that follows, sampled on the device, on the host."""
        if self.decode_mode != "graph":
            return self.decode(seqs, tokens).argmax(dim=-1).tolist()
        counts = [1] * len(seqs)
        starts = self._make_room(seqs, counts)
        graph = self._graph(starts)
        if not graph.continues(seqs, starts, tokens):
            graph.load(seqs, starts, tokens)
        graph.replay()
        chosen = graph.chosen(seqs, starts)
        self.store.wrote(len(seqs))
        self._appended(seqs, starts, counts)
        return chosen

    def launches_of_step(self, seq: int, token: int) -> Sequence[Launch]:
        """The launches of one decode step of `seq`, which it appends; of a graph, those of its capture."""
        with record() as launches:
            self.decode([seq], [token])
        if self.decode_mode != "graph":
            return launches
        return self._graph([self.length(seq) - 1]).launches

    @contextmanager
    def eagerly(self, watch: Callable[[Attention], Attention], splits: int | None = None) -> Iterator[None]:
        """Forwards inside the `with` run kernel by kernel, nothing compiled, and what they attend with is
        wrapped. splits: programs along a sequence in a decode, where the cell leaves them to the engine."""
        kept = self.decode_mode, self.compile_mode, self._watch, self._splits
        self.decode_mode, self.compile_mode, self._watch = "eager", "off", watch
        self._splits = self._splits if splits is None or self._splits is not None else splits
        try:
            yield
        finally:
            self.decode_mode, self.compile_mode, self._watch, self._splits = kept

    def prefill(self, seq: int, tokens: Sequence[int], logits: Logits = "last") -> Tensor:
        """`tokens` in chunks of the cell's `prefill_chunk`; logits of all chunks joined for "all"."""
        chunk, out = self.spec["prefill_chunk"], []
        for start in range(0, len(tokens), chunk):
            wanted = logits == "all" or start + chunk >= len(tokens)
            part = tokens[start : start + chunk]
            out.append(self.forward([(seq, part)], logits if wanted else "none")[0])
        return torch.cat(out) if logits == "all" else out[-1]

    def decode(self, seqs: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """One token for each sequence; float32 logits [B, V]."""
        return torch.cat(self.forward([(s, [t]) for s, t in zip(seqs, tokens, strict=True)], "last"))

    def synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def check_health(self) -> None:
        """Raises KvbenchError when a written K or V was not finite or could not be represented."""
        for entry in self.store.health():
            for kind in [kind for kind in ("nonfinite", "overflow") if entry[kind]]:
                raise KvbenchError(
                    f"Layer {entry['layer']}: {entry[kind]} {kind} K/V values were written in "
                    f"{self.store.fmt.name}; the format cannot hold them, so the cell has no valid result."
                )
