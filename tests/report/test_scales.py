"""Scales by layer in the report: values, sources, whether they were read; one table for equal cells."""

from dataclasses import replace

import pytest

from kvbench.report.html import render
from kvbench.report.sections.provenance import ScaleRow, summary
from kvbench.report.view import build

CHECKPOINT = {"k_source": "checkpoint", "v_source": "checkpoint"}
DYNAMIC = {"k_source": "dynamic", "v_source": "dynamic"}


def entry(layer, k=0.5, v=0.25, **changes):
    return {"layer": layer, "k": k, "v": v, "k_read": True, "v_read": True, **CHECKPOINT, **changes}


def made_with(maker, entries, other=None):
    """A run whose int8 records have these scales; other: those of the latency runner."""

    def change(record):
        if "int8_sym" not in record.key or record.runner not in ("storage", "latency"):
            return record
        scales = other if other and record.runner == "latency" else entries
        facts = {"scale_kind": "checkpoint", "scale_source": "from <its> files", "scales": scales}
        return replace(record, facts=record.facts | facts)

    return maker(batches=(1,), contexts=(128, 512)).with_records(change)


def test_cells_with_the_same_scales_have_one_table(maker):
    default = {"k_source": "default", "v_source": "default"}
    view = build(made_with(maker, [entry(0, k_read=False), entry(1, 1.0, 1.0, **default)]).judged)
    (found,) = view.scales
    assert found.summary == "1 of 2 layers read: checkpoint 1, default 1"
    assert sum(len(label.cells) for label in found.where) == 2
    assert found.rows == (
        ScaleRow(0, (("0.5", "checkpoint", "no"), ("0.25", "checkpoint", "yes"))),
        ScaleRow(1, (("1", "default", "yes"), ("1", "default", "yes"))),
    )
    page = render(view)
    assert "from &lt;its&gt; files." in page
    assert '<td class="num">0.5</td><td>checkpoint</td><td class="is-fail">no</td>' in page
    assert build(maker(batches=(1,), contexts=(128,)).judged).scales == ()


def test_what_records_of_a_cell_disagree_on_is_all_shown(maker):
    other = [entry(0, k=1.0, k_source=None, k_read=None, v_read=False)]
    ((k, v),) = (row.sides for row in build(made_with(maker, [entry(0)], other).judged).scales[0].rows)
    assert (k[0], k[1].split(" + ")[0], k[2]) == ("0.5 + 1", "checkpoint", "unproven")
    assert "unknown" in k[1]
    assert v == ("0.25", "checkpoint", "no")
    ranges = [entry(0, [0.1, 0.2], [1, 2], **DYNAMIC)], [entry(0, [0.05, 0.15], [1, 3], **DYNAMIC)]
    (found,) = build(made_with(maker, *ranges).judged).scales
    assert [side[0] for side in found.rows[0].sides] == ["0.05 to 0.2", "1 to 3"]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (("default", "default", "yes"), "30 of 30 layers read: checkpoint 28, default 2"),
        (
            ("checkpoint", "default", "no"),
            "29 of 30 layers read: K checkpoint 29, default 1; V checkpoint 28, default 2",
        ),
        (("default", "default", "unproven"), "29 of 30 layers read: checkpoint 28, default 2"),
    ],
)
def test_sides_that_differ_are_counted_separately(last, text):
    sources = [("checkpoint", "checkpoint", "yes")] * 28 + [("default", "default", "yes"), last]
    rows = [ScaleRow(i, (("1", k, "yes"), ("1", v, read))) for i, (k, v, read) in enumerate(sources)]
    assert summary(rows) == text
