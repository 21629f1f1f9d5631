"""Multiple choice against lm-evaluation-harness: same questions, same prompts, same plain weights.

    python benchmarks/mcq_peer.py --task mmlu|ceval [--shots 5] [--subjects 4] [--limit 100] [--model
    smollm2-135m-instruct]

Needs the `lm-eval` extra and KVBENCH_DATA_DIR. lm-eval runs its own task files, with only the data set
replaced by local files (for C-Eval also the delimiter, see --delimiter), on a plain transformers model;
kvbench runs its MCQ runner on a native engine. Correctness comes first: the token ids of every context and
choice and the pick of every question must be equal, or the exit status is 1 and no ratio is given. Time is
that of each tool's whole evaluation, model and (for lm-eval) data set already loaded; kvbench runs before and
after lm-eval and its slower run counts, lm-eval's best batch size counts. Questions of a subject share their
examples, so items/s depends on how many there are of each: it is part of the result. The last line on stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvbench.data.questions import SOURCES, Question, QuestionSet, questions
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Request, resolve
from kvbench.matrix.runners import RUNNERS
from kvbench.runners import mcq
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text.encode import Encoder, Pair, bos_ids
from kvbench.runners.text.prompts import LETTERS, TEMPLATES, spread
from kvbench.runners.text.scoring import capacity, group, score

# Where lm-eval keeps a subject's task file, below its `tasks` folder, and the splits that the file names.
PEER_FILES = {
    "mmlu": ("mmlu/default/mmlu_{}.yaml", "test"),
    "ceval": ("ceval/ceval-valid_{}.yaml", "val"),
    "arc_easy": ("arc/{}.yaml", "test"),  # no subjects: kvbench calls the set itself one
    "arc_challenge": ("arc/{}.yaml", "test"),
}
PEER_DELIMITER = " "  # what lm-eval puts between prompt and answer unless a task file says otherwise

Scores = dict[str, list[float]]
Encoded = dict[str, Pair]


@dataclass(frozen=True)
class Timed:
    """Scores by question id, and how long they took: wall seconds, and CPU seconds of all threads."""

    scores: Scores
    seconds: float
    cpu_seconds: float


def timed(run: Callable[[], Scores]) -> Timed:
    wall, cpu = time.perf_counter(), time.process_time()
    scores = run()
    return Timed(scores, time.perf_counter() - wall, time.process_time() - cpu)


def subset(data: QuestionSet, subjects: int | None, limit: int | None) -> list[Question]:
    """The runner's own choice of `limit` questions, out of `subjects` subjects evenly spaced over the list of
    all.
    """
    names = sorted({q.subject for q in data.questions})
    if subjects is not None and subjects < len(names):
        names = [names[i * len(names) // subjects] for i in range(subjects)]
    return spread([q for q in data.questions if q.subject in set(names)], limit)


def write_data(folder: Path, task: str, asked: Sequence[Question], data: QuestionSet) -> QuestionSet:
    """`asked` and their subjects' examples as a data directory of kvbench; returns it read back (ids are
    new).
    """
    subjects = {q.subject: None for q in asked}
    shown = [q for subject in subjects for q in data.examples[subject]]
    for name, rows in ((SOURCES[task].scored, asked), (SOURCES[task].shown, shown)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", newline="\n") as f:
            for q in rows:
                row = {
                    "subject": q.subject,
                    "question": q.question,
                    "choices": q.choices,
                    "answer": _letter(q),
                }
                f.write(json.dumps(row) + "\n")
    return questions(task, folder)


def _letter(q: Question) -> str:
    return LETTERS[q.answer] if q.answer is not None else ""


def _peer_row(task: str, q: Question) -> dict[str, Any]:
    """One question with the column names of the data set that lm-eval's task file was written for."""
    if task == "mmlu":
        return {"question": q.question, "choices": q.choices, "answer": q.answer}
    if task.startswith("arc_"):
        labels = list(LETTERS[: len(q.choices)])
        return {
            "question": q.question,
            "choices": {"text": q.choices, "label": labels},
            "answerKey": _letter(q),
        }
    return {"question": q.question, **dict(zip(LETTERS, q.choices, strict=True)), "answer": _letter(q)}


