"""The timing loop over fake arms (A20, A21), and the engine's arm on the real engine."""

import gc
import inspect
import json
import statistics
import time
from dataclasses import replace

import pytest
from torch import nn

from kvbench.errors import Refused
from kvbench.machine.device_state import DeviceState
from kvbench.runners import latency, transfer
from kvbench.runners.latency import SHAPES, EngineArm, prefill_plan, prompt_shapes, random_prompts
from kvbench.runners.storage import weights_bytes
from kvbench.runners.text.decode import greedy
from kvbench.runners.timing import measure, time_request


class Clock:
    """A monotonic clock that only moves when an arm works."""

    now = 100.0

    def __call__(self):
        return self.now


class Arm:
    """The parts that the fake arms share; `seen` collects the calls."""

    def __init__(self, clock):
        self.clock, self.seen = clock, []

    def synchronize(self):
        self.seen.append("wait")

    def ran(self):
        return {}

    def close(self):
        self.seen.append("close")


class CompilingArm(Arm):
    """The first call of each new (batch, length) shape costs 2 s, later ones 10 ms."""

    def __init__(self, clock, batch=1, context=8, compiled=()):
        super().__init__(clock)
        self.batch, self.context, self.compiled = batch, context, set(compiled)

    def _call(self, shape):
        self.clock.now += 0.010 if shape in self.compiled else 2.0
        self.compiled.add(shape)

    def submit(self):
        self.length = self.context
        self._call(("prefill", self.batch, self.length))

    def step(self):
        self.length += 1
        self._call(("decode", self.batch, self.length))


class LateArm(Arm):
    """Asynchronous: calls return at once and finish 50 ms later; only synchronize() waits."""

    due = 0.0

    def submit(self):
        self.due = self.clock.now + 0.050

    step = submit

    def synchronize(self):
        self.clock.now = max(self.clock.now, self.due)


class ScriptedArm(Arm):
    """Takes the given seconds for submit and for each step."""

    def __init__(self, clock, seconds):
        super().__init__(clock)
        self.seconds = seconds

    def submit(self):
        self.script = iter(self.seconds)
        self.step("submit")

    def step(self, name="step"):
        self.seen.append(name)
        self.clock.now += next(self.script)


def timed(seconds, tokens):
    """One request that takes these seconds for its tokens."""
    clock = Clock()
    return time_request("candidate", 0, ScriptedArm(clock, seconds), tokens, clock)


@pytest.mark.parametrize("shape", [(1, 8), (4, 512)], ids=str)
def test_a21_t1_t2_each_shape_is_warmed_up_whatever_came_before_and_its_cold_time_reported(shape):
    clock = Clock()
    arms = [(label, CompilingArm(clock, *shape)) for label in ("baseline", "candidate")]
    timings = measure(arms, new_tokens=4, repeats=3, warmup=1, clock=clock)
    assert [t.ttft_ms for t in timings.measured] == pytest.approx([10.0] * 6)
    assert [gap for t in timings.measured for gap in t.itl_ms] == pytest.approx([10.0] * 18)
    assert [(t.arm, t.order) for t in timings.warmup] == [("baseline", -1), ("candidate", -1)]
    assert [t.ttft_ms for t in timings.warmup] == pytest.approx([2000.0] * 2)
    assert timings.warmup[0].itl_ms == pytest.approx([2000.0] * 3)
    arms = [("candidate", CompilingArm(clock, *shape, {("prefill", *shape)}))]  # by an earlier cell
    again = measure(arms, new_tokens=4, repeats=3, warmup=1, clock=clock)
    assert [t.ttft_ms for t in (*again.warmup, *again.measured)] == pytest.approx([10.0] * 4)


