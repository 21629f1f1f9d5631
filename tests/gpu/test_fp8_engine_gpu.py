"""FP8 weights in an engine on a GPU: verified in every mode, the paths of the route, and no weight made anew
in 16 bits.
"""

import re

import pytest
import torch
from transformers import AutoConfig

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.evidence import examine as evidence
from kvbench.evidence import weight_products as weightprobe
from kvbench.evidence.products import rows_of
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import request_of, resolve
from kvbench.models.catalog import TINY
from kvbench.records.record import MISMATCH, VERIFIED
from kvbench.runners import gemm
from kvbench.runners.context import Context
from kvbench.runners.gemm import turn
from kvbench_kernels.gemm import fp8_linear, fp8_route
from kvbench_kernels.gemm.blockwise import dequantize_blocks
from kvbench_kernels.gemm.fp8_route import W8A8
from kvbench_kernels.launches import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own imports
]


def spec_of(**keys):
    return {
        **CELL_KEYS, "model": "tiny-wide", "weights": "fp8_block128", "backend": "triton", "device": "cuda",
        "dtype": "bfloat16", **keys,
    }  # fmt: skip


def loaded(**keys):
    spec = spec_of(**keys)
    return load_model(spec, "cuda", spec["dtype"])


def measured(model, prompt=40, steps=3, **keys):
    """The evidence after a prompt and a few greedy steps, and their tokens."""
    spec = spec_of(**keys)
    decision = resolve(request_of(spec), model.facts)
    first = weightprobe.probe_weights(model, decision)
    engine = Engine(model, decision, spec, sequences=1, tokens=512)
    seq = engine.add()
    tokens = [int(engine.prefill(seq, [i % 251 for i in range(prompt)])[-1].argmax())]
    for _ in range(steps):
        tokens += engine.greedy_step([seq], tokens[-1:])
    after = weightprobe.probe_after(model, decision, rows_of(engine.products))
    probes = [weightprobe.with_after(*both) for both in zip(first, after, strict=True)]
    return evidence.examine(engine, *probes, reads_expected=True), tokens


def level(found, name):
    return next(x for x in found.levels if x.name == f"{name}-weights")


@pytest.mark.parametrize("kv_format", ["native", "int8_sym", "fp8_e4m3"])
@pytest.mark.parametrize(("decode", "compile"), [("eager", "off"), ("graph", "off"), ("graph", "layer")])
def test_fp8_weights_are_verified_in_every_mode(decode, compile, kv_format):
    found, _ = measured(loaded(), decode=decode, compile=compile, kv_format=kv_format)
    assert [(x.name, x.sentence) for x in found.levels if x.state == MISMATCH] == []
    assert found.state == VERIFIED
    assert (found.effective, found.effective_weights) == (kv_format, "fp8_block128")
    facts = level(found, "E4").facts
    assert (
        sum(row["calls"] for row in facts["routes"]) == facts["products_a_forward"] * 4
    )  # a prompt and 3 steps
    share = level(found, "E5").facts["peak_share_of_codes"]
    assert share is not None
    assert share < 1


def test_graph_eager_and_compiled_steps_give_the_same_tokens():
    model = loaded()
    tokens = [measured(model, decode=d, compile="off")[1] for d in ("eager", "graph")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("gemm", "paths"), [("reference", {"reference"}), ("w8a16", {"w8a16", "reference"}), ("w8a8", None)]
)
def test_a_forced_path_is_the_one_that_runs(gemm, paths):
    found, _ = measured(loaded(), prompt=300, gemm=gemm)
    assert found.state == VERIFIED
    ran = {row["path"] for row in level(found, "E4").facts["routes"]}
    assert ran <= (W8A8 if paths is None else paths)


def test_w8a16_and_w8a8_are_told_apart():
    """One step in 16-bit activations, one prompt in FP8 ones: the record names both."""
    found, _ = measured(loaded(), prompt=300)
    paths = found.precision["gemm"].split(" and ")
    assert "w8a16" in paths
    assert set(paths) - {"w8a16"} <= W8A8
    assert set(paths) & W8A8


def test_a_product_that_dequantizes_the_whole_weight_is_caught_by_its_memory(monkeypatch):
    def whole(x, codes, scales, bias):
        launched("w8a16_vector")  # it even says what is due
        return torch.nn.functional.linear(x, dequantize_blocks(codes, scales, x.dtype), bias)

    model = loaded()
    monkeypatch.setitem(fp8_linear._PATHS, "w8a16", whole)
    e5 = level(measured(model)[0], "E5")
    assert e5.state == MISMATCH
    assert e5.facts["peak_share_of_codes"] >= 1


