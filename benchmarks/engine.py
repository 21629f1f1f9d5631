"""ITL, TTFT and perplexity throughput of the engine on one GPU, beside transformers with a static cache.

    python -m benchmarks.engine [--formats native,int8_sym,fp8_e4m3] [--weights native,fp8_block128]
                                [--parts itl,ttft,perplexity,peer,weights_itl,weights_ttft] [--out DIR]
                                [--itl-cells 1x1024,...] [--ttft-cells 1x1024,...] [--repeats 5]
    python -m benchmarks.engine --shape tiny         # the same on whatever is here, to try the script

A Qwen3-8B shape with random weights, loaded once. Everything is the code that the runners use: the engine
with what the resolver chose, the latency runner's arms and timing loop (interleaved, TTFT and ITL as defined
there, sampling included), the perplexity runner's passes.

    itl         decode steps on a cache of random K and V, so that a long context needs no prompt
    ttft        whole prompts
    peer        transformers' model on the same weight tensors, its decode compiled with mode reduce-overhead
                on a static cache of random values, interleaved with the native engine
    perplexity  chunks of 512 random tokens through the pages, logits scored
    weights_*   itl and ttft of FP8 weights: an arm "fp8_block128/int8_sym" (weights, then KV) next to the
                native one. Its weights are the native ones, quantized on load; both models stay on the device

Medians over the repeats with their range. The goals are a table (`GOALS`), each printed as reached, missed or
not measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Finding, Goal, as_json, chosen, finding, goal_lines
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS, KVShape
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import request_of, resolve
from kvbench.runners.latency import EngineArm, random_prompts
from kvbench.runners.perplexity import Pass
from kvbench.runners.text.chunking import SIZE, Chunk
from kvbench.runners.text.logits import budget, logprobs, packed
from kvbench.runners.timing import Arm, measure
from kvbench_kernels.support import GEMMS

# What a part measures; perplexity measures two things, of which the second fails with the first.
METRICS = {
    "itl": "itl_ms",
    "ttft": "ttft_ms",
    "perplexity": "pass_s",
    "peer": "peer_itl_ms",
    "weights_itl": "weights_itl_ms",
    "weights_ttft": "weights_ttft_ms",
}
PARTS = tuple(METRICS)
# The KV formats that quantized weights are timed with.
KV_OF_ITL, KV_OF_TTFT = "int8_sym", "native"
SEED = 0
STATIC_SCALE = 0.05
TTFT_TOKENS = 65536  # of an arm's prompts of one cell, all repeats together, where --repeats is fewer


@dataclass(frozen=True)
class Setup:
    """What is measured on a model. Cells are BATCHxCONTEXT; new_tokens: of an ITL request; chunks: of a
    perplexity pass; weights_*: cells of quantized weights.
    """

    model: str
    itl: str
    ttft: str
    peer: str
    new_tokens: int
    chunks: int
    weights_itl: str = ""
    weights_ttft: str = ""


SETUPS = {
    "qwen3-8b": Setup(
        "qwen3-8b-shape",
        "1x1024,1x32768,1x131072,8x4096,8x16384,32x8192,64x1024,64x4096",
        "1x1024,1x8192,1x32768",
        "1x1024,32x8192",
        33,
        64,
        "1x1024,1x32768,1x131072,8x16384,32x8192,64x1024,64x4096",
        "1x1024,1x8192",
    ),
    "tiny": Setup("tiny-llama", "1x33,2x64", "1x33,2x64", "1x33", 4, 4, "1x33", "2x64"),
}


# Goals ------------------------------------------------------------------------------------------------------

QUANTIZED = ("int8_sym", "fp8_e4m3")
# ITL of FP8 weights and INT8 KV, ms.
FP8_LIMITS = {
    "1x1024": 2.6,
    "1x32768": 3.2,
    "1x131072": 5.0,
    "8x16384": 5.1,
    "32x8192": 7.9,
    "64x1024": 4.1,
    "64x4096": 7.9,
}


def _shown(cell: str) -> str:
    """8x16384 as 8x16k."""
    batch, context = shape_of(cell)
    return f"{batch}x{context // 1024}k"


def _fp8_goals() -> dict[str, Goal]:
    return {
        f"C1 FP8 {_shown(cell)}": {
            "metric": "weights_itl_ms",
            "measure": "value",
            "cells": (cell,),
            "entries": ("fp8_block128/int8_sym",),
            "at_most": limit,
            "sentence": f"ITL of FP8 weights and INT8 KV at {_shown(cell)} is at most {limit} ms",
        }
        for cell, limit in FP8_LIMITS.items()
    }


def shape_of(cell: str) -> tuple[int, int]:
    """(batch, context) of a cell; SystemExit for anything else."""
    batch, _, context = cell.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise SystemExit(f"The cell {cell!r} is not BATCHxCONTEXT, as in 8x16384.")
    return int(batch), int(context)


# `metric`: what was measured; `measure` (one of MEASURES): what is asked of it, at `cells` (or all) for
# `entries`.
GOALS: dict[str, Goal] = {
    "C1 1x1k": {
        "metric": "itl_ms",
        "measure": "value",
        "cells": ("1x1024",),
        "entries": ("native",),
        "at_most": 4.2,
        "sentence": "ITL of bf16 weights and bf16 KV at 1x1k is at most 4.2 ms",
    },
    "C1 1x128k": {
        "metric": "itl_ms",
        "measure": "value",
        "cells": ("1x131072",),
        "entries": ("native",),
        "at_most": 9.0,
        "sentence": "ITL of bf16 weights and bf16 KV at 1x128k is at most 9.0 ms",
    },
    **_fp8_goals(),
    "C2 slope": {
        "metric": "itl_ms",
        "measure": "slope",
        "cells": ("1x131072",),
        "entries": QUANTIZED,
        "at_most": 0.56,
        "sentence": "from 1k to 128k, a quantized KV cache adds at most 0.56 of what bf16 adds to the ITL",
    },
    "C2 break-even": {
        "metric": "itl_ms",
        "measure": "over_native",
        "cells": ("1x1024",),
        "entries": QUANTIZED,
        "at_most": 1.0,
        "sentence": "a quantized KV cache is no slower from 1k tokens on",
    },
    "C2 every cell": {
        "metric": "itl_ms",
        "measure": "over_native",
        "entries": QUANTIZED,
        "at_most": 1.0,
        "sentence": "a quantized KV cache is slower than bf16 at no cell",
    },
    "C3 1k": {
        "metric": "ttft_ms",
        "measure": "value",
        "cells": ("1x1024",),
        "entries": ("native",),
        "at_most": 24,
        "sentence": "TTFT at 1k is at most 24 ms",
    },
    "C3 8k": {
        "metric": "ttft_ms",
        "measure": "value",
        "cells": ("1x8192",),
        "entries": ("native",),
        "at_most": 215,
        "sentence": "TTFT at 8k is at most 215 ms",
    },
    "C3 32k": {
        "metric": "ttft_ms",
        "measure": "value",
        "cells": ("1x32768",),
        "entries": ("native",),
        "at_most": 1350,
        "sentence": "TTFT at 32k is at most 1350 ms",
    },
    "C3 quantized": {
        "metric": "ttft_ms",
        "measure": "over_native",
        "entries": QUANTIZED,
        "at_most": 1.01,
        "sentence": "a quantized KV cache adds at most 1% to TTFT",
    },
    "C3 FP8 8k": {
        "metric": "weights_ttft_ms",
        "measure": "native_over",
        "cells": ("1x8192",),
        "entries": ("fp8_block128/native",),
        "at_least": 1.25,
        "sentence": "FP8 weights make TTFT at 8k 1.25x as fast or more",
    },
    "C4 1x1k": {
        "metric": "peer_itl_ms",
        "measure": "over_native",
        "cells": ("1x1024",),
        "entries": ("transformers",),
        "at_least": 1.5,
        "sentence": "transformers, compiled, with a static cache, takes 1.5x our ITL or more at 1x1k",
    },
    "C4 32x8k": {
        "metric": "peer_itl_ms",
        "measure": "over_native",
        "cells": ("32x8192",),
        "entries": ("transformers",),
        "at_least": 3.0,
        "sentence": "transformers, compiled, with a static cache, takes 3x our ITL or more at 32x8k",
    },
    "D1 rate": {
        "metric": "scored_tok_s",
        "measure": "value",
        "entries": ("native",),
        "at_least": 39_000,
        "sentence": "perplexity scores 39k tokens a second or more",
    },
    "D1 quantized": {
        "metric": "pass_s",
        "measure": "over_native",
        "entries": QUANTIZED,
        "at_most": 1.10,
        "sentence": "a perplexity pass read through quantized pages takes at most 1.10x the native one",
    },
}


@dataclass(frozen=True)
class Result:
    """A metric of one arm at one cell: median and range over `n` requests or passes. failed: why there is
    none.
    """

    metric: str
    cell: str
    entry: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    failed: str = ""


def result(metric: str, cell: str, entry: str, samples: Sequence[float]) -> Result:
    return Result(metric, cell, entry, statistics.median(samples), min(samples), max(samples), len(samples))


def _value(results: Iterable[Result], metric: str, cell: str, entry: str) -> float | None:
    return next((r.value for r in results if (r.metric, r.cell, r.entry) == (metric, cell, entry)), None)


def _over_native(row: Result, results: Sequence[Result]) -> float | None:
    native = _value(results, row.metric, row.cell, "native")
    return row.value / native if row.value and native else None


def _native_over(row: Result, results: Sequence[Result]) -> float | None:
    over = _over_native(row, results)
    return 1 / over if over else None


def _slope(row: Result, results: Sequence[Result]) -> float | None:
    """What the context from 1x1k to this cell adds to the ITL, over what it adds to the native one."""
    own, native = (
        [_value(results, row.metric, cell, entry) for cell in ("1x1024", row.cell)]
        for entry in (row.entry, "native")
    )
    if None in own or None in native or native[1] == native[0]:
        return None
    return (own[1] - own[0]) / (native[1] - native[0])  # type: ignore[operator]


MEASURES: dict[str, Callable[[Result, Sequence[Result]], float | None]] = {
    "value": lambda row, results: row.value,
    "over_native": _over_native,
    "native_over": _native_over,
    "slope": _slope,
}


def evaluate(goal: Goal, results: Sequence[Result]) -> list[Finding]:
    """What a goal asks of the results, cell by cell."""
    return [
        finding(goal, r.cell, r.entry, MEASURES[goal["measure"]](r, results))
        for r in results
        if r.metric == goal["metric"]
        and r.entry in goal["entries"]
        and r.cell in goal.get("cells", (r.cell,))
    ]


def table(results: Sequence[Result]) -> str:
    lines = []
    for r in results:
        head = f"{r.metric:>15} {r.cell:>9}  {r.entry:21}"
        if r.value is None or r.low is None or r.high is None:
            lines.append(f"{head} {r.failed}")
            continue
        over = _over_native(r, results) if r.entry != "native" else None
        ratio = f"  {over:.3f} of native" if over else ""
        lines.append(f"{head} {r.value:10.3f}  ({r.low:.3f} - {r.high:.3f}, n = {r.n}){ratio}")
    return "\n".join(lines)


# Arms -------------------------------------------------------------------------------------------------------


class FilledArm(EngineArm):
    """Decode on pages that hold `context` random tokens a sequence. Its TTFT is that of a decode step."""

    def __init__(self, engine: Engine, batch: int, context: int, new_tokens: int) -> None:
        super().__init__(engine, [[1]] * batch, 1, new_tokens)
        self.context = context
        self.seqs = [engine.add() for _ in range(batch)]
        for seq in self.seqs:
            fill(engine, seq, context)

    def submit(self) -> None:
        for seq in self.seqs:
            self.engine.store.reserve(seq, self.new_tokens)
        self.tokens = [prompt[0] for prompt in self.prompts]
        self.step()

    def close(self) -> None:
        for seq in self.seqs:
            self.engine.truncate(seq, self.context)


def fill(engine: Engine, seq: int, tokens: int) -> None:
    """Append random K and V to a sequence, written as a forward writes them."""
    store = engine.store
    start = store.length(seq)
    store.reserve(seq, tokens)
    slots = store.slots_for(seq, start, tokens)
    drawn: dict[KVShape, tuple[Tensor, Tensor]] = {}
    for layer, shape in enumerate(store.shapes):
        if shape not in drawn:
            drawn[shape] = tuple(  # type: ignore[assignment]
                torch.randn(tokens, shape.kv_heads, dim, dtype=engine.model.dtype, device=engine.model.device)
                for dim in (shape.head_dim, shape.value_dim)
            )
        store.write(layer, slots, *drawn[shape])
    store.commit(seq, tokens)


class TransformersArm:
    """transformers' own decode over a static cache that holds `context` random tokens a sequence."""

    def __init__(self, model: Any, batch: int, context: int, new_tokens: int) -> None:
        from transformers import StaticCache

        config, device = model.config, model.device
        room = -(-(context + new_tokens + 1) // 64) * 64
        cache = StaticCache(config=config, max_cache_len=room)
        cache.early_initialization(
            batch, config.num_key_value_heads, config.head_dim, dtype=model.dtype, device=device
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.cache, self.context, self.device = cache, context, device
        self.ids = torch.ones(batch, 1, dtype=torch.long, device=device)
        name = cache_argument(model)

        def decode(ids: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=ids, use_cache=True, **{name: cache}).logits
            return logits[:, -1].argmax(dim=-1, keepdim=True)

        on_gpu = device.type == "cuda"
        self.decode = torch.compile(decode, mode="reduce-overhead") if on_gpu else decode

    def submit(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
        self.ids.fill_(1)
        self.step()

    def step(self) -> None:
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            self.ids.copy_(self.decode(self.ids))
        self.ids.tolist()  # on the host, as in the engine's arm

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ran(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def cache_argument(model: Any) -> str:
    """What a forward calls its cache: transformers 5.17 says `past_key_values`, 5.24 `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def plain_transformers(loaded: LoadedModel) -> Any:
    """The model as transformers makes it, on the very weight tensors of `loaded`."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(loaded.model.config)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype, attn_implementation="sdpa")
    plain.load_state_dict(loaded.model.state_dict(), assign=True)
    for (name, module), (same, bound) in zip(
        plain.named_modules(), loaded.model.named_modules(), strict=True
    ):
        assert name == same
        module._buffers.update(bound._buffers)  # those that no state dict holds, such as rotary frequencies
    plain.eval().requires_grad_(False)
    return plain


# Parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """The model and what every cell's spec has in common. weights: formats of the weights_* parts; models:
    those loaded.
    """

    loaded: LoadedModel
    spec: Mapping[str, Any]
    setup: Setup
    formats: Sequence[str]
    repeats: int
    weights: Sequence[str] = ()
    models: dict[str, LoadedModel] = field(default_factory=dict)

    def engine(self, entry: str, sequences: int, tokens: int) -> Engine:
        """entry: a KV format, or "weights/KV format"."""
        weights, _, fmt = entry.rpartition("/")
        scale = STATIC_SCALE if KV_FORMATS[fmt].scale_kind == "static" else None
        spec = {**self.spec, "kv_format": fmt, "scale": scale, "batch": sequences, "context": tokens}
        if weights:
            spec["weights"] = weights
        model = self.model(weights)
        return Engine(model, resolve(request_of(spec), model.facts), spec, sequences=sequences, tokens=tokens)

    def model(self, weights: str) -> LoadedModel:
        """The model with weights of this format ("" for the native ones), loaded at its first use and
        kept.
        """
        if weights in ("", "native"):
            return self.loaded
        if weights not in self.models:
            spec = {**self.spec, "weights": weights}
            self.models[weights] = load_model(spec, spec["device"], spec["dtype"])
        return self.models[weights]

    def beside(self, fmt: str) -> list[str]:
        """The arms of a weights_* part: the native one, and each quantized weight format with the KV format
        `fmt`.
        """
        return ["native", *(f"{w}/{fmt}" for w in self.weights if w != "native")]

    def timed(
        self, arms: Sequence[tuple[str, Arm]], new_tokens: int, repeats: int | None = None
    ) -> dict[str, tuple[list[float], list[float]]]:
        """By arm: TTFT and mean ITL of each measured request, in ms."""
        timings = measure(arms, new_tokens=new_tokens, repeats=repeats or self.repeats, warmup=2)
        times: dict[str, tuple[list[float], list[float]]] = {label: ([], []) for label, _ in arms}
        for t in timings.measured:
            times[t.arm][0].append(t.ttft_ms)
            times[t.arm][1].append(statistics.fmean(t.itl_ms) if t.itl_ms else 0.0)
        return times


def itl(bench: Bench, cell: str) -> list[Result]:
    return _itl(bench, cell, bench.formats, "itl_ms")


def weights_itl(bench: Bench, cell: str) -> list[Result]:
    return _itl(bench, cell, bench.beside(KV_OF_ITL), "weights_itl_ms")


def _itl(bench: Bench, cell: str, entries: Sequence[str], metric: str) -> list[Result]:
    batch, context = shape_of(cell)
    new_tokens = bench.setup.new_tokens
    room = context + new_tokens
    arms = [(e, FilledArm(bench.engine(e, batch, room), batch, context, new_tokens)) for e in entries]
    times = bench.timed(arms, new_tokens)
    return [result(metric, cell, entry, gaps) for entry, (_, gaps) in times.items()]


def ttft(bench: Bench, cell: str) -> list[Result]:
    return _ttft(bench, cell, bench.formats, "ttft_ms")


def weights_ttft(bench: Bench, cell: str) -> list[Result]:
    return _ttft(bench, cell, bench.beside(KV_OF_TTFT), "weights_ttft_ms")


def _ttft(bench: Bench, cell: str, entries: Sequence[str], metric: str) -> list[Result]:
    batch, context = shape_of(cell)
    prompts = random_prompts(bench.loaded, batch, context)
    chunk = bench.spec["prefill_chunk"]
    arms = [(e, EngineArm(bench.engine(e, batch, context), prompts, chunk, 1)) for e in entries]
    # The first requests under full load are the fastest, and the arm that comes first gains by it.
    repeats = max(bench.repeats, TTFT_TOKENS // (batch * context))
    times = bench.timed(arms, 1, repeats)
    return [result(metric, cell, entry, firsts) for entry, (firsts, _) in times.items()]


def peer(bench: Bench, cell: str) -> list[Result]:
    batch, context = shape_of(cell)
    new_tokens = bench.setup.new_tokens
    ours = FilledArm(bench.engine("native", batch, context + new_tokens), batch, context, new_tokens)
    theirs = TransformersArm(plain_transformers(bench.loaded), batch, context, new_tokens)
    times = bench.timed([("native", ours), ("transformers", theirs)], new_tokens)
    return [result("peer_itl_ms", cell, arm, gaps) for arm, (_, gaps) in times.items()]


def perplexity(bench: Bench, cell: str) -> list[Result]:
    """Scored tokens a second, logits to log-probabilities included, and seconds a pass."""
    chunks = random_chunks(bench.setup.chunks, bench.loaded.vocab_size)
    device = bench.loaded.device
    packs = [[chunks[i] for i in pack] for pack in packed([SIZE] * len(chunks), budget(device))]
    tokens = max(len(pack) for pack in packs) * SIZE
    passes = {fmt: Pass(bench.engine(fmt, 1, tokens), bench.spec["prefill_chunk"]) for fmt in bench.formats}
    seconds: dict[str, list[float]] = {fmt: [] for fmt in passes}
    for round_ in range(-1, bench.repeats):  # round -1 warms up
        order = list(passes) if round_ % 2 == 0 else list(reversed(passes))
        for fmt in order:
            passes[fmt].engine.synchronize()
            start = time.perf_counter()
            total = score(passes[fmt], packs, device)
            if not total < 0:
                raise SystemExit(f"The {fmt} pass summed log-probabilities to {total}; no time counts.")
            if round_ >= 0:
                seconds[fmt].append(time.perf_counter() - start)
    scored = sum(c.scored for c in chunks)
    return [
        row
        for fmt, taken in seconds.items()
        for row in (
            result("scored_tok_s", cell, fmt, [scored / s for s in taken]),
            result("pass_s", cell, fmt, taken),
        )
    ]


def random_chunks(n: int, vocabulary: int) -> list[Chunk]:
    rng = random.Random(SEED)
    return [Chunk(tuple(rng.choices(range(vocabulary), k=SIZE)), 1, i) for i in range(n)]


def score(run: Pass, packs: Sequence[Sequence[Chunk]], device: torch.device) -> float:
    """Summed log-probability of the scored tokens, on the host at the end."""
    sums = []
    for pack in packs:
        for rows, chunk in zip(run.forward(pack), pack, strict=True):
            sums.append(logprobs(rows, torch.tensor(chunk.tokens[chunk.skip :], device=device)).sum())
    return float(torch.stack(sums).sum())


# Command ----------------------------------------------------------------------------------------------------


def attempt(part: Callable[[Bench, str], list[Result]], bench: Bench, cell: str) -> list[Result]:
    """The part's results, or one that says why there are none; memory is given back either way."""
    began = time.perf_counter()
    try:
        found = part(bench, cell)
    except Exception as e:  # the other cells still have their numbers
        if "CUDA error" in str(e):
            raise  # sticky: nothing after it would be true
        metric = METRICS[part.__name__]
        first = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
        entries = {
            "peer": ["transformers"],
            "weights_itl": bench.beside(KV_OF_ITL),
            "weights_ttft": bench.beside(KV_OF_TTFT),
        }.get(part.__name__, bench.formats)
        found = [
            Result(metric, cell, entry, failed=f"failed: {type(e).__name__}: {first[:150]}")
            for entry in entries
        ]
    if part is peer:
        torch.compiler.reset()  # or the compiled decode keeps its cache alive
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"{table(found)}\n    {part.__name__} {cell}: {time.perf_counter() - began:.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SETUPS), default="qwen3-8b")
    parser.add_argument("--formats", default="native,int8_sym,fp8_e4m3")
    parser.add_argument(
        "--weights",
        default="native,fp8_block128",
        help="of the weights_* parts; native has an arm in any case",
    )
    parser.add_argument("--gemm", default="auto", choices=GEMMS, help="path of the products of FP8 weights")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--itl-cells", default=None)
    parser.add_argument("--ttft-cells", default=None)
    parser.add_argument("--peer-cells", default=None)
    parser.add_argument("--weights-itl-cells", default=None)
    parser.add_argument("--weights-ttft-cells", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "triton"))
    parser.add_argument("--decode", default="auto", choices=("auto", "graph", "eager"))
    parser.add_argument("--compile", default="auto", choices=("auto", "layer", "off"))
    parser.add_argument("--prefill-chunk", type=int, default=32768)
    parser.add_argument("--out", type=Path, default=None, help="folder for engine.json")
    args = parser.parse_args()
    setup = SETUPS[args.shape]
    formats = chosen(args.formats, KV_FORMATS, "The format")
    weights = chosen(args.weights, WEIGHT_FORMATS, "The weight format")
    parts = chosen(args.parts, PARTS, "The part")
    if not set(weights) - {"native"}:
        parts = [part for part in parts if not part.startswith("weights_")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and args.shape != "tiny":
        raise SystemExit("torch sees no CUDA device; --shape tiny runs anywhere.")
    spec = {
        **CELL_KEYS,
        "model": setup.model,
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "backend": args.backend,
        "decode": args.decode,
        "compile": args.compile,
        "prefill_chunk": args.prefill_chunk,
        "gemm": args.gemm,
    }
    began = time.perf_counter()
    loaded = load_model(spec, spec["device"], spec["dtype"])
    bench = Bench(loaded, spec, setup, formats, args.repeats, weights)
    decision = bench.engine("native", 1, 16).decision
    print(f"{setup.model} loaded in {time.perf_counter() - began:.1f} s; {decision}", flush=True)
    work = {
        "itl": (itl, args.itl_cells or setup.itl),
        "ttft": (ttft, args.ttft_cells or setup.ttft),
        "peer": (peer, args.peer_cells or setup.peer),
        "perplexity": (perplexity, f"{setup.chunks}x{SIZE}"),
        "weights_itl": (weights_itl, args.weights_itl_cells or setup.weights_itl),
        "weights_ttft": (weights_ttft, args.weights_ttft_cells or setup.weights_ttft),
    }
    jobs = [(work[part][0], cell) for part in parts for cell in work[part][1].split(",")]
    results = list(itertools.chain.from_iterable(attempt(part, bench, cell) for part, cell in jobs))
    print("\n".join(goal_lines(GOALS, lambda goal: evaluate(goal, results))))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        out = {
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "torch": torch.__version__,
            "spec": spec,
            "decision": asdict(decision),
            "repeats": args.repeats,
            "weights": weights,
            "results": [asdict(r) for r in results],
            "goals": as_json(GOALS, lambda goal: evaluate(goal, results)),
        }
        (args.out / "engine.json").write_text(json.dumps(out, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
