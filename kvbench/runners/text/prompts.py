"""Prompts of the multiple-choice tasks, character for character those of lm-eval 0.4. Text in, text out.

One deliberate difference: C-Eval's prompt ends in a full-width colon, after which Chinese text has no space,
so its letters are scored without one (lm-eval scores " A" there).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.data.hub import CEVAL_SUBJECTS
from kvbench.data.questions import Question

LETTERS = "ABCD"
SHOT_END = "\n\n"


@dataclass(frozen=True)
class Template:
    """describe: subject -> the task text before everything; ask: a question -> its text up to the answer;
    letters: whether the letter or the choice's own text is scored; delimiter: what joins prompt and answer;
    policy: a sentence for the record.
    """

    describe: Callable[[str], str]
    ask: Callable[[Question], str]
    letters: bool
    delimiter: str
    policy: str

    def answers(self, q: Question) -> list[str]:
        """The scored text of each choice, without the delimiter. No choice may be missing (see `problem`)."""
        return list(LETTERS[: len(q.choices)]) if self.letters else [c or "" for c in q.choices]


def _lettered(q: Question) -> str:
    choices = (f"{letter}. {c}" for letter, c in zip(LETTERS, q.choices, strict=True))
    return "\n".join([q.question.strip(), *choices])


TEMPLATES: dict[str, Template] = {
    "mmlu": Template(
        lambda subject: (
            "The following are multiple choice questions (with answers) about "
            f"{subject.replace('_', ' ')}.\n\n"
        ),
        lambda q: f"{_lettered(q)}\nAnswer:",
        True,
        " ",
        'lm-eval mmlu: letter after "Answer:" with a space; shots are the first dev questions of the subject',
    ),
    "ceval": Template(
        lambda subject: (
            f"以下是中国关于{CEVAL_SUBJECTS.get(subject, subject)}的单项选择题，请选出其中的正确答案。\n\n"
        ),
        lambda q: f"{_lettered(q)}\n答案：",
        True,
        "",
        'lm-eval ceval-valid, but the letter follows "答案：" without a space; '
        "shots are the first dev questions of the subject",
    ),
    "arc_easy": Template(
        lambda subject: "",
        lambda q: f"Question: {q.question}\nAnswer:",
        False,
        " ",
        "lm-eval arc_easy: the choice's text is scored; "
        "shots are the first validation questions (lm-eval draws from train)",
    ),
    "cloze": Template(
        lambda subject: "",
        lambda q: q.question,
        False,
        "",
        "running text, then each continuation with its leading space; no examples",
    ),
}
TEMPLATES["arc_challenge"] = TEMPLATES["arc_easy"]


def problem(q: Question) -> str | None:
    """Why a question cannot be scored (no answer among its choices, a missing or empty choice), or None."""
    if q.answer is None:
        return "the answer is not among the choices"
    for index, choice in enumerate(q.choices):
        if choice is None or not choice.strip():
            return f"choice {index} is {'missing' if choice is None else 'empty'}"
    return None


def plain(template: Template, q: Question, shots: Sequence[Question]) -> str:
    """The prompt as plain text, up to the scored answer with its delimiter."""
    solved = [template.ask(s) + template.delimiter + template.answers(s)[s.answer or 0] for s in shots]
    return template.describe(q.subject) + SHOT_END.join([*solved, template.ask(q)])


def messages(template: Template, q: Question, shots: Sequence[Question]) -> list[dict[str, str]]:
    """The prompt as a chat: the description is the system's, each shot is a turn of user and assistant."""
    description = template.describe(q.subject)
    turns = [("system", description)] if description else []
    for s in shots:
        turns += [("user", template.ask(s)), ("assistant", template.answers(s)[s.answer or 0])]
    turns.append(("user", template.ask(q)))
    return [{"role": role, "content": content} for role, content in turns]


def continuations(template: Template, q: Question, chat: bool) -> list[str]:
    """The scored text after the prompt. In a chat the assistant's turn begins with it: no delimiter."""
    return [("" if chat else template.delimiter) + answer for answer in template.answers(q)]


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` questions: the first of every subject, then the second ones, ...; in file order."""
    seen: Counter[str] = Counter()
    keyed = []
    for index, q in enumerate(questions):
        seen[q.subject] += 1
        keyed.append((seen[q.subject], index))
    return [questions[index] for index in sorted(index for _, index in sorted(keyed)[:limit])]
