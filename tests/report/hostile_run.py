"""A run in which every name from outside is the same bad text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]></testcase><!--",
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
]


def hostile_run(maker: Any, text: str) -> Any:
    """Every kind of outcome, with `text` as run, model, cell, check, variant, sentence, reason, environment and error."""
    made = maker(batches=(1,), contexts=(128,), fixed={"model": text})
    made = made.with_manifest(
        name=text,
        command=(*made.manifest.command[:2], text),
        environment={**made.manifest.environment, text: text},
        matrix=replace(made.manifest.matrix, path=text),
    )
    made = made.with_cells(lambda c: replace(c, varied=("kv_format", "model"), name=f"{c.id}:{text}"))
    made = made.with_tasks(lambda task: replace(task, variant=task.variant and text))
    made = made.with_rows(lambda row: replace(row, variant=row.variant and text, note=text, partial=text))
    statuses = ("fail", "inconclusive", "not_evaluated", "pass")
    outcomes = [
        replace(o, check=text, sentence=text, why=text, variant=text, status=statuses[i % 4])
        for i, o in enumerate(made.verdict.outcomes)
    ]
    return replace(made, verdict=replace(made.verdict, outcomes=tuple(outcomes), exit_code=1, word="fail"))