def peer_tasks(folder: Path, task: str, data: QuestionSet, shots: int, delimiter: str) -> Any:
    """lm-eval's task of every subject, as `write_tasks` names and writes them: what
    `lm_eval.evaluator.evaluate` takes.
    """
    from lm_eval.tasks import TaskManager

    names = write_tasks(folder, task, data, shots, delimiter)
    return TaskManager(include_path=str(folder), include_defaults=False).load(names)


def write_tasks(folder: Path, task: str, data: QuestionSet, shots: int, delimiter: str) -> list[str]:
    """A task file a subject, from lm-eval's own of it; replaced are the data set, the number of examples and,
    where it is not lm-eval's, the delimiter. Returns their names, which are the subjects (a folder for
    `lm_eval --include_path`).
    """
    import lm_eval

    pattern, split = PEER_FILES[task]
    own = Path(lm_eval.__file__).parent / "tasks"
    names = list({q.subject: None for q in data.questions})
    for subject in names:
        parts = {split: [q for q in data.questions if q.subject == subject], "dev": data.examples[subject]}
        files = {part: str(folder / f"{subject}-{part}.jsonl") for part in parts}
        for part, rows in parts.items():
            lines = [json.dumps(_peer_row(task, q)) + "\n" for q in rows]
            Path(files[part]).write_text("".join(lines), encoding="utf-8")
        config = {
            "include": str(own / pattern.format(subject)),
            "task": subject,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "num_fewshot": shots,
        }
        if delimiter != PEER_DELIMITER:
            config["target_delimiter"] = delimiter
        if task.startswith("arc_"):  # its file names splits for examples, which no local file has
            config |= {"training_split": None, "validation_split": None}
        (folder / f"{subject}.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return names


def peer_model(loaded: LoadedModel, batch_size: int) -> Any:
    """lm-eval's transformers model over a copy of the same weights with transformers' own attention."""
    from lm_eval.models.huggingface import HFLM

    plain = copy.deepcopy(loaded.model)
    plain.set_attn_implementation("sdpa")  # type: ignore[operator]
    return HFLM(
        pretrained=plain,
        tokenizer=loaded.tokenizer,
        batch_size=batch_size,
        max_length=loaded.facts.max_context,
    )


def peer_scores(lm: Any, tasks: Any) -> Scores:
    """Log-probability of every choice, as lm-eval's evaluator gets it from its model."""
    from lm_eval.evaluator import evaluate

    evaluate(lm, tasks, bootstrap_iters=0)
    found: dict[str, dict[int, float]] = {}
    for subject, task in tasks["tasks"].items():
        for request in task.instances:
            found.setdefault(f"{subject}/{request.doc_id}", {})[request.idx] = request.resps[0][0]
    return {key: [own[i] for i in sorted(own)] for key, own in found.items()}


def peer_encoded(lm: Any, tasks: Any) -> Encoded:
    """The ids that lm-eval feeds for every question; call after `peer_scores`, which builds the requests."""
    texts: dict[str, dict[int, tuple[str, str]]] = {}
    for subject, task in tasks["tasks"].items():
        for request in task.instances:
            texts.setdefault(f"{subject}/{request.doc_id}", {})[request.idx] = request.args
    encoded = {}
    for key, own in texts.items():
        pairs = [lm._encode_pair(*own[i]) for i in sorted(own)]
        if any(context != pairs[0][0] for context, _ in pairs):
            raise SystemExit(f"lm-eval has more than one context for the choices of {key}.")
        encoded[key] = Pair(tuple(pairs[0][0]), tuple(tuple(c) for _, c in pairs), False)
    return encoded


def own_encoded(loaded: LoadedModel, task: str, data: QuestionSet, shots: int) -> Encoded:
    """The ids that the runner scores, by its own encoder; nothing may be truncated."""
    encoder = Encoder(
        TEMPLATES[task],
        loaded.tokenizer,
        False,
        loaded.facts.max_context,
        data.examples,
        bos_ids(loaded.tokenizer),
    )
    encoded = {}
    for subject in {q.subject: None for q in data.questions}:
        asked = [q for q in data.questions if q.subject == subject]
        for q, fitted in zip(asked, encoder.subject(asked, shots), strict=True):
            if fitted.pair is None or fitted.truncated:
                raise SystemExit(f"Question {q.id} does not fit the model whole; compare with fewer shots.")
            encoded[q.id] = fitted.pair
    return encoded


def engine_of(loaded: LoadedModel, spec: Mapping[str, Any], sequences: int, tokens: int) -> Engine:
    decision = resolve(Request("native", "native", "torch", "refuse"), loaded.facts)
    return Engine(loaded, decision, spec, sequences=sequences, tokens=tokens)


def own_measure(
    loaded: LoadedModel,
    spec: Mapping[str, Any],
    task: str,
    folder: Path,
    shots: int,
    engine: Callable[[int, int], Engine] | None = None,
) -> Measurement:
    """The MCQ runner, on a native engine unless engine(sequences, tokens) makes another."""
    options = {name: option.default for name, option in RUNNERS["mcq"].options.items()}

    def native(sequences: int, tokens: int) -> Engine:
        return engine_of(loaded, spec, sequences, tokens)

    make = engine or native
    context = Context(
        spec, {**options, "tasks": task, "shots": shots}, "", loaded, make, native, native, None, folder
    )
    return mcq.run(context)


def scores_of(measured: Measurement) -> Scores:
    return {row["id"]: row["scores"] for row in measured.samples["questions"]}


def unshared_scores(loaded: LoadedModel, spec: Mapping[str, Any], pairs: Encoded) -> Scores:
    """Every question with its whole prompt computed for it alone."""
    g = group(list(pairs.values()), share=False)
    page = spec["page_size"]
    engine = engine_of(loaded, spec, 1, capacity([g], loaded.device, page) * page)
    keys, found = list(pairs), {}
    for batch, scores, _ in score(engine, g, spec["prefill_chunk"]):
        found |= {keys[i]: own for i, own in zip(batch, scores, strict=True)}
    return found


def pick(scores: Sequence[float]) -> int:
    return scores.index(max(scores))


def largest_difference(a: Scores, b: Scores) -> float:
    return max(abs(x - y) for key in b for x, y in zip(a[key], b[key], strict=True))


def different_picks(a: Scores, b: Scores) -> list[str]:
    return [key for key in b if pick(a[key]) != pick(b[key])]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=tuple(PEER_FILES), required=True)
    parser.add_argument("--shots", type=int, choices=(0, 5), default=5)
    parser.add_argument("--subjects", type=int, default=4, help="subjects, evenly spaced (0: all)")
    parser.add_argument("--limit", type=int, default=100, help="questions, spread over the subjects (0: all)")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of torch, for both tools"
    )
    parser.add_argument("--batch-sizes", default="1,4", help="lm-eval's; its best counts")
    parser.add_argument(
        "--unshared", type=int, default=8, help="questions to score without a shared prefix too"
    )
    parser.add_argument(
        "--delimiter",
        choices=("kvbench", "lm-eval"),
        default="kvbench",
        help="whose join of prompt and answer both use; they differ for C-Eval only (none, and a space)",
    )
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    torch.set_num_threads(args.threads)
    data_dir = os.environ.get("KVBENCH_DATA_DIR")
    if not data_dir:
        raise SystemExit("KVBENCH_DATA_DIR is not set; name the folder that holds mmlu/ and ceval/.")
    if args.delimiter == "lm-eval":
        TEMPLATES[args.task] = replace(TEMPLATES[args.task], delimiter=PEER_DELIMITER)
    whole = questions(args.task, Path(data_dir))
    spec = {**CELL_KEYS, "model": args.model, "device": "cpu", "dtype": "float32"}
    loaded = load_model(spec, "cpu", "float32")
    with tempfile.TemporaryDirectory(prefix="mcq-peer-") as temp:
        data = write_data(
            Path(temp, "own"), args.task, subset(whole, args.subjects or None, args.limit or None), whole
        )
        result = _compare(args, loaded, spec, data, Path(temp))
    print(json.dumps(result))
    return 0 if result["same_prompts"] and not result["different_picks"] else 1


