"""lm-eval's tasks through the quantized store: equal to our runner and to its own model; faults withheld."""

import json
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from unittest.mock import patch

import pytest

if find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed: pip install -e '.[lm-eval]'", allow_module_level=True)

import torch
from lm_eval.api.instance import Instance
from typer.testing import CliRunner

from benchmarks import mcq_peer as peer
from kvbench.cli.main import app
from kvbench.data.questions import Question, QuestionSet
from kvbench.engines.reference import kind as reference_kind
from kvbench.engines.reference.engine import Engine
from kvbench.errors import KvbenchError, Refused, UsageError
from kvbench.lm_eval import model as lmeval
from kvbench.lm_eval.args import dropped
from kvbench.lm_eval.model import KvbenchLM, Unproven
from kvbench.records.run import RunDir
from kvbench.run.task.prepare import native_of
from kvbench.selftest import hops

# lm-eval's and its dependencies' own warnings are not ours to fail on.
pytestmark = pytest.mark.filterwarnings("default")

TINY = {"pretrained": "tiny-llama", "plumbing": True, "device": "cpu"}


def model(**given):
    return KvbenchLM(**{**TINY, "kv_format": "int8_sym", **given})


def request(kind, *args):
    return Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("one", 0, 1))


def pairs(*texts):
    return [request("loglikelihood", *own) for own in texts]


PAIRS = pairs(
    ("The capital of France is", " Paris"),
    ("The capital of France is", " London"),
    ("The capital of France is ", "L"),  # the space belongs to the continuation
    ("", "nothing before it"),
    ("a long context " * 40, "end"),  # cut from the left below
    ("The capital", " of France"),
)
TEXTS = [request("loglikelihood_rolling", text) for text in ("short", "a text of several windows " * 30)]
PROMPTS = [
    request("generate_until", text, {"until": ["\n\n"], "max_gen_toks": 12})
    for text in ("Once upon a time", "The", "a prompt that is far longer than the room there is " * 5)
]


@pytest.fixture(scope="module")
def quantized():
    return model()


# Equal to others.


