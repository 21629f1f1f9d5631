"""Free-running greedy decoding: the cell generates its own text, one token a forward.

Every token depends on what the cell stored before, so that errors may build up. An end-of-text token does not
stop the decoding: the record has its position, and later tokens are not counted.
"""

from kvbench.data.corpora import corpus
from kvbench.errors import UsageError
from kvbench.files import content_hash
from kvbench.matrix.resolve_backend import check_context
from kvbench.runners.context import Context, Measurement
from kvbench.runners.text.encode import check_chat, end_ids, heads


def run(ctx: Context) -> Measurement:
    """Raises Refused("invalid_context") when prompt and new tokens exceed the model's positions."""
    steps, asked = ctx.options["new_tokens"], prompts(ctx)
    length = max(map(len, asked))
    check_context(ctx.model.facts, length, steps)
    engine = ctx.engine(sequences=len(asked), tokens=length + steps)
    seqs = [engine.add() for _ in asked]
    texts = [[int(engine.prefill(seq, ids)[-1].argmax())] for seq, ids in zip(seqs, asked, strict=True)]
    for done in range(1, steps):
        best = engine.greedy_step(seqs, [text[-1] for text in texts])
        for text, token in zip(texts, best, strict=True):
            text.append(token)
        ctx.progress(done + 1, steps, "tokens")
    ends = end_ids(ctx.model.tokenizer, getattr(ctx.model.model, "config", None))
    eos = [next((i for i, token in enumerate(text) if token in ends), None) for text in texts]
    samples = {"tokens": texts, "eos": eos, "text": [ctx.model.tokenizer.decode(text) for text in texts]}
    mode = f"greedy, free-running, {len(asked)} prompts side by side, one token a forward"
    facts = {"mode": mode, "new_tokens": steps, "eos_tokens": ends, "ignore_eos": True}
    facts |= {"prompts": len(asked), "prompt_tokens": [len(ids) for ids in asked]}
    facts |= {"prompt_sha": content_hash(asked), "chat_template": ctx.options["chat_template"]}
    return Measurement(samples, facts)


def prompts(ctx: Context) -> list[list[int]]:
    """The heads of `prompts` documents, evenly over the corpus, at most `prompt_tokens` tokens each."""
    name, n, most, chat = (ctx.options[key] for key in ("data", "prompts", "prompt_tokens", "chat_template"))
    text, tokenizer = corpus(name, ctx.data_dir), ctx.model.tokenizer
    if chat:
        check_chat(tokenizer)
    found = []
    for i, head in heads(text, n, most):
        ids: list[int] = tokenizer(head, add_special_tokens=not chat)["input_ids"][:most]
        if chat:
            turn = [{"role": "user", "content": tokenizer.decode(ids)}]
            whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        if not ids:
            raise UsageError(f"Document {i} of corpus {name!r} is empty; use another text.")
        found.append(ids)
    return found
