"""Heat tables: which metrics get one, where each value is, and that its shade follows the number."""

from dataclasses import replace

import pytest

from kvbench.report.view import build


def heats(made):
    return {heat.metric: heat for heat in build(made.judged).heats}


def test_a_metric_over_batch_and_context_has_a_row_for_each_format_and_batch(maker):
    heat = heats(maker(contexts=(128, 512, 2048)))["itl_ms"]
    assert (heat.across, heat.columns) == ("context", ("128", "512", "2048"))
    assert (heat.unit, heat.better) == ("ms", "lower")
    assert [dict(row.parts) for row in heat.rows] == [
        {"kv_format": fmt, "batch": batch} for batch in ("1", "4") for fmt in ("native", "int8_sym")
    ]
    assert [row.label.baseline for row in heat.rows] == [True, False, True, False]
    assert all(cell.entry.shown.interval and cell.entry.shown.n for row in heat.rows for cell in row.cells)


def test_every_value_links_to_its_line(passing):
    view = build(passing.judged)
    lines = {f"{t.key}-{i}": (t, line) for t in view.tables for i, line in enumerate(t.lines)}
    cells = [(heat, cell) for heat in view.heats for row in heat.rows for cell in row.cells]
    assert len(cells) > 20
    for heat, cell in cells:
        table, line = lines[cell.anchor]
        assert line.entries[[c.metric for c in table.columns].index(heat.metric)] is cell.entry


def test_what_differs_along_one_axis_only_has_none(maker):
    found = heats(maker())
    assert "kv_bytes_total" in found
    assert "kv_ratio_16bit" not in found  # one ratio a format, the same in every cell
    assert "ppl" not in found  # not repeated over batch and context
    assert heats(maker(batches=(1,), formats=("native",))) == {}


FAR = {"formats": ("native",), "batches": (1, 100), "contexts": (100, 10_000)}


@pytest.mark.parametrize(
    ("shape", "metric", "shades"),
    [({}, "itl_ms", ["q0", "q8"]), (FAR, "kv_bytes_total", ["q0", "q4", "q4", "q8"])],
)
def test_shades_follow_the_values_by_logarithm_where_they_are_far_apart(maker, shape, metric, shades):
    cells = [c for row in heats(maker(**shape))[metric].rows for c in row.cells]
    found = [shade for _, shade in sorted((float(c.entry.shown.exact), c.shade) for c in cells)]
    assert found == sorted(found)
    assert (found if len(shades) == len(found) else [found[0], found[-1]]) == shades


def test_around_no_change_the_two_sides_have_two_colours_and_no_value_has_none(maker):
    values = {"int8_sym-1-128": 0.8, "int8_sym-1-512": 0.9, "int8_sym-4-128": 1.0, "int8_sym-4-512": 1.2}

    def change(row):
        if (row.metric, row.cell) == ("itl_ms", "native-1-128"):
            return replace(row, value=None, low=None, high=None)
        return replace(row, value=values[row.cell]) if row.metric == "itl_ratio" else row

    found = heats(maker().with_rows(change))
    assert found["itl_ratio"].around == "1"
    shades = [[c.shade for c in row.cells] for row in found["itl_ratio"].rows]
    assert shades == [["lo4", "lo2"], ["q0", "hi4"]]
    first = found["itl_ms"].rows[0].cells[0]
    assert (first.shade, first.entry.shown.text) == ("", "not measured")


def test_scales_make_the_columns_where_neither_batch_nor_context_varies(maker):
    made = maker(formats=("native", "int8_static", "fp8_e4m3_static"), batches=(1,), contexts=(128, 512))
    scales = {128: 0.05, 512: 1.0}  # the contexts become two scales of the static formats
    for cell in made.manifest.cells:
        scale = None if cell.spec["kv_format"] == "native" else scales[cell.spec["context"]]
        cell.spec.update({"scale": scale, "context": 128})
    for task in made.manifest.tasks:
        task.spec["scale"] = None
    made = made.with_manifest(cells=tuple(c for c in made.manifest.cells if c.id != "native-1-512"))
    made = made.with_cells(lambda c: replace(c, varied=("kv_format", "scale"), baseline="native-1-128"))

    def change(row):
        factor = (2 if "512" in row.cell else 1) * (1 + len(row.cell))
        return None if row.cell == "native-1-512" else replace(row, value=row.value and row.value * factor)

    heat = heats(made.with_rows(change))["itl_ms"]
    assert (heat.across, heat.columns) == ("scale", ("0.05", "1.0", "none given"))
    assert [len([c for c in row.cells if c]) for row in heat.rows] == [1, 2, 2]
