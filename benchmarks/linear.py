"""Skinny linear layers against cuBLAS: which tiling is fastest for each shape of Qwen3-8B and each number of
rows.

    python -m benchmarks.linear [--out linear.json] [--rows 1,2,4,8,16] [--shapes qkv,o,...] [--rounds 5]

Every variant is checked against float64 before its time counts. Times are of CUDA-graph replays over weights
that rotate through at least 240 MB (four times the L2), medians of rounds that alternate between the variants
and cuBLAS (one F.linear a weight, as a model calls it). Then the products of whole layers are timed with the
best variants. The variants are compiled by several processes first. The table comes last; --out gets every
number, and `measured` in it holds the lines for kvbench_kernels/skinny_config.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import copy_bandwidth
from kvbench_kernels.gemm.skinny_config import Tiling
from kvbench_kernels.gemm.skinny_linear import skinny_linear_many
from kvbench_kernels.splitk import splits_used

COLD_BYTES = 240e6
PASS_BYTES = 960e6  # weights read by one replay
LAYERS = 8
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "qkv": ((4096, 1024, 1024), 4096),
    "gate_up": ((12288, 12288), 4096),
    "o": ((4096,), 4096),
    "down": ((4096,), 12288),
    "lm_head": ((151936,), 4096),
    "kv_one": ((1024,), 4096),
    "gate_one": ((12288,), 4096),
}
LAYER = ("qkv", "o", "gate_up", "down")
ALONE = {
    "qkv": ("o", "kv_one", "kv_one"),
    "o": ("o",),
    "gate_up": ("gate_one", "gate_one"),
    "down": ("down",),
}

# (block_n, block_k, warps, stages)
VECTOR_1 = (
    (2, 1024, 2, 1), (4, 512, 2, 1), (4, 1024, 4, 1), (4, 2048, 8, 1), (8, 512, 2, 1), (8, 1024, 4, 1),
    (2, 2048, 4, 1), (2, 4096, 8, 1), (2, 4096, 4, 1), (1, 4096, 4, 1), (1, 4096, 2, 1), (16, 512, 4, 1),
    (4, 1024, 4, 3), (4, 1024, 4, 4), (8, 512, 4, 4), (8, 1024, 4, 3), (2, 2048, 4, 4),
)  # fmt: skip
VECTOR_MORE = (
    (4, 512, 2, 1),
    (4, 1024, 4, 1),
    (2, 1024, 4, 1),
    (2, 2048, 8, 1),
    (4, 1024, 4, 3),
    (2, 1024, 2, 1),
)
# (block_n, block_k, warps, stages, swap)
DOT = (
    (16, 256, 1, 4, False), (16, 512, 2, 3, False), (32, 128, 2, 4, False), (32, 256, 2, 4, False),
    (64, 128, 4, 4, False), (64, 256, 4, 3, False), (128, 128, 4, 3, False),
    (64, 128, 4, 4, True), (64, 128, 4, 6, True), (64, 256, 4, 3, True), (128, 128, 4, 4, True),
)  # fmt: skip


def variants(m: int, ns: Sequence[int], k: int) -> list[Tiling]:
    """Every tiling worth a try for x [m, k] and weights of ns rows."""
    found = []
    for pdl in (False, True):
        for n, bk, warps, stages in VECTOR_1 if m == 1 else VECTOR_MORE if m <= 4 else ():
            found += [Tiling("vector", n, bk, s, warps, stages, pdl=pdl) for s in (1, 2)]
        for n, bk, warps, stages, swap in DOT if m > 1 else ():
            found += [Tiling("dot", n, bk, s, warps, stages, swap, pdl) for s in (1, 2, 4, 8)]
    return [t for t in found if splits_used(t, k) == t.splits and _fills(t, ns)]


def _fills(t: Tiling, ns: Sequence[int]) -> bool:
    """CTAs for the GPU, but no splits where there are CTAs enough."""
    ctas = sum(-(-n // t.block_n) for n in ns) * t.splits
    return ctas >= 120 and (t.splits == 1 or ctas <= 1600)


def name_of(t: Tiling) -> str:
    return (
        f"{t.kind[0]} {t.block_n}x{t.block_k} w{t.warps} st{t.stages} sp{t.splits}"
        f"{' swap' if t.swap else ''}{' pdl' if t.pdl else ''}"
    )


def compile_one(job: tuple[int, int, Tiling]) -> str:
    """Run one small product in its own process, which leaves the compiled kernel in Triton's disk cache."""
    m, count, tiling = job
    x = torch.zeros(m, 12288, device="cuda", dtype=torch.bfloat16)
    w = torch.zeros(256, 12288, device="cuda", dtype=torch.bfloat16)
    try:
        skinny_linear_many(x, (w,) * count, tiling=tiling)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name_of(tiling)}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(jobs: list[tuple[int, int, Tiling]], processes: int) -> list[str]:
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [fault for fault in pool.map(compile_one, jobs, chunksize=4) if fault]


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls as one graph. Without torch.cuda.graph, which empties the allocator's cache for each of
    thousands.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def medians(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, tuple[float, float]]:
    """us a replay of each graph, and half its spread, over rounds that alternate between them."""
    times: dict[str, list[float]] = {key: [] for key in graphs}
    for graph in graphs.values():
        replay_us(graph, 1)
    for _ in range(rounds):
        for key, graph in graphs.items():
            times[key].append(replay_us(graph, 3))
    return {key: (statistics.median(t), (max(t) - min(t)) / 2) for key, t in times.items()}