def _compare(
    args: argparse.Namespace, loaded: LoadedModel, spec: Mapping[str, Any], data: QuestionSet, temp: Path
) -> dict[str, Any]:
    from importlib.metadata import version

    sizes = Counter(q.subject for q in data.questions)
    Path(temp, "peer").mkdir()
    tasks = peer_tasks(temp / "peer", args.task, data, args.shots, TEMPLATES[args.task].delimiter)
    facts: dict[str, Any] = {}

    def own() -> Scores:
        measured = own_measure(loaded, spec, args.task, temp / "own", args.shots)
        facts.update(measured.facts)
        return scores_of(measured)

    print(f"{len(data.questions)} questions of {len(sizes)} subjects, {args.threads} threads", flush=True)
    first = timed(own)
    print(f"kvbench: {first.seconds:.1f} s", flush=True)
    peers: dict[int, Timed] = {}
    for size in map(int, args.batch_sizes.split(",")):
        lm = peer_model(loaded, size)
        peers[size] = timed(lambda lm=lm: peer_scores(lm, tasks))  # type: ignore[misc]
        print(f"lm-eval, batch {size}: {peers[size].seconds:.1f} s", flush=True)
    second = timed(own)
    ours = max(first, second, key=lambda t: t.seconds)
    mine, theirs = own_encoded(loaded, args.task, data, args.shots), peer_encoded(lm, tasks)
    other_ids = [
        key
        for key, pair in mine.items()
        if (pair.context, pair.continuations) != (theirs[key].context, theirs[key].continuations)
    ]
    best = min(peers, key=lambda size: peers[size].seconds)
    asked = {q.id: q for q in data.questions}
    picks = sorted({key for peer in peers.values() for key in different_picks(ours.scores, peer.scores)})
    for key in picks:
        print(f"{key} differs: kvbench {ours.scores[key]}")
        for size, peer in peers.items():
            print(f"{'':{len(key)}}  lm-eval, batch {size} {peer.scores[key]}")
    for key in other_ids[:5]:
        print(f"{key}: the ids of the prompt or of a choice differ from lm-eval's")
    some = {q.id: mine[q.id] for q in spread(data.questions, args.unshared)}
    alone = unshared_scores(loaded, spec, some)
    n = len(asked)
    same = not other_ids and not picks
    result = {
        "task": args.task,
        "shots": args.shots,
        "model": args.model,
        "lm_eval": version("lm_eval"),
        "delimiter": TEMPLATES[args.task].delimiter,
        "questions": n,
        "questions_a_subject": dict(sizes),
        "same_prompts": not other_ids,
        "different_picks": picks,
        "max_logprob_difference": {s: largest_difference(ours.scores, p.scores) for s, p in peers.items()},
        "accuracy": sum(pick(ours.scores[key]) == q.answer for key, q in asked.items()) / n,
        "shared_unshared": {
            "questions": len(some),
            "max_logprob_difference": largest_difference(ours.scores, alone),
            "different_picks": different_picks(ours.scores, alone),
        },
        "tokens": {
            k: facts[k] for k in ("computed_tokens", "prefix_tokens", "question_tokens", "unshared_tokens")
        },
        "kvbench_seconds": [round(t.seconds, 2) for t in (first, second)],
        "kvbench_cpu_seconds": [round(t.cpu_seconds, 2) for t in (first, second)],
        "lm_eval_seconds": {s: round(p.seconds, 2) for s, p in peers.items()},
        "lm_eval_cpu_seconds": {s: round(p.cpu_seconds, 2) for s, p in peers.items()},
        "lm_eval_best_batch": best,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "kvbench_items_s": n / ours.seconds,
        "lm_eval_items_s": n / peers[best].seconds,
        "ratio": peers[best].seconds / ours.seconds if same else None,
        "cpu_ratio": min(p.cpu_seconds for p in peers.values()) / ours.cpu_seconds if same else None,
    }
    print(f"{args.task} {args.shots}-shot, {n} questions: {', '.join(f'{s} {c}' for s, c in sizes.items())}")
    print(f"prompts: {n - len(other_ids)} of {n} equal token for token; picks: {n - len(picks)} of {n} equal")
    for size, peer in peers.items():
        print(
            f"lm-eval, batch {size}   {n / peer.seconds:8.3f} items/s  {peer.seconds:8.1f} s  "
            f"{peer.cpu_seconds:8.1f} CPU s  "
            f"largest logprob difference {result['max_logprob_difference'][size]:.1e}"
        )
    print(
        f"kvbench            {n / ours.seconds:8.3f} items/s  {ours.seconds:8.1f} s  {ours.cpu_seconds:8.1f} "
        "CPU s  "
        f"shared against unshared {result['shared_unshared']['max_logprob_difference']:.1e}"
    )
    if same:
        print(f"ratio {result['ratio']:.2f} (CPU time {result['cpu_ratio']:.2f})")
    return result


if __name__ == "__main__":
    sys.exit(main())
