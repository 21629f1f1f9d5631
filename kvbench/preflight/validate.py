"""What `kvbench validate` finds: whether all of a matrix can run and answer its gate, without model or GPU.

A problem (exit code 2) would stop a cell or leave a required check without a result; a note informs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.data.corpora import ABSENT
from kvbench.errors import KvbenchError, NotAvailable, Refused, UsageError
from kvbench.gate.coverage import uncovered
from kvbench.gate.policy import Gate
from kvbench.matrix.cells import Cell
from kvbench.matrix.load import Matrix
from kvbench.matrix.resolve_backend import ASPECTS, context_fault
from kvbench.matrix.tasks import FingerprintData, data_names
from kvbench.matrix.yaml import read
from kvbench.models.source import config_facts
from kvbench.preflight.plan import AT_LOAD, CellPlan, device_note, plan_cell
from kvbench.run.task.checks import quality_on_random_weights, too_long

MATRIX, GATE = "matrix", "gate"


@dataclass(frozen=True)
class Finding:
    """What was found in one file."""

    file: str
    kind: str
    summary: str  # a line on its content
    facts: tuple[str, ...] = ()  # the models, and the data with its digests
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_text(self) -> str:
        many = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        lines = [f"{self.file}: {many if self.problems else 'ok'}; {self.summary}"]
        lines += [f"  {fact}" for fact in self.facts]
        lines += [f"  problem: {sentence}" for sentence in self.problems]
        return "\n".join([*lines, *(f"  note: {sentence}" for sentence in self.notes)])


def kind_of(path: Path) -> str:
    """By its sections; a file that cannot be parsed counts as a matrix, whose loader reports the mistakes."""
    try:
        data = read(path).data
    except UsageError:
        return MATRIX
    return GATE if isinstance(data, dict) and "checks" in data and "runners" not in data else MATRIX


def of_error(path: Path, kind: str, error: KvbenchError) -> Finding:
    """A file that cannot be loaded: each mistake is a problem."""
    return Finding(str(path), kind, "it cannot be used", problems=tuple(str(error).split("\n")))


def of_gate(gate: Gate) -> Finding:
    required = sum(check.required for check in gate.checks)
    words = f"{len(gate.checks)} checks, {required} of them required, evidence up to {gate.evidence}"
    return Finding(str(gate.path), GATE, words)


def of_matrix(
    matrix: Matrix, gate: Gate | None, digest_of: FingerprintData, environment: Mapping[str, Any]
) -> Finding:
    """digest_of(name, split): sha256 of evaluation data, or "absent". environment: of `host()`."""
    plans = [plan_cell(cell) for cell in matrix.cells]
    data = {key: digest_of(*key) for task in matrix.tasks for key in data_names(task)}
    absent = sorted({name for (name, _), sha in data.items() if sha == ABSENT})
    open_checks = list(uncovered(gate, matrix.cells, matrix.tasks, absent))
    faults = [(p.cell.name, p.problem) for p in plans if p.problem]
    facts = list(_models(matrix.cells))
    judged = f"judged by {gate.name}" if gate else "no gate"
    for (name, split), sha in data.items():
        which = f" ({split})" if name == "wikitext2" else ""
        facts.append(f"data {name}{which}: {'missing' if sha == ABSENT else f'sha256 {sha}'}")
    missing = (
        "data {0} is missing, so what it measures is reported as not evaluated; pass a folder that holds it "
        "with --data-dir, or see kvbench data fetch {0}."
    )
    return Finding(
        str(matrix.path),
        MATRIX,
        f"{len(matrix.cells)} cells, {len(matrix.tasks)} tasks, {judged}",
        facts=tuple(facts),
        problems=(
            *_grouped((name, problem) for name, problem in faults if not problem.startswith(AT_LOAD)),
            *_grouped(_refused_tasks(matrix)),
            *(found.sentence for found in open_checks if found.check.required),
        ),
        notes=(
            *(line.removeprefix("note: ") for line in device_note(plans, environment)),
            *_grouped((name, problem) for name, problem in faults if problem.startswith(AT_LOAD)),
            *_grouped(_fallbacks(plans)),
            *(found.sentence for found in open_checks if not found.check.required),
            *(missing.format(name) for name in absent),
        ),
    )


def _models(cells: Sequence[Cell]) -> Iterator[str]:
    """`model NAME: llama, 30 layers of full attention, 9 query heads on 3 KV heads of 64, at most ...`"""
    seen = {(c.spec["model"], c.spec["model_revision"]): c.spec for c in cells}
    for (name, _), spec in seen.items():
        try:
            facts = config_facts(spec)
        except KvbenchError:
            yield f"model {name}: its config could not be read; see below"
            continue
        kinds = Counter(layer.kind for layer in facts.layers)
        attention = " and ".join(f"{count} layers of {kind} attention" for kind, count in kinds.items())
        heads = dict.fromkeys((x.q_heads, x.shape.kv_heads, x.shape.head_dim) for x in facts.layers)
        shapes = "; ".join(f"{q} query heads on {n} KV heads of {dim}" for q, n, dim in heads)
        limit = f", at most {facts.max_context} positions" if facts.max_context else ""
        yield f"model {name}: {facts.model_type}, {attention}, {shapes}{limit}"


def _grouped(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """From (cell, sentence): each sentence once, after the names of its cells."""
    cells: dict[str, dict[str, None]] = {}
    for cell, sentence in found:
        cells.setdefault(sentence, {})[cell or "the only cell"] = None
    for sentence, names in cells.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"{'; '.join(list(names)[:2])}{more}: {sentence}"


def _fallbacks(plans: Sequence[CellPlan]) -> Iterator[tuple[str, str]]:
    """Fallbacks that the matrix allows: the cells run, but not as requested."""
    for plan in plans:
        for aspect in ASPECTS if plan.decision else ():
            choice = getattr(plan.decision, aspect)
            if choice.fell_back:
                words = f"{aspect} {choice.requested} falls back to {choice.resolved}: {choice.sentence}"
                yield plan.cell.name, words


def _refused_tasks(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Tasks that are refused for their cell's model or shape, though the cell itself can run."""
    names = {cell.id: cell.name for cell in matrix.cells}
    for task in matrix.tasks:
        if fault := quality_on_random_weights(task):
            yield names[task.cells[0]], fault.sentence
            continue
        try:
            facts = config_facts(task.spec)
        except (NotAvailable, Refused, UsageError):
            continue
        # The prompt fits the model, but what is generated after it does not; plan reports the other case.
        fits = not context_fault(facts, task.spec.get("context", 0), 0)
        if fits and (fault := too_long(task, facts)):
            yield names[task.cells[0]], f"{task.runner}: {fault.sentence}"
