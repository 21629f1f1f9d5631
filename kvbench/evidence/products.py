"""E4-weights: the paths that FP8 linear layers took in the measured run, by (M, N, K), for its forwards."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.engines.reference.engine import Engine, Product, path_asked, products_of
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.evidence.kernels import compiled_products
from kvbench.evidence.probe_values import level_of
from kvbench.evidence.stored_weights import groups
from kvbench.records.record import VERIFIED, Level
from kvbench_kernels.gemm.fp8_linear import target_of
from kvbench_kernels.gemm.fp8_route import W8A8, path_of_kernel, route
from kvbench_kernels.launches import Launch

QUANTIZES = ("fp8_quantize_activation", "fp8_quantize_activation_torch")

Products = Counter[tuple[str, Product]]


def products_level(engine: Engine, run: Products, forwards: int, step: Sequence[Launch]) -> tuple[Level, str]:
    """The level, and the execution precision of the products: "native", or the paths.

    run, forwards: of the measured run, taken before any probe; step: the launches of one decode step.
    """
    expected = Counter(
        (sum(m.out_features for _, m in group), group[0][1].in_features)
        for group in groups(engine.model.model)
    )
    if not expected and not run:
        return Level("E4-weights", VERIFIED, "No product of FP8 weights ran."), "native"
    probed = not forwards
    if probed:  # a runner without forwards: only the probe can be shown
        run, forwards = products_of(step), 1
    faults = [*_routed(engine, run), *_counted(expected, run, forwards)]
    table = list(_table(run))
    paths = dict.fromkeys(str(row["path"]) for row in table)
    calls = ", ".join(f"{path} {sum(r['calls'] for r in table if r['path'] == path)} times" for path in paths)
    where = "a probed decode step" if probed else f"each of {forwards} forwards"
    right = f"Every FP8 layer was computed in {where}: {calls}."
    facts = {"gemm": engine.gemm, "forwards": forwards, "products_a_forward": expected.total()}
    facts |= {"calls": _calls(run), "routes": table, "compiled": compiled_products(step)}
    level = level_of("E4-weights", faults, "Other products ran", right, **facts)
    return level, "not measured" if probed and not faults else " and ".join(paths)


def rows_of(run: Products) -> dict[tuple[int, int], list[int]]:
    """Rows at which products are probed again, by (N, K): fewest, most and most frequent of each kernel."""
    calls: dict[tuple[int, int, str], Counter[int]] = {}
    for (kernel, (m, n, k)), count in run.items():
        if kernel not in QUANTIZES and m:
            calls.setdefault((n, k, kernel), Counter())[m] += count
    rows: dict[tuple[int, int], set[int]] = {}
    for (n, k, _), seen in calls.items():
        often = max(seen, key=lambda m: (seen[m], m))
        rows.setdefault((n, k), set()).update((min(seen), max(seen), often))
    return {shape: sorted(found) for shape, found in rows.items()}


def _routed(engine: Engine, run: Products) -> Iterator[str]:
    """Products by another path than the decision's and the shape's."""
    dtype, target = dtype_name(engine.model.dtype), target_of(engine.model.device)
    gemm = path_asked(engine.gemm)
    if engine.gemm != engine.decision.gemm.resolved:
        yield f"the engine runs gemm {engine.gemm}, and {engine.decision.gemm.resolved} was resolved"
    for (kernel, (m, n, k)), count in run.items():
        if kernel in QUANTIZES:
            continue
        path, expected = path_of_kernel(kernel), route(m, n, k, dtype, target, gemm)
        if path != expected:
            yield f"{kernel} computed {m} x {n} x {k} {count} times, and path {expected} was expected"


def _counted(expected: Counter[tuple[int, int]], run: Products, forwards: int) -> Iterator[str]:
    """Every layer must be computed once a forward, and each W8A8 product must quantize its input once."""
    ran: Counter[tuple[int, int]] = Counter()
    inputs: Counter[Product] = Counter()
    for (kernel, (m, n, k)), count in run.items():
        if kernel in QUANTIZES:
            inputs[m, n, k] -= count
            continue
        ran[n, k] += count
        if path_of_kernel(kernel) in W8A8:
            inputs[m, n, k] += count
    for n, k in ran | expected:
        if ran[n, k] != expected[n, k] * forwards:
            times = f"{ran[n, k]} times in {forwards} forwards, expected {expected[n, k]} a forward"
            yield f"weights of {n} x {k} were multiplied {times}"
    for (m, n, k), count in inputs.items():
        if count:
            what = f"products of {m} x {n} x {k} by FP8 activations"
            yield f"{what} and quantizations of their inputs differ by {count}"


def _calls(run: Products) -> dict[str, int]:
    calls: Counter[str] = Counter()
    for (kernel, _), count in run.items():
        calls[kernel] += count
    return dict(sorted(calls.items()))


def _table(run: Products) -> Iterator[dict[str, Any]]:
    """The route map of the run: for each weight shape and kernel, its calls and the rows that it had."""
    rows: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for (kernel, (m, n, k)), count in run.items():
        if kernel not in QUANTIZES:
            rows.setdefault((n, k, kernel), []).append((m, count))
    for (n, k, kernel), seen in sorted(rows.items()):
        calls, ms = sum(c for _, c in seen), [m for m, _ in seen]
        row = {"n": n, "k": k, "path": path_of_kernel(kernel) or "unknown", "kernel": kernel}
        yield row | {"calls": calls, "m_min": min(ms), "m_max": max(ms)}
