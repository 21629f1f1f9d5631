"""The engine on a GPU: CUDA graphs and compiled layers give what eager steps give, and see what changes after
a capture.
"""

import gc
import json

import pytest
import torch

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.evidence import examine as evidence
from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import request_of, resolve
from kvbench.models.catalog import TINY
from kvbench.records.record import VERIFIED
from kvbench.runners.latency import EngineArm, random_prompts
from kvbench.runners.timing import measure, time_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own imports
]

# of 9, 29 and 49 tokens
PROMPTS = [[(37 * i + 11 * row) % 251 for i in range(9 + 20 * row)] for row in range(3)]


def loaded(dtype="bfloat16", name="tiny-llama"):
    return load_model({**CELL_KEYS, "model": name, "model_weights": "random"}, "cuda", dtype)


@pytest.fixture(scope="module")
def model():
    return loaded()


def made(model, kv_format="int8_sym", sequences=3, **keys):
    scale = 0.05 if kv_format.endswith("static") else None
    spec = {
        **CELL_KEYS, "model": "tiny-llama", "kv_format": kv_format, "scale": scale, "backend": "triton",
        "device": "cuda",
        "dtype": "bfloat16", **keys,
    }  # fmt: skip
    decision = resolve(request_of(spec), model.facts)
    return Engine(model, decision, spec, sequences=sequences, tokens=96)


def text(engine, steps=24):
    """Greedy tokens of three ragged sequences, a step for all at a time: over a page's end, and more."""
    seqs = [engine.add() for _ in PROMPTS]
    logits = engine.forward(list(zip(seqs, PROMPTS, strict=True)))
    tokens = [int(out[-1].argmax()) for out in logits]
    out = [tokens]
    for _ in range(steps):
        tokens = engine.greedy_step(seqs, tokens)
        out.append(tokens)
    for seq in seqs:
        engine.free(seq)
    return out


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_graph_and_eager_give_the_same_tokens(model, kv_format):
    plain = text(made(model, kv_format, decode="eager", compile="off"))
    engine = made(model, kv_format, decode="graph", compile="off")
    assert text(engine) == plain
    assert text(engine) == plain  # a second request on the graphs of the first
    assert sum(graph.replays for graph in engine.graphs.values()) == 48


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # another attention of the library for each
def test_compiled_layers_give_the_logits_of_plain_ones_but_for_rounding(dtype):
    mine = loaded(dtype)

    def logits(compile):
        engine = made(mine, dtype=dtype, decode="graph", compile=compile)
        seq = engine.add()
        engine.prefill(seq, PROMPTS[2])
        return engine.decode([seq], [7])

    plain, compiled = logits("off"), logits("layer")
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0.05 * plain.abs().max().item())


def test_logits_that_were_handed_out_outlive_the_next_step():
    """In float32 too, where they need no conversion: the graph's own are overwritten by its next replay."""
    engine = made(loaded("float32"), "native", dtype="float32", decode="graph", compile="off")
    seq = engine.add()
    engine.prefill(seq, PROMPTS[1])
    (first,) = engine.forward([(seq, [7])])
    kept = first.clone()
    (second,) = engine.forward([(seq, [8])])
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_changed_after_the_capture_changes_the_logits(model, name):
    engine = made(model, decode="graph", compile="off")
    seq = engine.add()
    engine.prefill(seq, PROMPTS[1])

    def decode():
        engine.truncate(seq, len(PROMPTS[1]))
        return engine.decode([seq], [7]).clone()

    before = decode()
    (graph,) = engine.graphs.values()
    live = getattr(engine.store.layers[2], name)
    kept = live.clone()
    live.mul_(2)
    changed = decode()
    live.copy_(kept)
    assert not torch.equal(changed, before)
    assert torch.equal(decode(), before)
    assert list(engine.graphs.values()) == [graph]  # the very graph that was captured before
    assert graph.replays == 3


def test_garbage_of_an_earlier_engine_does_not_end_a_capture(model):
    """An engine with graphs that only a collection finds, and a collector that meets it first while the next
    one captures.
    """
    due = text(made(model, "int8_static", decode="eager"), steps=2)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(10**8)  # what is made from here on stays young, and is met by the first collection
    try:
        earlier, engine = (made(model, "int8_static", decode="graph") for _ in range(2))
        text(earlier, steps=2)
        earlier.itself = earlier
        del earlier
        inside = engine.run_model

        def collecting(*args, **keys):
            if torch.cuda.is_current_stream_capturing():
                gc.set_threshold(1)
            return inside(*args, **keys)

        engine.run_model = collecting
        assert text(engine, steps=2) == due
    finally:
        gc.set_threshold(*thresholds)


