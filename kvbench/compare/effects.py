"""What changed from one stored run to another, metric by metric, from the raw samples of both. Pure; no model, no torch.

    times        pairs of interleaved requests: the candidate's ratio to native in one run over that in the other, which cancels a
                 machine that is slower as a whole; without native arms in both, independent repeats (Welch), which cancels nothing
    perplexity   chunk by chunk, clustered by document
    KLD          the ratio of its sums, clustered by document
    shares       step by step, token by token, question by question
    bytes        as they are

The statistics are those of `kvbench.stats.intervals`. What has no samples to pair is not judged, and `UNJUDGED` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.compare.pairing import Pair, Side
from kvbench.data.corpora import evenly
from kvbench.metrics import latency, mcq, storage, transfer
from kvbench.metrics.value import BLOCK
from kvbench.records.record import Record
from kvbench.stats.intervals import (
    Estimate,
    clustered_mean,
    clustered_ratio,
    exp,
    independent_difference,
    mcnemar_p,
    paired_difference,
)
from kvbench.stats.stability import time_of

BESIDE, ALONE, TEXT, DIVERGENCE, SHARE, BYTES = (
    "time beside native",
    "time",
    "perplexity",
    "KLD",
    "share",
    "bytes",
)


@dataclass(frozen=True)
class Effect:
    """The change of a metric from the first run to the second.

    kind: one of those above, by which its margin goes. unit: "%" of a ratio, 100 * (second / first - 1), "pt" of a share, else
    the metric's own. low, high: 95%, None where the samples are too few. n: samples in each run (the fewer) of what `counted`
    says; units: as of `metrics.Row`. identical: what was compared is the same to the last bit. method: how, in words; beside:
    of times, the change without the native arm, which decides nothing; subset: what both runs have, where one of them has more.
    """

    metric: str
    kind: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    counted: str = ""
    units: float | None = None
    identical: bool = False
    method: str = ""
    beside: Effect | Unable | None = None
    subset: str = ""

    @property
    def sampled(self) -> bool:
        return self.kind != BYTES


@dataclass(frozen=True)
class Unable:
    """A metric that both runs should have samples of, and why there is nothing to pair."""

    metric: str
    why: str


def effects(pair: Pair) -> Iterator[Effect | Unable]:
    """Every judged metric of two records that may be compared. Raises what reading damaged samples raises."""
    assert pair.second is not None
    find = _EFFECTS.get(pair.runner)
    if find:
        yield from find(pair.first, pair.second)


def judged(runner: str) -> tuple[str, ...]:
    """The metrics of a runner that `effects` gives."""
    return _JUDGED.get(runner, ())


def _records(first: Side, second: Side) -> tuple[Record, Record]:
    assert first.record is not None
    assert second.record is not None
    return first.record, second.record


def _exact(
    derive: Callable[..., Iterator[Any]], metrics: Sequence[str], own: Side, other: Side
) -> Iterator[Effect | Unable]:
    sides = [{v.metric: v.value for v in derive(r, None)} for r in _records(own, other)]
    for metric in metrics:
        a, b = (side.get(metric) for side in sides)
        if a is None or b is None:
            if a is not b:
                yield Unable(metric, "one of the two did not measure it")
            continue
        unit = "B/token" if metric == "kv_bytes_per_token" else "B"
        yield Effect(metric, BYTES, unit, b - a, method="exact", identical=a == b)


def _storage(first: Side, second: Side) -> Iterator[Effect | Unable]:
    yield from _exact(storage.values, _JUDGED["storage"], first, second)


def _transfer(first: Side, second: Side) -> Iterator[Effect | Unable]:
    yield from _exact(transfer.values, ("transfer_bytes",), first, second)
    for way in ("out", "in"):
        own, other = (
            [math.log(sum(s["layer_bytes"]) / s["seconds"]) for s in r.samples["swaps"] if s["way"] == way]
            for r in _records(first, second)
        )
        yield _alone(f"swap_{way}_gb_s", own, other, "swaps")


def _latency(first: Side, second: Side) -> Iterator[Effect | Unable]:
    for metric, quantity in (("itl_ms", "itl"), ("ttft_ms", "ttft")):
        here, there = (_arms(record, quantity) for record in _records(first, second))
        if isinstance(here, str) or isinstance(there, str):
            yield Unable(metric, here if isinstance(here, str) else str(there))
            continue
        (own, pairs), (other, others) = here, there
        alone = _alone(metric, own, other, "requests")
        if not pairs or not others:
            yield alone
            continue
        found = independent_difference(pairs, others)
        yield _ratio(
            metric, BESIDE, found, min(len(pairs), len(others)), "pairs",
            method="ratio to the interleaved native arm, over that ratio in the first run",
            beside=alone,
        )  # fmt: skip


def _arms(record: Record, quantity: str) -> tuple[list[float], list[float]] | str:
    """Logarithms of the candidate's times, and of their ratios to the baseline's pair by pair; or why there are none."""
    ordered = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    if quantity == "itl" and (wrong := latency.wrong_count(ordered)):
        return wrong
    logs: dict[str, list[float]] = {"candidate": [], "baseline": []}
    for arm in ordered:
        time = time_of(arm, quantity)
        if time is None:
            return "one output token has no gap"
        if not 0 < time < math.inf:
            return "a time is not a positive number"
        logs[arm["arm"]].append(math.log(time))
    own, other = logs["candidate"], logs["baseline"]
    if not own:
        return "no request was measured"
    return own, [a - b for a, b in zip(own, other, strict=False)]


def _alone(metric: str, first: Sequence[float], second: Sequence[float], counted: str) -> Effect | Unable:
    if not first or not second:
        return Unable(metric, f"one of the two has no {counted}")
    found = independent_difference(first, second)
    return _ratio(metric, ALONE, found, min(len(first), len(second)), counted, "independent repeats (Welch)")


def _ratio(
    metric: str, kind: str, logs: Estimate, n: int, counted: str, method: str, beside: Effect | Unable | None = None, subset: str = "",
    identical: bool = False,
) -> Effect:  # fmt: skip
    """A change of logarithms as one in percent."""
    low, high = (_percent(logs.interval[0]), _percent(logs.interval[1])) if logs.interval else (None, None)
    return Effect(
        metric, kind, "%", _percent(logs.value), low, high, n, counted, logs.effective, identical, method, beside, subset
    )  # fmt: skip


def _percent(log_ratio: float) -> float:
    return 100 * (exp(log_ratio) - 1)


def _perplexity(first: Side, second: Side) -> Iterator[Effect | Unable]:
    a, b, subset = _common_chunks(*_records(first, second))
    if not a:
        yield Unable("ppl", subset)
        return
    tokens, owners = [c["tokens"] for c in a], [c["document"] for c in a]
    n = sum(tokens)
    found = clustered_ratio([y["nll"] - x["nll"] for x, y in zip(a, b, strict=True)], tokens, owners)
    same = _same(a, b, "nll")
    yield _ratio(
        "ppl", TEXT, found, n, "tokens", f"chunk by chunk, {_documents(found)}", subset=subset, identical=same
    )
    if not all("kld" in c for c in (*a, *b)):
        return
    yield _divergence(a, b, owners, n, subset)
    flags = [y["top1_equal"] - x["top1_equal"] for x, y in zip(a, b, strict=True)]
    yield _share(
        "top1_agreement", flags, tokens, owners, "tokens", subset=subset, identical=same and _same(a, b, "kld")
    )  # fmt: skip


def _common_chunks(first: Record, second: Record) -> tuple[list[Any], list[Any], str]:
    """The chunks that both scored, and which of them those are where one has more; or none, and why."""
    sides = [dict(zip(chunk_places(r), r.samples["chunks"], strict=True)) for r in (first, second)]
    places = sorted(sides[0].keys() & sides[1].keys())
    a, b = ([side[place] for place in places] for side in sides)
    if not places:
        return [], [], "the two scored no chunk in common"
    if [(c["tokens"], c["document"]) for c in a] != [(c["tokens"], c["document"]) for c in b]:
        return [], [], "the chunks do not score the same tokens"
    most = max(map(len, sides))
    return a, b, f"{len(places)} chunks that both scored, of {most}" if len(places) < most else ""


def chunk_places(record: Record) -> list[int]:
    """Indexes of the record's chunks among all chunks of the text.

    Records without the fact `places` have those that their limit spread evenly over `chunks_total`.
    """
    n = len(record.samples["chunks"])
    places: list[int] | None = record.facts.get("places")
    return places if places is not None else evenly(record.facts.get("chunks_total") or n, n)


def _divergence(
    a: Sequence[Any], b: Sequence[Any], owners: Sequence[Hashable], n: int, subset: str
) -> Effect | Unable:
    """Sum of KLD over sum of KLD. Which run is the denominator must not matter, so the wider interval of the two counts."""
    sums = [[c["kld"] for c in side] for side in (a, b)]
    if not all(math.fsum(side) > 0 for side in sums):
        same = sums[0] == sums[1]
        if same:
            return Effect(
                "kld_mean",
                DIVERGENCE,
                "%",
                0.0,
                0.0,
                0.0,
                n,
                "tokens",
                identical=True,
                method="no divergence in either",
            )
        return Unable("kld_mean", "in one of the two nothing diverges, so there is no ratio")
    there, back = clustered_mean(sums[1], sums[0], owners), clustered_mean(sums[0], sums[1], owners)
    value = math.log(there.value) if there.value > 0 else math.nan
    halves = [
        (math.log(found.interval[1]) - math.log(found.interval[0])) / 2
        for found in (there, back)
        if found.interval and found.interval[0] > 0
    ]
    interval = (value - max(halves), value + max(halves)) if len(halves) == 2 else None
    logs = Estimate(value, interval, there.units, min(there.effective, back.effective))
    return _ratio(
        "kld_mean", DIVERGENCE, logs, n, "tokens", f"chunk by chunk, {_documents(there)}", subset=subset,
        identical=_same(a, b, "kld"),
    )  # fmt: skip


def _documents(found: Estimate) -> str:
    return f"{found.units} document{'s' if found.units != 1 else ''}"


def _same(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], key: str) -> bool:
    return [x[key] for x in a] == [y[key] for y in b]


def _share(
    metric: str, differences: Sequence[int], counts: Sequence[int], owners: Sequence[Hashable], counted: str, **words: Any
) -> Effect:  # fmt: skip
    """Change of a share in points: successes there less those here, by item or by group of `counts` items, clustered by owner.

    The interval is Bonett and Price's on the discordant items, of groups as many as there must be at least, and no narrower than
    the cluster-robust t-interval; none where all items have one owner.
    """
    n = sum(counts)
    gained, lost = sum(max(d, 0) for d in differences), sum(max(-d, 0) for d in differences)
    low, high = paired_difference(gained, lost, n)
    value = (gained - lost) / n
    units = None
    ends: tuple[float | None, float | None] = (low, high)
    if len(set(owners)) < n:  # else every item is an owner, and Bonett and Price have it all
        found = clustered_ratio(differences, counts, owners)
        units = found.effective
        ends = (min(low, found.interval[0]), max(high, found.interval[1])) if found.interval else (None, None)
    said: dict[str, Any] = {
        "method": f"{counted[:-1]} by {counted[:-1]}, {gained} gained, {lost} lost",
        **words,
    }
    low_pt, high_pt = (None if end is None else 100 * end for end in ends)
    return Effect(metric, SHARE, "pt", 100 * value, low_pt, high_pt, n, counted, units, **said)


def _steps(metric: str, own: Sequence[bool], other: Sequence[bool], **words: Any) -> Effect:
    """Steps of one text, clustered by blocks of neighbours as their share itself is."""
    differences = [int(b) - int(a) for a, b in zip(own, other, strict=True)]
    owners = [i // BLOCK for i in range(len(differences))]
    return _share(metric, differences, [1] * len(differences), owners, "steps", **words)


def _parity(first: Side, second: Side) -> Iterator[Effect | Unable]:
    own, other = (record.samples["steps"]["argmax_equal"] for record in _records(first, second))
    if not own or len(own) != len(other):
        yield Unable("steps_argmax_agreement", f"{len(own)} steps in one and {len(other)} in the other")
        return
    cases = [record.samples["steps"] for record in _records(first, second)]
    yield _steps(
        "steps_argmax_agreement", list(map(bool, own)), list(map(bool, other)), identical=cases[0] == cases[1]
    )


def _agreement(first: Side, second: Side) -> Iterator[Effect | Unable]:
    """Both followed their own native text, so steps are pairs for as long as the native texts are one."""
    if not first.native or not second.native:
        return  # a baseline agrees with itself
    texts = [side.native.samples["tokens"] for side in (first, second) if side.native]
    own, other = (record.samples["tokens"] for record in _records(first, second))
    steps = min(map(len, (*texts, own, other)))
    shared = next((i for i in range(steps) if texts[0][i] != texts[1][i]), steps)
    if not shared:
        yield Unable("top1_teacher_forced", "the native texts part at the first step")
        return
    flags = [[x == y for x, y in zip(tokens[:shared], texts[0], strict=False)] for tokens in (own, other)]
    part = f"{shared} of {steps} steps, before the native texts part" if shared < steps else ""
    scores = [r.samples.get("logprob_native_token") for r in _records(first, second)]
    same = own == other and texts[0] == texts[1] and bool(scores[0]) and scores[0] == scores[1]
    yield _steps("top1_teacher_forced", flags[0], flags[1], subset=part, identical=same)


def _mcq(first: Side, second: Side) -> Iterator[Effect | Unable]:
    sides = [mcq.judge(record) for record in _records(first, second)]
    keys = [key for key in sides[0] if key in sides[1]]
    most = max(map(len, sides))
    subset = f"{len(keys)} questions that both scored, of {most}" if len(keys) < most else ""
    if not keys:
        yield Unable("mcq_accuracy", "the two scored no question in common")
        return
    a, b = ([side[key] for key in keys] for side in sides)
    if any(x.answer != y.answer for x, y in zip(a, b, strict=True)):
        yield Unable("mcq_accuracy", "a question has another answer in the other run")
        return
    if not all(j.picks for j in (*a, *b)):
        yield Unable("mcq_accuracy", "a question has a choice without a number")
        return
    same = [j.scores for j in a] == [j.scores for j in b]
    yield _questions("mcq_accuracy", [j.right for j in a], [j.right for j in b], subset, same)
    natives = [mcq.judge(side.native) for side in (first, second) if side.native]
    if len(natives) == 2 and all(key in native and native[key].picks for key in keys for native in natives):
        flags = [
            [j.picks[0] == native[key].picks[0] for key, j in zip(keys, judged, strict=True)]
            for judged, native in zip((a, b), natives, strict=True)
        ]
        alike = same and all(natives[0][key].scores == natives[1][key].scores for key in keys)
        yield _questions("mcq_agreement", flags[0], flags[1], subset, alike)


def _questions(metric: str, own: Sequence[bool], other: Sequence[bool], subset: str, same: bool) -> Effect:
    differences = [int(b) - int(a) for a, b in zip(own, other, strict=True)]
    gained, lost = differences.count(1), differences.count(-1)
    found = _share(
        metric, differences, [1] * len(own), range(len(own)), "questions", subset=subset, identical=same
    )
    return replace(found, method=f"{found.method}, exact McNemar p = {mcnemar_p(gained, lost):.2g}")


_EFFECTS: dict[str, Callable[[Side, Side], Iterator[Effect | Unable]]] = {
    "storage": _storage,
    "transfer": _transfer,
    "parity": _parity,
    "latency": _latency,
    "agreement": _agreement,
    "perplexity": _perplexity,
    "mcq": _mcq,
}

_JUDGED: dict[str, tuple[str, ...]] = {
    "storage": ("kv_bytes_total", "kv_bytes_payload", "kv_bytes_scales", "kv_bytes_per_token", "weight_bytes",
                "weight_payload_bytes", "weight_scale_bytes", "weight_native_bytes", "page_table_bytes"),
    "transfer": ("transfer_bytes", "swap_out_gb_s", "swap_in_gb_s"),
    "parity": ("steps_argmax_agreement",),
    "latency": ("itl_ms", "ttft_ms"),
    "agreement": ("top1_teacher_forced",),
    "perplexity": ("ppl", "kld_mean", "top1_agreement"),
    "mcq": ("mcq_accuracy", "mcq_agreement"),
}  # fmt: skip
