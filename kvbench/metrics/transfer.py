"""Bytes of the host's buffers, and GB/s of the swaps of a batch, by a clock around synchronised copies."""

import math
from collections.abc import Iterator
from functools import partial
from math import inf

from kvbench.metrics.declare.change import exact_change, independent_change
from kvbench.metrics.declare.metric import RATE, Effect, Measured, Metric, Table, Unable
from kvbench.metrics.declare.units import BYTES, GB_PER_S, RATIO
from kvbench.metrics.declare.value import Value
from kvbench.records.record import Record
from kvbench.stats.intervals import median


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    swaps, facts = record.samples["swaps"], record.facts
    moved = max(sum(swap["layer_bytes"]) for swap in swaps)
    yield Value("transfer_bytes", moved, len(swaps))
    yield Value("transfer_ratio_16bit", moved / facts["native16_bytes"], len(swaps))

    expected = facts["expected_layer_bytes"]
    off = [  # the bytes of a warm-up swap must be right too
        abs(got - want)
        for swap in (*record.samples["warmup"], *swaps)
        for got, want in zip(swap["layer_bytes"], expected, strict=True)
    ]
    wrong = sum(1 for difference in off if difference)
    note = f"{wrong} of {len(off)} layers moved differ from the formula" if wrong else ""
    yield Value("transfer_bytes_difference", sum(off), len(off), note=note)

    for metric, way in (("swap_out_gb_s", "out"), ("swap_in_gb_s", "in")):
        rates = [sum(s["layer_bytes"]) / s["seconds"] / 1e9 for s in swaps if s["way"] == way]
        yield Value(metric, median(rates), len(rates))


_bytes_change = partial(exact_change, values)


def _rate_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable:
    way = metric.name.removeprefix("swap_").removesuffix("_gb_s")
    swaps = [[s for s in side.record.samples["swaps"] if s["way"] == way] for side in (first, second)]
    logs = [[math.log(sum(s["layer_bytes"]) / s["seconds"]) for s in side] for side in swaps]
    return independent_change(metric, logs[0], logs[1], "swaps", RATE)


FACTS: tuple[str, ...] = ("tokens",)
TABLES: tuple[Table, ...] = (
    Table("transfer", "Transfer",
          note="The pages of the cell's batch and context are copied to the host (pinned memory on a GPU) "
               "and back, bit for bit, scales included. 1 GB/s is 10^9 B per second.",
          metrics=(
        Metric("transfer_bytes", BYTES, "lower", "Bytes moved",
               "bytes of the host's buffers after the whole batch was swapped out, scales included",
               plausible=(1.0, inf), brief=True, effect=_bytes_change),
        Metric("transfer_ratio_16bit", RATIO, "lower", "Ratio to 16-bit",
               "transfer_bytes over those of the same pages in a 2-byte native format",
               plausible=(0.01, 4.0), brief=True),
        Metric("transfer_bytes_difference", BYTES, "lower", "Moved minus formula",
               "bytes by which the moved bytes and the formula differ, added up over layers, swaps and "
               "directions; must be 0", plausible=(0.0, 0.0), brief=True),
        Metric("swap_out_gb_s", GB_PER_S, "higher", "Swap out",
               "bytes over seconds from the device to the host, synchronised; median over repeats, 1 GB = "
               "10^9 B", plausible=(1e-06, 1000.0), brief=True, effect=_rate_change),
        Metric("swap_in_gb_s", GB_PER_S, "higher", "Swap in",
               "bytes over seconds from the host to the device, synchronised; median over repeats, 1 GB = "
               "10^9 B", plausible=(1e-06, 1000.0), brief=True, effect=_rate_change),
    )),
)  # fmt: skip
