"""A synthetic run of the shape that `kvbench run` leaves: SmolLM2-135M, native and int8_sym, batch x context.

The numbers are made up where they are measured (times, quality) and exact where they are formulas (bytes).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from kvbench.gate.verdict import Outcome, Verdict, exit_code_of
from kvbench.matrix.cells import CELL_KEYS, Cell, Task
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.records.record import Record
from kvbench.records.run import Manifest, MatrixFile, Run
from kvbench.report.model import JudgedRun

LAYERS, SHAPE, DTYPE = 30, KVShape(3, 64, 64), "float32"
NATIVE = {"requested": "native", "resolved": "native", "reason": "asked for and supported", "rejected": []}


def outcome(check, status, sentence="", *, cells=(), metric="", **fields):
    """A check's outcome as the gate gives it; the fields that a test does not care about are empty."""
    reasons = {"pass": "kept", "fail": "broken", "inconclusive": "spans_limit"}
    made = Outcome(check, status, reasons.get(status, "not_measured"), sentence, tuple(cells), metric)
    return replace(made, **fields)


@dataclass(frozen=True)
class Made:
    """The four inputs of a report, and small edits of them."""

    manifest: Manifest
    records: list[Record]
    rows: list[Row]
    verdict: Verdict

    @property
    def run(self):
        return Run(self.manifest, tuple(self.records))

    @property
    def judged(self):
        return JudgedRun(self.run, self.rows, self.verdict)

    def cell(self, **want):
        return next(c for c in self.manifest.cells if all(c.spec[k] == v for k, v in want.items()))

    def with_manifest(self, **fields):
        return replace(self, manifest=replace(self.manifest, **fields))

    def with_tasks(self, change):
        return self.with_manifest(tasks=tuple(map(change, self.manifest.tasks)))

    def with_cells(self, change):
        return self.with_manifest(cells=tuple(map(change, self.manifest.cells)))

    def with_records(self, change):
        return replace(self, records=[r for r in map(change, self.records) if r is not None])

    def with_rows(self, change):
        return replace(self, rows=[r for r in map(change, self.rows) if r is not None])

    def with_outcomes(self, *more, change=lambda o: o):
        """The outcomes changed (None leaves one out), then `more` of them, and the exit code that follows."""
        outcomes = (*filter(None, map(change, self.verdict.outcomes)), *more)
        return replace(self, verdict=Verdict(outcomes, exit_code_of(outcomes)))


def make(formats=("native", "int8_sym"), batches=(1, 4), contexts=(128, 512), fixed=None):
    """A passing run. `fixed` sets cell keys in every cell."""
    shapes = itertools.product(formats, batches, contexts)
    cells = [_cell(fmt, batch, context, fixed or {}) for fmt, batch, context in shapes]
    tasks = _tasks(cells)
    records = [_record(task) for task in tasks]
    rows = [row for task, record in zip(tasks, records, strict=True) for row in _rows(task, record, cells)]
    axes = {"kv_format": list(formats), "batch": list(batches), "context": list(contexts)}
    manifest = Manifest(
        "int8", tuple(cells), tuple(tasks),
        matrix=MatrixFile("matrices/int8.yaml", "9f2c1a7e0b44", {"name": "int8", "axes": axes}),
        command=("kvbench", "run", "matrices/int8.yaml"), created_at="2026-10-01T12:00:00+00:00",
        environment={"kvbench": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.9",
                     "cpu": {"name": "generic", "cores": 2}, "gpu": None, "clock": "perf_counter"},
        gate="gates/int8.yaml",
    )  # fmt: skip
    return Made(manifest, records, rows, Verdict(tuple(_outcomes(cells)), 0))


def _cell(fmt, batch, context, fixed):
    spec = CELL_KEYS | {"model": "smollm2-135m-instruct", "device": "cpu", "dtype": DTYPE} | fixed
    spec |= {"kv_format": fmt, "batch": batch, "context": context}
    name = f"kv_format={fmt},batch={batch},context={context}"
    varied = ("kv_format", "batch", "context")
    return Cell(f"{fmt}-{batch}-{context}", name, spec, varied, f"native-{batch}-{context}", 4)


