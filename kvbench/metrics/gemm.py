"""Products of the linear layers compared with float64 products on the dequantized weight: the worst cases."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import ERROR, PATHS, RATIO, SHARE
from kvbench.metrics.declare.value import Value, unmeasured, worst_place
from kvbench.records.record import Record
from kvbench.stats.intervals import largest

At = tuple[Mapping[str, Any], Mapping[str, Any]]  # a product, and one row of its sweep


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    products = record.samples["products"]
    sweep = [(product, row) for product in products for row in product["rows"]]
    if not sweep:
        return
    yield _error(sweep)
    shares = [(row["distance"] / row["bound"], _place((product, row))) for product, row in sweep]
    yield _worst("gemm_bound_share", shares)
    yield from _first_row(products)
    yield Value("gemm_paths", len({row["path"] for _, row in sweep}), len(sweep), note=_routes(record))
    for metric, other in (
        ("gemm_native_time_ratio", "us_native"),
        ("gemm_reference_time_ratio", "us_reference"),
    ):
        ran = [(product, row) for product, row in sweep if row.get(other) and row["path"] != "native"]
        timed = [(row["us"] / row[other], _place((product, row))) for product, row in ran]
        none = Value(metric, None, 0, note="times are measured for FP8 weights on a GPU only")
        yield _worst(metric, timed) if timed else none


def _error(sweep: Sequence[At]) -> Value:
    by_path: dict[str, list[float]] = {}
    for _, row in sweep:
        by_path.setdefault(row["path"], []).append(row["error"])
    note = ", ".join(f"{path} {largest(errors):.2g}" for path, errors in by_path.items())
    return Value("gemm_error_max", largest(row["error"] for _, row in sweep), len(sweep), note=note)


def _first_row(products: Sequence[Mapping[str, Any]]) -> Iterator[Value]:
    """How the first row of output, whose input is fixed, changes from one number of rows to the next."""
    steps = [
        (product, before, row)
        for product in products
        for before, row in zip(product["rows"], product["rows"][1:], strict=False)
    ]
    if not steps:
        names = ("gemm_boundary_diff", "gemm_boundary_argmax")
        yield from unmeasured(names, "a sweep of one number of rows has nothing to compare", 0)
        return
    places = [
        (row["row0_diff"], f"{_shape(product)}, {a['m']} rows {a['path']} to {row['m']} rows {row['path']}")
        for product, a, row in steps
    ]
    yield _worst("gemm_boundary_diff", places)
    equal = sum(bool(row["row0_argmax_equal"]) for _, _, row in steps)
    yield Value("gemm_boundary_argmax", equal / len(steps), len(steps))


def _routes(record: Record) -> str:
    """`1..64 w8a16, 65.. w8a8 (N x K: 576 x 576, 192 x 576)`, products with the same route together."""
    shapes: dict[str, list[str]] = {}
    for shape, route in record.facts["routes"].items():
        shapes.setdefault(route, []).append(shape)
    return "; ".join(f"{route} (N x K: {', '.join(of)})" for route, of in shapes.items())


def _worst(metric: str, found: Sequence[tuple[float, str]]) -> Value:
    worst = largest(value for value, _ in found)
    return Value(metric, worst, len(found), note=f"worst: {worst_place(found, worst)}")


def _place(at: At) -> str:
    product, row = at
    layer = f", {row['layer']}" if "layer" in row else ""
    return f"{_shape(product)}, {row['m']} rows, {row['path']}{layer}"


def _shape(product: Mapping[str, Any]) -> str:
    return f"{product['n']} x {product['k']}"


FACTS: tuple[str, ...] = ()
TABLES: tuple[Table, ...] = (
    Table("gemm", "Products",
          note="Linear layers over a sweep of rows (M), compared with float64 on the dequantized weight. "
               "Paths: reference dequantizes and multiplies; w8a16 keeps x as it is; w8a8 and hopper "
               "quantize x too, which costs about 3% of error. The bound is that of the path's own "
               "computation. Row 0 has the same input at every M: it changes where the route does.",
          metrics=(
        Metric("gemm_error_max", ERROR, "lower", "Worst error",
               "largest distance of an output row from the float64 product with the dequantized weight, "
               "relative to the row's norm", brief=True),
        Metric("gemm_bound_share", RATIO, "lower", "Worst share of bound",
               "largest distance of an output row from the exact product of its path (W8A8: of quantized x) "
               "over the path's rounding bound; above 1 the path computes something else", brief=True),
        Metric("gemm_boundary_diff", ERROR, "lower", "Worst step of row 0",
               "largest change of the first output row, its input unchanged, from one number of rows of "
               "the sweep to the next, relative to its norm", brief=True),
        Metric("gemm_boundary_argmax", SHARE, "higher", "Steps with equal argmax",
               "share of these steps on which the argmax of that row stays the same"),
        Metric("gemm_native_time_ratio", RATIO, "lower", "Worst time to native",
               "worst time of a product over F.linear with the dequantized weight, both over the model's "
               "layers of the shape in turn; GPU only", plausible=(0.05, inf), brief=True),
        Metric("gemm_reference_time_ratio", RATIO, "lower", "Worst time to reference",
               "worst time of a product over the reference path; GPU only", plausible=(0.0001, inf)),
        Metric("gemm_paths", PATHS, "", "Paths, by rows",
               "number of paths that ran over the sweep; the note says which took which rows", brief=True),
    )),
)  # fmt: skip