def test_a21_t3_an_asynchronous_backend_is_waited_for(runner_context, monkeypatch):
    clock = Clock()
    timing = time_request("candidate", 0, LateArm(clock), 3, clock)
    assert (timing.ttft_ms, timing.itl_ms) == (pytest.approx(50.0), pytest.approx([50.0, 50.0]))
    arm = LateArm(clock := Clock())
    arm.submit()  # still running for 50 ms, which are not of the next request
    assert time_request("candidate", 0, arm, 1, clock).ttft_ms == pytest.approx(50.0)
    assert clock.now == pytest.approx(100.1)
    ctx, waited = runner_context("latency", **KEYS), []
    arm = EngineArm(ctx.engine(sequences=1, tokens=8), [[1, 2]], 16, 1)
    monkeypatch.setattr(arm.engine, "synchronize", lambda: waited.append("device"))
    arm.synchronize()
    assert waited == ["device"]


def test_a20_t1_ttft_is_outside_itl_and_every_sample_is_kept():
    timing = timed([0.2] + [0.1] * 8, 9)  # T1: one gap fewer than tokens
    assert (timing.ttft_ms, timing.itl_ms) == (pytest.approx(200.0), pytest.approx([100.0] * 8))
    timing = timed([0.2], 1)  # T3: no ITL
    assert (timing.ttft_ms, timing.itl_ms) == (pytest.approx(200.0), ())
    with pytest.raises(ValueError, match="at least 1"):
        timed([0.2], 0)
    timing = timed([0.2, *[0.010] * 60, 0.300, *[0.010] * 39], 101)  # T4: a stall
    assert (max(timing.itl_ms), statistics.mean(timing.itl_ms)) == (pytest.approx(300.0), pytest.approx(12.9))


def test_arms_are_interleaved_and_pairs_alternate():
    clock, seen = Clock(), []
    arms = [(label, CompilingArm(clock)) for label in ("baseline", "candidate")]
    progress = lambda done, total, note: seen.append((done, total))  # noqa: E731
    timings = measure(arms, new_tokens=2, repeats=4, warmup=2, clock=clock, progress=progress)
    assert "".join(t.arm[0] for t in timings.measured) == "bccbbccb"
    assert [t.order for t in timings.measured] == list(range(8))
    assert [arm.seen.count("close") for _, arm in arms] == [6, 6]
    assert seen == [(i, 12) for i in range(13)]


def test_the_device_state_is_read_outside_of_a_requests_time():
    clock, looks = Clock(), iter(range(100))
    arm = ScriptedArm(clock, [0.2, 0.1, 0.1])

    def look():
        arm.seen.append("look")
        clock.now += 5.0
        return {"n": next(looks)}

    timings = measure([("candidate", arm)], new_tokens=3, repeats=2, warmup=1, clock=clock, read_state=look)
    one = ["wait", "submit", *["wait", "step"] * 2, "wait", "close"]
    assert arm.seen == [*one, *(["look", *one, "look"] * 2)]
    states = [{"before": {"n": n}, "after": {"n": n + 1}} for n in (0, 2)]
    assert [t.device for t in timings.measured] == states
    assert timings.warmup[0].device is None
    assert clock.now == pytest.approx(100 + 3 * 0.4 + 4 * 5.0)
    assert [t.ttft_ms for t in timings.measured] == pytest.approx([200.0] * 2)
    assert [gap for t in timings.measured for gap in t.itl_ms] == pytest.approx([100.0] * 4)
    assert [t.total_ms for t in timings.measured] == pytest.approx([400.0] * 2)


