"""Names that mean harm, and runs that have one of them everywhere where a name from outside can be."""

import itertools
from dataclasses import replace

from kvbench.gate.verdict import Verdict

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><style>*{display:none}",
    "]]></testcase><!--",
    "{{ 7*7 }}{% raw %}",
    "a|b||c `code` ``x`` ```\n# head\n- list\n\n| x | y |\n| --- | --- |",
    "**bold** _em_ ~~gone~~ [link](javascript:x) ![i](x) <b>&lt;&#35; $x$ @user #12",
    "\\| \\\\| \\",
    "=cmd|' /C calc'!A0",
    "a\nb\r\n\x1b[31mred\x00\x0b\x7f\ufffe",
    "\nfile::error file=x,line=1::y%0A%25,:",
    "\u202egnp.exe\u2028x",
    "\ud800lone",
    "n" * 500,
    "量化键值缓存",
    "$\\frac{1}{$",
    "_hidden",
]


def hostile(maker, text, statuses=("fail",)):
    """`text` as run, model, cell, format, check, variant, sentence, note, environment, error and fact.

    statuses: of the outcomes, in turn.
    """
    made = maker(batches=(1,), contexts=(128,), fixed={"model": text, "trust_remote_code": True})
    made = made.with_manifest(
        name=text,
        command=(*made.manifest.command[:2], text),
        environment={**made.manifest.environment, text: {text: text}},
        matrix=replace(made.manifest.matrix, path=text, source={text: [text]}),
    )
    made = made.with_cells(lambda c: replace(c, varied=("kv_format", "model"), name=f"{c.id}:{text}"))
    choice = {"requested": text, "resolved": "native", "reason": text, "rejected": [[text, text]]}

    def change(record):
        levels = [{"name": "E1", "state": "mismatch", "sentence": text, "facts": {text: text}}]
        evidence = {**record.evidence, "effective": text, "levels": levels}
        error = {"type": text, "message": text, "tail": [text, text]}
        status = "error" if record.runner == "parity" else "ok"
        decision, facts = {**record.decision, "kv_format": choice}, {**record.facts, text: text}
        return replace(record, decision=decision, evidence=evidence, status=status, error=error, facts=facts)

    made = made.with_tasks(lambda task: replace(task, variant=task.variant and text))
    made = made.with_records(change).with_rows(lambda r: replace(r, variant=text, note=text, partial=text))
    words = dict.fromkeys(("check", "sentence", "why", "limit", "variant"), text)
    found = zip(made.verdict.outcomes, itertools.cycle(statuses))
    outcomes = [replace(o, **words, status=status) for o, status in found]
    return replace(made, verdict=Verdict(tuple(outcomes), 1))


def all_statuses(maker, text):
    return hostile(maker, text, ("fail", "inconclusive", "not_evaluated", "pass"))
