"""Settings: what the arguments of a PackedDataset mean. Checked together, they make the Stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from streampack.arguments import check_choices, check_numbers
from streampack.chats import Targets
from streampack.conversations import Format
from streampack.encode import Encoder, Overlong, Policies
from streampack.items import Transform
from streampack.mixture import Mix, Mixture
from streampack.packing import UNPACKED, Packer, Packing
from streampack.retry import Retry
from streampack.sources import as_source
from streampack.stream import Part, Stream
from streampack.templates import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of PackedDataset that shape the stream; explained there."""

    seq_len: int
    format: Format | Mapping[str, Format]
    targets: Targets
    text_column: str | Mapping[str, str]
    lanes: int
    buffer_size: int
    shuffle: bool
    shuffle_block: int
    seed: int
    epochs: int | None
    overlong: Overlong
    truncate_keep: Literal["start", "end"]
    packing: Packing
    append_eos: bool | Literal["auto"]
    empty: Literal["drop", "error"]
    no_target: Literal["drop", "keep", "error"]
    bad: Literal["drop", "error"]
    max_bad_share: float
    vocab_size: int | None
    transform: Transform | Mapping[str, Transform] | None
    max_example_len: int | None
    max_examples_per_row: int | None
    pad_to_multiple_of: int | None
    pad_token_id: int | None
    source_name: str | None
    retry: Retry | None

    def check(self) -> None:
        """Refuse settings that cannot be used.

        Raises:
            ValueError, TypeError: naming the value and the remedy.
        """
        check_numbers(
            {
                "seq_len": (self.seq_len, 2),
                "lanes": (self.lanes, 1),
                "buffer_size": (self.buffer_size, 1),
                "shuffle_block": (self.shuffle_block, 1),
                "seed": (self.seed, 0),
                "epochs": (self.epochs, 1),
                "vocab_size": (self.vocab_size, 1),
                "max_example_len": (self.max_example_len, 2),
                "max_examples_per_row": (self.max_examples_per_row, 1),
                "pad_to_multiple_of": (self.pad_to_multiple_of, 1),
                "pad_token_id": (self.pad_token_id, 0),
            }
        )
        check_choices(
            {
                "targets": (self.targets, get_args(Targets)),
                "overlong": (self.overlong, get_args(Overlong)),
                "truncate_keep": (self.truncate_keep, ("start", "end")),
                "packing": (self.packing, get_args(Packing)),
                "append_eos": (self.append_eos, (True, False, "auto")),
                "empty": (self.empty, ("drop", "error")),
                "no_target": (self.no_target, ("drop", "keep", "error")),
                "bad": (self.bad, ("drop", "error")),
            }
        )
        self._check_formats()
        self._check_lengths()
        self._check_kinds()

    def _check_formats(self) -> None:
        for format in self.format.values() if isinstance(self.format, Mapping) else [self.format]:
            check_choices({"format": (format, get_args(Format))})
            if format == "text" and self.targets not in ("auto", "all"):
                raise ValueError(
                    f"targets={self.targets!r} with format='text', of which every token is a target; pass the format "
                    "of the examples, or targets='auto'"
                )

    def _check_lengths(self) -> None:
        seq_len, multiple = self.seq_len, self.pad_to_multiple_of or 1
        if seq_len % multiple:
            raise ValueError(f"seq_len={seq_len} is not a multiple of pad_to_multiple_of={multiple}")
        if multiple > 1 and self.packing == "wrapped":
            raise ValueError("packing='wrapped' cuts examples anywhere, so pad_to_multiple_of cannot hold; use another")
        if self.max_examples_per_row is not None and self.packing in UNPACKED:
            raise ValueError(
                f"max_examples_per_row={self.max_examples_per_row} with packing={self.packing!r}, where each row is "
                "one example; leave it out"
            )
        if self.max_example_len is not None and self.max_example_len > seq_len and self.packing != "wrapped":
            raise ValueError(f"max_example_len={self.max_example_len} does not fit into seq_len={seq_len}")

    def _check_kinds(self) -> None:
        for column in self.text_column.values() if isinstance(self.text_column, Mapping) else [self.text_column]:
            if not isinstance(column, str):
                raise TypeError(f"text_column={column!r} is {type(column).__name__}, not a str")
        if self.source_name is not None and not isinstance(self.source_name, str):
            raise TypeError(f"source_name={self.source_name!r} is {type(self.source_name).__name__}, not a str")
        for function in self.transform.values() if isinstance(self.transform, Mapping) else [self.transform]:
            if function is not None and not callable(function):
                raise TypeError(f"transform={function!r} is {type(function).__name__}, not a function")
        share = self.max_bad_share
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"max_bad_share={share!r}: pass a share of the examples, 0 .. 1")

    def stream(self, source: Any, tokenizer: Any) -> Stream:
        """The stream that these settings make of a source (or a Mixture).

        Raises:
            ValueError, TypeError: for a source or tokenizer that cannot be used.
        """
        if tokenizer is not None and not callable(tokenizer):
            raise TypeError(f"tokenizer is {type(tokenizer).__name__}, not a Transformers tokenizer (or None)")
        if tokenizer is None and self.format != "text":
            raise ValueError(
                f"format={self.format!r} needs a tokenizer, whose chat template makes text of conversations"
            )
        if isinstance(source, Mixture):
            parts, mix = self._parts(source, tokenizer), self._mix(source)
        else:
            for argument in ("format", "text_column", "transform"):
                if isinstance(getattr(self, argument), Mapping):
                    raise TypeError(f"{argument} is a dict, which is for the sources of a Mixture; pass one value")
            one = as_source(source, lanes=self.lanes, name=self.source_name)
            encoder, transform = self._encoder(tokenizer, self.format, self.text_column), self.transform
            parts, mix = [Part(source=one, encoder=encoder, transform=transform)], None  # type: ignore[arg-type]
        return Stream(
            parts=parts,
            mix=mix,
            packer=self._packer(tokenizer),
            lanes=self.lanes,
            shuffle=self.shuffle,
            shuffle_block=self.shuffle_block,
            seed=self.seed,
            epochs=self.epochs,
            max_example_len=self.max_example_len,
            retry=Retry.of(self.retry),
            names=self._names(tokenizer),
        )

    def _parts(self, mixture: Mixture, tokenizer: Any) -> list[Part]:
        if self.source_name is not None:
            raise ValueError(f"source_name={self.source_name!r}: the sources of a Mixture have their names already")
        formats, columns, transforms = self.format, self.text_column, self.transform
        for argument, given in (("format", formats), ("text_column", columns), ("transform", transforms)):
            unknown = sorted(set(given) - set(mixture.sources)) if isinstance(given, Mapping) else []
            if unknown:
                raise ValueError(f"{argument} names {unknown[0]!r}, the Mixture has {', '.join(mixture.sources)}")
        parts = []
        for name, data in mixture.sources.items():
            format = formats.get(name, "text") if isinstance(formats, Mapping) else formats
            column = columns.get(name, "text") if isinstance(columns, Mapping) else columns
            transform = transforms.get(name) if isinstance(transforms, Mapping) else transforms
            source = as_source(data, lanes=self.lanes, name=None)
            count = getattr(source, "num_examples", None)
            if count is not None and count < self.lanes:
                raise ValueError(
                    f"source {name!r} has {count} examples for lanes={self.lanes}, so some lanes would get none of it "
                    f"and could not keep its weight; use lanes={count} or fewer, or more examples"
                )
            encoder = self._encoder(tokenizer, format, column)
            parts.append(Part(source=source, encoder=encoder, transform=transform, name=name))
        return parts

    def _mix(self, mixture: Mixture) -> Mix:
        if (self.epochs is None) != (mixture.stop == "endless"):
            remedy = "pass epochs=None" if self.epochs is not None else "pass epochs=1, or stop='endless'"
            raise ValueError(f"epochs={self.epochs} with a Mixture of stop={mixture.stop!r}: {remedy}")
        return Mix(weights=tuple(mixture.weights.values()), by=mixture.by, stop=mixture.stop)

    def _encoder(self, tokenizer: Any, format: Any, text_column: Any) -> Encoder:
        # `wrapped` cuts examples where rows end, so none is too long unless a policy or a limit says so.
        cuts_anyway = self.packing == "wrapped" and self.max_example_len is None and self.overlong in ("auto", "split")
        return Encoder(
            tokenizer,
            format=format,
            targets=self.targets,
            text_column=text_column,
            append_eos=self.append_eos,
            limit=None if cuts_anyway else self.max_example_len or self.seq_len,
            policies=Policies(
                overlong=self.overlong,
                truncate_keep=self.truncate_keep,
                empty=self.empty,
                no_target=self.no_target,
                bad=self.bad,
            ),
            cuts_any=self.packing == "wrapped",
            vocab_size=self.vocab_size,
        )

    def _packer(self, tokenizer: Any) -> Packer:
        return Packer(
            seq_len=self.seq_len,
            buffer_size=self.buffer_size,
            packing=self.packing,
            max_examples=1 if self.packing in UNPACKED else self.max_examples_per_row,
            pad_to_multiple_of=self.pad_to_multiple_of or 1,
            pad_token_id=_pad_token_id(tokenizer) if self.pad_token_id is None else self.pad_token_id,
            keep_no_target=self.no_target == "keep",
            max_bad_share=self.max_bad_share,
        )

    def _names(self, tokenizer: Any) -> dict[str, Any]:
        """More that identifies the stream. Plain values."""
        formats, columns, transforms = self.format, self.text_column, self.transform
        return {
            "format": None if tokenizer is None else dict(formats) if isinstance(formats, Mapping) else formats,
            "targets": self.targets,
            "chat_template": self._chat_template(tokenizer),
            "text_column": None if tokenizer is None else dict(columns) if isinstance(columns, Mapping) else columns,
            "append_eos": self.append_eos,
            "overlong": self.overlong,
            "truncate_keep": self.truncate_keep,
            "empty": self.empty,
            "no_target": self.no_target,
            "bad": self.bad,
            "vocab_size": self.vocab_size,
            "pad_token_id": self._packer(tokenizer).pad_token_id,
            "transform": {name: _function_name(one) for name, one in transforms.items()}
            if isinstance(transforms, Mapping)
            else _function_name(transforms),
        }

    def _chat_template(self, tokenizer: Any) -> str | None:
        """A fingerprint of the chat template, where one is used."""
        formats = {*self.format.values()} if isinstance(self.format, Mapping) else {self.format}
        is_used = formats != {"text"} and getattr(tokenizer, "chat_template", None)
        return ChatTemplate(tokenizer).fingerprint() if is_used else None


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return int(token)
    return 0


def _function_name(function: Callable[..., Any] | None) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)
