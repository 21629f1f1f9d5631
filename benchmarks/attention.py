"""Paged decode attention and the quantizing write on one GPU, beside public kernels in the same run.

    python -m benchmarks.attention [--cells 8x16384,64x8192] [--formats native,int8_sym,fp8_e4m3] [--peers
    sdpa_cudnn,...] [--rounds 5] [--splits N] [--out DIR]
    python -m benchmarks.attention --warm all   # FlashInfer compiles at first use: all its peers, in
    parallel, beforehand

Geometry of Qwen3-8B: 32 query heads, 8 KV heads, head_dim 128, pages of 16 tokens. A cell is BATCHxCONTEXT,
or `mixed`: one sequence of 65,536 tokens and 31 of 4,096.

Protocol. Every entry of a cell works on the same random data in its own layout: as many buffer sets as make
256 MB of KV (4x the L2), in one CUDA graph, so that each call finds cold caches. The result of every call is
compared with FP32 attention over the dequantized values before anything is timed: an entry that fails has no
time. Then the entries take turns, forwards and backwards, for `rounds` rounds; median, smallest and largest
are reported. B, the copy bandwidth (bytes read plus written), is measured before and after, and the larger
counts. TB/s are those of KV bytes, scales included. The goals are a table (`GOALS`), each printed as reached,
missed or not measured. Exit status 1 when a kernel of ours failed its check."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_data import (
    COLD_BYTES,
    DEVICE,
    HEAD_DIM,
    KV_HEADS,
    PAGE,
    STATIC_SCALE,
    Data,
    bytes_of,
    compare,
    lengths_of,
)
from benchmarks.attention_entries import COMPILED, PEERS, Call, Entry, own_entry
from benchmarks.attention_goals import GOALS, Row, evaluate, table
from benchmarks.goals import as_json, chosen, goal_lines
from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE

REPLAYS = 4  # a sample
CELLS = "1x1024,1x16384,1x131072,8x4096,8x16384,8x32768,32x8192,64x1024,64x4096,64x8192,mixed"
FORMATS = "native,int8_sym,fp8_e4m3"
WRITE_TOKENS = (1, 8, 64)


# Measuring --------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """A captured graph whose result was right. calls keeps the buffers that the graph reads."""

    graph: Any
    calls: list[Call]
    per_replay: int
    row: Row


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[Any, list[Any]]:
    """(CUDA graph of all calls, what each returned); the first call runs before, so that it may compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs = [call() for call in calls]
    torch.cuda.synchronize()
    return graph, outs


def prepare(cell: str, entry: Entry, data: Data) -> Ready | Row:
    """A checked graph, or a row that says why there is none."""
    nbytes = entry.nbytes(data.lengths)
    try:
        calls = entry.build(data)
        kernels = launched_by(calls[0]) if entry.own else ()
        graph, outs = capture(calls)
        for out in outs:
            out.fill_(math.nan)  # what a call does not write must not look right
        graph.replay()
        torch.cuda.synchronize()
        got = torch.stack([out.reshape(data.q.shape[1:]) for out in outs])
        cosine, max_abs = compare(got, data.oracle(entry.values))
    except Exception as e:  # a peer that cannot run is a line of the table
        if "CUDA error" in str(e):
            raise  # sticky: nothing after it would be true
        return Row(cell, entry.name, nbytes, failed=f"cannot run: {first_line(e)}")
    row = Row(cell, entry.name, nbytes, cosine=cosine, max_abs=max_abs, kernels=kernels)
    if not cosine >= entry.cosine:
        return Row(
            cell,
            entry.name,
            nbytes,
            cosine=cosine,
            max_abs=max_abs,
            kernels=kernels,
            failed=f"FAILED: cosine {cosine:.7f} against the oracle, expected {entry.cosine}",
        )
    return Ready(graph, calls, len(calls), row)


def launched_by(call: Call) -> tuple[str, ...]:
    """Names of the kernels of ours that one call launches."""
    from kvbench_kernels.launches import record

    with record() as launches:
        call()
    torch.cuda.synchronize()
    return tuple(launch.name for launch in launches)


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:110]}" if lines else type(error).__name__