@pytest.mark.parametrize(("path", "kernel"), [("w8a8", "fp8_matmul_w8a8"), ("hopper", "hopper_w8a8")])
def test_so_is_one_of_a_prompt_s_products(path, kernel, tmp_path, monkeypatch):
    """On a layer wide enough to tell; whichever path its 130 rows have."""
    sizes = (
        {"intermediate_size": 8192} if path == "w8a8" else {"hidden_size": 2048, "intermediate_size": 2048}
    )
    config = {**TINY["tiny-wide"], **sizes, "num_hidden_layers": 1}
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    model = loaded(model=str(tmp_path), model_weights="random")
    monkeypatch.setattr(fp8_route, "_DEFAULT", ((32, "w8a16"), (fp8_route._ALL, path)))
    assert measured(model)[0].state == VERIFIED

    def whole(x, codes, scales, bias):
        launched(kernel)
        launched("fp8_quantize_activation")
        return torch.nn.functional.linear(x, dequantize_blocks(codes, scales, x.dtype), bias)

    monkeypatch.setitem(fp8_linear._PATHS, path, whole)
    e5 = level(measured(model)[0], "E5")
    assert e5.state == MISMATCH
    assert e5.facts["peak_share_of_codes"] >= 1


def test_float32_weights_run_by_the_reference():
    found, _ = measured(loaded(dtype="float32"), dtype="float32")
    assert found.state == VERIFIED
    assert found.precision["gemm"] == "reference"


def test_weights_changed_after_the_capture_of_a_graph_are_read():
    model, spec = loaded(), spec_of(decode="graph", compile="off")
    engine = Engine(model, resolve(request_of(spec), model.facts), spec, sequences=1, tokens=64)
    seq = engine.add()
    engine.prefill(seq, list(range(20)))
    before = engine.decode([seq], [3]).clone()
    engine.truncate(seq, 20)
    module = next(m for m in model.model.modules() if isinstance(m, Fp8Linear))
    module.weight_scale_inv.data.mul_(2)
    assert not torch.equal(engine.decode([seq], [3]), before)
    engine.truncate(seq, 20)
    module.weight_scale_inv.data.mul_(0.5)
    assert torch.equal(engine.decode([seq], [3]), before)


def timed(monkeypatch, l2=None):
    """What the gemm runner says it timed, by shape; l2: of the device, in bytes, if another than its own."""
    if l2 is not None:
        monkeypatch.setattr(gemm.Bench, "l2", l2)
    model, spec = loaded(), spec_of()
    decision = resolve(request_of(spec), model.facts)

    def engine(sequences, tokens):
        return Engine(model, decision, spec, sequences=sequences, tokens=tokens)

    options = {"rows": [1, 40, 130], "max_rows": 256, "seed": 0}
    found = gemm.run(Context(spec, options, "", model, engine, engine, engine, None, True, None))
    rows = [row for product in found.samples["products"] for row in product["rows"]]
    assert all(row[arm] > 0 for row in rows for arm in ("us", "us_native", "us_reference"))
    return found.facts["timed_with"]


def test_products_of_a_small_model_are_timed_warm_and_the_record_says_so(monkeypatch):
    found = timed(monkeypatch)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    assert list(found) == ["512 x 256", "256 x 256", "320 x 256", "256 x 320"]
    assert found["512 x 256"] == turn(4, 4, 524_416, 1_048_576, l2, 2_038_752)
    assert set(re.findall("warm|cold", found["512 x 256"])) == {"warm"}


def test_products_are_timed_cold_over_layers_that_exceed_the_l2(monkeypatch):
    found = timed(monkeypatch, l2=40_000)
    assert found == {
        "512 x 256": turn(2, 4, 262_208, 524_288, 40_000, 2_038_752),
        "256 x 256": turn(3, 4, 196_656, 393_216, 40_000, 2_038_752),
        "320 x 256": turn(2, 8, 163_888, 327_680, 40_000, 2_038_752),
        "256 x 320": turn(2, 4, 163_888, 327_680, 40_000, 2_038_752),
    }
    assert {word for text in found.values() for word in re.findall("warm|cold", text)} == {"cold"}
