"""FP8 linear layers on one GPU: our paths as routed and each by itself, beside public kernels in the same
run.

    python -m benchmarks.fp8_linear [--shapes qkv,o,gate_up,down] [--m 1,2,4,...] [--odd 3,7,...] [--peers
    cublas,...] [--own ours,w8a16,...] [--rounds 5] [--out DIR]
    python -m benchmarks.fp8_linear --warm all       # what compiles at first use, in parallel, beforehand
    python -m benchmarks.fp8_linear --shapes tiny --m 1,3 --odd '' --peers cublas     # to try the script on
    anything

y[M, N] = x[M, K] times a weight [N, K] of FP8 codes with 128x128 block scales, the shapes of Qwen3-8B. `ours`
is `fp8_linear` as a model calls it, quantization of x included; w8a16, w8a8 and hopper are its paths by
force, and *_alone the products without the quantization. Of the peers, scaled_mm and deepgemm leave the
quantization out; *_q includes it (torch has no quantizer and gets ours), deepgemm_oq is DeepGEMM's product
behind our quantizer. cublas multiplies the same values in bfloat16. At the rows of --odd only `ours`,
hopper_alone and cublas run.

Protocol. As many weights as make 240 MB of codes (4x the L2), in one CUDA graph, so that each call finds cold
caches. The result of every call is compared with float32 products before anything is timed: with the
dequantized weight, and where x is quantized also with the quantized operands (printed for all, and a bound
for ours). An entry that is wrong has no time. Then the entries take turns, forwards and backwards, for
`rounds` rounds; median, smallest and largest are kept. B, the copy bandwidth, is measured before and after.
The goals are a table (`GOALS`), each printed as reached, missed or not measured. The last lines are the
fastest path of each shape, for `kvbench_kernels.gemm.fp8_route`. Exit status 1 when a path of ours was wrong
or did not run."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import copy_bandwidth, first_line
from benchmarks.fp8_linear_data import BOUNDS, PRODUCT_BOUND, SHAPES, Case, Weights, distance, fault_of
from benchmarks.fp8_linear_entries import NATIVE, OWN, PEERS, ROUTED, Bound, Call, Entry
from benchmarks.fp8_linear_goals import GOALS, Row, errors, evaluate, failures, header, line, suggested_route
from benchmarks.goals import as_json, chosen, goal_lines
from kvbench_kernels.gemm.fp8_route import W8A8

QWEN = "qkv,o,gate_up,down"
ROWS = "1,2,4,8,16,32,64,96,128,256,512,1024,2048,4096,8192"
# Beside tile edges, and between the others.
ODD = (
    "3,7,17,33,65,80,100,127,129,144,160,193,257,320,385,513,641,769,1000,"
    "1025,1281,1537,1793,2049,3073,4097,8191"
)
ODD_ENTRIES = (ROUTED, "hopper_alone", NATIVE)
REPLAYS = 4  # a sample
ENTRIES = {**OWN, **PEERS}


# Measuring --------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """Calls whose results were right, and what replays them all. calls and outs hold the memory that a graph
    uses.
    """

    replay: Callable[[], Any]
    calls: Sequence[Call]
    outs: Sequence[Tensor]
    row: Row


def captured(calls: Sequence[Call], device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """(what runs all calls again, what each returned); each runs once before, so that it may compile.

    Without torch.cuda.graph, which empties the allocator's cache for each of many hundred graphs.
    """
    if device.type != "cuda":
        return lambda: [call() for call in calls], [call() for call in calls]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            outs = [call() for call in calls]
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph.replay, outs


def prepare(case: Case, shape: str, entry: Entry, bind: Callable[[], Bound]) -> Ready | Row:
    """Checked calls, or a row that says why there are none."""
    weights = case.weights
    dtype = str(weights.dtype).removeprefix("torch.")
    row = Row(shape, case.m, weights.n, weights.k, entry.name)
    numerics = entry.numerics
    try:
        if why := entry.takes(case.m, weights.n, weights.k, dtype):
            return replace(row, word="-", failed=why)
        calls = bind()(case.x)
        if entry.own:
            path = routed_path(case, dtype) if entry.name == ROUTED else entry.name.split("_")[0]
            numerics = numerics or ("w8a8" if path in W8A8 else "w8a16")
            row = replace(row, path=path, kernels=launched_by(calls[0]))
        replay, outs = captured(calls, weights.device)
        if weights.device.type == "cuda":
            for out in outs:
                out.fill_(math.nan)  # what a call does not write must not look right
            replay()
        off = distance(outs, case.due)
        off_product = distance(outs, case.due_quantized) if numerics == "w8a8" else None
    except ImportError as e:
        return replace(row, word="absent", failed=first_line(e))
    except Exception as e:  # a peer that cannot run is a word of the table
        if weights.device.type == "cuda":
            torch.cuda.synchronize()  # raises where no later result would be true
        return replace(row, word="failed", failed=f"cannot run: {first_line(e)}")
    row = replace(row, off_weight=off[0], off_product=off_product[0] if off_product else None)
    fault = fault_of(off, BOUNDS[numerics])
    if off_product and entry.own:
        fault = fault or fault_of(off_product, PRODUCT_BOUND)
    return replace(row, word="WRONG", failed=fault) if fault else Ready(replay, calls, outs, row)


def routed_path(case: Case, dtype: str) -> str:
    from kvbench_kernels.gemm.fp8_linear import target_of
    from kvbench_kernels.gemm.fp8_route import route

    return route(case.m, case.weights.n, case.weights.k, dtype, target_of(case.x.device))


def launched_by(call: Call) -> tuple[str, ...]:
    """Names of the kernels of ours that one call launches."""
    from kvbench_kernels.launches import record

    with record() as launches:
        call()
    return tuple(launch.name for launch in launches)


def sample(ready: Ready, on_gpu: bool) -> float:
    """us a call."""
    ready.replay()
    if not on_gpu:
        begun = time.perf_counter()
        ready.replay()
        return (time.perf_counter() - begun) * 1e6 / len(ready.calls)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        ready.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / REPLAYS / len(ready.calls)


def alternate(ready: Sequence[Ready], rounds: int, on_gpu: bool) -> list[Row]:
    """The rows with their times; the entries take turns, forwards and then backwards."""
    times: list[list[float]] = [[] for _ in ready]
    for round_ in range(rounds):
        order = range(len(ready))
        for i in order if round_ % 2 == 0 else reversed(order):
            times[i].append(sample(ready[i], on_gpu))
    return [
        replace(r.row, us=statistics.median(t), us_min=min(t), us_max=max(t))
        for r, t in zip(ready, times, strict=True)
    ]


class Layer:
    """One shape: its weights, and what each entry made of them."""

    def __init__(self, shape: str, device: torch.device, cold: bool = True) -> None:
        self.shape = shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        bytes_ = {} if cold and device.type == "cuda" else {"cold": 0}
        self.weights = Weights(*SHAPES[shape], device, dtype, **bytes_)
        self._bound: dict[str, Bound] = {}

    def bound(self, entry: Entry) -> Bound:
        if entry.name not in self._bound:
            self._bound[entry.name] = entry.bind(self.weights)
        return self._bound[entry.name]

    def measure(self, m: int, entries: Sequence[Entry], rounds: int) -> list[Row]:
        case = Case(self.weights, m)
        prepared = [prepare(case, self.shape, e, lambda e=e: self.bound(e)) for e in entries]  # type: ignore[misc]
        on_gpu = self.weights.device.type == "cuda"
        timed = iter(alternate([p for p in prepared if isinstance(p, Ready)], rounds, on_gpu))
        return [next(timed) if isinstance(p, Ready) else p for p in prepared]


# Command ----------------------------------------------------------------------------------------------------


def warm(name: str, shape: str, rows: Sequence[int], device: torch.device) -> None:
    """Every kernel of an entry for one shape, compiled; the first error last."""
    layer, entry, fault = Layer(shape, device, cold=False), ENTRIES[name], None
    weights = layer.weights
    for m in rows:
        if entry.takes(m, weights.n, weights.k, str(weights.dtype).removeprefix("torch.")):
            continue
        try:
            layer.bound(entry)(torch.randn(m, weights.k, device=device, dtype=weights.dtype))[0]()
        except Exception as e:  # the others may do
            fault = fault or e
    if device.type == "cuda":
        torch.cuda.synchronize()
    if fault:
        raise fault


def warm_all(names: Sequence[str], shapes: Sequence[str], rows: Sequence[int], odd: Sequence[int]) -> None:
    """Each entry and shape in processes of their own, as many at a time as there are processors."""

    def one(job: tuple[str, str, list[int]]) -> str:
        name, shape, part = job
        command = [sys.executable, "-m", "benchmarks.fp8_linear", "--warm", name, "--shapes", shape]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "--m", ",".join(map(str, part)), "--odd", ""], capture_output=True, text=True
        )
        tail = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        took = time.perf_counter() - began
        return (
            f"warm {name} {shape} M={part[0]}..{part[-1]}: {'; '.join(tail)[:160] or 'built'} ({took:.0f} s)"
        )

    jobs = []
    for name in names:
        wanted = sorted({*rows, *(odd if ENTRIES[name].own else ())})
        size = -(-len(wanted) // max(ENTRIES[name].compiled, 1))
        parts = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        jobs += [(name, shape, part) for shape in shapes for part in parts]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for text in pool.map(one, jobs):
            print(text, flush=True)


def numbers(given: str) -> list[int]:
    """The numbers of a comma-separated list; SystemExit for anything else."""
    parts = [part for part in given.split(",") if part]
    if wrong := [part for part in parts if not (part.isdecimal() and int(part))]:
        raise SystemExit(f"The number of rows {wrong[0]!r} is no whole number from 1 on.")
    return [int(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=QWEN)
    parser.add_argument("--m", default=ROWS)
    parser.add_argument("--odd", default=ODD, help="rows for `ours`, hopper_alone and cublas; '' for none")
    parser.add_argument("--own", default=",".join(OWN))
    parser.add_argument("--peers", default=",".join(PEERS), help="'' for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for fp8_linear.json")
    parser.add_argument(
        "--warm", default=None, metavar="ENTRIES", help="compile these (or all that compile) and stop"
    )
    args = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    shapes = chosen(args.shapes, SHAPES, "The shape")
    rows, odd = numbers(args.m), numbers(args.odd)
    entries = [
        ENTRIES[n] for n in (*chosen(args.own, OWN, "The path"), *chosen(args.peers, PEERS, "The peer"))
    ]
    # Peers first: nvcc takes longest.
    every = ",".join(n for n, e in {**PEERS, **OWN}.items() if e.compiled)
    names = chosen(every if args.warm == "all" else args.warm or "", ENTRIES, "The entry")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and shapes != ["tiny"]:
        raise SystemExit("torch sees no CUDA device; --shapes tiny runs anywhere.")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    if len(names) == 1 and len(shapes) == 1:
        warm(names[0], shapes[0], sorted({*rows, *odd}), device)
        return
    if names:
        warm_all(names, shapes, rows, odd)
        return
    on_gpu = device.type == "cuda"
    began = time.perf_counter()
    before = copy_bandwidth() if on_gpu else math.nan
    found: list[Row] = []
    columns = [e.name for e in entries]
    print(header(columns), flush=True)
    for shape in shapes:
        layer = Layer(shape, device)
        for m in sorted({*rows, *odd}):
            some = entries if m in rows else [e for e in entries if e.name in ODD_ENTRIES]
            here = layer.measure(m, some, args.rounds)
            print(line({r.entry: r for r in here}, columns), flush=True)
            found += here
            if on_gpu:
                torch.cuda.empty_cache()
        del layer
        print(f"{shape}: {time.perf_counter() - began:.0f} s since the start", flush=True)
        write(args, found, [before])
    after = copy_bandwidth() if on_gpu else math.nan
    write(args, found, [before, after])
    print("\n".join([*errors(found), *failures(found)]))
    name = torch.cuda.get_device_name() if on_gpu else device.type
    print(f"B: {before:.3f} TB/s before, {after:.3f} after; {name}, torch {torch.__version__}")
    print("\n".join(suggested_route(found)))
    print("\n".join(goal_lines(GOALS, lambda goal: evaluate(goal, found))))
    if any(r.failed and r.word != "-" for r in found if r.entry in OWN):
        raise SystemExit(1)


def write(args: argparse.Namespace, rows: Sequence[Row], copies: Sequence[float]) -> None:
    """Everything measured so far, as JSON."""
    if not args.out:
        return
    import triton

    args.out.mkdir(parents=True, exist_ok=True)
    known = [b for b in copies if not math.isnan(b)]
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_s": known,
        "rounds": args.rounds,
        "rows": [asdict(r) | {"tflops": r.tflops} for r in rows],
        "route": suggested_route(rows),
        "goals": as_json(GOALS, lambda goal: evaluate(goal, rows)),
    }
    (args.out / "fp8_linear.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
