"""What `kvbench validate` finds: can all of a matrix run, and does it answer its gate? No model is loaded, no GPU is needed.

`plan` shows what a run would do and always ends with 0; this says what stands against it, and ends with 2 where something does. A
problem is what would end a cell or fail a required check whatever is measured; a note is what the reader should know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.data.corpora import ABSENT
from kvbench.errors import KvbenchError, NotAvailable, Refused, UsageError
from kvbench.gate.coverage import in_vain
from kvbench.gate.policy import Gate
from kvbench.matrix.cells import Cell, Task
from kvbench.matrix.load import Matrix
from kvbench.matrix.resolve import ASPECTS, context_fault
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.tasks import FingerprintData
from kvbench.metrics.collect import METRICS
from kvbench.models.attention_facts import ModelFacts
from kvbench.models.source import config_facts
from kvbench.preflight.plan import CellPlan, device_note, plan_cell
from kvbench.run.task.checks import quality_on_random_weights, too_long
from kvbench_kernels.support import Rejected

MATRIX, GATE = "matrix", "gate"


@dataclass(frozen=True)
class Finding:
    """One file and what was found of it. summary: a line on what it is; facts: lines of what was looked at, the data's digests among
    them; problems, notes: sentences."""

    file: str
    kind: str
    summary: str
    facts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        state = (
            f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}" if self.problems else "ok"
        )
        lines = [f"{self.file}: {state}; {self.summary}", *(f"  {fact}" for fact in self.facts)]
        lines += [f"  problem: {sentence}" for sentence in self.problems]
        return "\n".join([*lines, *(f"  note: {sentence}" for sentence in self.notes)])


def kind_of(path: Path) -> str:
    """By its sections; a file that cannot be read that far is a matrix, whose loader says what is wrong with it."""
    from kvbench.matrix.yaml import read

    try:
        data = read(path).data
    except UsageError:
        return MATRIX
    return GATE if isinstance(data, dict) and "checks" in data and "runners" not in data else MATRIX


def of_error(path: Path, kind: str, error: KvbenchError) -> Finding:
    """A file that does not even load: each complaint is a problem."""
    return Finding(str(path), kind, "it cannot be used", problems=tuple(str(error).split("\n")))


def of_gate(gate: Gate) -> Finding:
    required = sum(check.required for check in gate.checks)
    words = f"{len(gate.checks)} checks, {required} of them required, evidence up to {gate.evidence}"
    return Finding(str(gate.path), GATE, words)


def of_matrix(
    matrix: Matrix, gate: Gate | None, digest_of: FingerprintData, environment: Mapping[str, Any]
) -> Finding:
    """digest_of(name, split): sha256 of evaluation data, or "absent". environment: that of `kvbench.machine.host.host()`."""
    plans = [plan_cell(cell) for cell in matrix.cells]
    data = {key: digest_of(*key) for task in matrix.tasks for key in _data_of(task)}
    absent = {name for (name, _), sha in data.items() if sha == ABSENT}
    cells = f"{len(matrix.cells)} cells, {len(matrix.tasks)} tasks"
    judged = f"judged by {gate.name}" if gate else "no gate"
    return Finding(
        str(matrix.path),
        MATRIX,
        f"{cells}, {judged}",
        (*_models(matrix.cells), *(_said_of_data(*key, sha) for key, sha in data.items())),
        (*_unable(plans), *_untakable(matrix), *_vain(gate, matrix, absent, required=True)),
        (*(line.removeprefix("note: ") for line in device_note(plans, environment)), *_undecided(plans), *_fallen_back(plans),
         *_vain(gate, matrix, absent, required=False), *(_how_to_get(name) for name in sorted(absent))),
    )  # fmt: skip


def _models(cells: Sequence[Cell]) -> Iterator[str]:
    """`model smollm2-135m-instruct: llama, 30 layers of full attention, 9 query heads on 3 KV heads of 64, at most 8192 positions`"""
    seen = {(c.spec["model"], c.spec["model_revision"]): c.spec for c in cells}
    for (name, _), spec in seen.items():
        try:
            yield f"model {name}: {described(config_facts(spec))}"
        except KvbenchError:
            yield f"model {name}: its config could not be read; see below"


def described(facts: ModelFacts) -> str:
    kinds: dict[str, int] = {}
    for layer in facts.layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    attention = " and ".join(f"{count} layers of {kind} attention" for kind, count in kinds.items())
    shapes = dict.fromkeys(
        f"{x.q_heads} query heads on {x.shape.kv_heads} KV heads of {x.shape.head_dim}" for x in facts.layers
    )
    limit = f", at most {facts.max_context} positions" if facts.max_context else ""
    return f"{facts.model_type}, {attention}, {'; '.join(shapes)}{limit}"


def _data_of(task: Task) -> Iterator[tuple[str, str]]:
    for key, option in RUNNERS[task.runner].options.items():
        if option.names_data:
            yield task.options[key], task.options.get("split", "test")


def _said_of_data(name: str, split: str, sha: str) -> str:
    which = f" ({split})" if name == "wikitext2" else ""
    return f"data {name}{which}: {'not here' if sha == ABSENT else f'sha256 {sha}'}"


def _how_to_get(name: str) -> str:
    return (
        f"data {name} is not here, so what is measured on it is reported as not evaluated; give --data-dir a folder that holds it, or "
        f"see kvbench data fetch {name}."
    )


def _grouped(said: Sequence[tuple[str, str]]) -> Iterator[str]:
    """(cell, sentence) with each sentence once, behind the cells that it is true of."""
    cells: dict[str, list[str]] = {}
    for cell, sentence in said:
        cells.setdefault(sentence, []).append(cell or "the only cell")
    for sentence, all_names in cells.items():
        names = list(dict.fromkeys(all_names))
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"{'; '.join(names[:2])}{more}: {sentence}"


def _unable(plans: Sequence[CellPlan]) -> Iterator[str]:
    found = [(p.cell.name, p.problem) for p in plans if p.problem]
    yield from _grouped([(name, text) for name, text in found if not text.startswith("decided at load")])


def _undecided(plans: Sequence[CellPlan]) -> Iterator[str]:
    found = [(p.cell.name, p.problem) for p in plans if p.problem]
    yield from _grouped([(name, text) for name, text in found if text.startswith("decided at load")])


def _fallen_back(plans: Sequence[CellPlan]) -> Iterator[str]:
    """Fallbacks that the matrix allows: they run, as something else."""
    choices = [(p.cell.name, a, getattr(p.decision, a)) for p in plans if p.decision for a in ASPECTS]
    yield from _grouped(
        [(name, f"{a} {c.requested} falls back to {c.resolved}: {c.sentence}") for name, a, c in choices if c.fell_back]
    )  # fmt: skip


def _untakable(matrix: Matrix) -> Iterator[str]:
    """Tasks that their cell's model or shape refuses, though the cell itself can run."""
    names = {cell.id: cell.name for cell in matrix.cells}
    said = []
    for task in matrix.tasks:
        if fault := quality_on_random_weights(task):
            said.append((names[task.cells[0]], fault.sentence))
        elif fault := _generates_too_much(task):
            said.append((names[task.cells[0]], f"{task.runner}: {fault.sentence}"))
    yield from _grouped(said)