def _tasks(cells):
    variants = {"perplexity": ["wikitext2", "pydoc"], "mcq": ["cloze"]}
    tasks = {}
    for cell in cells:
        for runner, declared in ((name, RUNNERS[name]) for name in RUNNERS if name in _VALUES):
            for variant in variants.get(runner, [""]):
                spec = {key: value for key, value in cell.spec.items() if key not in declared.ignores}
                fmt = spec["kv_format"]
                shape = [str(spec[key]) for key in ("kv_format", "batch", "context") if key in spec]
                key = "-".join([runner, variant, *shape])
                baseline = None if fmt == "native" else key.replace(fmt, "native")
                shared = tasks[key].cells if key in tasks else ()
                tasks[key] = Task(key, runner, variant, spec, {}, (*shared, cell.id), baseline)
    return list(tasks.values())


def level(name, sentence, state="verified", **facts):
    return {"name": name, "state": state, "sentence": sentence, "facts": facts}


def _record(task):
    spec = task.spec
    fmt = spec["kv_format"]
    storage = KV_FORMATS[fmt].payload_dtype or DTYPE
    choice = NATIVE | {"requested": fmt, "resolved": fmt}
    samples, facts = _measured(task)
    e2 = "not_applicable" if fmt == "native" else "verified"
    quantized = spec["weights"] != "native"
    weights = NATIVE | {"requested": spec["weights"], "resolved": spec["weights"]}
    path = (
        {"requested": spec["gemm"], "resolved": "by_shape", "reason": "best_available"} if quantized else {}
    )
    return Record(
        key=task.key, runner=task.runner, protocol=1, status="ok", spec=spec, options={},
        decision={"kv_format": choice, "weights": weights,
                  "backend": NATIVE | {"requested": "torch", "resolved": "torch"},
                  "gemm": NATIVE | {"requested": "auto", "reason": "native_weights"} | path},
        evidence={
            "effective": fmt,
            "effective_weights": spec["weights"],
            "levels": [
                level("E1", f"All {LAYERS} layers store {storage}.", layers=LAYERS, difference=0),
                level("E2", "4,096 sampled codes equal the reference quantizer.", e2, codes=4096, clipped=0),
                level("E3", "Changing a stored payload moves the logits."),
            ],
            "precision": {"storage": storage, "transfer": "not measured", "execution": DTYPE,
                          "weights": _FP8 if quantized else DTYPE,
                          "gemm": _products(task) if quantized else "native"},
            "reads": {"tokens": 12000, "quantized_tokens": 0 if fmt == "native" else 12000, "calls": 900},
        },
        samples=samples, facts=facts, environment={}, partial=None, error=None,
        started_at="2026-10-01T12:00:00+00:00", seconds=3.25,
    )  # fmt: skip


_FP8 = "bfloat16 and float8_e4m3fn + float32 scales"


def _products(task):
    """The paths of the products that a task made: prompts have many rows, decode steps few, storage none."""
    return {"storage": "not measured", "latency": "w8a16 and w8a8"}.get(task.runner, "w8a8")


def _measured(task):
    spec, runner = task.spec, task.runner
    if runner == "storage":
        tokens = spec["batch"] * spec["context"]
        n = kv_bytes(KV_FORMATS[spec["kv_format"]], SHAPE, tokens, DTYPE)
        sizes = {"payload": n.payload, "scales": n.scales}
        layer = sizes | {f"expected_{key}": size for key, size in sizes.items()} | {"dtype": "int8"}
        facts = {"tokens": tokens, "page_table_bytes": tokens // 2, "held_bytes": 0, "workspace_bytes": 0,
                 "weights_bytes": 538_060_032, "native_dtype": DTYPE, "device_peak_bytes": None}  # fmt: skip
        return {"layers": [{"layer": i, **layer} for i in range(LAYERS)]}, facts
    if runner == "latency":
        itl = _itl(spec)
        arms = [{"arm": arm, "order": i, "ttft_ms": 9 * itl,
                 "itl_ms": [itl * (0.97 + 0.01 * i), itl * (0.99 + 0.01 * i)]}
                for i, arm in enumerate(["candidate", "baseline", "baseline", "candidate"])]  # fmt: skip
        facts = {"clock": "perf_counter", "synchronised": False}
        return {"arms": arms, "warmup": []}, facts | {"host_load": {"before": 0.4, "after": 0.5, "cpus": 2}}
    if runner == "perplexity":
        facts = {"protocol": "stream512", "split": "test", "bos": "none", "stride": 512, "scored": 292_883,
                 "tokens": 293_457, "chunk": 512, "text": "raw",
                 "data_sha": "a1b2c3", "skipped_rows": 0}  # fmt: skip
        return {"chunks": []}, facts
    return {}, {"seed": 0, "steps": 2048}


