"""E3- and E5-weights: what the products of FP8 layers read and give, and the memory that they take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvbench.engines.reference.engine import path_asked
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.load import LoadedModel
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear, using
from kvbench.evidence.probe_values import Make, level_of
from kvbench.evidence.stored_weights import fp8_modules, groups, source_level
from kvbench.evidence.weight_reach import last_of_each, unreached
from kvbench.matrix.resolve_backend import Decision
from kvbench.records.record import NOT_APPLICABLE, VERIFIED, Level
from kvbench_kernels.gemm.blockwise import BLOCK, dequantize_activation, dequantize_blocks
from kvbench_kernels.gemm.blockwise import quantize_activation_torch as quantize_activation
from kvbench_kernels.gemm.fp8_linear import target_of
from kvbench_kernels.gemm.fp8_route import W8A8, Path, route

ROWS = (1, 130)  # of the probes: a decode step's, and a prompt's

# Up to ALL_ROWS rows of an output are all compared; of more, one in each stripe of rows, at a moving place.
ALL_ROWS, STRIPE = 64, 32

# From so many columns on, the memory of a W8A8 product with several rows shows whether its weight was
# dequantized: its own buffers, at most 8 parts of 256 rows in float32, are smaller.
SHOWING_COLUMNS = 8 * 256 * 4

# Largest distance of an output from the product in float64, as a share of its norm: weights and outputs
# rounded once to the dtype. FP8 tensor cores keep about 14 bits of a sum of 32 to 128 products.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
TOLERANCE_W8A8 = 2.0**-8


@torch.inference_mode()
def probe_weights(loaded: LoadedModel, decision: Decision, make: Make | None = None) -> tuple[Level, ...]:
    """E2-, E3- and E5-weights of a loaded model. make: engines on it, for what must reach the logits."""
    if decision.weights.resolved == "native":
        sentence = "Native weights are not quantized."
        return tuple(Level(f"{e}-weights", NOT_APPLICABLE, sentence) for e in ("E2", "E3", "E5"))
    probe = _Probe(loaded, path_asked(decision.gemm.resolved))
    with using(probe.gemm):
        for group in groups(loaded.model):
            for rows in ROWS:
                probe.product(group, rows)
    if make is not None:
        probe.model(make, list(fp8_modules(loaded.model)))
    return source_level(loaded), probe.e3(), probe.e5()


@torch.inference_mode()
def probe_after(
    loaded: LoadedModel,
    decision: Decision,
    rows: Mapping[tuple[int, int], Sequence[int]],
    make: Make | None = None,
) -> tuple[Level, ...]:
    """E2-, E3- and E5-weights after a run, at the numbers of rows that it had.

    rows: by (N, K) of the product (`kvbench.evidence.products.rows_of`). The probes of the model were taken
    once, at `ROWS`: other rows may take another path, and a run may have changed the code, so one row is
    probed again too.
    """
    probe = _Probe(loaded, path_asked(decision.gemm.resolved))
    with using(probe.gemm):
        for group in groups(loaded.model):
            shape = sum(m.out_features for _, m in group), group[0][1].in_features
            probe.product(group, ROWS[0])
            probe.rows(group, [m for m in rows.get(shape, ()) if m != ROWS[0]])
    if make is not None:
        probe.model(make, last_of_each(list(fp8_modules(loaded.model))))
    return source_level(loaded), probe.e3(), probe.e5()


def with_after(first: Level, after: Level) -> Level:
    """Whichever level does not hold, of a model and of it after a run, with the facts of both."""
    worse = after if first.state == VERIFIED else first
    return Level(first.name, worse.state, worse.sentence, {**first.facts, "after_run": dict(after.facts)})


Group = Sequence[tuple[str, Fp8Linear]]


@dataclass
class _Probe:
    """What the products of a model showed so far.

    unread, wrong: faults in words, of E3 and of E5; error, seen: the largest, and numbers of rows, by path.
    from_native, from_stored: squared distances of sampled outputs from those of native weights (None: not
    sampled) and of the stored ones. peak: most bytes of a fused product beyond output and x, by its codes.
    """

    loaded: LoadedModel
    gemm: str
    unread: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    error: dict[str, float] = field(default_factory=dict)
    from_native: float | None = None
    from_stored: float = 0.0
    peak: float | None = None
    changes: int = 0
    seen: dict[str, set[int]] = field(default_factory=dict)

    def rows(self, group: Group, counts: Sequence[int]) -> None:
        """Compares one product at each of these numbers of rows with float64; all rows must be finite."""
        if not counts:
            return
        stored = [dequantize_blocks(m.weight.data, m.weight_scale_inv.data).double() for _, m in group]
        for count in counts:
            x = probe_input(count, count, group[0][1].in_features).to(self.loaded.device, self.loaded.dtype)
            for (name, m), weight, y in zip(group, stored, _outputs(group, x), strict=True):
                self._compare(name, m, weight, x, y)

    def model(self, make: Make, names: Sequence[str]) -> None:
        """Checks that outputs reach the logits, and compares the product of every layer in the model."""
        worked = set()

        def work(name: str, m: Fp8Linear, x: Tensor, y: Tensor) -> None:
            worked.add(name)
            stored = dequantize_blocks(m.weight.data, m.weight_scale_inv.data).double()
            self._compare(name, m, stored, x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))

        self.unread += unreached(make, names, work)
        idle = (name for name in fp8_modules(self.loaded.model) if name not in worked)
        self.unread += [f"{name} is not called" for name in idle]

    def _compare(self, name: str, m: Fp8Linear, stored: Tensor, x: Tensor, y: Tensor) -> None:
        """y [M, N] against x [M, K] times `stored` [N, K] plus bias in float64, in the rows of `compared`."""
        path, some = self._path(m, len(x)), compared(len(x)).to(x.device)
        used = dequantize_activation(*quantize_activation(x[some])) if path in W8A8 else x[some]
        finite = bool(y.isfinite().all())
        error = block_distance(y[some], used.double(), stored, m.bias) if finite else math.inf
        self._judge(name, path, len(x), error)

    def _judge(self, name: str, path: Path, rows: int, error: float) -> None:
        self.error[path] = max(self.error.get(path, 0.0), error)
        self.seen.setdefault(path, set()).add(rows)
        if not error <= self._allowed(path):
            away = f"{name} is {error:.3g} of its norm away from the product with its codes and scales"
            self.wrong.append(f"{away}, by path {path} at {rows} row{'' if rows == 1 else 's'}")

    def product(self, group: Group, rows: int) -> None:
        """Checks one product at so many rows: its values, and that it follows what its modules store."""
        x = probe_input(rows, rows, group[0][1].in_features).to(self.loaded.device, self.loaded.dtype)
        biases = [None if m.bias is None else m.bias.data.clone() for _, m in group]
        for _, m in group:
            if m.bias is not None:
                m.bias.data.zero_()  # so that twice the scales give exactly twice the output
        try:
            before = self._watched(group, x)
            for at, (name, m) in enumerate(group):
                self._value(name, m, x, before[at])
                self._reads(group, at, x, before[at])
        finally:
            for (_, m), bias in zip(group, biases, strict=True):
                if m.bias is not None and bias is not None:
                    m.bias.data.copy_(bias)
        allowed = self._allowed(self._path(group[0][1], rows))
        for (name, _), bias, y, plain in zip(group, biases, _outputs(group, x), before, strict=True):
            if bias is not None and not _distance(y.float(), plain.float() + bias.float()) <= allowed:
                self.wrong.append(f"{name} does not add its bias")

    def _allowed(self, path: Path) -> float:
        """How far an output may be from the expected one, as a share of its norm."""
        allowed = TOLERANCE[self.loaded.dtype]
        return max(allowed, TOLERANCE_W8A8) if path in W8A8 else allowed

    @cached_property
    def columns(self) -> dict[int, int]:
        """Columns of the product that a layer (by id) is in, its siblings' included."""
        every = groups(self.loaded.model)
        return {id(m): sum(other.out_features for _, other in group) for group in every for _, m in group}

    def _path(self, m: Fp8Linear, rows: int) -> Path:
        where = dtype_name(self.loaded.dtype), target_of(self.loaded.device)
        return route(rows, self.columns[id(m)], m.in_features, *where, self.gemm)

    def _watched(self, group: Group, x: Tensor) -> list[Tensor]:
        """The outputs; a fault is recorded when they took as much memory as half of the weight in 16 bits.

        The portable W8A8 product also keeps the parts of a sum that is split along K. With many rows and few
        columns they are as large as the weight, and the memory shows nothing.
        """
        _outputs(group, x)  # compiles, and allocates what stays allocated
        rows, k = x.shape
        path = self._path(group[0][1], rows)
        parts = path == "w8a8" and rows > 1 and k < SHOWING_COLUMNS
        if x.device.type != "cuda" or path == "reference" or parts:
            return _outputs(group, x)
        torch.cuda.synchronize(x.device)
        torch.cuda.reset_peak_memory_stats(x.device)
        held = torch.cuda.memory_allocated(x.device)
        out = _outputs(group, x)
        taken = torch.cuda.max_memory_allocated(x.device) - held
        size = sum(m.weight.numel() for _, m in group)
        expected = 2 * sum(o.numel() * o.element_size() for o in out) + 2 * x.numel()
        share = (taken - expected) / size
        self.peak = max(self.peak or 0.0, share)
        if share >= 1:
            took = f"{taken} B for a product of {rows} row{'' if rows == 1 else 's'}"
            self.wrong.append(f"{group[0][0]} takes {took}: its {size} weights are dequantized to 16 bits")
        return out

    def _value(self, name: str, m: Fp8Linear, x: Tensor, y: Tensor) -> None:
        """y against the product with the dequantized weight in float64."""
        path = self._path(m, len(x))
        used = dequantize_activation(*quantize_activation(x)) if path in W8A8 else x.float()
        stored = dequantize_blocks(m.weight.data, m.weight_scale_inv.data).double()
        self._judge(name, path, len(x), block_distance(y, used.double(), stored))
        for sample in self.loaded.weights.samples:
            if sample.module == name and sample.native is not None:
                native = used.double() @ sample.native.to(x.device).double().t()
                mine = slice(sample.row, sample.row + len(sample.native))
                distance = (y[:, mine].double() - native).square().sum().item()
                self.from_native = (self.from_native or 0.0) + distance
                expected = used.double() @ stored[mine].t()
                self.from_stored += (y[:, mine].double() - expected).square().sum().item()

    def _reads(self, group: Group, at: int, x: Tensor, before: Tensor) -> None:
        name, m = group[at]
        raw = m.weight.data.view(torch.uint8)
        m.weight_scale_inv.data.mul_(2)
        doubled = _outputs(group, x)[at]
        m.weight_scale_inv.data.mul_(0.5)
        raw.bitwise_xor_(0x80)
        negated = _outputs(group, x)[at]
        raw.bitwise_xor_(0x80)
        restored = _outputs(group, x)[at]
        self.changes += 2
        # Doubling is exact, except where float16 had to round the smaller weight to a subnormal number.
        apart = TOLERANCE[torch.float16] if self.loaded.dtype == torch.float16 else 0.0
        if not _distance(doubled.float(), 2 * before.float()) <= apart:
            self.unread.append(f"doubling the scales of {name} does not double its output")
        # Not bit for bit: FP8 tensor cores cut the last bits of a sum, and which ones depends on its sign.
        if not _distance(negated.float(), -before.float()) <= max(TOLERANCE[before.dtype], TOLERANCE_W8A8):
            self.unread.append(f"negating the codes of {name} does not negate its output")
        if not torch.equal(restored, before):
            self.unread.append(f"restoring what {name} stores does not restore its output bit for bit")

    def e3(self) -> Level:
        moved = "of stored scales and codes each moved their module's output as they must"
        right = f"{self.changes} changes {moved}."
        wrong = "Products do not read what the model stores"
        return level_of("E3-weights", self.unread, wrong, right, changes=self.changes)

    def e5(self) -> Level:
        # At most half as far: native weights of a former FP8 checkpoint equal the stored ones up to rounding.
        if self.from_native is not None and not 4 * self.from_native >= self.from_stored:
            self.wrong.append(
                "outputs are closer to those of native weights than to those of the stored ones"
            )
        errors = ", ".join(f"{path} within {error:.2g}" for path, error in self.error.items())
        facts = {
            "error": self.error,
            "rows": {path: sorted(seen) for path, seen in self.seen.items()},
            "distance_from_stored": self.from_stored**0.5,
            "distance_from_native": None if self.from_native is None else self.from_native**0.5,
            "peak_share_of_codes": self.peak,
        }
        right = f"Products are those of the dequantized weights: {errors}."
        return level_of(
            "E5-weights", self.wrong, "Products are not those of the stored weights", right, **facts
        )


