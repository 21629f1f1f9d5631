"""A tokenizer that needs no file: one token a UTF-8 byte (its value is the id), then <bos> and <eos>."""

from typing import Any

from kvbench.models.catalog import BYTE_VOCABULARY


def byte_tokenizer() -> Any:
    """A transformers tokenizer of 258 ids. Encoding adds no special token; decoding gives the text back."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"<bos>": BYTE_VOCABULARY["bos_token_id"], "<eos>": BYTE_VOCABULARY["eos_token_id"]}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