def test_the_collector_is_off_while_measuring_and_back_on_after_an_error():
    class Failing(ScriptedArm):
        def step(self, name="step"):
            assert not gc.isenabled()
            super().step(name)

    arm = Failing(clock := Clock(), [0.2, 0.1])
    with pytest.raises(StopIteration):
        measure([("baseline", arm), ("candidate", arm)], new_tokens=3, repeats=1, warmup=0, clock=clock)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("lengths", "chunk", "shapes"),
    [
        ([128] * 32, 512, [(4, 0, 128)]), ([3, 3, 3], 512, [(3, 0, 3)]), ([4], 4, [(1, 0, 4)]),
        ([8], 4, [(1, 0, 4), (1, 4, 4)]), ([21] * 3, 42, [(2, 0, 21), (1, 0, 21)]),
        ([21], 8, [(1, 0, 8), (1, 8, 8), (1, 16, 5)]), ([8, 4], 512, []),
        ([5, 5], 4, [(1, 0, 4), (1, 3, 2)]),  # the forward between is of two prompts at different places
        ([8 * (SHAPES + 2)], 8, [(1, 8 * i, 8) for i in range(SHAPES)]),
    ],
)  # fmt: skip
def test_prefill_forwards_cover_each_prompt_once_and_are_captured_once_a_shape(lengths, chunk, shapes):
    plan = list(prefill_plan(lengths, chunk))
    sizes = [sum(stop - start for _, start, stop in forward) for forward in plan]
    assert sizes[:-1] == [chunk] * (len(plan) - 1)
    assert 0 < sizes[-1] <= chunk
    covered = [(row, i) for forward in plan for row, start, stop in forward for i in range(start, stop)]
    assert covered == [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    assert all(len({row for row, _, _ in forward}) == len(forward) for forward in plan)  # one piece a prompt
    assert prompt_shapes(plan) == shapes


KEYS = {"batch": 3, "context": 21, "new_tokens": 5, "repeats": 2, "prefill_chunk": 16}


def test_a_candidate_is_interleaved_with_its_baseline(runner_context, as_baseline, monkeypatch):
    """With the device's state around every measured request, and why what is not there."""
    closed = []
    monkeypatch.setattr(DeviceState, "close", lambda self: closed.append(self))
    ctx = runner_context("latency", **KEYS)
    baseline = as_baseline(ctx, latency.run(ctx))
    requests = [[a["arm"] for a in baseline.samples[kind]] for kind in ("warmup", "arms")]
    assert requests == [["candidate"], ["candidate"] * 2]
    assert set(baseline.facts["arms"]) == {"candidate"}

    ctx = runner_context("latency", baseline=baseline, kv_format="int8_sym", **KEYS)
    made = []
    for name in ("engine", "native"):
        make = getattr(ctx, name)
        object.__setattr__(ctx, name, lambda make=make, **size: made.append(make(**size)) or made[-1])
    measured = latency.run(ctx)
    stores = [(e.store.fmt.name, e.store.num_pages, e.store.sequences()) for e in made]
    assert stores == [("int8_sym", 6, []), ("native", 6, [])]
    assert made[0].store.reads["quantized_tokens"] == made[1].store.reads["tokens"] > 0

    arms, facts = measured.samples["arms"], measured.facts
    order = ["baseline", "candidate", "candidate", "baseline"]
    assert [(a["order"], a["arm"]) for a in arms] == list(enumerate(order))
    keys = {"quota_us", "quota_periods", "steal_ticks", "cpu_ticks"}  # of a CPU
    for arm in arms:
        assert len(arm["itl_ms"]) == 4
        assert min(arm["ttft_ms"], *arm["itl_ms"]) > 0
        assert arm["total_ms"] == pytest.approx(arm["ttft_ms"] + sum(arm["itl_ms"]))
        assert (arm["prefill_tokens"], arm["batch"], arm["new_tokens"]) == (63, 3, 5)
        assert {end: set(state) for end, state in arm["device"].items()} == {"before": keys, "after": keys}
    warmup = [(w["arm"], "device" in w) for w in measured.samples["warmup"]]
    assert warmup == [("baseline", False), ("candidate", False)]
    json.dumps(measured.samples)
    state = facts["device_state"]
    assert (state["found_by"], state["other_processes"], len(closed)) == (None, None, 2)
    assert set(state["unread"]) <= {"cpu_quota", "cpu_steal"}
    assert (facts["backend"], facts["decode"], facts["layers"]) == ("torch", "eager", "off")
    assert facts["prompt_sha"] == baseline.facts["prompt_sha"]
    assert (facts["clock"], facts["synchronised"], facts["prefill_forwards"]) == ("perf_counter", True, 4)
    assert facts["copy_reason"] == "no copy is timed on a cpu"
    own, native = (facts["arms"][name] for name in ("candidate", "baseline"))
    assert own["settings"] == native["settings"]
    assert (own["settings"]["backend"], own["settings"]["dtype"]) == ("torch", "float32")
    assert own["settings"]["kernels"]
    assert own["reads"]["weight_bytes"] == native["reads"]["weight_bytes"] > 0
    dim = ctx.model.layers[0].shape.head_dim
    ratio = own["reads"]["kv_bytes_per_token"] / native["reads"]["kv_bytes_per_token"]
    assert ratio == (dim + 2) / (4 * dim)


@pytest.mark.parametrize("runner", [latency, transfer])
def test_a21_t4_no_runner_looks_at_the_wall_clock(runner, runner_context, backwards):
    for function in (time_request, measure):
        assert inspect.signature(function).parameters["clock"].default is time.perf_counter
    name = runner.__name__.rpartition(".")[2]
    samples = runner.run(runner_context(name, batch=1, context=33, repeats=1)).samples
    times = [x for arm in samples.get("arms", ()) for x in (arm["ttft_ms"], *arm["itl_ms"])]
    times += [swap["seconds"] for swap in samples.get("swaps", ())]
    assert times
    assert all(0 < value < 60_000 for value in times)


def test_a11_t3_a_latency_of_the_interpreter_is_refused(runner_context, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ctx = runner_context("latency", backend="triton", kv_format="int8_sym", **KEYS)
    with pytest.raises(Refused) as e:
        latency.run(ctx)
    assert e.value.reason == "interpreter_latency"


def test_the_engine_arm_gives_each_prompt_its_own_greedy_text(runner_context):
    """Prompts are seeded, differ and hold no special token."""
    ctx = runner_context("latency", **KEYS)
    prompts = random_prompts(ctx.model, 4, 300)
    assert prompts == random_prompts(ctx.model, 4, 300)
    assert len({tuple(p) for p in prompts}) == 4
    assert all(len(p) == 300 and max(p) < 256 for p in prompts)  # 256 and 257 are <bos> and <eos>
    prompts = random_prompts(ctx.model, 3, 21)
    arm = EngineArm(ctx.engine(sequences=3, tokens=26), prompts, 16, 5)
    for _ in range(2):  # a request leaves nothing behind that changes the next
        texts = []
        for call in (arm.submit, *[arm.step] * 4):
            call()
            texts.append(arm.tokens)
        arm.close()
        for row, prompt in enumerate(prompts):
            engine = ctx.engine(sequences=1, tokens=26)
            assert [t[row] for t in texts] == greedy(engine, engine.add(), prompt, 5, 0).best


def test_a_step_reads_the_output_layer_once_and_neither_embedding_nor_experts():
    model = nn.Module()
    model.embed_tokens, model.lm_head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    model.proj = nn.Linear(8, 8, bias=False)
    model.experts = nn.ModuleList([nn.Linear(8, 16, bias=False) for _ in range(4)])
    for embedding in (4 * 100 * 8, 0):
        assert latency.step_weight_bytes(model) == 4 * (8 * 8 + 100 * 8)
        assert weights_bytes(model) == latency.step_weight_bytes(model) + 4 * 4 * 8 * 16 + embedding
        model.lm_head.weight = model.embed_tokens.weight  # tied


def test_bytes_of_a_token_are_those_of_the_live_pages_without_layers_with_a_window(runner_context):
    """tiny-llama in float32: int8_sym takes (D + 2) / (4 D) of native."""
    made = (runner_context("latency", kv_format=fmt) for fmt in ("int8_sym", "native"))
    own, native = (ctx.engine(sequences=2, tokens=33) for ctx in made)
    layers, shape = len(own.layers), own.layers[0].shape
    assert latency.kv_bytes_per_token(own) == layers * 2 * shape.kv_heads * (shape.head_dim + 2)
    whole = layers * 2 * shape.kv_heads * shape.head_dim * 4
    assert latency.kv_bytes_per_token(native) == whole
    native.layers = (replace(native.layers[0], sliding_window=8), *native.layers[1:])
    assert latency.kv_bytes_per_token(native) == whole * (layers - 1) / layers
