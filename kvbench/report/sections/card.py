"""The release card: four questions of a release manager, each with a short answer, its reason and the numbers behind it.

Pure: from the verdict and the rows. What was not measured stays "not measured"; what covers only a part, or was held to no limit, is
never said to be more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun, judged
from kvbench.report.sections.answers import answers
from kvbench.report.sections.candidate import Answer, Candidate
from kvbench.report.sections.precision import PrecisionLine

_KEYS = (
    "model",
    "kv_format",
    "weights",
)  # what makes a candidate; the cells below it differ in shape, scale or backend
_GRAVEST = ("fail", "inconclusive", "incomplete", "partial", "pass")


@dataclass(frozen=True)
class Card:
    """One candidate format with the answers of all its cells, in the questions' order."""

    name: str
    cells: tuple[str, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Release:
    """word: what a release manager may take home; tone: pass only where a gate passed and nothing is held back; held: why it is no
    release whatever the checks say; cards: a candidate each, the gravest first.
    """

    word: str
    tone: str
    sentence: str
    held: tuple[str, ...]
    cards: tuple[Card, ...]


def release(run: JudgedRun, labels: Labels, precision: Sequence[PrecisionLine]) -> Release:
    """precision: the lines of all cells, as `precision_lines` gives them."""
    held = reservations(run, labels)
    candidates = _candidates(labels)
    if not candidates:
        held = (*held, "every cell is a baseline, so there is no candidate")
    cards = [Card(c.name, c.cells, answers(run, labels, precision, c, held)) for c in candidates]
    cards.sort(key=lambda card: min(_GRAVEST.index(answer.tone) for answer in card.answers[:2]))
    # Where nothing else holds it back, an answer that is no plain yes does: a gate may ask for less than these questions.
    held = held or tuple(
        f"{card.name}: {answer.question} {answer.word}"
        for card in cards
        for answer in card.answers[:2]
        if answer.tone != "pass"
    )
    word, tone, sentence = _conclusion(run, held)
    return Release(word, tone, sentence, held, tuple(cards))


def _conclusion(run: JudgedRun, held: Sequence[str]) -> tuple[str, str, str]:
    code = run.verdict.exit_code
    if code == 1:
        return "Not ready", "fail", "A check failed."
    if code == 4:
        return "Undecided", "inconclusive", "The data cannot decide every check."
    if code != 0:
        return "Incomplete", "incomplete", "Something that is required was not evaluated."
    if held:
        return "No release yet", "partial", "What was checked passed, but that is not enough for a release."
    return (
        "Ready",
        "pass",
        f"Every check of {one_line(str(run.manifest.gate), 200)} passed, on the whole of the data.",
    )


def reservations(run: JudgedRun, labels: Labels) -> tuple[str, ...]:
    """What keeps a run from being a release even where every check passed; the notices say more of each."""
    specs = [cell.spec for cell in labels.cells.values()]
    partial = sum(record.partial is not None for record in run.records)
    missing = len(run.manifest.tasks) - len(run.records)
    checks = run.verdict.outcomes
    skipped = sum(outcome.status == "not_evaluated" for outcome in checks)
    merged = run.manifest.merged and run.manifest.merged.differences
    found = (
        (not judged(run), "no gate was judged"),
        (any(s.get("model_weights") == "random" for s in specs), "the weights are random"),
        (any(s.get("plumbing") for s in specs), "it is a plumbing run"),
        (partial > 0, f"{partial} of {len(run.records)} results are partial"),
        (missing > 0 and not run.manifest.stopped, f"{missing} of {len(run.manifest.tasks)} tasks have no record"),
        (run.manifest.shard is not None, "it is a share of a matrix"),
        (bool(merged), "shards that were merged differ"),
        (skipped > 0, f"{skipped} of {len(checks)} checks were not evaluated"),
        (any(s.get("prefill_reads") == "fresh" for s in specs), "prompts read fresh K/V, not the stored ones"),
    )  # fmt: skip
    return tuple(sentence for holds, sentence in found if holds)


def _candidates(labels: Labels) -> list[Candidate]:
    """The cells that are compared with another, by what they ask for; keys that all share are left out of the name."""
    cells = {name: cell for name, cell in labels.cells.items() if cell.baseline != name}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cell in cells.items():
        groups.setdefault(tuple(str(cell.spec.get(key)) for key in _KEYS), []).append(name)
    several_models = len({key[0] for key in groups}) > 1
    several_weights = any(key[2] not in ("native", "None") for key in groups)
    found = []
    for (model, kv_format, weights), names in groups.items():
        parts = [model] * several_models + [f"KV {kv_format}" if several_weights else kv_format]
        parts += [f"weights {weights}"] * several_weights
        baselines = tuple(dict.fromkeys(cells[name].baseline for name in names))
        found.append(Candidate(one_line(" · ".join(parts), 200), kv_format, weights, tuple(names), baselines))
    return found
