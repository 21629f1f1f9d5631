"""Made-up runs over several contexts: storage and latency of a native and an FP8 cell of Qwen3-8B's sizes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.matrix.cells import Cell, Task
from kvbench.metrics.collect import Row, derive
from kvbench.records.record import Record
from kvbench.records.run import Manifest, Run
from tests.factories.runs.made import BASE, CAND, MadeRun, layers, storage_facts

SETTINGS = {"backend": "gpu", "decode": "graph", "splits": [4], "kernels": ["paged_decode_split"]}
# Qwen3-8B: bytes of a token in 16 bits and in FP8 with F32 scales.
NATIVE_KV, FP8_KV = 147_456.0, 76_032.0


def arm(name: str, order: int, itl: float, batch: int, context: int, own: str = "fp8_e4m3") -> dict[str, Any]:
    """own: the KV format of the cell that the record is of; its baseline is native."""
    gaps, ttft = [itl, itl, itl], 50.0
    return {
        "arm": name, "order": order, "ttft_ms": ttft, "itl_ms": gaps, "total_ms": ttft + sum(gaps),
        "prefill_tokens": batch * context, "batch": batch, "new_tokens": 4,
        "ran": {
            "kv_format": "native" if name == "baseline" else own, "weights": "native",
            "computed_tokens": batch * (context + 15),  # the runner's default is 16 new tokens
        },
    }  # fmt: skip


def arm_facts(kv: float, **settings: Any) -> dict[str, Any]:
    return {"settings": SETTINGS | settings, "reads": {"weight_bytes": 10**9, "kv_bytes_per_token": kv}}


def timed_at(
    own: float = 10.0, native: float = 10.0, batch: int = 2, context: int = 128, **facts: Any
) -> MadeRun:
    """Latency and storage of a native and an FP8 cell; `facts` go into the candidate's latency record."""
    run = MadeRun("fp8_e4m3", batch=batch, context=context)
    arms = [
        arm("candidate" if i in (0, 3) else "baseline", i, own if i in (0, 3) else native, batch, context)
        for i in range(4)
    ]
    alone = [arm("candidate", i, native, batch, context, own="native") for i in range(2)]
    shared = {"copy_gb_s": 4000.0, "cache_bytes": 50_000_000, **facts}
    both = {"candidate": arm_facts(FP8_KV), "baseline": arm_facts(NATIVE_KV)}
    return run.measure(
        "latency",
        ({"arms": arms, "warmup": []}, {"arms": both, **shared}),
        ({"arms": alone, "warmup": []}, {"arms": {"candidate": arm_facts(NATIVE_KV)}, **shared}),
    ).measure(
        "storage",
        (layers(22, 2000, 100), storage_facts(256, 88_000)),
        (layers(22, 4000, 0), storage_facts(256, 88_000)),
    )


class Contexts:
    """A run over several contexts: ITL of native and FP8 as lines (ms, us a token), exact unless `scatter` is
    given.
    """

    def __init__(
        self,
        own: tuple[float, float] = (6.0, 0.42),
        native: tuple[float, float] = (6.0, 0.8),
        contexts: Sequence[int] = (1024, 4096, 16384),
        scatter: float = 0.0,
        kv: tuple[float, float] = (FP8_KV, NATIVE_KV),
        **settings: Any,
    ) -> None:
        self.cells: list[Cell] = []
        self.tasks: list[Task] = []
        self.records: list[Record] = []
        for context in contexts:
            itl = [at + slope * context / 1e3 for at, slope in (own, native)]
            run = timed_at(*itl, batch=1, context=context)
            run.records[1] = replace(
                run.records[1],
                samples={
                    **run.records[1].samples,
                    "arms": [
                        arm(a["arm"], i, a["itl_ms"][0] + scatter * (-1) ** i, 1, context)
                        for i, a in enumerate(run.records[1].samples["arms"])
                    ],
                },
                facts={
                    **run.records[1].facts,
                    "arms": {"candidate": arm_facts(kv[0], **settings), "baseline": arm_facts(kv[1])},
                },
            )
            name = {BASE: f"{BASE}{context}", CAND: f"{CAND}{context}"}
            self.cells += [
                replace(c, id=name[c.id], baseline=name[BASE], name=f"{c.name},context={context}")
                for c in run.cells
            ]
            for task, record in zip(run.tasks, run.records, strict=True):
                key = f"{task.key}-{context}"
                baseline = task.baseline and f"{task.baseline}-{context}"
                cells = tuple(name[c] for c in task.cells)
                self.tasks.append(replace(task, key=key, cells=cells, baseline=baseline))
                self.records.append(replace(record, key=key))

    @property
    def run(self) -> Run:
        return Run(Manifest("made", tuple(self.cells), tuple(self.tasks)), tuple(self.records))

    def rows(self) -> list[Row]:
        return derive(self.run)

    def row(self, metric: str, cell: str = f"{CAND}1024") -> Row:
        (row,) = [r for r in self.rows() if (r.metric, r.cell) == (metric, cell)]
        return row