def test_fewer_sequences_than_the_graph_has_rows(model):
    """Of four sequences at most, three share the graph of four rows: one of them is not there."""
    engine = made(model, sequences=4, decode="graph", compile="off")
    alone = made(model, sequences=4, decode="eager", compile="off")
    for rows in (3, 2, 3, 1):
        seqs, others = ([e.add() for _ in range(rows)] for e in (engine, alone))
        for e, mine in ((engine, seqs), (alone, others)):
            e.forward(list(zip(mine, PROMPTS, strict=False)))
        found, due = engine.decode(seqs, [5] * rows), alone.decode(others, [5] * rows)
        torch.testing.assert_close(found, due, rtol=0, atol=0.05 * due.abs().max().item())
        for e, mine in ((engine, seqs), (alone, others)):
            for seq in mine:
                e.free(seq)
    assert {rows for rows, _, _ in engine.graphs} == {4, 2, 1}


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a08_t2_a_swap_between_two_steps_of_a_graph_changes_nothing(model, kv_format):
    """The pages are overwritten with 0x7F meanwhile and come back elsewhere, where the next step must look."""

    def logits(swapped):
        engine = made(model, kv_format, decode="graph", compile="off")
        seq = engine.add()
        engine.prefill(seq, PROMPTS[1])
        tokens = engine.greedy_step([seq], [7])
        if swapped:
            before = list(engine.store.table.pages(seq))
            engine.swap_out(seq)
            for live in engine.store.layers:
                for tensor in live.paged().values():
                    tensor.view(torch.uint8).fill_(0x7F)
            engine.swap_in(seq)
            assert engine.store.table.pages(seq) != before
        tokens = engine.greedy_step([seq], tokens)
        return engine.decode([seq], tokens)

    assert torch.equal(logits(swapped=True), logits(swapped=False))


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3_static"])
def test_the_evidence_of_a_graph_is_verified(model, kv_format):
    engine = made(model, kv_format)
    assert (engine.decode_mode, engine.compile_mode) == ("graph", "layer")
    text(engine, 4)
    found = evidence.examine(engine, reads_expected=True)
    assert found.state == VERIFIED, found.levels
    e4 = next(level for level in found.levels if level.name == "E4")
    assert e4.facts["backend"] == "gpu"
    assert e4.facts["graph_replays"] == 4  # of the run, not of the probes
    assert e4.facts["decode"][f"kv_write_{kv_format}"] == 1


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory):
    """tiny-llama with the head_dim that the Gluon kernel takes."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps({**TINY["tiny-llama"], "head_dim": 64}))
    return loaded("bfloat16", str(folder))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_gluon_kernel_has_the_same_evidence_and_the_same_tokens_in_a_graph(wide_heads, kv_format):
    engine = made(wide_heads, kv_format)
    tokens = text(engine, 4)
    found = evidence.examine(engine, reads_expected=True)
    assert found.state == VERIFIED, found.levels
    e4 = next(level for level in found.levels if level.name == "E4")
    assert e4.facts["decode"]["paged_decode_hopper"] == 1
    # Compiled layers in both: on eager steps they are the same code.
    assert tokens == text(made(wide_heads, kv_format, decode="eager"), 4)


def test_a21_t1_a_shape_seen_first_costs_a_warm_up_and_no_measured_request():
    model = loaded()  # its layers have not been compiled for another test
    arm = EngineArm(made(model), random_prompts(model, 3, 21), 512, 6)
    timings = measure([("candidate", arm)], new_tokens=6, repeats=3, warmup=1)
    (warm,) = timings.warmup
    # Capture and compilation take a second or more, a step of this model about a millisecond.
    assert max(warm.ttft_ms, *warm.itl_ms) > 10 * max(max(t.ttft_ms, *t.itl_ms) for t in timings.measured)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("batch", "chunk", "graphs"), [(3, 512, 1), (3, 42, 2), (1, 8, 3), (2, 16, 2)])
def test_prompts_over_several_forwards_are_graphs_with_the_same_text(model, kv_format, batch, chunk, graphs):
    """Whole prompts of some sequences a forward, and chunks of one behind what it holds; of the last case one
    is eager.
    """
    prompts = random_prompts(model, batch, 21)

    def texts(engine):
        arm, found = EngineArm(engine, prompts, chunk, 4), []
        for _ in range(2):
            arm.submit()
            found.append(arm.tokens)
            for _ in range(3):
                arm.step()
                found.append(arm.tokens)
            arm.close()
        return found

    engine = made(model, kv_format)
    assert texts(engine) == texts(made(model, kv_format, decode="eager"))
    assert len(engine.prompt_graphs) == graphs
    assert {graph.replays for graph in engine.prompt_graphs.values()} == {2}
    found = evidence.examine(engine, reads_expected=True)
    assert found.state == VERIFIED, found.levels


def test_a21_t3_a_step_is_timed_to_its_end_on_the_device(model):
    """A queue of work on the device before the step: its time is the step's, for the token is not there
    before.
    """
    arm = EngineArm(made(model), random_prompts(model, 1, 21), 512, 3)
    time_request("warm", -1, arm, 3)
    honest = arm.step
    big = torch.randn(8192, 8192, device="cuda")
    big.matmul(big)  # the library is loaded before the clock starts

    def busy():
        for _ in range(20):
            big.matmul(big)
        honest()

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        big.matmul(big)
    stop.record()
    torch.cuda.synchronize()
    arm.step = busy
    assert min(time_request("busy", 0, arm, 3).itl_ms) > 0.5 * start.elapsed_time(stop)
