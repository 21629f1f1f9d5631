"""The model `kvbench` of lm-evaluation-harness: tasks run through the paged store, with evidence.

The only file that imports lm_eval (extra `lm-eval`). Releases of lm-eval with entry points find it by itself;
for older ones `kvbench lm-eval` registers it. Each task has its own engine: a number is only returned if that
engine is verified to have read the requested format.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models import utils as model_utils
from tqdm import tqdm

from kvbench.engines.protocol import Engine
from kvbench.errors import KvbenchError, UsageError
from kvbench.files import content_hash
from kvbench.formats.kv import pages_for
from kvbench.gate.precision import judge_precision
from kvbench.lm_eval.args import ARGUMENTS, cell_of, check_known, dropped
from kvbench.machine.host import host
from kvbench.matrix.cells import CELL_KEYS
from kvbench.models.source import uses_random_weights
from kvbench.records.record import Evidence
from kvbench.run.task.checks import random_weights, require
from kvbench.run.task.measure import evidence_of
from kvbench.run.task.prepare import Session, require_device
from kvbench.runners.text.decode import Sampler, write
from kvbench.runners.text.encode import Pair, end_ids
from kvbench.runners.text.scoring import capacity, group, score_choices

OWN_ARGUMENTS = ("batch_size", "max_length", "max_gen_toks", "add_bos_token")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
LM_EVAL_DEVICE = "cuda:0"  # its command line's default for --device; treated as auto
MOST_CHOICES = 64  # continuations that share one context's logits [n, V] at once

log = logging.getLogger(__name__)

Given = dict[str, Any]
Answers = list[tuple[float, bool]]  # summed log-probability, whether greedy decoding gives it
# (texts or None, ids of the context, ids of the continuation), as TemplateLM passes them.
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


class Unproven(KvbenchError):
    """The engine is not shown to have run as requested, so there is no result (exit code 1)."""

    exit_code = 1


@register_model("kvbench")
class KvbenchLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's model over kvbench's engine.

    Arguments: cell keys (`kvbench.lm_eval.args.ARGUMENTS`), and batch_size: sequences generated together;
    max_length: positions used; max_gen_toks: new tokens, unless a task sets them; add_bos_token: whether a
    text gets the tokenizer's special tokens. Raises UsageError for unknown or invalid arguments, Refused for
    what the engine cannot run as requested, and Unproven instead of an answer when its evidence fails.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        check_known(given, (*ARGUMENTS, *OWN_ARGUMENTS))
        own = {name: given.pop(name, None) for name in OWN_ARGUMENTS}
        self.given = dict(given)  # kept to compare with the cell
        self.spec = cell_of(given, host())
        self.batch_size = _whole("batch_size", own["batch_size"], 1)
        self.max_gen_toks = _whole("max_gen_toks", own["max_gen_toks"], 256)
        self.add_bos_token = own["add_bos_token"]
        if self.add_bos_token not in (None, True, False):
            raise UsageError(f"add_bos_token: expected true or false, got {self.add_bos_token!r}.")
        require(random_weights("lm-eval", self.spec))
        self._session = Session(None, host().environment)
        require_device(self.spec, self._session.environment)
        self.loaded = self._session.model(self.spec)
        self.decision = self._session.kind.decide(self.spec, self.loaded.facts)
        self.max_length = self._positions(own["max_length"])
        self.tokenizer = self.loaded.tokenizer
        self._device = self.loaded.device
        self.proofs: list[tuple[Evidence, dict[str, Any]]] = []

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Given, additional_config: Given | None = None) -> KvbenchLM:
        """From --model_args, and lm-eval's command-line options that these do not set."""
        options = {k: v for k, v in (additional_config or {}).items() if v is not None}
        if options.get("device") == LM_EVAL_DEVICE:
            del options["device"]
        return cls(**{**options, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Given | None = None) -> KvbenchLM:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    def _positions(self, asked: Any) -> int:
        name, limit = self.loaded.name, self.loaded.facts.max_context
        if asked is None and limit is None:
            raise UsageError(f"The config of {name} has no number of positions; give max_length.")
        length = _whole("max_length", asked, limit or 1)
        if limit is not None and length > limit:
            raise UsageError(f"max_length is {length}, but {name} has {limit} positions; give at most that.")
        return length

    # Texts

    @property
    def eot_token_id(self) -> int:
        end: int = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        first: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """Key of lm-eval's cache of requests: the model's content and the whole cell with its format."""
        named = content_hash([self.loaded.sha, self.spec])
        return f"kvbench-{self.spec['kv_format']}-{self.spec['weights']}-{named}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text. Special tokens: as given, else none before a BOS, else as `add_bos_token`."""
        special = add_special_tokens
        if special is None:
            begins = model_utils.has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            special = False if begins else self.add_bos_token
        given = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.tokenizer.encode(string, **given)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The tokenizer's chat template applied; an error of the template is raised, nothing is left out."""
        how = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
        how["continue_final_message"] = not add_generation_prompt
        text: str = self.tokenizer.apply_chat_template(chat_history, **how)
        return text

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuse lm-eval's cache of answers, whose key is the prompt without the format."""
        if cache_hook.dbdict is not None:
            raise UsageError(
                "lm-eval's cache of answers (--use_cache) has only the prompts as key, so one format would "
                "get another's answers; leave it out."
            )
        super().set_cache_hook(cache_hook)

    # Requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Answers:
        """Task by task, so that the common prefix of a task's prompts is computed once."""
        answers: Answers = []
        for _, own in groupby(requests, key=lambda request: request.task_name):
            answers += super().loglikelihood(list(own), disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Each text in disjoint windows of `max_length` with one token of context; scores each token once."""
        windows: list[Encoded] = []
        counts: list[int] = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            found = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            windows += [(None, *utils.make_disjoint_window(pair)) for pair in found]
            counts.append(len(windows) - sum(counts))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in range(n)) for n in counts]

    def _loglikelihood_tokens(self, requests: list[Encoded], disable_tqdm: bool = False, **_: Any) -> Answers:
        if not requests:
            return []
        pairs, places = self._pairs(requests)
        g = group(pairs)
        page, chunk = self.spec["page_size"], self.spec["prefill_chunk"]
        engine = self._engine(capacity([g], self.loaded.device, page) * page)
        answers: Answers = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Log-probabilities") as bar:
            for batch, scores, _computed in score_choices(engine, g, chunk):
                for i, own in zip(batch, scores, strict=True):
                    for at, choice in zip(places[i], own, strict=True):
                        answers[at] = choice.logprob, choice.greedy
                    bar.update(len(own))
        self._prove(engine)
        return answers

    def _pairs(self, requests: Sequence[Encoded]) -> tuple[list[Pair], list[list[int]]]:
        """Contexts with all their continuations in order of appearance, and each continuation's request."""
        found: dict[tuple[int, ...], list[int]] = {}
        for at, (texts, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise KvbenchError(
                    f"A continuation of {len(continuation)} tokens after {len(context)} cannot be scored in "
                    f"{self.max_length} positions: {str(texts)[:200]!r}."
                )
            excess = len(context) + len(continuation) - 1 - self.max_length  # the last token is not fed
            if excess > 0:
                log.warning("Cut %d tokens from the left: they exceed %d positions.", excess, self.max_length)
            found.setdefault(tuple(context[max(0, excess) :]), []).append(at)
        pairs, places = [], []
        for context_ids, own in found.items():
            for start in range(0, len(own), MOST_CHOICES):
                block = own[start : start + MOST_CHOICES]
                pairs.append(Pair(context_ids, tuple(tuple(requests[at][2]) for at in block), False))
                places.append(block)
        return pairs, places

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop text, the end of text or the task's number of tokens."""
        if not requests:
            return []
        work = [self._generation(request) for request in requests]
        batches = list(_batches(work, self.batch_size))
        page = self.spec["page_size"]
        pages = [pages_for(len(ids) + sampler.new_tokens, page) for ids, sampler in work]
        engine = self._engine(max(sum(pages[i] for i in batch) for batch in batches) * page)
        texts = [""] * len(work)
        with tqdm(total=len(work), disable=disable_tqdm, desc="Texts") as bar:
            for batch in batches:
                sampler = work[batch[0]][1]
                prompts = [work[i][0] for i in batch]
                for i, ids in zip(batch, write(engine, self.tokenizer, prompts, sampler), strict=True):
                    text = self.tokenizer.decode(ids, skip_special_tokens=True)
                    texts[i] = model_utils.postprocess_generated_text(text, list(sampler.until), None)
                bar.update(len(batch))
        self._prove(engine)
        return texts

    def _generation(self, request: Instance) -> tuple[list[int], Sampler]:
        """The prompt's ids, cut from the left to leave room for the new tokens, and the sampler."""
        context, given = request.args
        kwargs = model_utils.normalize_gen_kwargs(given, self.max_gen_toks)
        until = model_utils.handle_stop_sequences(
            kwargs.pop("until", None), eos=self.tokenizer.decode(self.eot_token_id)
        )
        new_tokens: int = kwargs.pop("max_gen_toks")
        check_known((f"gen_kwargs.{name}" for name in kwargs), [f"gen_kwargs.{name}" for name in SAMPLING])
        room = self.max_length - new_tokens
        if room < 1:
            raise UsageError(
                f"{request.task_name} asks for {new_tokens} new tokens, but there are {self.max_length} "
                "positions; give --gen_kwargs max_gen_toks=N or a larger max_length."
            )
        ids = self.tok_encode(context)
        if len(ids) > room:
            cut = len(ids) - room
            log.warning("Cut %d tokens of a prompt, to leave room for %d new ones.", cut, new_tokens)
        ends = end_ids(self.tokenizer, getattr(self.loaded.model, "generation_config", None))
        own = {name: kwargs[name] for name in SAMPLING if kwargs.get(name) is not None}
        return ids[-room:], Sampler(tuple(until), new_tokens, frozenset(ends), **own)

    # Engines and their evidence

    def _engine(self, tokens: int) -> Engine:
        made: Engine = self._session.kind.make(
            self.loaded, self.decision, self.spec, sequences=1, tokens=tokens
        )
        return made

    def _prove(self, engine: Engine) -> None:
        """Examine the engine that gave the answers. Raises Unproven unless all evidence holds."""
        evidence, scales = evidence_of(engine, self.decision, self.spec, self._session)
        verdict = judge_precision(self.spec, asdict(self.decision), asdict(evidence), scales)
        if why := dropped(self.given, self.spec) or verdict.sentence:
            raise Unproven(f"The answers are withheld: {why}")
        self.proofs.append((evidence, scales))

    def get_model_info(self) -> dict[str, Any]:
        """For `config` of lm-eval's results. Raises Unproven if no engine has answered."""
        if not self.proofs:
            raise Unproven(
                "No engine of kvbench has answered a request, so there is no evidence for the results."
            )
        last, scales = self.proofs[-1]
        reads = {key: sum(proof.reads[key] for proof, _ in self.proofs) for key in last.reads}
        resolved = {key: getattr(self.decision, key).resolved for key in ("kv_format", "weights", "backend")}
        shown = {
            "requested": {key: self.given.get(key, CELL_KEYS[key]) for key in ("kv_format", "weights")},
            "resolved": resolved,
            "effective": {"kv_format": last.effective, "weights": last.effective_weights},
            "evidence": last.state,
            "levels": {level.name: f"{level.state}: {level.sentence}" for level in last.levels},
            "precision": dict(last.precision),
            "reads": reads,
            "engines": len(self.proofs),
            **scales,
            "partial": "random weights: plumbing only" if uses_random_weights(self.spec) else None,
            "cell": self.spec,
            "environment": host().environment,
        }
        levels = ", ".join(f"{level.name} {level.state}" for level in last.levels)
        quantized, total = reads["quantized_tokens"], reads["tokens"]
        print(
            f"kvbench: effective kv_format {last.effective}, weights {last.effective_weights}; {last.state} "
            f"({levels}); {quantized:,} of {total:,} tokens read from quantized pages.",
            file=sys.stderr,
        )
        return {
            "model_num_parameters": sum(p.numel() for p in self.loaded.model.parameters()),
            "model_dtype": self.loaded.dtype_name,
            "model_sha": self.loaded.sha,
            "max_length": self.max_length,
            "kvbench": shown,
        }


def _whole(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}.")
    return number


def _batches(work: Sequence[tuple[list[int], Sampler]], size: int) -> Iterator[list[int]]:
    """Batches of indexes: at most `size` prompts with the same sampler, the longest first."""
    groups: dict[Sampler, list[int]] = {}
    for i, (_, sampler) in enumerate(work):
        groups.setdefault(sampler, []).append(i)
    for own in groups.values():
        order = sorted(own, key=lambda i: -len(work[i][0]))
        yield from (order[at : at + size] for at in range(0, len(order), size))


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with this model registered; it ends by SystemExit or by returning."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
