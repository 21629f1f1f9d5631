"""The products of the model's linear layers, by path: their distance from the dequantized weight, and their
time.

For the first module of each shape (N, K), with its codes and scales: x is seeded, with a few large channels
as activations have, and its first M rows are multiplied for every M of the sweep, which has both sides of
every boundary of the route. Each output is compared with the float64 product of x and the dequantized weight;
for the other layers of the shape some rows are compared, and the worst layer counts. A path other than the
expected one fails the cell.

A decode step finds each layer's weights in memory, not in the L2 cache. So the timed calls go over the
model's own layers of the shape in turn, as many as fill the L2 `COLD` times over, or all there are; the facts
say whether that left the weights cold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engines.reference.engine import path_asked
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.weights.fp8_linear import using
from kvbench.errors import KvbenchError
from kvbench.evidence.products import QUANTIZES
from kvbench.evidence.weight_products import TOLERANCE, TOLERANCE_W8A8, compared, probe_input, row_distance
from kvbench.runners.context import Context, Measurement
from kvbench.runners.linears import Linear, Product, check_all, products
from kvbench.stats.intervals import largest
from kvbench_kernels.gemm.blockwise import dequantize_activation, quantize_activation_torch
from kvbench_kernels.gemm.fp8_linear import target_of
from kvbench_kernels.gemm.fp8_route import W8A8, path_of_kernel, route
from kvbench_kernels.launches import Launch, record

NATIVE = "native"

# A timing on a GPU queues at least CALLS calls after a kernel that only waits WAIT_CYCLES for each call, so
# that it measures the device and not the host.
CALLS, ROUNDS, WAIT_CYCLES = 5, 5, 1_600_000

# An L2 does not replace lines strictly in order, so the bytes read in between must clearly exceed it.
COLD = 4


@dataclass(frozen=True)
class Turn:
    """The layers that the calls of a sample went over in turn: `layers` out of `of` with this shape.

    stored, native: bytes of their weights as the model holds them, and in the engine's dtype; l2: of the
    device's L2; model: of all weights of the model.
    """

    layers: int
    of: int
    stored: int
    native: int
    l2: int
    model: int

    def __str__(self) -> str:
        text = (
            f"CUDA events over {self.layers} of {self.of} layers in turn, L2 {self.l2:,} B: weights "
            f"{self.stored:,} B, {warmth(self.stored, self.l2)}; native ones {self.native:,} B, "
            f"{warmth(self.native, self.l2)}"
        )
        if self.stored > self.l2:
            return text
        if self.model > self.l2:
            return f"{text}; the model's {self.model:,} B exceed the L2, so its steps may find them cold"
        return f"{text}; the model's {self.model:,} B fit into the L2, so its steps find them warm too"


def run(ctx: Context) -> Measurement:
    decision, model = ctx.engine(sequences=1, tokens=ctx.spec["page_size"]).decision, ctx.model
    gemm = path_asked(decision.gemm.resolved)
    found = products(model.model)
    check_all(model.model, found)
    quantized = decision.weights.resolved != "native"
    if any(product.quantized != quantized for product in found):
        raise KvbenchError(
            f"weights {decision.weights.resolved} were resolved, but the loaded model {model.name} has "
            "others; its products are not this cell's."
        )
    held = sum(p.nbytes for p in model.model.parameters())
    bench = Bench(gemm, model.device, model.dtype, ctx.options, held)
    with torch.inference_mode(), using(gemm):
        measured = []
        for index, product in enumerate(found):
            ctx.progress(index, len(found), f"{product.n} x {product.k}")
            measured.append(bench.measure(product))
    facts = {
        "routes": {f"{p['n']} x {p['k']}": route_map(p["routes"]) for p in measured},
        "kernels": _kernels(measured),
        "gemm": gemm,
        "dtype": dtype_name(model.dtype),
        "seed": ctx.options["seed"],
        "error_is": "distance of an output row from float64 x and dequantized weight, as a share of its "
        "norm; worst row",
        "bounds": {
            path: bench.bound(path) for path in dict.fromkeys(r["path"] for p in measured for r in p["rows"])
        },
        "timed_with": {f"{p['n']} x {p['k']}": p["timed_with"] for p in measured} if bench.timing else None,
    }
    return Measurement({"products": measured}, facts)


@dataclass(frozen=True)
class Bench:
    """gemm: one of `kvbench_kernels.support.GEMMS`; options: the runner's; held: bytes of all weights."""

    gemm: str
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any]
    held: int

    @property
    def timing(self) -> bool:
        return self.device.type == "cuda"

    @property
    def l2(self) -> int:
        """Bytes."""
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def expected_path(self, product: Product, m: int) -> str:
        if not product.quantized:
            return NATIVE
        return route(m, product.n, product.k, dtype_name(self.dtype), target_of(self.device), self.gemm)

    def bound(self, path: str) -> float:
        """Largest allowed distance of an output row from the path's exact product, as a share of its norm."""
        rounding = TOLERANCE[self.dtype]
        return max(rounding, TOLERANCE_W8A8) if path in W8A8 else rounding

    def measure(self, product: Product) -> dict[str, Any]:
        routes = runs(lambda m: self.expected_path(product, m), self.options["max_rows"])
        edges = [m for _, last, _ in routes[:-1] for m in (last, last + 1)]
        sweep = sorted({*self.options["rows"], *edges})
        x = probe_input(self.options["seed"], max(sweep), product.k).to(self.device, self.dtype)
        exact = product.weight().double()
        self._check_no_rows(product, x)
        first = _with_bias(x[:1].double() @ exact.t(), product)[0]
        before, rows = first, list[dict[str, Any]]()
        for m in sweep:
            row, now = self._row(product, x[:m], exact)
            row["row0_diff"] = row_distance(now[None], before[None]) if rows else 0.0
            row["row0_argmax"] = int(now.argmax())
            rows.append(row)
            row["row0_argmax_equal"] = row["row0_argmax"] == rows[max(0, len(rows) - 2)]["row0_argmax"]
            before = now
        self._alike(product, x, rows)
        turn = self._time(product, x, rows) if self.timing else None
        return {
            "n": product.n,
            "k": product.k,
            "modules": list(product.names),
            "calls_a_forward": len(product.layers),
            "routes": routes,
            "boundaries": edges,
            "exact_row0_argmax": int(first.argmax()),
            "timed_with": None if turn is None else str(turn),
            "rows": rows,
        }

    def _check_no_rows(self, product: Product, x: Tensor) -> None:
        empty = tuple(product(x[:0]).shape)
        if empty != (0, product.n):
            raise KvbenchError(
                f"{product.names[0]}: expected shape [0, {product.n}] for no rows, got {list(empty)}."
            )

    def _row(self, product: Product, x: Tensor, exact: Tensor) -> tuple[dict[str, Any], Tensor]:
        """The record's row for one M of the sweep, and the first output row in float64."""
        out, path, kernels = self._computed(product, x)
        y = out.double()
        error, distance = self._off(product, x, y, exact, path)
        row = {"m": len(x), "layer": product.names[0], "path": path, "kernels": kernels}
        return {**row, "error": error, "distance": distance, "bound": self.bound(path)}, y[0]

    def _alike(self, product: Product, x: Tensor, rows: Sequence[dict[str, Any]]) -> None:
        """Raise each M's error and distance to the worst of the shape's other layers, by some rows."""
        for layer in product.alike:
            exact = layer.weight().double()
            for row in rows:
                some = compared(row["m"]).to(x.device)
                out, path, _ = self._computed(layer, x[: row["m"]])
                error, distance = self._off(layer, x[some], out[some].double(), exact, path)
                row["error"] = largest([row["error"], error])
                if not (math.isnan(row["distance"]) or distance <= row["distance"]):  # a NaN is kept
                    row["distance"], row["layer"] = distance, layer.names[0]

    def _off(self, product: Product, x: Tensor, y: Tensor, exact: Tensor, path: str) -> tuple[float, float]:
        """Distance of y from the product with x, and from that with x as the path quantizes it."""
        error = row_distance(y, _with_bias(x.double() @ exact.t(), product))
        if path not in W8A8:
            return error, error
        used = dequantize_activation(*quantize_activation_torch(x)).double()
        return error, row_distance(y, _with_bias(used @ exact.t(), product))

    def _computed(self, product: Product, x: Tensor) -> tuple[Tensor, str, list[str]]:
        """The output, its path and its kernels. Raises KvbenchError for an unexpected path."""
        with record() as launches:
            y = product(x)
        path, kernels = ran(launches) if product.quantized else (NATIVE, _names(launches))
        if path != (expected := self.expected_path(product, len(x))):
            raise KvbenchError(
                f"{product.names[0]} ({len(x)} x {product.n} x {product.k}): expected path {expected}, got "
                f"{path} ({', '.join(kernels) or 'no named kernel'})."
            )
        return y, path, kernels

    def _time(self, product: Product, x: Tensor, rows: list[dict[str, Any]]) -> Turn:
        """Add to the rows the microseconds a call of the path, the reference path, and F.linear on
        dequantized weights, all over the same layers in turn.
        """
        sizes = [layer.nbytes for layer in product.layers]
        layers = product.layers[: in_turn(sizes, self.l2)]
        native = [(layer.weight().to(self.dtype), layer.bias) for layer in layers]
        for row in rows:
            part = x[: row["m"]]
            for layer in layers:  # raises for a layer that takes another path
                self._computed(layer, part)
            calls = [partial(_call, layer.modules, part) for layer in layers]
            row["us"] = microseconds(calls)
            row["us_native"] = microseconds([partial(F.linear, part, *layer) for layer in native])
            if product.quantized:
                with using("reference"):
                    row["us_reference"] = microseconds(calls)
        return Turn(
            layers=len(layers),
            of=len(product.layers),
            stored=sum(sizes[: len(layers)]),
            native=sum(weight.nbytes for weight, _ in native),
            l2=self.l2,
            model=self.held,
        )


