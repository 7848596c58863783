"""Chats: examples that are conversations, or a prompt and its completion, to tokens and targets.

What is a target:

    targets      of prompt_completion                  of messages, sharegpt
    all          every token                           every token
    completion   the completion, and EOS               the last message, if it is the assistant's
    assistant    the assistant's turns                 the assistant's turns

A turn is what the template writes after the generation prompt, with the end-of-turn token. Tokens that merge over the
border are targets (see `spans`). A conversation has the special tokens that its template writes, and no others; prompt
and completion as plain text are one text, with those that the tokenizer and `append_eos` add to a text.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from streampack.conversations import Chat, Format, Prompted, read
from streampack.sources import Fault
from streampack.spans import Mask, MergedTokens, Span, mask_of, trailing_specials
from streampack.tables import Block
from streampack.templates import ChatTemplate, Rendered
from streampack.texts import TextTokenizer, for_texts
from streampack.token_ids import Encoded, Tokens

Targets = Literal["auto", "all", "completion", "assistant"]
AUTO: dict[Format, Targets] = {
    "text": "all",
    "prompt_completion": "completion",
    "messages": "assistant",
    "sharegpt": "assistant",
}
"""What targets="auto" is for each format."""


class ChatReader:
    """Reads examples of one of the formats for fine-tuning.

    Args:
        tokenizer: makes tokens of the texts.
        format: of the examples; not "text".
        targets: which tokens are targets; not "auto".
    """

    def __init__(self, tokenizer: TextTokenizer, *, format: Format, targets: Targets) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self.targets = targets
        self._template: ChatTemplate | None = None
        if format != "prompt_completion":
            self._template = ChatTemplate(tokenizer.tokenizer)

    def read(self, block: Block, picks: Sequence[int]) -> list[Encoded | Fault]:
        """The tokens of the picked examples, or what is wrong with them."""
        examples = read(self.format, block, picks)
        chats = [one for one in examples if isinstance(one, Chat) and one.messages]
        texts = [one for one in examples if isinstance(one, Prompted)]
        from_chats, from_texts = iter(self._from_chats(chats)), iter(self._from_texts(texts))
        return [
            next(from_texts)
            if isinstance(one, Prompted)
            else one
            if isinstance(one, Fault)
            else next(from_chats)
            if one.messages
            else Encoded(np.zeros(0, dtype=np.int32), None)
            for one in examples
        ]

    def _from_chats(self, chats: Sequence[Chat]) -> list[Encoded | Fault]:
        if not chats:
            return []
        if self._template is None:
            self._template = ChatTemplate(self.tokenizer.tokenizer)
        if self.targets == "all":
            texts = self._template.texts(chats)
            found = for_texts(texts, lambda those: self.tokenizer.ids(those, specials=False), name=self.format)
            return [one if isinstance(one, Fault) else _encoded(one, None) for one in found]
        rendered = self._template.with_answers(chats, only_last=self.targets == "completion")
        masked = self._masked(rendered, specials=False)
        return [one if isinstance(one, Fault) else _encoded(*one) for one in masked]

    def _from_texts(self, prompted: Sequence[Prompted]) -> list[Encoded | Fault]:
        if self.targets == "assistant":
            what = "'prompt' and 'completion' are text, which has no turns; pass targets='completion'"
            return [Fault("targets", what)] * len(prompted)
        rendered = [
            Rendered(one.prompt + one.completion, [(len(one.prompt), len(one.prompt) + len(one.completion))])
            for one in prompted
        ]
        masked = self._masked(rendered, specials=True)
        keep = self.targets == "completion"
        return [
            one if isinstance(one, Fault) else self.tokenizer.framed(one[0], one[1] if keep else None) for one in masked
        ]

    def _masked(self, rendered: Sequence[Rendered | Fault], *, specials: bool) -> list[tuple[Any, Mask] | Fault]:
        """Ids and targets. Special tokens that the tokenizer adds at the end are targets, too."""
        texts = [one if isinstance(one, Fault) else one.text for one in rendered]
        encodings = for_texts(texts, lambda those: self.tokenizer.encodings(those, specials=specials), name=self.format)
        return [
            encoding
            if isinstance(one, Fault) or isinstance(encoding, Fault)
            else _masked(encoding, one.spans, specials)
            for encoding, one in zip(encodings, rendered, strict=True)
        ]


def _masked(encoding: Any, spans: Sequence[Span], specials: bool) -> tuple[Any, Mask] | Fault:
    try:
        mask = mask_of(encoding, spans)
    except MergedTokens as merged:
        return Fault("targets", str(merged))
    if specials and (added := trailing_specials(encoding)):
        mask[-added:] = True
    return encoding.ids, mask


def _encoded(ids: list[int] | Tokens, targets: Mask | None) -> Encoded:
    return Encoded(np.asarray(ids, dtype=np.int32), targets)