def made_weights(ns: Sequence[int], k: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for n in ns)


def poison(m: int, ns: Sequence[int]) -> None:
    """NaN in the memory that the next outputs will probably get, so that an unwritten element shows."""
    held = [torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16) for n in ns]
    del held


def fault_of(outs: Sequence[Tensor], oracle: Sequence[Tensor]) -> str:
    """Empty when each output is its float64 value rounded to bfloat16 (and float32's noise of summation)."""
    for out, exact in zip(outs, oracle, strict=True):
        allowed = exact.abs() * 2**-8 + 1e-4 * exact.pow(2).mean().sqrt()
        wrong = ~((out.double() - exact).abs() <= allowed)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            return f"{int(wrong.sum())} wrong, first {at}: {out[at].item()} for {exact[at].item()}"
    return ""


def cublas(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [F.linear(x, w) for w in weights]


def sweep(name: str, rows: Sequence[int], rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """One record a number of rows: best variant, cuBLAS, and every variant's time."""
    ns, k = SHAPES[name]
    size = sum(ns) * k * 2
    copies = [made_weights(ns, k) for _ in range(max(1, -int(-COLD_BYTES // size)))]
    launches = max(len(copies), -int(-PASS_BYTES // size))
    records = []
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        oracle = [x.double() @ w.double().T for w in copies[0]]
        graphs, faults, tilings = {}, {}, {}
        order = [w for w, _ in zip(cycle(copies), range(launches), strict=False)]
        cublas(x, copies[0])
        graphs["cublas"] = graph_of([partial(cublas, x, w) for w in order])
        for tiling in variants(m, ns, k):
            key = name_of(tiling)
            poison(m, ns)
            try:
                outs = skinny_linear_many(x, copies[0], tiling=tiling)
                again = skinny_linear_many(x, copies[0], tiling=tiling)
                fault = fault_of(outs, oracle)
                if not fault and not all(torch.equal(a, b) for a, b in zip(outs, again, strict=True)):
                    fault = "a second call gave other bits"
                if not fault:
                    graphs[key] = graph_of([partial(skinny_linear_many, x, w, None, tiling) for w in order])
                    tilings[key] = tiling
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error)[:160]}"
            if fault:
                faults[key] = fault
        times = {
            key: (us / launches, spread / launches) for key, (us, spread) in medians(graphs, rounds).items()
        }
        ranked = sorted(tilings, key=lambda key: times[key][0])
        if not ranked:
            print(f"{name} m={m}: no variant is right: {list(faults.items())[:2]}", flush=True)
            continue
        best = ranked[0]
        plain = next((key for key in ranked if not tilings[key].pdl), best)
        records.append(
            {
                "shape": name, "n": list(ns), "k": k, "m": m, "bytes": size, "best": best,
                "us": times[best][0],
                "spread_us": times[best][1], "share_of_copy": size / (times[best][0] * 1e-6) / bandwidth,
                "cublas_us": times["cublas"][0], "ratio": times["cublas"][0] / times[best][0],
                "best_without_pdl": plain, "us_without_pdl": times[plain][0],
                "tiling": dataclasses.asdict(tilings[best]),
                "tiling_without_pdl": dataclasses.asdict(tilings[plain]),
                "all_us": {key: round(times[key][0], 3) for key in ranked}, "faults": faults,
            }
        )  # fmt: skip
        del graphs
    return records


def layers(records: list[dict[str, Any]], m: int, rounds: int) -> dict[str, Any]:
    """The products of whole layers, us a layer: cuBLAS and the best variants, together, alone, and with small
    kernels between the products, which is where a programmatic launch has less to hide.
    """
    best = {(r["shape"], r["m"]): r for r in records}
    needed = set(LAYER) | {part for parts in ALONE.values() for part in parts}
    if any((shape, m) not in best for shape in needed):
        return {}
    x = {k: torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for k in (4096, 12288)}
    small = torch.zeros(4096, device="cuda")
    weights = [{name: made_weights(*SHAPES[name]) for name in LAYER} for _ in range(LAYERS)]

    def tiling(shape: str, key: str) -> Tiling:
        return Tiling(**best[shape, m][key])

    def calls(how: str, between: bool) -> list[Callable[[], object]]:
        made: list[Callable[[], object]] = []
        for layer in weights:
            for name in LAYER:
                w, values = layer[name], x[SHAPES[name][1]]
                if between:
                    made.append(partial(small.add_, 1))
                if how == "cublas":
                    made.append(partial(cublas, values, w))
                elif how == "alone":
                    for one, part in zip(w, ALONE[name], strict=True):
                        made.append(partial(skinny_linear_many, values, (one,), None, tiling(part, "tiling")))
                else:
                    made.append(partial(skinny_linear_many, values, w, None, tiling(name, how)))
        return made

    arms = {
        f"{label}{' + 4 small kernels' if between else ''}": calls(how, between)
        for between in (False, True)
        for label, how in (
            ("cublas", "cublas"),
            ("best", "tiling"),
            ("best without pdl", "tiling_without_pdl"),
            ("best, one launch a weight", "alone"),
        )
    }
    for arm in arms.values():
        for call in arm:
            call()
    times = medians({label: graph_of(arm) for label, arm in arms.items()}, rounds)
    return {"m": m, "us_a_layer": {label: round(us / LAYERS, 2) for label, (us, _) in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("linear.json"))
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    args = parser.parse_args()
    started = time.perf_counter()
    rows = [int(m) for m in args.rows.split(",")]
    shapes = args.shapes.split(",")
    torch.manual_seed(0)
    jobs = sorted(
        {
            # A dot kernel serves every number of rows, a vector kernel one.
            (m if t.kind == "vector" else 2, len(SHAPES[shape][0]), t)
            for shape in shapes
            for m in rows
            for t in variants(m, *SHAPES[shape])
        },
        key=repr,
    )
    faults = compile_all(jobs, args.processes)
    compiled = time.perf_counter() - started
    print(f"{len(jobs)} kernels in {compiled:.0f} s, {len(faults)} that failed: {faults[:3]}", flush=True)
    bandwidth = copy_bandwidth() * 1e12
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy_tb_s": bandwidth / 1e12}
    records: list[dict[str, Any]] = []
    for shape in shapes:
        records += sweep(shape, rows, args.rounds, bandwidth)
        torch.cuda.empty_cache()
        print(f"{shape} done after {time.perf_counter() - started:.0f} s", flush=True)
        result |= {"records": records, "compile_faults": faults}
        args.out.write_text(json.dumps(result, indent=1))
    result["layers"] = [layers(records, m, args.rounds) for m in rows]
    result["copy_tb_s_end"] = copy_bandwidth()
    result["measured"] = [
        f"({r['m']}, {sum(r['n'])}, {r['k']}): {Tiling(**r['tiling'])!r},  # {r['us']:.1f} us"
        for r in records
    ]
    result["seconds"] = time.perf_counter() - started
    args.out.write_text(json.dumps(result, indent=1))
    wrong = {f"{r['shape']} m{r['m']} {key}": why for r in records for key, why in r["faults"].items()}
    print(f"{len(wrong)} variants not timed: {list(wrong.items())[:4]}")
    for layer in result["layers"]:
        if layer:
            print(
                f"us a layer at M={layer['m']} (floor {385.9e6 / bandwidth * 1e6:.1f}):", layer["us_a_layer"]
            )
    print(
        f"copy {bandwidth / 1e12:.2f}, at the end {result['copy_tb_s_end']:.2f} TB/s; "
        f"{result['seconds']:.0f} s"
    )
    print(f"{'shape':9}{'M':>3} {'us':>7} {'copy':>5} {'cuBLAS':>7} {'x':>5} {'no pdl':>7}  best")
    for r in records:
        print(
            f"{r['shape']:9}{r['m']:>3} {r['us']:7.1f} {r['share_of_copy']:5.0%} {r['cublas_us']:7.1f} "
            f"{r['ratio']:5.2f} {r['us_without_pdl']:7.1f}  {r['best']}"
        )


if __name__ == "__main__":
    main()
