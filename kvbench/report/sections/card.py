"""The release card: four questions of a release manager, each with a short answer, its reason and the numbers
behind it.

What was not measured stays "not measured"; a result on part of the data, or one without a limit, is never
presented as more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.gate.verdict import NOT_EVALUATED
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun, judged
from kvbench.report.sections.answers import answers
from kvbench.report.sections.candidate import Answer, Candidate
from kvbench.report.sections.precision import PrecisionLine

QUESTIONS = ("Is it really running?", "Is it safe?", "Is it worth it?", "What would change the verdict?")
# What makes a candidate; its cells differ in shape, scale or backend.
_KEYS = ("model", "kv_format", "weights")
_WORST_FIRST = ("fail", "inconclusive", "incomplete", "partial", "pass")
_CONCLUSIONS = {
    1: ("Not ready", "fail", "A check failed."),
    3: ("Incomplete", "incomplete", "A required result was not evaluated."),
    4: ("Undecided", "inconclusive", "There is too little data to decide every check."),
}


@dataclass(frozen=True)
class Card:
    """One candidate format with an answer to each of QUESTIONS."""

    name: str
    cells: tuple[str, ...]
    answers: tuple[Answer, ...]

    @property
    def answered(self) -> list[tuple[str, Answer]]:
        return list(zip(QUESTIONS, self.answers, strict=True))

    @property
    def open(self) -> list[str]:
        """The first two questions without a plain yes."""
        return [f"{self.name}: {q} {answer.word}" for q, answer in self.answered[:2] if answer.tone != "pass"]


@dataclass(frozen=True)
class Release:
    """word: the conclusion; tone: "pass" only where a gate passed and nothing blocks a release; blockers: why
    it is not a release even if all checks passed; cards: one a candidate, worst first.
    """

    word: str
    tone: str
    sentence: str
    blockers: tuple[str, ...]
    cards: tuple[Card, ...]


def release(run: JudgedRun, precision: Sequence[PrecisionLine]) -> Release:
    """The release card. precision: the lines of all cells, as `precision_lines` gives them."""
    found = _blockers(run)
    candidates = _candidates(run)
    if not candidates:
        found = (*found, "every cell is a baseline, so there is no candidate")
    cards = [Card(c.name, c.cells, answers(run, precision, c, found)) for c in candidates]
    cards.sort(key=lambda card: min(_WORST_FIRST.index(answer.tone) for answer in card.answers[:2]))
    # A gate may ask for less than the card: then an answer that is not a plain yes blocks the release.
    found = found or tuple(text for card in cards for text in card.open)
    gate = one_line(str(run.manifest.gate), 200)
    conclusion = "Ready", "pass", f"All checks of {gate} passed, on all of the data."
    if run.verdict.exit_code:
        conclusion = _CONCLUSIONS.get(run.verdict.exit_code, _CONCLUSIONS[3])
    elif found:
        conclusion = "No release yet", "partial", "All checks passed, but that is not enough for a release."
    return Release(*conclusion, found, tuple(cards))


def _blockers(run: JudgedRun) -> tuple[str, ...]:
    """Why a run cannot be a release even if every check passed; the notices give details."""
    manifest, specs = run.manifest, [cell.spec for cell in run.manifest.cells]
    partial = sum(record.partial is not None for record in run.records)
    tasks = len(manifest.tasks)
    missing = tasks - len(run.records)
    checks = run.verdict.outcomes
    skipped = sum(outcome.status == NOT_EVALUATED for outcome in checks)
    found = {
        "no gate was applied": not judged(run),
        "the weights are random": any(s.get("model_weights") == "random" for s in specs),
        "this is a plumbing test": any(s.get("plumbing") for s in specs),
        f"{partial} of {len(run.records)} results are partial": partial > 0,
        f"{missing} of {tasks} tasks have no record": missing > 0 and not manifest.stopped,
        "this is one shard of a matrix": manifest.shard is not None,
        "merged shards differ": bool(manifest.merged and manifest.merged.differences),
        f"{skipped} of {len(checks)} checks were not evaluated": skipped > 0,
        "prompts read fresh K/V, not the stored ones": any(s.get("prefill_reads") == "fresh" for s in specs),
    }
    return tuple(sentence for sentence, holds in found.items() if holds)


def _candidates(run: JudgedRun) -> list[Candidate]:
    """The cells that have a baseline, by what they request; keys that all share are not in the name."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cell in run.run.cells.items():
        if cell.baseline != name:
            groups.setdefault(tuple(str(cell.spec.get(key)) for key in _KEYS), []).append(name)
    several_models = len({key[0] for key in groups}) > 1
    several_weights = any(key[2] not in ("native", "None") for key in groups)
    found = []
    for (model, kv_format, weights), names in groups.items():
        parts = [model] * several_models + [f"KV {kv_format}" if several_weights else kv_format]
        parts += [f"weights {weights}"] * several_weights
        baselines = tuple(dict.fromkeys(run.run.cells[name].baseline for name in names))
        name = one_line(" · ".join(parts), 200)
        found.append(Candidate(name, kv_format, weights, tuple(names), baselines))
    return found
