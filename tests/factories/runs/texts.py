"""Made-up runs of perplexity and divergences over documents, and of many cells."""

import random
from dataclasses import replace

from tests.factories.runs.made import BASE, MadeRun, chunks, text_facts

TEXT = "wikitext2 rows512"


def text(change: float, documents: int, seed: int, noise: float = 0.002, spread: float = 0.001) -> MadeRun:
    """Perplexity and divergences of a candidate whose log-perplexity is `change` above native, 4 chunks of
    511 tokens a document.

    spread: of that change between documents; noise: of a chunk's.
    """
    draw = random.Random(seed)
    n, tokens, owners = 4 * documents, 511, [i // 4 for i in range(4 * documents)]
    level = [draw.gauss(change, spread) for _ in range(documents)]
    native = [tokens * draw.gauss(3.0, 0.3) for _ in range(n)]
    own = [x + tokens * draw.gauss(level[d], noise) for x, d in zip(native, owners, strict=True)]
    facts = text_facts(n * tokens, protocol="rows512")
    made = [chunks(*((x, tokens) for x in side), documents=owners) for side in (own, native)]
    equal = [tokens - draw.randrange(8) for _ in range(n)]
    for chunk, same in zip(made[0]["chunks"], equal, strict=True):
        chunk |= {"top1_equal": same, "kld": 1e-4 * tokens, "delta_p": 0.0, "kept": 5}
    kept = [draw.lognormvariate(-9, 1) for _ in range(5 * n)]
    whole = {"mean": 1e-4, "n": n * tokens, "p50": 1e-4, "p90": 4e-4, "p99": 1e-3, "p999": 2e-3, "max": 1e-2}
    made[0] |= {
        "kld": whole,
        "kld_tokens": kept,
        "top1_equal": sum(equal),
        "delta_p": [0.0] * len(kept),
        "delta_p_mean": 0.0,
    }
    return MadeRun().measure("perplexity", (made[0], facts), (made[1], facts), variant=TEXT)


def many(shifts: list[float]) -> MadeRun:
    """A run with a candidate cell a shift, each with a task of its own."""
    run = text(shifts[0], 6, 0)
    for i, shift in enumerate(shifts[1:], 1):
        other, name = text(shift, 6, i), f"cand{i}"
        run.add_cell(1, name, name)
        task = replace(other.tasks[1], key=f"key{i}", cells=(name,), baseline=f"key{i}-base")
        run.tasks += [replace(other.tasks[0], key=f"key{i}-base", cells=(BASE,)), task]
        for record, key in zip(other.records, (f"key{i}-base", f"key{i}"), strict=True):
            run.records.append(type(record)(**{**vars(record), "key": key}))
    return run
