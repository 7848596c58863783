"""Tiny real tokenizers, made in milliseconds.

The file is not called tokenizers.py: run from inside tests/, that would hide the package of this name.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

UNK, BOS, EOS = 0, 1, 2
SPECIALS = ["<unk>", "<s>", "</s>"]


def word_tokenizer(
    words: str = "a b c d",
    *,
    adds: str = "$A",
    eos_token: str | None = "</s>",
    bos_token: str | None = "<s>",
    lowercase: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """Each word is a token: <unk> 0, <s> 1, </s> 2, then the words from 3 on ("a b c d": a 3, b 4, c 5, d 6).

    `adds` says which special tokens it adds by itself: "<s> $A" begins each text with BOS, "$A </s>" ends it with EOS.
    """
    vocabulary = {word: number for number, word in enumerate([*SPECIALS, *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=adds, pair=None, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token=eos_token, bos_token=bos_token, **settings
    )


def byte_tokenizer(*lines: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few lines, like that of GPT-2: adds no special tokens; </s> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines or ["the theme then there", "one on none done"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
