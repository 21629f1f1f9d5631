"""`kvbench reproduce`: a published table and the measured values, as text, Markdown and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.published.reproduce import NOT_RUN, Shape
from kvbench.published.table import Table
from kvbench.render.numbers import plain

COLUMNS = ("line", "published", "ours", "ours / published", "verdict")


@dataclass(frozen=True)
class Reproduced:
    """name: SOURCE TABLE; hardware, models: of the run; stands_in: the model used instead of the published
    one; faults: failed built-in checks of the run (precision, impossible values, ...), which make it invalid.
    """

    name: str
    table: Table
    shape: Shape
    hardware: str
    models: str
    stands_in: str
    command: str
    faults: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return 1 if self.faults else self.shape.exit_code

    @property
    def verdict(self) -> str:
        return "the run is invalid" if self.faults else self.shape.verdict


def hardware_of(
    environment: Mapping[str, Any], specs: Sequence[Mapping[str, Any]], backends: Iterable[str]
) -> str:
    """`NVIDIA H200, bfloat16, backend triton`: what the cells ran on. backends: the resolved ones."""
    gpus, devices = environment.get("gpus") or [], {spec["device"] for spec in specs}
    where = gpus[0]["name"] if gpus and "cuda" in devices else environment.get("cpu") or "an unknown CPU"
    dtypes = ", ".join(sorted({spec["dtype"] for spec in specs}))
    return f"{where}, {dtypes}, backend {', '.join(sorted(set(backends))) or 'none: nothing ran'}"


def head(found: Reproduced) -> list[str]:
    """The lines above the table: model and hardware of both sides."""
    lines = found.table.lines
    models = dict.fromkeys(line.texts.get("model", "") for line in lines)
    devices = dict.fromkeys(line.texts.get("device", "") for line in lines)
    theirs = ", ".join(filter(None, models)) or "an unnamed model"
    where = ", ".join(filter(None, devices)) or "unnamed hardware"
    return [
        f"{found.name}: {found.table.head.get('title', found.table.path.stem)}",
        f"published: {theirs}, on {where} ({found.table.head.get('source', 'no source given')})",
        f"ours: {found.models or 'nothing'}, on {found.hardware or 'nothing'}",
        *([f"not the published model: {found.stands_in}"] if found.stands_in else []),
    ]


def foot(found: Reproduced) -> list[str]:
    """The lines below the table: orders, faults, the command for rows that were not run, and the verdict."""
    text = []
    for order in found.shape.orders:
        flipped = f"; flipped: {'; '.join(order.flipped)}" if order.flipped else ""
        text.append(
            f"order of {order.column}: {order.alike} pairs in the same order, {order.open} undecided, "
            f"{len(order.flipped)} flipped{flipped}"
        )
    text += [f"fault: {fault}" for fault in found.faults]
    states = [row.state for row in found.shape.rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if NOT_RUN in states:
        text.append(f"to run it: {found.command}")
    text.append(f"{found.verdict} ({counts}). Exit code {found.exit_code}.")
    return text


def cells(found: Reproduced) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for row in found.shape.rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
        ours, verdict = _sides(row.ours) or "-", f"{row.state}: {plain(row.sentence, 300)}"
        rows.append((row.name, _sides(row.published), ours, ratio, verdict))
    return rows


def _sides(values: Mapping[str, str]) -> str:
    sides = " -> ".join(values[side] for side in ("baseline", "candidate") if side in values)
    return f"{sides} ({values['change']})" if "change" in values else sides


def as_text(found: Reproduced) -> str:
    out, before = head(found), ""
    for name, published, ours, ratio, verdict in cells(found):
        out += ["", name, f"  published  {published}"]
        out += [f"  ours       {ours}"] if ours != "-" else []
        out += [f"  ours / published  {ratio}"] if ratio != "-" else []
        # A cause shared by consecutive lines is printed once.
        again = verdict == before and ours == "-"
        out.append(f"  {verdict.split(':')[0]}: as above" if again else f"  {verdict}")
        before = verdict
    return "\n".join([*out, "", *foot(found)])


def as_markdown(found: Reproduced) -> str:
    def cell(text: str) -> str:
        return plain(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")

    title, *rest = head(found)
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *cells(found)]
    table = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    above, below = ([f"- {cell(line)}" for line in lines] for lines in (rest, foot(found)))
    return "\n".join([f"## {cell(title)}", "", *above, "", *table, "", *below, ""])


def as_json(found: Reproduced) -> dict[str, Any]:
    return {
        "table": found.name,
        "title": found.table.head.get("title"),
        "source": found.table.head.get("source"),
        "head": head(found)[1:],
        "hardware": found.hardware,
        "models": found.models,
        "rows": [asdict(row) for row in found.shape.rows],
        "orders": [asdict(order) for order in found.shape.orders],
        "faults": list(found.faults),
        "command": found.command,
        "verdict": found.verdict,
        "exit_code": found.exit_code,
    }
