"""Made-up samples of the runners whose numbers are drawn, and runs that hold them."""

import itertools
from dataclasses import replace

from kvbench.metrics.collect import derive
from kvbench.report.figures.page import figures

SIX = [14.0, 10.0, 12.0, 11.0, 15.0, 13.0]
READS = {"weight_bytes": 1e9, "kv_bytes_per_token": 1e6}


def measured(made, **samples):
    """The run with samples and facts, a pair by runner or by (runner, format), put into its records, and rows
    that are derived of them."""
    keyed = {tuple(key.split("__")): value for key, value in samples.items()}

    def change(record):
        found = keyed.get((record.runner, record.spec["kv_format"])) or keyed.get((record.runner,))
        if found is None:
            return record
        own, facts = found
        return replace(record, samples=own, facts={**record.facts, **facts})

    made = made.with_records(change)
    return replace(made, rows=derive(made.run))


def figure(view, section, number=0):
    return [f for f in figures(view) if f.section == section][number]


def texts(row):
    return [cell if isinstance(cell, str) else cell.brief for cell in row]


def small(maker, **kinds):
    return maker(batches=(1,), contexts=(128,), **kinds)


def latency(ttft, itl, reads=None, **facts):
    shape = {"arm": "candidate", "prefill_tokens": 128, "batch": 1}
    arms = [
        shape | {"order": i, "ttft_ms": t, "itl_ms": gaps, "new_tokens": 1 + len(gaps)}
        for i, (t, gaps) in enumerate(zip(ttft, itl, strict=True))
    ]
    return {"arms": arms, "warmup": []}, {"arms": {"candidate": {"reads": reads}}, **facts}


def text_of(nll, kld, document=0):
    """A chunk of two buckets (2 and 1 scored tokens) with its KLD summed."""
    found = {"tokens": 3, "nll": nll, "document": document, "kld": sum(kld), "delta_p": 0.0}
    return found | {"top1_equal": 2, "kept": 3, "by_position": [[2, nll / 2], [1, nll / 2]]}


FACTS = {"scored": 9, "positions": [0, 2, 4]}
NATIVE = [text_of(3.0, [0, 0, 0], d) for d in range(3)]
KLD = [[0.1, 0.2, 0.3], [0.0, 0.0, 0.9], [0.4, 0.0, 0.0]]
OWN = [text_of(3.0 + d, kld, d) for d, kld in enumerate(KLD)]


def quality(own=OWN, tokens=KLD, kept=None):
    flat = list(itertools.chain(*tokens)) if kept is None else kept
    whole = {"n": 9, "mean": 0.21, "p50": 0.1} | dict.fromkeys(("p90", "p99", "p999", "max"), 0.9)
    own = {"chunks": own, "native_chunks": NATIVE, "kld_tokens": flat, "top1_equal": 6, "kld": whole}
    return own, FACTS


def perplexed(maker, **own):
    native = {"chunks": NATIVE}, FACTS
    return measured(small(maker), perplexity__native=native, perplexity__int8_sym=quality(**own))


STEPS = 128


def agreement(differ=(), margins=None, flips=(), continuation=None, facts=None):
    native, margins = list(range(STEPS)), margins or [1.0] * STEPS
    base = {"tokens": native, "margins": margins, "aa_margins": [m + 0.01 for m in margins]}
    shared = {"steps": STEPS, "prompt_tokens": 4, "prompt_sha": "p"}
    own = {"tokens": [-1 if i in differ else t for i, t in enumerate(native)], "margins": []}
    return {
        "agreement__native": (base, shared | {"aa_disagreements": list(flips)} | (facts or {})),
        "agreement__int8_sym": (own | (continuation or {}), shared),
    }


def side(layer, name, error=0.01, **more):
    found = {"layer": layer, "side": name, "elements": 1000, "nonfinite": 0, "amax": 4.0, "rms": 1.0}
    found |= {"error": error, "bound_share": 0.5, "clipped": 0, "flushed": 20, "codes_used": 255}
    return found | {"scale_min": 0.01, "scale_max": 0.05, "scales_log2": {}} | more


def healthy(maker, layers, **more):
    """A run whose quality tasks are of the health runner instead."""

    def health(of):
        return replace(of, runner="health") if of.runner == "parity" else of

    made = small(maker).with_tasks(health).with_records(health)
    sides = [side(i, name, 0.01 * (i + 1), **more) for i in range(layers) for name in ("k", "v")]
    exact = {"error": 0.0, "flushed": 0, "codes_used": None, "scale_min": None, "scale_max": None}
    facts, native = {"tokens": 64, "format": "int8_sym"}, [s | exact for s in sides]
    return measured(
        made, health__native=({"sides": native}, facts), health__int8_sym=({"sides": sides}, facts)
    )


def question(key, answer, scores, **more):
    found = {"id": f"q{key}", "subject": "s", "answer": answer, "scores": scores, "pick": 0, "tie": False}
    return found | {"tokens": [1] * 3, "chars": [1] * 3, "truncated": False, "skipped": None} | more


FIRST, SECOND, CLOSE = [-1.0, -2.0, -3.0], [-2.0, -1.0, -3.0], [-1.0, -1.001, -3.0]
