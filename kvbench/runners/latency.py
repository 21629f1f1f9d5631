"""TTFT and ITL of one batch at one context length, interleaved with the native engine.

A candidate's task measures the arms "baseline" and "candidate" (A B B A ...). A baseline's task measures one
engine repeatedly, with all requests called "candidate"; neighbours give the noise floor.
"""

import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.engines.reference.backends import LIBRARY
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import LoadedModel
from kvbench.errors import Refused
from kvbench.evidence.kernels import ATTENDS, backend_label, run_of
from kvbench.files import content_hash
from kvbench.machine.device_state import DeviceState
from kvbench.runners.context import Context, Measurement
from kvbench.runners.timing import Timing, measure

SEED = 0
SHAPES = 32  # most prefill shapes captured as CUDA graphs: each costs time and memory in the first request
COPY_BYTES = 2 * 10**9
LEAST_COPY = 10**8  # a smaller copy stays in the cache

Piece = tuple[int, int, int]  # row, start, stop
Shape = tuple[int, int, int]  # sequences, tokens held, tokens added


class EngineArm:
    """A static batch on an engine: all prompts are submitted at once, each step is a token a sequence.

    chunk: most tokens of a prefill forward; new_tokens: tokens of a request, whose pages are reserved.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], chunk: int, new_tokens: int) -> None:
        self.engine, self.prompts, self.new_tokens = engine, prompts, new_tokens
        self.plan = list(prefill_plan([len(p) for p in prompts], chunk))
        self.shapes = prompt_shapes(self.plan)
        self.seqs: list[int] = []
        self.tokens: list[int] = []
        self._before = 0  # tokens that the engine had computed when the request was submitted

    def submit(self) -> None:
        self._before = self.engine.computed_tokens
        self.seqs = [self.engine.add() for _ in self.prompts]
        for seq, prompt in zip(self.seqs, self.prompts, strict=True):
            self.engine.store.reserve(seq, len(prompt) + self.new_tokens - 1)
        for shape in self.shapes:  # captured in the first request, which is a warm-up if there is one
            self.engine.capture_prompts(*shape)
        last: dict[int, Tensor] = {}
        for forward in self.plan:
            work = [(self.seqs[row], self.prompts[row][start:stop]) for row, start, stop in forward]
            logits = self.engine.forward(work, "last")
            last.update((row, out[-1]) for (row, _, _), out in zip(forward, logits, strict=True))
        rows = torch.stack([last[row] for row in range(len(self.prompts))])
        self.tokens = rows.argmax(dim=-1).tolist()  # on the host: part of the time

    def step(self) -> None:
        self.tokens = self.engine.greedy_step(self.seqs, self.tokens)

    def synchronize(self) -> None:
        self.engine.synchronize()

    def ran(self) -> dict[str, Any]:
        """The formats of this arm's engine, and the tokens that it computed for the request."""
        return {
            "kv_format": self.engine.store.fmt.name,
            "weights": self.engine.model.weights.format,
            "computed_tokens": self.engine.computed_tokens - self._before,
        }

    def close(self) -> None:
        for seq in self.seqs:
            self.engine.free(seq)
        self.seqs = []


