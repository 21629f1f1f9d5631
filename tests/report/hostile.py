"""Names that mean harm, and a run that has one of them everywhere where a name from outside can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><style>*{display:none}",
    "{{ 7*7 }}{% raw %}",
    "=cmd|' /C calc'!A0",
    "a\nb\r\n\x1b[31mred\x00",
    "\u202egnp.exe",
    "n" * 500,
    "量化键值缓存",
    "$\\frac{1}{$",
    "_hidden",
]


def hostile(maker: Any, text: str) -> Any:
    """`text` everywhere where a name from outside can be: model, run, format, reasons, errors, facts, variants."""
    made = maker(batches=(1,), contexts=(128,), fixed={"model": text, "trust_remote_code": True})
    made = made.with_manifest(
        name=text,
        command=(*made.manifest.command[:2], text),
        environment={**made.manifest.environment, text: {text: text}},
        matrix=replace(made.manifest.matrix, path=text, source={text: [text]}),
    )
    made = made.with_cells(lambda cell: replace(cell, varied=("kv_format", "model")))
    choice = {"requested": text, "resolved": "native", "reason": text, "rejected": [[text, text]]}

    def change(record):
        levels = [{"name": "E1", "state": "mismatch", "sentence": text, "facts": {text: text}}]
        evidence = {**record.evidence, "effective": text, "levels": levels}
        error = {"type": text, "message": text, "tail": [text, text]}
        status = "error" if record.runner == "parity" else "ok"
        return replace(record, decision={**record.decision, "kv_format": choice}, evidence=evidence,
                       status=status, error=error, facts={**record.facts, text: text})  # fmt: skip

    made = made.with_tasks(lambda task: replace(task, variant=task.variant and text))
    made = made.with_records(change).with_rows(lambda r: replace(r, variant=text, note=text, partial=text))
    bad = [replace(o, check=text, sentence=text, why=text, limit=text, status="fail", variant=text)
           for o in made.verdict.outcomes]  # fmt: skip
    return replace(made, verdict=replace(made.verdict, outcomes=tuple(bad), exit_code=1, word="fail"))