def probe_input(seed: int, rows: int, k: int) -> Tensor:
    """[rows, k] float32 from N(0, 1), with four channels thirty times as large, as activations have."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    x[:, :: max(1, k // 4)] *= 30
    return x


def _outputs(group: Group, x: Tensor) -> list[Tensor]:
    """[M, N] each. The layers get [1, M, K], as they do from the engine."""
    return [m(x[None])[0].clone() for _, m in group]


def compared(rows: int) -> Tensor:
    """Numbers of the rows of an output that are compared: all, or one in each `STRIPE` and the last."""
    if rows <= ALL_ROWS:
        return torch.arange(rows)
    starts = torch.arange(0, rows, STRIPE)
    # 7 and STRIPE are coprime, so that every place in a stripe has its turn.
    places = (starts + torch.arange(len(starts)) * 7 % STRIPE).clamp(max=rows - 1)
    return torch.tensor(sorted({*places.tolist(), rows - 1}))


def block_distance(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """Largest distance of 128 columns of a row of y [M, N] from x [M, K] times weight [N, K] plus bias [N].

    x and weight in float64; infinite where y is not finite. As a share of the expected norm, or of the norm
    without cancellation, which rounding follows. A block of wrong codes has 128 columns; a row would hide it.
    """
    added = torch.zeros(len(weight), dtype=torch.float64, device=y.device) if bias is None else bias.double()
    expected, size = x @ weight.t() + added, (x.square() @ weight.square().t() + added.square()).sqrt()
    parts = (torch.split(t, BLOCK, -1) for t in (y.double() - expected, expected, size))
    shares = [
        (off.norm(dim=-1) / torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp(min=1e-30)).amax()
        for off, a, b in zip(*parts, strict=True)
    ]
    return float(torch.stack(shares).amax().nan_to_num(nan=math.inf))


def row_distance(y: Tensor, expected: Tensor) -> float:
    """Largest distance of a row from the expected one, as a share of that one's norm; NaN stays NaN."""
    return float(((y - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).amax())


def _distance(y: Tensor, expected: Tensor) -> float:
    """Of the norms; infinite where y is not finite."""
    distance = ((y - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    return distance if distance == distance else float("inf")
