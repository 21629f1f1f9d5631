"""The products of the model's linear layers, by path: distance from the dequantized weight, and time.

For the first module of each shape (N, K) the first M rows of a seeded x are multiplied for every M of the
sweep, which has both sides of every boundary of the route, and compared with the float64 product of x and the
dequantized weight; for the other layers of the shape some rows are, and the worst layer counts.

A decode step finds each layer's weights in memory, not in the L2 cache. So the timed calls go over the
model's own layers of the shape in turn, as many as fill the L2 `COLD` times over, or all there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbench.engines.reference.engine import path_asked
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear, using
from kvbench.errors import KvbenchError
from kvbench.evidence.products import QUANTIZES
from kvbench.evidence.stored_weights import fp8_modules, groups
from kvbench.evidence.weight_products import TOLERANCE, TOLERANCE_W8A8, compared, probe_input, row_distance
from kvbench.runners.context import Context, Measurement
from kvbench.stats.intervals import largest
from kvbench_kernels.gemm.blockwise import dequantize_activation, dequantize_blocks, quantize_activation_torch
from kvbench_kernels.gemm.fp8_linear import target_of
from kvbench_kernels.gemm.fp8_route import W8A8, path_of_kernel, route
from kvbench_kernels.launches import Launch, record

NATIVE = "native"

# A timing on a GPU queues at least CALLS calls after a kernel that only waits WAIT_CYCLES for each call, so
# that it measures the device and not the host.
CALLS, ROUNDS, WAIT_CYCLES = 5, 5, 1_600_000

# An L2 does not replace lines strictly in order, so the bytes read in between must clearly exceed it.
COLD = 4

Linear = nn.Linear | Fp8Linear


@dataclass(frozen=True)
class Product:
    """Modules that one call computes together (q, k, v; gate, up; or one), the first of their shape; alike:
    the same of the model's other layers of this shape.
    """

    names: tuple[str, ...]
    modules: tuple[Linear, ...]
    n: int
    k: int
    alike: tuple[Product, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        # [1, M, K], as from the engine. Modules of one product recognise each other by the same input tensor.
        batch = x[None]
        return torch.cat([module(batch) for module in self.modules], dim=-1)[0]

    @property
    def quantized(self) -> bool:
        return isinstance(self.modules[0], Fp8Linear)

    @property
    def layers(self) -> tuple[Product, ...]:
        """All calls of this shape in a forward, this one first."""
        return (self, *self.alike)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and biases in the modules."""
        return sum(held.nbytes for module in self.modules for held in module.parameters())

    @property
    def bias(self) -> Tensor | None:
        biases: list[Tensor] = [module.bias for module in self.modules if module.bias is not None]
        return torch.cat(biases) if biases else None

    def weight(self) -> Tensor:
        """[N, K] in float32: the dequantized or the native weight."""
        return torch.cat([_dequantized(module) for module in self.modules])


def _dequantized(module: Linear) -> Tensor:
    if isinstance(module, Fp8Linear):
        return dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
    return module.weight.data.float()


def products(model: nn.Module) -> list[Product]:
    """The products of the FP8 linear layers, or of all but the output layer if there are none, by shape."""
    output = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    linears: dict[str, Linear] = {**fp8_modules(model)} or {
        name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    }
    if not linears:
        raise KvbenchError("The model has no linear layer but its output layer: no product to measure.")
    names = {id(m): name for name, m in linears.items()}
    calls: list[tuple[Linear, ...]] = [tuple(getattr(m, "group", ())) or (m,) for m in linears.values()]
    followers = {id(m) for call in calls for m in call[1:]}
    shapes: dict[tuple[int, int], list[Product]] = {}
    for call in calls:
        if id(call[0]) not in followers:
            shape = sum(m.out_features for m in call), call[0].in_features
            shapes.setdefault(shape, []).append(Product(tuple(names[id(m)] for m in call), call, *shape))
    return [replace(first, alike=tuple(others)) for first, *others in shapes.values()]