def test_native_answers_are_those_of_lm_evals_transformers_model(monkeypatch):
    """Log-probabilities within 1e-3; flags and texts equal. 200 positions in pieces of 48: texts are cut."""
    lm = model(kv_format="native", max_length=200, batch_size=3, prefill_chunk=48)
    theirs = peer.peer_model(lm.loaded, 1)
    theirs._max_length = 200
    for ours, due in zip(lm.loglikelihood(PAIRS), theirs.loglikelihood(PAIRS), strict=True):
        assert ours[0] == pytest.approx(due[0], abs=1e-3)
        assert ours[1] == due[1]
    assert lm.loglikelihood_rolling(TEXTS) == pytest.approx(theirs.loglikelihood_rolling(TEXTS), abs=1e-2)

    def named(token_ids, skip_special_tokens=False, **_):
        """Each token by its number, since random bytes are no text. 256 and 257 are BOS and EOS."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return [named(own, skip_special_tokens) for own in ids]
        shown = [ids] if isinstance(ids, int) else ids
        return "".join(f"<{i}>" for i in shown if i < 256 or not skip_special_tokens)

    monkeypatch.setattr(lm.tokenizer, "decode", named)
    texts = lm.generate_until(PROMPTS)
    assert texts == theirs.generate_until(PROMPTS)
    assert len(set(texts)) == len(PROMPTS)
    stop = texts[0].split(">")[6] + ">"  # a token in the middle of the first text
    short = [request("generate_until", PROMPTS[0].args[0], {"until": [stop], "max_gen_toks": 12})]
    assert lm.generate_until(short) == theirs.generate_until(short) == [texts[0].split(stop)[0]]


def test_what_greedy_decoding_writes_is_flagged_greedy_and_nothing_else(quantized):
    prompt = "Once upon a time"
    (text,) = quantized.generate_until([request("generate_until", prompt, {"until": [], "max_gen_toks": 5})])
    seq_ids = quantized.tok_encode(prompt)
    engine = Engine(quantized.loaded, quantized.decision, quantized.spec, sequences=1, tokens=64)
    seq = engine.add()
    ids = [int(engine.prefill(seq, seq_ids)[-1].argmax())]
    while len(ids) < 5:
        ids.append(int(engine.decode([seq], [ids[-1]])[0].argmax()))
    assert quantized.tokenizer.decode(ids, skip_special_tokens=True) == text
    other = [*ids[:4], (ids[4] + 1) % 256]
    said = quantized._loglikelihood_tokens([(None, seq_ids, ids), (None, seq_ids, other)], disable_tqdm=True)
    assert [greedy for _, greedy in said] == [True, False]


def test_continuations_that_share_a_context_are_scored_as_they_are_alone(quantized, monkeypatch):
    together = quantized.loglikelihood(PAIRS)
    alone = [quantized.loglikelihood([one])[0] for one in PAIRS]
    assert [a for a, _ in together] == pytest.approx([a for a, _ in alone], abs=1e-4)
    monkeypatch.setattr(lmeval, "MOST_CHOICES", 1)
    assert [a for a, _ in quantized.loglikelihood(PAIRS)] == pytest.approx([a for a, _ in alone], abs=1e-4)


SUBJECTS = ("anatomy", "virology")


def made_up():
    def ask(subject, i):
        choices = tuple(f"{subject} {letter} {i * 7 % 5}" for letter in "wxyz")
        asked = f"Which of the four comes after number {i}?"
        return Question(f"{subject}/{i}", subject, asked, choices, i % 4)

    asked = tuple(ask(subject, i) for subject in SUBJECTS for i in range(3))
    shown = {subject: tuple(ask(subject, i) for i in range(5, 10)) for subject in SUBJECTS}
    return QuestionSet("mmlu", asked, shown, "made up", "made up", "none")


@pytest.mark.slow
def test_the_command_line_gives_the_scores_that_our_runner_stores(tmp_path, monkeypatch):
    """Every score equals `kvbench run`'s to the last bit; lm-eval's own MMLU task files, 5 examples."""
    data = peer.write_data(tmp_path / "data", "mmlu", made_up().questions, made_up())
    (tmp_path / "tasks").mkdir()
    names = peer.write_tasks(tmp_path / "tasks", "mmlu", data, 5, " ")
    matrix = tmp_path / "m.yaml"
    matrix.write_text(
        "name: peer\nmodel: {source: tiny-llama, plumbing: true}\naxes: {kv_format: [native, int8_sym]}\n"
        "engine: {device: cpu}\nrunners: {mcq: {tasks: mmlu, shots: 5}}\n"
    )
    paths = ["--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "run")]
    ran = CliRunner().invoke(app, ["run", str(matrix), *paths])
    assert ran.exit_code in (0, 4), ran.output  # 4: so few questions, all of the same letter
    stored = {r.spec["kv_format"]: r for r in RunDir(tmp_path / "run").load().records}
    assert stored["int8_sym"].status == "ok", ran.output
    rows = {q["id"]: q for q in stored["int8_sym"].samples["questions"]}
    native = {q["id"]: q for q in stored["native"].samples["questions"]}
    assert all(rows[key]["scores"] != native[key]["scores"] for key in rows)

    monkeypatch.setattr(sys, "argv", ["kvbench"])  # put back after the test: lm-eval reads it
    cell = "pretrained=tiny-llama,plumbing=true,kv_format=int8_sym,device=cpu"
    arguments = ["lm-eval", "--model", "kvbench", "--model_args", cell, "--tasks", ",".join(names)]
    arguments += ["--log_samples", "--include_path", str(tmp_path / "tasks")]
    arguments += ["--output_path", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (proof,) = [line for line in done.stderr.splitlines() if line.startswith("kvbench: effective")]
    found = {}
    for subject in SUBJECTS:
        (path,) = (tmp_path / "out").rglob(f"samples_{subject}_*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            found[f"{subject}/{sample['doc_id']}"] = [float(answer[0][0]) for answer in sample["resps"]]
    assert found == {key: row["scores"] for key, row in rows.items()}
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    for subject in SUBJECTS:
        own = [row for row in rows.values() if row["subject"] == subject]
        assert results["results"][subject]["acc,none"] == sum(r["pick"] == r["answer"] for r in own) / 3
    shown = results["config"]["kvbench"]
    assert shown["requested"] == shown["effective"] == {"kv_format": "int8_sym", "weights": "native"}
    assert shown["evidence"] == "verified"
    assert shown["engines"] == len(SUBJECTS)
    assert shown["reads"]["quantized_tokens"] == shown["reads"]["tokens"] == shown["reads"]["due_tokens"] > 0
    assert shown["partial"] == "random weights: plumbing only"
    tokens = f"{shown['reads']['tokens']:,}"
    assert proof.startswith("kvbench: effective kv_format int8_sym, weights native; verified (E1 ")
    assert proof.endswith(f"; {tokens} of {tokens} tokens read from quantized pages.")


# Nothing unproven leaves.


def secretly_native():
    def engine(*args, **keys):
        return Engine(args[0], native_of(args[1]), *args[2:], **keys)

    return patch.object(reference_kind, "Engine", engine)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (secretly_native, "the decision did not reach the engine"),
        (hops.every_store("native"), "int8_sym was resolved, the evidence shows native"),
        (hops.one_layer_native, "layer 3 K is stored as native"),
    ],
    ids=["engine", "store", "layer"],
)
@pytest.mark.parametrize(
    ("kind", "requests"),
    [("loglikelihood", PAIRS[:2]), ("loglikelihood_rolling", TEXTS[:1]), ("generate_until", PROMPTS[:1])],
)
def test_answers_of_an_engine_that_is_secretly_native_are_withheld(quantized, kind, requests, fault, says):
    before = len(quantized.proofs)
    with fault(), pytest.raises(Unproven, match=says) as caught:
        getattr(quantized, kind)(requests)
    assert (caught.value.exit_code, len(quantized.proofs)) == (1, before)


def test_a_decision_that_drops_the_format_is_withheld():
    dropping = lambda request, facts: native_of(hops.decide(request, facts))  # noqa: E731
    with patch.object(reference_kind, "resolve", dropping):
        lm = model()
    with pytest.raises(Unproven, match="int8_sym"):
        lm.loglikelihood(PAIRS[:1])


@pytest.mark.parametrize(
    ("key", "value"), [("kv_format", "native"), ("page_size", 32), ("model", "tiny-qwen2")]
)
def test_an_argument_that_the_cell_does_not_have_is_withheld(key, value):
    """The hop before the request: the resolver never hears of what was given."""
    made = lmeval.cell_of
    with patch.object(lmeval, "cell_of", lambda given, host: {**made(given, host), key: value}):
        lm = model(page_size=16)
    with pytest.raises(Unproven, match=f"the cell has {key}={value}"):
        lm.loglikelihood(PAIRS[:1])


def test_arguments_that_the_machine_settles_are_no_change(tmp_path):
    fixed = {"kv_format": "int8_static", "scale": 1.0}
    given = {**fixed, "pretrained": "tiny-llama", "device": "auto", "dtype": "auto"}
    spec = {**fixed, "model": "tiny-llama", "device": "cpu", "dtype": "float32"}
    assert dropped(given, spec) == ""
    assert dropped({**given, "scale": "s.json"}, {**spec, "scale": {"k": [1.0], "v": [1.0]}}) == ""
    assert dropped({**given, "device": "cuda"}, spec).startswith("device=cuda was given")


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_a_sentence_and_exit_code_3(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(sys, "argv", ["kvbench"])
    cell = "pretrained=tiny-llama,plumbing=true,device=cuda"
    arguments = ["lm-eval", "--model", "kvbench", "--tasks", "arc_easy", "--model_args", cell]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3, done.output
    assert "no CUDA device" in done.stderr


def test_lm_evals_cache_of_answers_is_refused_and_its_cache_of_requests_kept_apart(tmp_path):
    from lm_eval.api.model import CachingLM

    with pytest.raises(Unproven, match="no evidence"):  # no engine has answered
        model().get_model_info()
    with pytest.raises(UsageError, match="--use_cache"):
        CachingLM(model(), str(tmp_path / "answers.db"))
    static = ({"kv_format": "int8_static", "scale": scale} for scale in (0.1, 0.2))
    named = {model(**given).tokenizer_name for given in ({}, {"kv_format": "native"}, *static)}
    assert len(named) == 4
    assert model().tokenizer_name in named


# What is refused.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_fromat": "int8_sym"}, "kv_fromat is not known; accepted are .*Did you mean kv_format"),
        ({"prefill_reads": "fresh"}, "prefill_reads is not known"),
        ({"kv_format": "int8"}, "int8_sym"),
        ({"kv_format": "int8_static"}, "needs a scale"),
        ({"scale": 0.1}, "int8_sym takes none; the static formats do: int8_static"),
        ({"gemm": "w8a8"}, "native weights have no FP8 product"),
        ({"batch_size": "auto"}, "batch_size: .* got 'auto'"),
        ({"max_length": 5000}, "tiny-llama has 4096 positions"),
        ({"add_bos_token": "yes"}, "expected true or false"),
        ({"pretrained": None}, "pretrained"),
        ({"device": "tpu"}, "expected auto, cpu or cuda"),
    ],
)
def test_arguments_that_are_not_accepted_are_refused_in_a_sentence(given, says):
    with pytest.raises(UsageError, match=says):
        model(**given)


def test_what_the_engine_refuses_is_refused_here():
    with pytest.raises(Refused, match="random weights"):
        model(plumbing=False)
    with pytest.raises(Refused):
        model(pretrained="tiny-deepseek-v2")


def test_settings_that_no_text_can_follow_are_refused(quantized):
    beams = "gen_kwargs.num_beams is not known; accepted are gen_kwargs.do_sample"
    for given, says in (({"num_beams": 4}, beams), ({"max_gen_toks": 4096}, "4096 new tokens")):
        with pytest.raises(UsageError, match=says):
            quantized.generate_until([request("generate_until", "a", given)])
    with pytest.raises(KvbenchError, match="A continuation of 0 tokens"):
        quantized.loglikelihood(pairs(("context", "")))


def test_the_device_that_lm_eval_names_by_itself_is_auto_and_a_given_one_is_kept():
    given = {"pretrained": "tiny-llama", "plumbing": True}
    lm = KvbenchLM.create_from_arg_obj({**given, "device": "cpu"}, {"device": "cuda:0", "batch_size": 2})
    assert (lm.spec["device"], lm.batch_size) == ("cpu", 2)
    text = "pretrained=tiny-llama,plumbing=true,kv_format=int8_static,scale=0.05,dtype=bfloat16"
    lm = KvbenchLM.create_from_arg_string(text, {"device": "cuda:0", "max_batch_size": None})
    assert (lm.spec["scale"], lm.spec["dtype"]) == (0.05, "bfloat16")
    assert lm.spec["device"] in ("cpu", "cuda")


def test_a_later_lm_eval_finds_the_model_by_its_entry_point():
    own = [e for e in entry_points(group="lm_eval.models") if e.name == "kvbench"]
    if not own:
        pytest.skip("kvbench is not installed here, so no entry point is")
    assert own[0].load() is KvbenchLM
