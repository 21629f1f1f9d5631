"""The plots of speed against what limits it: a decode step's bytes and time beside the copy bandwidth, and the linear layers' products."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from kvbench.render.numbers import one_line
from kvbench.render.svg import INK, RC, colour, drawn, log_axis, marker, xy
from kvbench.report.figures.gemm import BESIDE, ProductTimes
from kvbench.report.figures.roofline import Roof


def roof_svg(roof: Roof, title: str) -> str:
    """ms a decode step over the bytes it reads (MB, 10^6), log axes; the line is the least time at the device's copy bandwidth."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(point.line for point in roof.points))
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 3.4), layout="constrained")
        panel = figure.subplots()
        for i, name in enumerate(names):
            found = [((p.weights + p.cache) / 1e6, p.itl.value or nan) for p in roof.points if p.line == name]
            panel.plot(*xy(found), marker(i), color=colour(i), markersize=6)
        reads = [(point.weights + point.cache) / 1e6 for point in roof.points]
        times = [point.itl.value or nan for point in roof.points]
        least = [read / roof.copy for read in reads] if roof.copy else []  # MB / (GB/s) is ms
        log_axis(panel, "x", min(reads), max(reads))
        log_axis(panel, "y", min(times + least), max(times + least))
        if roof.copy:
            ends = panel.get_xlim()
            panel.plot(ends, [end / roof.copy for end in ends], color=INK, linewidth=1.2)
        panel.set_xlabel("read a step (MB)")
        panel.set_ylabel("ITL mean (ms)")
        panel.grid()
        panel.tick_params(length=0)
        return drawn(figure, "roof", title)


SERIES = {"us": "what runs", **BESIDE}


def products_svg(products: Sequence[ProductTimes], title: str) -> str:
    """Microseconds a call over the rows of x, log axes, one panel a shape (N x K)."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(3, len(products))
    rows = -(-len(products) // columns)
    sizes = [m for product in products for m, _, _ in product.rows]
    times_us = [us for product in products for _, _, times in product.rows for us in times.values()]
    ends_m, ends_us = (min(sizes), max(sizes)), (min(times_us), max(times_us))
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 0.3 + 2.3 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).flat
        for panel in panels[len(products) :]:
            panel.set_visible(False)
        several = len({product.name for product in products}) > 1
        for panel, product in zip(panels, products, strict=False):
            for i, key in enumerate(SERIES):
                found = [(m, times[key]) for m, _, times in product.rows if key in times]
                panel.plot(
                    [m for m, _ in found], [us for _, us in found], color=colour(i), marker=marker(i), markersize=3.5,
                    linewidth=1.0,
                )  # fmt: skip
            shape = f"{product.n} x {product.k}"
            panel.set_title(f"{one_line(product.name, 30)}\n{shape}" if several else shape, loc="left")
            log_axis(panel, "x", *ends_m)
            log_axis(panel, "y", *ends_us)
            panel.grid(axis="y")
            panel.tick_params(length=0, labelbottom=True)
        figure.supylabel("µs a call", fontsize=10)
        figure.supxlabel("rows (M)", fontsize=10)
        return drawn(figure, "products", title)
