"""Free-running greedy decoding: the cell writes its own text, one token a forward, and the tokens are kept.

Agreement reads the baseline's text; here every token is conditioned on what the cell itself stored before, so that errors
may build up. The prompts are documents of a corpus, spread over it, and decoded side by side. An end-of-text token does not
stop the decoding: where it came is in the record, and what follows it counts for nothing.
"""

from __future__ import annotations

from kvbench.cells import content_hash
from kvbench.corpora import corpus, first_ids
from kvbench.decision import check_context
from kvbench.errors import UsageError
from kvbench.runners.context import Context, Measurement


def run(ctx: Context) -> Measurement:
    """Raises Refused("invalid_context") when prompt and new tokens exceed the model's positions."""
    steps, length = ctx.options["new_tokens"], ctx.options["prompt_tokens"]
    check_context(ctx.model.facts, length, steps)
    asked = prompts(ctx)
    engine = ctx.engine(sequences=len(asked), tokens=length + steps)
    seqs = [engine.add() for _ in asked]
    texts: list[list[int]] = []
    for seq, prompt in zip(seqs, asked, strict=True):
        texts.append([int(engine.prefill(seq, prompt)[-1].argmax())])
    for done in range(1, steps):
        best = engine.greedy_step(seqs, [text[-1] for text in texts])
        for text, token in zip(texts, best, strict=True):
            text.append(token)
        ctx.progress(done + 1, steps, "tokens")
    ends = end_tokens(ctx)
    eos = [next((i for i, token in enumerate(text) if token in ends), None) for text in texts]
    samples = {
        "tokens": texts,
        "eos": eos,
        "text": [ctx.model.tokenizer.decode(text) for text in texts],
    }
    facts = {
        "mode": f"greedy, free-running, {len(asked)} prompts side by side, one token a forward",
        "prompts": len(asked),
        "prompt_tokens": length,
        "new_tokens": steps,
        "prompt_sha": content_hash(asked),
        "eos_tokens": sorted(ends),
        "ignore_eos": True,
    }
    return Measurement(samples, facts)


def prompts(ctx: Context) -> list[list[int]]:
    """The heads of `prompts` documents, evenly over the corpus; a short document runs on into the next.

    Raises UsageError for a corpus with fewer documents, or too little text behind the last of them.
    """
    name, n, wanted = (ctx.options[key] for key in ("data", "prompts", "prompt_tokens"))
    text = corpus(name, ctx.data_dir)
    if len(text.documents) < n:
        raise UsageError(
            f"Corpus {name!r} has {len(text.documents)} documents, and {n} prompts are asked for; ask for fewer."
        )
    starts = [text.documents[i * len(text.documents) // n] for i in range(n)]
    return [first_ids(name, "".join(text.stream[at:]), ctx.model.tokenizer, wanted) for at in starts]


def end_tokens(ctx: Context) -> set[int]:
    """The ids that end a text, by the model's config and its tokenizer."""
    said = getattr(getattr(ctx.model.model, "config", None), "eos_token_id", None)
    listed = said if isinstance(said, list) else [said]
    return {int(i) for i in (*listed, ctx.model.tokenizer.eos_token_id) if i is not None}
