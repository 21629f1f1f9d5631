"""`kvbench history`: the values of many stored runs over time, and where one changed. Pure.

A line is one metric of one piece of work over the runs that have it, in the order of creation. Each run is
compared with the previous one that has the work, as `kvbench compare` does, with Holm's correction over all
neighbours and cells. If the two are incomparable, the line breaks there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvbench.compare.pairing import TIMED, Pair, Stored, pairs_of
from kvbench.compare.result import BETTER, WORSE, Finding
from kvbench.compare.two_runs import faults_of, judge, named, place_of
from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.metric import BESIDE
from kvbench.metrics.declare.units import BYTES

# Shown with what is judged; the change of a ratio to the interleaved baseline is that of its time.
RATIOS = {"itl_ratio": "itl_ms", "ttft_ratio": "ttft_ms"}
BESIDES = (*RATIOS, "ppl_delta_pct", "kv_ratio_16bit")


@dataclass(frozen=True)
class Point:
    """One run's value on a line."""

    run: int  # its index in `History.runs`
    row: Row
    broken: tuple[str, ...] = ()  # why the line starts anew here
    change: Finding | None = None  # from the previous point

    @property
    def changed(self) -> bool:
        return self.change is not None and self.change.outcome in (WORSE, BETTER)


@dataclass(frozen=True)
class Line:
    metric: str
    variant: str
    place: str
    points: tuple[Point, ...]

    @property
    def segments(self) -> tuple[tuple[Point, ...], ...]:
        """The points between breaks."""
        found: list[list[Point]] = []
        for point in self.points:
            if point.broken or not found:
                found.append([])
            found[-1].append(point)
        return tuple(map(tuple, found))


@dataclass(frozen=True)
class History:
    """runs: by `created_at`; faults, named: as of `compare.Comparison`."""

    runs: tuple[Stored, ...]
    faults: tuple[tuple[str, str], ...]
    named: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def changes(self) -> tuple[tuple[Line, Point], ...]:
        return tuple((line, point) for line in self.lines for point in line.points if point.changed)


@dataclass(frozen=True)
class _Stop:
    """One piece of work in one run, paired with the previous run on its track."""

    run: int
    cell: str
    variant: str
    pair: Pair | None


def history(
    runs: Sequence[Stored],
    chosen: Sequence[Collection[str] | None] = (),
    only: Collection[str] = (),
    margin: float | None = None,
) -> History:
    """runs in their order; the other arguments as of `compare.compare`."""
    chosen = list(chosen) or [None] * len(runs)
    tracks = _tracks(runs, chosen)
    pairs = [stop.pair for _, track in tracks for stop in track if stop.pair]
    wanted = {RATIOS.get(metric, metric) for metric in only}
    judged = judge([p for p in pairs if not p.unlike], wanted, margin)
    found = {(f.runs, f.cell, f.metric, f.variant): f for f in judged}
    shown = [m for m in METRICS.values() if (m.name in only if only else m.effect or m.name in BESIDES)]
    lines = tuple(
        line
        for runner, track in tracks
        for metric in shown
        if metric.runner == runner
        if (line := _line(runs, metric.name, track, found)) is not None
    )
    faults = tuple(f for run, cells in zip(runs, chosen, strict=True) for f in faults_of(run, cells))
    return History(tuple(runs), faults, named(pairs), lines)


def _tracks(
    runs: Sequence[Stored], chosen: Sequence[Collection[str] | None]
) -> list[tuple[str, list[_Stop]]]:
    """(runner, its stops) of each piece of work; a run is paired with the previous one that has the work."""
    tracks: list[tuple[str, list[_Stop]]] = []
    for j, run in enumerate(runs):
        taken: set[str] = set()
        pairs = {
            i: {pair.first.task.key: pair for pair in pairs_of(runs[i], run, chosen[i])}
            for i in {track[-1].run for _, track in tracks}
        }
        for runner, track in tracks:
            last = track[-1]
            task = runs[last.run].run.task_at(last.cell, runner, last.variant)
            pair = pairs[last.run].get(task.key) if task else None
            if pair is not None and pair.second is not None and pair.second.task.key not in taken:
                taken.add(pair.second.task.key)
                track.append(_Stop(j, pair.second.cell, last.variant, pair))
        for task in run.run.tasks:
            cells = [cell for cell in task.cells if chosen[j] is None or cell in (chosen[j] or ())]
            if cells and task.key not in taken:
                tracks.append((task.runner, [_Stop(j, cells[0], task.variant, None)]))
    return tracks


def _line(
    runs: Sequence[Stored],
    metric: str,
    track: Sequence[_Stop],
    found: dict[tuple[tuple[str, str], str, str, str], Finding],
) -> Line | None:
    """None where no run has a value."""
    points = []
    for stop in track:
        row = runs[stop.run].rows.get((stop.cell, metric, stop.variant))
        if row is None:
            continue
        broken: tuple[str, ...] = ()
        change = None
        if stop.pair and stop.pair.second:
            broken = stop.pair.unlike
            if stop.pair.machine and stop.pair.runner in TIMED and METRICS[metric].unit is not BYTES:
                broken = (*broken, f"times of two machines ({stop.pair.machine})")
            names = (stop.pair.first.run.name, stop.pair.second.run.name)
            change = found.get((names, stop.pair.first.cell, RATIOS.get(metric, metric), stop.variant))
        # A change relative to native belongs to the ratio, any other to the time itself.
        beside = change is not None and change.effect is not None and change.effect.kind is BESIDE
        points.append(
            Point(stop.run, row, broken, None if broken or beside != (metric in RATIOS) else change)
        )
    if all(point.row.value is None for point in points):
        return None
    first = track[0]
    place = place_of(runs[first.run], METRICS[metric].runner, first.cell)
    return Line(metric, first.variant, place, tuple(points))