def check_all(model: nn.Module, found: Sequence[Product]) -> None:
    """Raises KvbenchError unless the layers have the products' names and shapes and are a forward's calls."""
    layers = [layer for product in found for layer in product.layers]
    for layer in layers:
        for name, module in zip(layer.names, layer.modules, strict=True):
            if model.get_submodule(name) is not module:
                raise KvbenchError(f"The layer measured as {name} is another layer of the model.")
        n, k = sum(m.out_features for m in layer.modules), layer.modules[0].in_features
        if (n, k) != (layer.n, layer.k):
            raise KvbenchError(f"{layer.names[0]} is {n} x {k}, not {layer.n} x {layer.k} as measured.")
    expected = Counter(tuple(name for name, _ in group) for group in groups(model))
    measured = Counter(layer.names for layer in layers)
    for names in expected | measured if expected else ():
        if expected[names] != measured[names]:
            raise KvbenchError(
                f"A forward computes {' and '.join(names)} as one product {expected[names]} times, but "
                f"{measured[names]} would be measured; the measurement would not match the model's calls."
            )


def turn(layers: int, of: int, stored: int, native: int, l2: int, model: int) -> str:
    """A sentence on the layers that the calls of a sample went over in turn, out of `of` with this shape.

    In bytes: stored, native: their weights as the model holds them, and in the engine's dtype; model: all.
    """
    held = f"weights {stored:,} B, {warmth(stored, l2)}; native ones {native:,} B, {warmth(native, l2)}"
    text = f"CUDA events over {layers} of {of} layers in turn, L2 {l2:,} B: {held}"
    if stored > l2:
        return text
    cold = "exceed the L2, so its steps may find them cold"
    warm = "fit into the L2, so its steps find them warm too"
    return f"{text}; the model's {model:,} B {cold if model > l2 else warm}"


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
    bench, measured = Bench(gemm, model.device, model.dtype, ctx.options, held), []
    with torch.inference_mode(), using(gemm):
        for index, product in enumerate(found):
            ctx.progress(index, len(found), f"{product.n} x {product.k}")
            measured.append(bench.measure(product))
    kernels: dict[str, dict[str, None]] = {}  # of each path that ran, in order
    for row in (row for product in measured for row in product["rows"]):
        kernels.setdefault(row["path"], {}).update(dict.fromkeys(row["kernels"]))
    shapes = {f"{p['n']} x {p['k']}": p for p in measured}
    facts = {
        "routes": {shape: route_map(p["routes"]) for shape, p in shapes.items()},
        "kernels": {path: list(names) for path, names in kernels.items()},
        "gemm": gemm,
        "dtype": dtype_name(model.dtype),
        "seed": ctx.options["seed"],
        "error_is": "distance of an output row from float64 x and dequantized weight, as a share of its "
        "norm; worst row",
        "bounds": {path: bench.bound(path) for path in kernels},
        "timed_with": {shape: p["timed_with"] for shape, p in shapes.items()} if bench.timing else None,
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
        before, rows = None, list[dict[str, Any]]()
        for m in sweep:
            out, path, kernels = self._computed(product, x[:m])
            y = out.double()
            error, distance = self._off(product, x[:m], y, exact, path)
            row = {"m": m, "layer": product.names[0], "path": path, "kernels": kernels, "error": error}
            row |= {"distance": distance, "bound": self.bound(path), "row0_argmax": int(y[0].argmax())}
            row["row0_diff"] = 0.0 if before is None else row_distance(y[:1], before)
            row["row0_argmax_equal"] = not rows or row["row0_argmax"] == rows[-1]["row0_argmax"]
            rows.append(row)
            before = y[:1]
        self._alike(product, x, rows)
        return {
            "n": product.n,
            "k": product.k,
            "modules": list(product.names),
            "calls_a_forward": len(product.layers),
            "routes": routes,
            "boundaries": edges,
            "exact_row0_argmax": int(first.argmax()),
            "timed_with": self._time(product, x, rows) if self.timing else None,
            "rows": rows,
        }

    def _check_no_rows(self, product: Product, x: Tensor) -> None:
        empty = tuple(product(x[:0]).shape)
        if empty != (0, product.n):
            raise KvbenchError(
                f"{product.names[0]}: expected shape [0, {product.n}] for no rows, got {list(empty)}."
            )

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

    def _time(self, product: Product, x: Tensor, rows: list[dict[str, Any]]) -> str:
        """Add to the rows the microseconds a call of the path, the reference path and a native F.linear."""
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
        held = sum(sizes[: len(layers)]), sum(weight.nbytes for weight, _ in native)
        return turn(len(layers), len(sizes), *held, self.l2, self.held)


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
    paths = {path_of_kernel(name) or "unknown" for name in names if name not in QUANTIZES} or {"unknown"}
    return paths.pop() if len(paths) == 1 else "mixed", names


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


def _with_bias(y: Tensor, product: Product) -> Tensor:
    return y if product.bias is None else y + product.bias.double()
