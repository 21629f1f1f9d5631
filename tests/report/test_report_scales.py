"""Scales by layer in the report: what they are, where they come from, whether they were read; one table a cell."""

import re
from dataclasses import replace

from kvbench.report.html import render
from kvbench.report.sections.provenance import ScaleRow, summary
from kvbench.report.view import build


def entry(layer, k=0.5, v=0.25, **changes):
    own = {
        "layer": layer,
        "k": k,
        "v": v,
        "k_source": "checkpoint",
        "v_source": "checkpoint",
        "k_read": True,
        "v_read": True,
    }
    return own | changes


def made_with(maker, entries, other=None):
    """A run whose int8 records have these scales; those of the latency runner the others."""

    def change(record):
        if "int8_sym" not in record.key or record.runner not in ("storage", "latency"):
            return record
        scales = other if other is not None and record.runner == "latency" else entries
        return replace(
            record,
            facts={
                **record.facts,
                "scale_kind": "checkpoint",
                "scale_source": "from <its> files",
                "scales": scales,
            },
        )

    return maker(batches=(1,), contexts=(128, 512)).with_records(change)


def rows(made):
    (found,) = build(made.judged).scales
    return found


def test_one_table_for_cells_that_are_the_same(maker):
    entries = [entry(0), entry(1, 1.0, 1.0, k_source="default", v_source="default")]
    found = rows(made_with(maker, entries))
    assert found.summary == "2 of 2 layers read: checkpoint 1, default 1"
    assert sum(len(label.cells) for label in found.where) == 2
    assert found.rows == (
        ScaleRow(0, (("0.5", "checkpoint", "yes"), ("0.25", "checkpoint", "yes"))),
        ScaleRow(1, (("1", "default", "yes"), ("1", "default", "yes"))),
    )


def test_what_records_of_a_cell_disagree_on_is_all_shown(maker):
    found = rows(made_with(maker, [entry(0)], [entry(0, k=1.0, k_source=None, k_read=None, v_read=False)]))
    assert found.rows[0].sides == (
        ("0.5 + 1", "checkpoint + unknown: not what was asked for", "unproven"),
        ("0.25", "checkpoint", "no"),
    )
    assert found.summary.startswith("0 of 1 layers read: K ")


def test_ranges_of_dynamic_scales_are_joined(maker):
    dynamic = {"k_source": "dynamic", "v_source": "dynamic"}
    found = rows(
        made_with(
            maker, [entry(0, [0.1, 0.2], [1, 2], **dynamic)], [entry(0, [0.05, 0.15], [1, 3], **dynamic)]
        )
    )
    assert [side[0] for side in found.rows[0].sides] == ["0.05 to 0.2", "1 to 3"]
    assert found.summary == "1 of 1 layers read: dynamic 1"


def side(source, read="yes"):
    return "1", source, read


def test_sides_that_differ_are_counted_apart():
    same = [ScaleRow(i, (side("checkpoint"), side("checkpoint"))) for i in range(28)]
    same += [ScaleRow(i, (side("default"), side("default"))) for i in range(28, 30)]
    assert summary(same) == "30 of 30 layers read: checkpoint 28, default 2"
    unlike = [*same[:-1], ScaleRow(29, (side("checkpoint"), side("default", "no")))]
    assert summary(unlike) == "29 of 30 layers read: K checkpoint 29, default 1; V checkpoint 28, default 2"
    half = [ScaleRow(0, (side("given"), side("given", "unproven")))]
    assert summary(half) == "0 of 1 layers read: given 1"


def test_the_page_has_the_line_and_the_table(maker):
    page = render(build(made_with(maker, [entry(0, k_read=False), entry(1)]).judged))
    section = page[page.index('<section id="precision"') :]
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))
    assert "1 of 2 layers read: checkpoint 2" in text
    assert "from &lt;its&gt; files." in text
    assert (
        "Layer K source read V source read 0 0.5 checkpoint no 0.25 checkpoint yes 1 0.5 checkpoint yes"
        in text
    )


def test_a_run_without_scales_has_no_table(maker):
    made = maker(batches=(1,), contexts=(128,))
    assert build(made.judged).scales == ()
    assert "Scales by layer" not in render(build(made.judged))