def sample(ready: Ready) -> float:
    """us a call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ready.graph.replay()
    start.record()
    for _ in range(REPLAYS):
        ready.graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / REPLAYS / ready.per_replay


def alternate(
    entries: Sequence[Ready], rounds: int, take: Callable[[Ready], float] = sample
) -> list[list[float]]:
    """Samples of each entry; the entries take turns, forwards and then backwards."""
    times: list[list[float]] = [[] for _ in entries]
    for round_ in range(rounds):
        order = range(len(entries))
        for i in order if round_ % 2 == 0 else reversed(order):
            times[i].append(take(entries[i]))
    return times


def timed(row: Row, times: Sequence[float]) -> Row:
    return replace(row, us=statistics.median(times), us_min=min(times), us_max=max(times))


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 2 GB, bytes read plus written; median of 7."""
    source = torch.randn(1_000_000_000, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    rates = []
    for _ in range(8):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        rates.append(2 * source.nbytes / start.elapsed_time(stop) / 1e9)
    return statistics.median(rates[1:])


def measure_cell(cell: str, entries: Sequence[Entry], rounds: int) -> list[Row]:
    lengths = lengths_of(cell)
    smallest = min(e.nbytes(lengths) for e in entries)
    data = Data(lengths, -(-COLD_BYTES // smallest))
    prepared = [prepare(cell, entry, data) for entry in entries]
    times = iter(alternate([p for p in prepared if isinstance(p, Ready)], rounds))
    return [timed(p.row, next(times)) if isinstance(p, Ready) else p for p in prepared]


def measure_writes(formats: Sequence[str], rounds: int) -> list[Row]:
    """The quantizing write of K and V of n tokens, one row each: cells "write 1", "write 8", ..."""
    return [row for tokens in WRITE_TOKENS for row in _measure_write(tokens, formats, rounds)]


def _measure_write(tokens: int, formats: Sequence[str], rounds: int) -> list[Row]:
    sets = 64
    pages = COLD_BYTES // (2 * PAGE * KV_HEADS * HEAD_DIM)
    k, v = (
        torch.randn((sets, tokens, KV_HEADS, HEAD_DIM), device=DEVICE, dtype=torch.bfloat16) for _ in "kv"
    )
    slots = torch.randperm(pages * PAGE, device=DEVICE)[: sets * tokens].view(sets, tokens)
    prepared = [_prepare_write(fmt, k, v, slots, pages) for fmt in formats]
    times = iter(alternate([p for p in prepared if isinstance(p, Ready)], rounds))
    return [timed(p.row, next(times)) if isinstance(p, Ready) else p for p in prepared]


def _prepare_write(fmt: str, k: Tensor, v: Tensor, slots: Tensor, pages: int) -> Ready | Row:
    cell, name = f"write {slots.shape[1]}", f"write {fmt}"
    scale = None if KV_FORMATS[fmt].scale_kind != "static" else torch.full((1,), STATIC_SCALE, device=DEVICE)
    wanted = [QUANTIZE[fmt](x, scale) for x in (k, v)]
    nbytes = bytes_of(fmt, [slots.shape[1]])
    shape = (pages, KV_HEADS, PAGE, HEAD_DIM)
    store = [torch.zeros(shape, dtype=w.codes.dtype, device=DEVICE) for w in wanted]
    scales = [
        scale if w.scales is None else torch.zeros(shape[:3], dtype=w.scales.dtype, device=DEVICE)
        for w in wanted
    ]
    health = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    try:
        from kvbench_kernels.kv.write import paged_write

        cache = LayerPages(KV_FORMATS[fmt], *store, *scales)
        calls = [
            lambda s=s: paged_write(cache, k[s], v[s], slots[s], health)  # type: ignore[misc]
            for s in range(k.shape[0])
        ]
        kernels = launched_by(calls[0])
        graph, _ = capture(calls)
        graph.replay()
        torch.cuda.synchronize()
    except Exception as e:
        if "CUDA error" in str(e):
            raise
        return Row(cell, name, nbytes, failed=f"cannot run: {first_line(e)}")
    page, offset = slots // PAGE, slots % PAGE
    for w, codes, stored in zip(wanted, store, scales, strict=True):
        equal = torch.equal(codes.view(torch.uint8)[page, :, offset], w.codes.view(torch.uint8))
        if w.scales is not None and stored is not None:
            equal = equal and torch.equal(stored[page, :, offset], w.scales)
        if not equal:
            return Row(
                cell, name, nbytes, kernels=kernels, failed="FAILED: stored bytes are not the quantizer's"
            )
    return Ready(graph, calls, len(calls), Row(cell, name, nbytes, kernels=kernels))


# Command ----------------------------------------------------------------------------------------------------


def warm(names: Sequence[str]) -> None:
    """Compile peers: one here, several each in a process of its own."""
    if len(names) == 1:
        entry = PEERS[names[0]]
        entry.build(Data((1024, 1024), 1))[0]()
        torch.cuda.synchronize()
        return
    running = {
        n: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attention", "--warm", n], stderr=subprocess.PIPE, text=True
        )
        for n in names
    }
    for name, process in running.items():
        _, error = process.communicate()
        tail = error.strip().splitlines()[-1:] if process.returncode else []
        print(f"warm {name}: {'; '.join(tail) or 'built'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--peers", default=",".join(PEERS), help="'' for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--splits", type=int, default=None, help="programs along a sequence, instead of the default's"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for attention.json")
    parser.add_argument("--warm", default=None, metavar="PEERS", help="compile these peers (or all) and stop")
    args = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    formats = chosen(args.formats, KV_FORMATS, "The format")
    peers = chosen(args.peers, PEERS, "The peer")
    cells = {cell: lengths_of(cell) for cell in args.cells.split(",") if cell}
    names = chosen(",".join(COMPILED) if args.warm == "all" else args.warm or "", PEERS, "The peer")
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch sees none.")
    torch.manual_seed(0)
    if names:
        warm(names)
        return
    entries = [*(own_entry(fmt, args.splits) for fmt in formats), *(PEERS[name] for name in peers)]
    before = copy_bandwidth()
    rows: list[Row] = []
    for cell in cells:
        found = measure_cell(cell, entries, args.rounds)
        print(table(found, before), flush=True)
        rows += found
        torch.cuda.empty_cache()
    found = measure_writes(formats, args.rounds)
    print(table(found, before), flush=True)
    rows += found
    after = copy_bandwidth()
    b = max(before, after)
    lines = goal_lines(GOALS, lambda goal: evaluate(goal, rows, b))
    print(
        f"B: {before:.3f} TB/s before, {after:.3f} after; {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}"
    )
    print("\n".join(lines))
    if args.out:
        import triton

        args.out.mkdir(parents=True, exist_ok=True)
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_tb_s": [before, after],
            "rounds": args.rounds,
            "splits": args.splits,
            "rows": [asdict(r) | {"tb_s": r.tb_s, "share": r.tb_s / b if r.tb_s else None} for r in rows],
            "goals": as_json(GOALS, lambda goal: evaluate(goal, rows, b)),
        }
        (args.out / "attention.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    own = {*formats, *(f"write {fmt}" for fmt in formats)}
    if any(r.failed for r in rows if r.entry in own):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
