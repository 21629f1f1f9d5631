"""The data of all plots and drill-downs of a page; `kvbench.report.figures.page` lays them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.figures.agreement import AgreementLine, agreement_lines
from kvbench.report.figures.divergence import KldLine, kld_lines
from kvbench.report.figures.drilldown import Chunks, Questions, chunk_lists, question_lists
from kvbench.report.figures.health import HealthLine, health_lines
from kvbench.report.figures.series import TimeSeries, ttft_series
from kvbench.report.figures.speed import ProductTimes, Roof, product_times, roof
from kvbench.report.model import JudgedRun

T = TypeVar("T")


@dataclass(frozen=True)
class PlotData:
    """Empty or None where nothing was measured. problems: (section, sentence) for each unreadable record."""

    ttft: tuple[TimeSeries, ...]
    kld: tuple[KldLine, ...]
    agreement: tuple[AgreementLine, ...]
    health: tuple[HealthLine, ...]
    roof: Roof | None
    products: tuple[ProductTimes, ...]
    questions: tuple[Questions, ...]
    chunks: tuple[Chunks, ...]
    problems: tuple[tuple[str, str], ...]


def plot_data(run: JudgedRun, labels: Labels) -> PlotData:
    """Collects the data of every plot. An unreadable record costs one plot, never the page."""
    problems: list[tuple[str, str]] = []

    def read(section: str, of: Callable[[JudgedRun, Labels], T], missing: T) -> T:
        try:
            return of(run, labels)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as e:
            why = one_line(f"{type(e).__name__}: {e}", 200)
            problems.append((section, f"A plot is missing: samples of a record cannot be read ({why})."))
            return missing

    return PlotData(
        read("latency", ttft_series, ()),
        read("quality", kld_lines, ()),
        read("agreement", agreement_lines, ()),
        read("health", health_lines, ()),
        read("latency", roof, None),
        read("gemm", product_times, ()),
        read("mcq", question_lists, ()),
        read("quality", chunk_lists, ()),
        tuple(problems),
    )
