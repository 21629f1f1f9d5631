"""Heat tables: which metrics get one, where each value stands, and that its shade says what the number says."""

from dataclasses import replace

from kvbench.report.view import build


def heats(made):
    return {heat.metric: heat for heat in build(made.judged).heats}


def test_a_metric_over_batch_and_context_has_a_table_with_a_row_for_each_format_and_batch(maker):
    heat = heats(maker(contexts=(128, 512, 2048)))["itl_ms"]
    assert (heat.across, heat.columns, heat.unit, heat.better) == (
        "context",
        ("128", "512", "2048"),
        "ms",
        "lower",
    )
    assert [dict(row.parts) for row in heat.rows] == [
        {"kv_format": fmt, "batch": batch} for batch in ("1", "4") for fmt in ("native", "int8_sym")
    ]
    assert [row.label.baseline for row in heat.rows] == [True, False, True, False]
    assert all(cell.entry.shown.interval and cell.entry.shown.n for row in heat.rows for cell in row.cells)


def test_every_value_leads_to_the_line_that_it_is_taken_from(maker):
    view = build(maker().judged)
    lines = {f"{t.key}-{i}": (t, line) for t in view.tables for i, line in enumerate(t.lines)}
    for heat in view.heats:
        for row in heat.rows:
            for cell in row.cells:
                table, line = lines[cell.anchor]
                place = [c.metric for c in table.columns].index(heat.metric)
                assert line.entries[place] is cell.entry


def test_what_differs_along_one_axis_only_needs_no_map(maker):
    found = heats(maker())
    assert "kv_bytes_total" in found
    assert "kv_ratio_16bit" not in found  # a ratio a format, the same in every cell
    assert "ppl" not in found  # not repeated over batch and context
    assert heats(maker(batches=(1,), formats=("native",))) == {}


def test_shades_run_from_the_lowest_to_the_highest_by_logarithm_where_values_are_far_apart(maker):
    def places(made, metric):
        cells = [c for row in heats(made)[metric].rows for c in row.cells]
        return [shade for _, shade in sorted((float(c.entry.shown.exact), c.shade) for c in cells)]

    near = places(maker(), "itl_ms")
    assert (near[0], near[-1]) == ("q0", "q8")
    assert near == sorted(near)
    made = maker(formats=("native",), batches=(1, 100), contexts=(100, 10_000))
    assert places(made, "kv_bytes_total") == ["q0", "q4", "q4", "q8"]


def test_around_no_change_the_two_sides_have_two_colours(maker):
    values = {"int8_sym-1-128": 0.8, "int8_sym-1-512": 0.9, "int8_sym-4-128": 1.0, "int8_sym-4-512": 1.2}
    made = maker().with_rows(lambda r: replace(r, value=values[r.cell]) if r.metric == "itl_ratio" else r)
    heat = heats(made)["itl_ratio"]
    assert heat.around == "1"
    assert [[cell.shade for cell in row.cells] for row in heat.rows] == [["lo4", "lo2"], ["q0", "hi4"]]


def test_what_was_not_measured_has_no_shade_and_stays_not_measured(maker):
    made = maker().with_rows(
        lambda r: (
            replace(r, value=None, low=None, high=None)
            if (r.metric, r.cell) == ("itl_ms", "native-1-128")
            else r
        )
    )
    first = heats(made)["itl_ms"].rows[0].cells[0]
    assert (first.shade, first.entry.shown.text) == ("", "not measured")


def test_scales_make_the_columns_where_neither_batch_nor_context_varies(maker):
    made = maker(formats=("native", "int8_static", "fp8_e4m3_static"), batches=(1,), contexts=(128, 512))
    for cell in made.manifest.cells:  # the contexts become two scales of the static formats
        native, context = cell.spec["kv_format"] == "native", cell.spec["context"]
        scale = None if native else {128: 0.05, 512: 1.0}[context]
        cell.spec.update({"scale": scale, "context": 128})
    kept = tuple(c for c in made.manifest.cells if c.id != "native-1-512")
    made = made.with_manifest(cells=kept).with_cells(
        lambda cell: replace(cell, varied=("kv_format", "scale"), baseline="native-1-128")
    )
    for task in made.manifest.tasks:
        task.spec["scale"] = None
    made = made.with_rows(
        lambda r: (
            None
            if r.cell == "native-1-512"
            else replace(r, value=r.value and r.value * (2 if "512" in r.cell else 1) * (1 + len(r.cell)))
        )
    )
    heat = heats(made)["itl_ms"]
    assert (heat.across, heat.columns) == ("scale", ("0.05", "1.0", "none given"))
    assert [len([c for c in row.cells if c]) for row in heat.rows] == [1, 2, 2]