def prefill_plan(lengths: Sequence[int], chunk: int) -> Iterator[list[Piece]]:
    """Forwards of at most `chunk` tokens that prefill all prompts in order, as (row, start, stop) pieces.

    A long prompt takes several forwards and short ones share one: [5, 5] in chunks of 4 is
    [(0, 0, 4)], [(0, 4, 5), (1, 0, 3)], [(1, 3, 5)].
    """
    forward: list[Piece] = []
    room = chunk
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            forward.append((row, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield forward
                forward, room = [], chunk
    if forward:
        yield forward


def shape_of(forward: Sequence[Piece]) -> Shape | None:
    """The shape of a forward whose pieces are equal; None for others."""
    (start, stop), *others = {piece[1:] for piece in forward}
    return None if others else (len(forward), start, stop - start)


def prompt_shapes(plan: Sequence[Sequence[Piece]]) -> list[Shape]:
    """The distinct shapes of the forwards, at most `SHAPES`."""
    shapes = dict.fromkeys(shape for forward in plan if (shape := shape_of(forward)) is not None)
    return list(shapes)[:SHAPES]


def random_prompts(model: LoadedModel, batch: int, context: int) -> list[list[int]]:
    """`batch` prompts of `context` ids, drawn with a fixed seed from the ids that are not special."""
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ids = [i for i in range(model.vocab_size) if i not in special]
    rng = random.Random(SEED)
    return [rng.choices(ids, k=context) for _ in range(batch)]


def run(ctx: Context) -> Measurement:
    batch, context, new_tokens = ctx.spec["batch"], ctx.spec["context"], ctx.options["new_tokens"]
    prompts = random_prompts(ctx.model, batch, context)
    capacity = {"sequences": batch, "tokens": context + new_tokens}
    engine = ctx.engine(**capacity)
    if backend_label(engine) == "interpreter":
        raise Refused(
            "interpreter_latency",
            "latency on backend triton with TRITON_INTERPRET set would time Triton's interpreter, not the "
            "kernels; unset TRITON_INTERPRET and measure on a CUDA device, or set backend: torch.",
        )
    engines = {"candidate": engine}
    if not ctx.is_baseline:
        engines = {"baseline": ctx.native(**capacity), **engines}
    chunk = ctx.spec["prefill_chunk"]
    arms = [(name, EngineArm(own, prompts, chunk, new_tokens)) for name, own in engines.items()]
    own, counts = arms[-1][1], {key: ctx.options[key] for key in ("repeats", "warmup")}
    load_before = os.getloadavg()[0]
    with closing(DeviceState(ctx.model.device)) as state:
        others = [state.others()]
        timings = measure(arms, new_tokens=new_tokens, **counts, progress=ctx.progress, read_state=state.read)
        others.append(state.others())
        known = [found for found in others if found is not None]  # before the first request, after the last
        most = max(known, key=lambda found: found["count"] or 0) if known else None
        found_by, unread = state.found_by or None, dict(state.unread)
        device_state = {**state.fixed(), "found_by": found_by, "other_processes": most, "unread": unread}
    shape = {"prefill_tokens": batch * context, "batch": batch, "new_tokens": new_tokens}
    samples = {
        "arms": [{"order": t.order, **_times(t), **shape, "device": t.device} for t in timings.measured],
        "warmup": [_times(t) for t in timings.warmup],
    }
    modes = {"decode": engine.decode_mode, "layers": engine.compile_mode, "backend": backend_label(engine)}
    facts = {
        **counts,
        "clock": "perf_counter",
        "synchronised": True,
        "threads": torch.get_num_threads(),
        "host_load": {"before": load_before, "after": os.getloadavg()[0], "cpus": os.cpu_count()},
        "prompt": f"seeded random token ids (seed {SEED}), special tokens left out",
        "prompt_sha": content_hash(prompts),
        "prefill_forwards": len(own.plan),
        "prefill_graphs": sum(shape_of(forward) in engine.prompt_graphs for forward in own.plan),
        **modes,
        "arms": {name: arm_facts(engine) for name, engine in engines.items()},
        **device_facts(ctx.model.device),
        "device_state": device_state,
    }
    return Measurement(samples, facts)


def _times(t: Timing) -> dict[str, Any]:
    times = {"ttft_ms": t.ttft_ms, "itl_ms": list(t.itl_ms), "total_ms": t.total_ms}
    return {"arm": t.arm, **times, "ran": dict(t.ran)}


def arm_facts(engine: Engine) -> dict[str, Any]:
    """{"settings": the engine's, after its requests; "reads": least bytes that a decode step reads}."""
    run, decision, model = run_of(engine), engine.decision, engine.model
    kernels = sorted({name for _, name in run.calls if name == LIBRARY or name.startswith(ATTENDS)})
    settings: dict[str, Any] = {
        "weights": decision.weights.resolved,
        "gemm": decision.gemm.resolved,
        "kernels": kernels,
    }
    settings |= {"decode": engine.decode_mode, "compile": engine.compile_mode, "splits": sorted(run.splits)}
    settings |= {"device": str(model.device), "dtype": model.dtype_name, "backend": backend_label(engine)}
    weights = step_weight_bytes(model.model)
    reads = {"weight_bytes": weights, "kv_bytes_per_token": kv_bytes_per_token(engine)}
    return {"settings": settings, "reads": reads}


def step_weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that every decode step reads whole: all but input embeddings (unless tied to the
    output layer) and experts, tied ones once.
    """
    rows = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tensors = {
        (t.data_ptr(), t.numel() * t.element_size())
        for name, t in model.state_dict().items()
        if t.numel() and name.rpartition(".")[0] not in rows and ".experts." not in f".{name}"
    }
    return sum(size for _, size in tensors)


def kv_bytes_per_token(engine: Engine) -> float:
    """Bytes that each token of context adds to what a step reads; layers with a window are left out."""
    store, layers = engine.store, enumerate(engine.layers)
    live = sum(store.live_bytes(i).total for i, layer in layers if layer.sliding_window is None)
    return live / (store.num_pages * store.page_size)


def device_facts(device: torch.device) -> dict[str, Any]:
    """{"copy_gb_s": bytes read and written a second by a copy on the device, or None, "copy_reason", ...}."""
    if device.type != "cuda":
        return {"copy_gb_s": None, "copy_reason": f"no copy is timed on a {device.type}", "cache_bytes": None}
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    if size < max(LEAST_COPY, 4 * cache):
        reason = f"{size:,} B of free memory are too little to time a copy"
        return {"copy_gb_s": None, "copy_reason": reason, "cache_bytes": cache}
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    event: Any = torch.cuda.Event
    rates = []
    for _ in range(8):
        start, stop = (event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize(device)
        rates.append(2 * size / start.elapsed_time(stop) / 1e6)
    return {"copy_gb_s": statistics.median(rates[1:]), "copy_reason": "", "cache_bytes": cache}