def _itl(spec):
    base = 41.0 + 6.5 * spec["batch"] + 0.012 * spec["batch"] * spec["context"]
    return base * (1.0 if spec["kv_format"] == "native" else 1.07)


def _rows(task, record, cells):
    """What `derive` would give, one row a cell of the task; differences only for candidates."""
    variants = {"wikitext2": WIKITEXT, "pydoc": "pydoc stream512", "cloze": "cloze 0-shot"}
    variant, rows = variants.get(task.variant, ""), []
    for cell in (c for c in cells if c.id in task.cells):
        for metric, value, unit, n, low, high, paired in _VALUES[task.runner](task.spec, record):
            if not (paired and task.spec["kv_format"] == "native"):
                baseline = cell.baseline if paired else None
                rows.append(Row(cell.id, metric, variant, value, UNITS[unit], n, low, high, baseline))
    return rows


def _storage(spec, record):
    tokens = record.facts["tokens"]
    n = kv_bytes(KV_FORMATS[spec["kv_format"]], SHAPE, tokens, DTYPE)
    native = kv_bytes(KV_FORMATS["native"], SHAPE, tokens, DTYPE)
    return [
        ("kv_bytes_total", LAYERS * n.total, "B", LAYERS, None, None, False),
        ("kv_bytes_payload", LAYERS * n.payload, "B", LAYERS, None, None, False),
        ("kv_bytes_scales", LAYERS * n.scales, "B", LAYERS, None, None, False),
        ("kv_bytes_per_token", LAYERS * n.total / tokens, "B/token", LAYERS, None, None, False),
        ("kv_bytes_difference", 0, "B", LAYERS, None, None, False),
        ("kv_ratio", n.total / native.total, "ratio", LAYERS, None, None, True),
        ("kv_ratio_16bit", 2 * n.total / native.total, "ratio", LAYERS, None, None, False),
        ("weight_bytes", 538_060_032, "B", None, None, None, False),
    ]


def _latency(spec, record):
    itl = _itl(spec)
    return [
        ("itl_ms", itl, "ms", 45, 0.985 * itl, 1.015 * itl, False),
        ("itl_ratio", 1.07, "ratio", 3, 1.0412, 1.0993, True),
        ("itl_p50_ms", 0.99 * itl, "ms", 45, None, None, False),
        ("itl_p90_ms", 1.08 * itl, "ms", 45, None, None, False),
        ("itl_p99_ms", 1.21 * itl, "ms", 45, None, None, False),
        ("ttft_ms", 9.0 * itl, "ms", 3, None, None, False),
        ("ttft_ratio", 1.0213, "ratio", 3, 0.9821, 1.0618, True),
        ("ttft_cold_ms", 14.0 * itl, "ms", 1, None, None, False),
        ("decode_tok_s", 1000 * spec["batch"] / itl, "tok/s", 45, None, None, False),
    ]


def _perplexity(spec, record):
    return [
        ("ppl", 18.8617 if spec["kv_format"] == "native" else 18.8771, "ppl", 292_883, None, None, False),
        ("ppl_delta_pct", 0.0816, "%", 292_883, -0.0123, 0.1755, True),
        ("kld_mean", 0.000312, "nat", 292_883, None, None, True),
        ("kld_p99", 0.00401, "nat", 292_883, None, None, True),
        ("top1_agreement", 0.99182, "share", 292_883, 0.99149, 0.99214, True),
    ]


def _agreement(spec, record):
    return [
        ("top1_teacher_forced", 0.99707, "share", 2048, 0.99363, 0.99866, True),
        ("first_divergence", 613, "step", 2048, None, None, True),
        ("divergence_margin", 0.0042, "logit", 1, None, None, True),
        *[("aa_disagreement", 0.0, "share", 2048, None, None, False)] * (spec["kv_format"] == "native"),
    ]


def _mcq(spec, record):
    accuracy = 0.715 - 0.005 * (spec["kv_format"] != "native")
    return [
        ("mcq_accuracy", accuracy, "share", 200, 0.6436, 0.7684, False),
        ("mcq_delta_pt", -0.5, "pt", 200, -1.9, 0.9, True),
        ("mcq_mcnemar_p", 1.0, "p-value", 200, None, None, True),
    ]


