"""Bytes of the host's buffers, compared with the same formulas, and GB/s of the swaps of a batch in each
direction, by a clock around synchronised copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.metrics.value import Value
from kvbench.records.record import Record
from kvbench.stats.intervals import median


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    swaps, facts = record.samples["swaps"], record.facts
    moved = max(sum(swap["layer_bytes"]) for swap in swaps)
    yield Value("transfer_bytes", moved, len(swaps))
    yield Value("transfer_ratio_16bit", moved / facts["native16_bytes"], len(swaps))

    expected = facts["expected_layer_bytes"]
    off = [  # the bytes of an unmeasured swap must be right too
        abs(got - due)
        for swap in (*record.samples["warmup"], *swaps)
        for got, due in zip(swap["layer_bytes"], expected, strict=True)
    ]
    wrong = sum(1 for difference in off if difference)
    note = f"{wrong} of {len(off)} layers moved differ from the formula" if wrong else ""
    yield Value("transfer_bytes_difference", sum(off), len(off), note=note)

    for metric, way in (("swap_out_gb_s", "out"), ("swap_in_gb_s", "in")):
        rates = [sum(s["layer_bytes"]) / s["seconds"] / 1e9 for s in swaps if s["way"] == way]
        yield Value(metric, median(rates), len(rates))