def in_turn(sizes: Sequence[int], l2: int) -> int:
    """Number of layers, from the first on, that fill the L2 `COLD` times, or all. sizes, l2: bytes."""
    return next((i for i, held in enumerate(accumulate(sizes), 1) if held >= COLD * l2), len(sizes))


def warmth(held: int, l2: int) -> str:
    """Whether calls that go over `held` bytes of weights in turn find them in an L2 of `l2` bytes."""
    if held >= COLD * l2:
        return "cold"
    return "partly cold" if held > l2 else "warm"


def runs(path: Callable[[int], str], last: int) -> list[list[Any]]:
    """[first M, last M, path] of each range of M from 1 to `last` with one path; the last range is open."""
    found: list[list[Any]] = []
    for m in range(1, last + 1):
        if not found or found[-1][2] != path(m):
            found.append([m, m, path(m)])
        found[-1][1] = m
    return found


def route_map(routes: Sequence[Sequence[Any]]) -> str:
    """`1..64 w8a16, 65.. w8a8`"""
    closed = [f"{first}..{last} {path}" for first, last, path in routes[:-1]]
    return ", ".join([*closed, f"{routes[-1][0]}.. {routes[-1][2]}"])


def ran(launches: Sequence[Launch]) -> tuple[str, list[str]]:
    """The path of the multiplying kernels ("mixed" or "unknown" if not one), and the names of all kernels."""
    names = _names(launches)
    paths = {path_of_kernel(name) for name in names if name not in QUANTIZES}
    if len(paths) != 1:
        return "mixed" if paths else "unknown", names
    return paths.pop() or "unknown", names


def microseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Median over rounds of the device's time a call. A round makes each call in turn, equally often."""
    for call in calls:
        call()  # compiles
    queued = [*calls] * -(-CALLS // len(calls))
    taken: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(WAIT_CYCLES * len(queued))  # type: ignore[no-untyped-call]
        start.record()
        for call in queued:
            call()
        end.record()
        end.synchronize()
        taken.append(1e3 * start.elapsed_time(end) / len(queued))
    return median(taken)


def _call(modules: Sequence[Linear], x: Tensor) -> None:
    """Call the modules as the model does, without joining their outputs."""
    batch = x[None]
    for module in modules:
        module(batch)


def _names(launches: Sequence[Launch]) -> list[str]:
    return list(dict.fromkeys(launch.name for launch in launches))


def _kernels(measured: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for row in (row for product in measured for row in product["rows"]):
        found.setdefault(row["path"], {}).update(dict.fromkeys(row["kernels"]))
    return {path: list(names) for path, names in found.items()}


def _with_bias(y: Tensor, product: Product) -> Tensor:
    return y if product.bias is None else y + product.bias.double()