def _parity(spec, record):
    return [
        ("parity_max_abs", 3.2e-7, "error", 40, None, None, False),
        ("parity_bound_share", 0.0032, "ratio", 40, None, None, False),
        ("steps_argmax_agreement", 1.0, "share", 2048, 0.99813, 1.0, False),
    ]


_VALUES = {
    "storage": _storage,
    "latency": _latency,
    "perplexity": _perplexity,
    "agreement": _agreement,
    "mcq": _mcq,
    "parity": _parity,
}


WIKITEXT = "wikitext2 stream512"
PRECISION_LIMIT = "requested = resolved = effective, verified"


def _outcomes(cells):
    """The built-in checks, then an exact limit on each quantized cell and one limit that they share."""
    found = [
        outcome("precision", "pass", f"{c.name}: verified.", cells=[c.id], limit=PRECISION_LIMIT)
        for c in cells
    ]
    found.append(outcome("plausible", "pass", "all 96 measured values are finite and possible."))
    quantized = [c for c in cells if c.spec["kv_format"] == "int8_sym"]
    for c in quantized:
        sentence = f"kv_ratio_16bit on {c.name} is 0.515625 (n=30); the limit is 0.515625: kept."
        found.append(
            outcome("kv_ratio_16bit equals 0.515625", "pass", sentence, cells=[c.id], metric="kv_ratio_16bit",
                    value=0.515625, limit="equal to 0.515625", why="(64+2)/128", bounds=(0.515625, 0.515625))
        )  # fmt: skip
    if quantized:
        value = "0.0816 % (95% interval -0.0123 to 0.1755, n=292,883)"
        sentence = f"ppl_delta_pct of {WIKITEXT} on {quantized[0].name} is {value}: kept."
        found.append(
            outcome("ppl_delta_pct within [-1, 1]", "pass", sentence, cells=[c.id for c in quantized],
                    metric="ppl_delta_pct", variant=WIKITEXT, value=0.0816, limit="within [-1, 1]",
                    why="the source's target", bounds=(-1.0, 1.0))
        )  # fmt: skip
    return found


def fail(made):
    """The same run, but layer 7 of one cell stayed native, a quality check failed and a task crashed."""
    bad = made.cell(kv_format="int8_sym", batch=4, context=512).id
    sentence = "Layer 7 of 30 stores float32 where int8 was resolved."

    def change(record):
        if record.runner == "storage" and record.key.endswith("int8_sym-4-512"):
            levels = [dict(level) for level in record.evidence["levels"]]
            levels[0] = level("E1", sentence, "mismatch", layer=7, dtype="float32")
            return replace(record, evidence={**record.evidence, "effective": "mixed", "levels": levels})
        if record.runner == "mcq" and "int8_sym" in record.key:
            tail = ["Traceback (most recent call last):", "MemoryError: cannot allocate 1.2 GiB"]
            error = {"type": "MemoryError", "message": "cannot allocate 1.2 GiB", "tail": tail}
            return replace(record, status="error", samples={}, facts={}, evidence=None, error=error)
        return record

    def edit(row):
        if row.metric.startswith("mcq") and row.cell.startswith("int8"):
            return None
        if row.metric == "ppl_delta_pct":
            return replace(row, value=2.41, low=2.02, high=2.81)
        return row

    name = made.cell(kv_format="int8_sym").name
    lost = f"{made.run.names[bad]}: mismatch: the evidence shows mixed. E1: {sentence} (seen in storage)"
    value = "2.41 % (95% interval 2.02 to 2.81, n=292,883)"
    broken = f"ppl_delta_pct of {WIKITEXT} on {name} (and 3 more cells) is {value}: broken."

    def judge(o):
        if o.cell == bad and o.check == "precision":
            return replace(o, status="fail", sentence=lost)
        return replace(o, status="fail", value=2.41, sentence=broken) if o.metric == "ppl_delta_pct" else o

    quantized = [c.id for c in made.manifest.cells if c.spec["kv_format"] == "int8_sym"]
    crashed = "mcq cloze on int8_sym: cannot allocate 1.2 GiB (MemoryError)"
    unknown = "mcq_delta_pt of cloze 0-shot was not measured: MemoryError."
    more = (
        outcome("cell error", "not_evaluated", crashed, cells=quantized, variant="cloze"),
        outcome("mcq_delta_pt at least -1", "not_evaluated", unknown, cells=quantized, metric="mcq_delta_pt",
                variant="cloze 0-shot", limit="at least -1"),
    )  # fmt: skip
    return made.with_records(change).with_rows(edit).with_outcomes(*more, change=judge)