def _generates_too_much(task: Task) -> Rejected | None:
    """The prompt fits the model, and what is generated after it does not; plan reports a prompt that does not fit."""
    try:
        facts = config_facts(task.spec)
    except (NotAvailable, Refused, UsageError):
        return None
    return None if context_fault(facts, task.spec.get("context", 0), 0) else too_long(task, facts)


def _vain(gate: Gate | None, matrix: Matrix, absent: set[str], required: bool) -> Iterator[str]:
    """Checks, required ones or the others, that no task answers, or only tasks whose data is not here."""
    yield from (
        sentence
        for check, sentence in in_vain(gate, matrix.cells, matrix.tasks)
        if check.required == required
    )
    for check in gate.checks if gate else ():
        metric, variant = METRICS[check.metric], check.where.get("variant")
        picked = {cell.id for cell in matrix.cells if check.picks(cell.spec)}
        own = [
            task
            for task in matrix.tasks
            if task.runner == metric.runner
            and variant in (None, task.variant)
            and picked.intersection(task.cells)
        ]
        lacking = [{name for name, _ in _data_of(task)} & absent for task in own]
        if check.required == required and own and all(lacking):
            names = ", ".join(sorted(set().union(*lacking)))
            comes = ", which is exit code 3" if required else ""
            yield f"check {check.name} (line {check.line}): its data is not here ({names}); it will not be evaluated{comes}."
