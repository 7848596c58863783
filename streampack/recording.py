"""Recording: how long the examples of a source are, read once, to be packed again by any settings.

A recording is a source itself: a stream over it has the lanes, blocks, buffers and rows of that over the real source,
with zeros for ids, so nothing about packing is done here. A sample is a recording of some of the shards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streampack.encode import Encoder, Overlong, Policies, Reason
from streampack.items import transformed
from streampack.order import IntArray, permutation
from streampack.reading import ShardReader
from streampack.sources import FAULTS, Fault, where
from streampack.stream import Part, Stream
from streampack.tables import Block, Chunk, Position, sizes
from streampack.token_ids import Encoded, Tokens

FEWEST_SHARDS = 4
"""A sample has at least so many whole shards, if there are: from how they differ it is known how sure it is."""
MANY_SHARDS = 16
"""Where the number of all examples is known, shards need not be read to the end, and so many share the sample."""
OVERSHOOT, BAD_SHOWN = 4, 20
"""A sample that is so many times as large as asked for ends inside a shard; bad examples that are shown."""

_USED, _TRANSFORM = len(FAULTS), len(FAULTS) + 1
_SAMPLE = 32  # keeps the random streams of sampling apart from those of dealing


@dataclass(eq=False)
class Recording:
    """The examples that were read, shard by shard, as a Source. n = examples."""

    name: str
    num_shards: int
    """That were read, of `of_shards`."""
    of_shards: int
    of_examples: int | None
    """In the whole source; None: not known."""
    of_size: float | None
    """In the whole source, in the unit of `shard_sizes`; None: not known."""
    shard_sizes: IntArray | None
    """int64 [num_shards], in proportion to their tokens, about; None: not known, and then the first one is the last of
    the source, which is often a short one, and the others were drawn at random."""
    is_whole: list[bool]
    """Of each shard: was it read to its end?"""
    starts: IntArray
    """int64 [num_shards + 1]: the first example of each shard."""
    tokens: npt.NDArray[np.int32]
    """int32 [n]: tokens of each example, 0 where it is left out."""
    faults: npt.NDArray[np.uint8]
    """uint8 [n]: which of FAULTS it has, or that it is used, or that the transform left it out."""
    masks: list[bytes] | None
    """Of each example its targets, a bit for each token; None: every token is a target."""
    sizes_of_examples: IntArray
    """int64 [n]: bytes, as they bound blocks."""
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    """(place, reason, what is wrong) of the first bad examples."""

    @property
    def num_examples(self) -> int:
        return len(self.tokens)

    @property
    def is_complete(self) -> bool:
        """All of the source was read."""
        return self.num_shards == self.of_shards and all(self.is_whole)

    def read(self, shard: int, start: int) -> Iterator[pa.Table]:
        """The places of the examples in the recording."""
        first, end = self.starts[shard : shard + 2].tolist()
        yield pa.table({"place": np.arange(first + start, end)})

    def sizes(self, table: pa.Table) -> IntArray:
        found: IntArray = self.sizes_of_examples[table.column("place").to_numpy()]
        return found

    def sample(self, examples: int, *, seed: int = 0) -> "Recording":
        """A recording of some of its shards, drawn at random, with about so many examples; all where it has no more."""
        if self.num_examples <= examples:
            return self
        counts = np.diff(self.starts)
        order = permutation(self.num_shards, seed, _SAMPLE)
        shards = order[: int(np.searchsorted(np.cumsum(counts[order]), examples)) + 1]
        places = np.concatenate([np.arange(*self.starts[shard : shard + 2]) for shard in shards])
        return replace(
            self,
            num_shards=len(shards),
            shard_sizes=None if self.shard_sizes is None else self.shard_sizes[shards],
            is_whole=[self.is_whole[shard] for shard in shards],
            starts=np.concatenate([[0], np.cumsum(counts[shards])]),
            tokens=self.tokens[places],
            faults=self.faults[places],
            masks=None if self.masks is None else [self.masks[place] for place in places],
            sizes_of_examples=self.sizes_of_examples[places],
        )

    def left_out(self) -> dict[str, int]:
        """How many examples are left out, by the reasons that do not depend on the row length."""
        counts = np.bincount(self.faults, minlength=_TRANSFORM + 1).tolist()
        empty = int(np.count_nonzero((self.faults == _USED) & (self.tokens == 0)))
        bad = {f"bad_{reason}": count for reason, count in zip(FAULTS, counts, strict=False)}
        found = {"empty": empty, "transform": counts[_TRANSFORM], **bad}
        return {reason: count for reason, count in found.items() if count}

    def stream(self, like: Stream, *, seq_len: int | None = None, buffer_size: int | None = None) -> Stream:
        """The stream of these examples with the settings of another one, or some of its own. Where that would stop
        with an error (for an over-long or bad example), this leaves the example out.

        Raises:
            ValueError: for settings that do not go together.
        """
        packer = like.packer
        packer = replace(
            packer, seq_len=seq_len or packer.seq_len, buffer_size=buffer_size or packer.buffer_size, max_bad_share=1.0
        )
        longest = None if like.max_example_len is None else min(like.max_example_len, packer.seq_len)
        encoder = _RecordedEncoder(self, like.parts[0].encoder, limit=longest or packer.seq_len)
        if like.parts[0].encoder.limit is None:  # `wrapped` cuts them where rows end
            encoder.limit = None
        return replace(
            like, parts=[Part(source=self, encoder=encoder)], packer=packer, max_example_len=longest, epochs=1
        )


class _RecordedEncoder(Encoder):
    """Gives recorded examples their lengths and targets again; what is left out is decided as always."""

    def __init__(self, recording: Recording, like: Encoder, *, limit: int) -> None:
        super().__init__(
            None,
            text_column="",
            append_eos=False,
            limit=limit,
            policies=Policies(overlong=lenient(like.policies.overlong, recording), no_target=_kept(like.policies)),
            cuts_any=like.cuts_any,
        )
        self.recording = recording
        self._zeros = np.zeros(int(recording.tokens.max(initial=0)), dtype=np.int32)

    def select(self, table: pa.Table) -> Chunk:
        return table

    def encode(self, block: Block, picks: Sequence[int]) -> list[Any]:
        recording, longest = self.recording, self.limit or 1 << 62
        assert isinstance(block.data, pa.Table)
        places = block.data.column("place").to_numpy()[picks]
        found: list[Tokens | Encoded | Reason | Fault | str] = []
        for pick, place, tokens, fault in zip(
            picks, places.tolist(), recording.tokens[places].tolist(), recording.faults[places].tolist(), strict=True
        ):
            if fault != _USED:
                found.append("transform" if fault == _TRANSFORM else Fault(FAULTS[fault], ""))
            elif recording.masks is None and 0 < tokens <= longest:
                found.append(self._zeros[:tokens])
            else:
                found.append(self._judge(Encoded(self._zeros[:tokens], recording_mask(recording, place)), block, pick))
        return found


def recording_mask(recording: Recording, place: int) -> npt.NDArray[np.bool_] | None:
    """The targets of an example, bool [tokens]."""
    if recording.masks is None:
        return None
    bits = np.unpackbits(np.frombuffer(recording.masks[place], dtype=np.uint8), count=int(recording.tokens[place]))
    return bits.astype(bool)


def lenient(overlong: Overlong, recording: Recording) -> Overlong:
    """The policy for over-long examples, where it would be an error: leave them out."""
    if overlong == "auto":
        return "split" if recording.masks is None else "drop"
    return "drop" if overlong == "error" else overlong


def _kept(policies: Policies) -> Any:
    return "keep" if policies.no_target == "keep" else "drop"


def record(
    stream: Stream,
    *,
    examples: int | None = None,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Recording:
    """Read a source and keep how long its examples are: about 30 bytes each, and a bit for each token where not all
    are targets.

    Args:
        stream: of one source.
        examples: read about so many, of shards drawn at random; None: all.
        seed: of the draw.
        progress: called with the number of examples that were read since the last call.

    Raises:
        ValueError: for a mixture or rows of no fixed length; for a source without examples or such columns.
    """
    if stream.packer.row_len is None:
        raise ValueError(
            f"packing={stream.packer.packing!r}: rows have no fixed length, a batch is so many examples; choose another"
        )
    if stream.mix is not None:
        names = ", ".join(str(one.name) for one in stream.parts)
        raise ValueError(f"a Mixture has no epoch of its own; report on its sources by themselves: {names}")
    source = stream.parts[0].source
    known = getattr(source, "num_examples", None)
    if examples is not None and known is not None and known <= examples:
        examples = None
    recorder = _Recorder(stream, progress)
    try:
        for shard in range(source.num_shards) if examples is None else recorder.order(seed):
            if examples is not None and recorder.has_enough(examples):
                break
            recorder.read(shard, most=None if examples is None else recorder.room(examples))
    finally:
        recorder.reader.close()
    return recorder.recording()


class _Recorder:
    """Reads shards one after the other."""

    def __init__(self, stream: Stream, progress: Callable[[int], object] | None) -> None:
        self.part = stream.parts[0]
        source, encoder, transform = self.part.source, self.part.encoder, self.part.transform
        self.reader = ShardReader(source, lanes=1, select=None if transform else encoder.select, retry=stream.retry)
        self.of_examples: int | None = getattr(source, "num_examples", None)
        known = getattr(source, "shard_sizes", None)
        self._shard_sizes: IntArray | None = known() if known else None
        self._progress = progress
        self._shards: list[tuple[int, bool, list[_Piece]]] = []
        self._count = 0
        self._bad: list[tuple[str, str, str]] = []

    def order(self, seed: int) -> Iterator[int]:
        """The shards in the order in which a sample takes them."""
        last = self.part.source.num_shards - 1
        if self.of_examples is None and self._shard_sizes is None:
            yield last
            yield from permutation(last, seed, _SAMPLE).tolist()
        else:
            yield from permutation(last + 1, seed, _SAMPLE).tolist()

    def has_enough(self, examples: int) -> bool:
        fewest = MANY_SHARDS if self.of_examples is not None else FEWEST_SHARDS + (self._shard_sizes is None)
        return self._count >= OVERSHOOT * examples or (self._count >= examples and len(self._shards) >= fewest)

    def room(self, examples: int) -> int:
        """How many examples of the next shard to read at most."""
        if self.of_examples is not None:
            return -(-examples // min(MANY_SHARDS, self.part.source.num_shards))
        return OVERSHOOT * examples - self._count

    def read(self, shard: int, *, most: int | None) -> None:
        pieces: list[_Piece] = []
        index, is_whole, is_cut = 0, False, False
        while not is_whole and (most is None or index < most):
            chunk = self.reader.piece(shard, index)
            is_whole = not len(chunk)
            if most is not None and index + len(chunk) > most:
                chunk, is_cut = chunk[: most - index], True
            if len(chunk):
                pieces.append(self._piece(shard, index, chunk))
            index += len(chunk)
            if self._progress is not None:
                self._progress(len(chunk))
        if not (is_whole or is_cut):  # it may have ended there
            is_whole = not len(self.reader.piece(shard, index))
        self._count += index
        self._shards.append((shard, is_whole, pieces))

    def _piece(self, shard: int, index: int, chunk: Chunk) -> "_Piece":
        block = Block(
            source=self.part.source,
            position=Position(0, 0, 0, 0),
            shards=np.full(len(chunk), shard),
            indices=np.arange(index, index + len(chunk)),
            data=chunk,
        )
        kept, rows = block, list[int | None](range(len(chunk)))
        if self.part.transform is not None:
            kept, rows = transformed(block, range(len(chunk)), self.part.transform)
        picks, batch = [row for row in rows if row is not None], self.part.encoder.batch
        encoded: list[Encoded | Fault] = []
        for first in range(0, len(picks), batch):
            encoded += self.part.encoder.tokens(kept, picks[first : first + batch])
        if not self._count and not index:
            _refuse_if_no_column(encoded, kept)
        answers, piece = iter(encoded), _Piece(len(chunk), sizes(chunk))
        for place, row in enumerate(rows):
            answer = None if row is None else next(answers)
            if isinstance(answer, Fault):
                piece.faults[place] = FAULTS.index(answer.reason)
                if len(self._bad) < BAD_SHOWN:
                    self._bad.append((where(self.part.source, shard, index + place), answer.reason, answer.what))
            elif answer is None:
                piece.faults[place] = _TRANSFORM
            else:
                piece.tokens[place] = len(answer.ids)
                if answer.targets is not None:
                    piece.masks[place] = np.packbits(answer.targets).tobytes()
        return piece

    def recording(self) -> Recording:
        """What was read; all of the source in its own order, so that its rows are those of the source."""
        shards, known = self._shards, self._shard_sizes
        if len(shards) == self.part.source.num_shards:
            shards = sorted(shards, key=lambda shard: shard[0])
        pieces = [piece for _, _, of_shard in shards for piece in of_shard]
        if not self._count:
            raise ValueError(f"source {self.part.source.name!r} has no examples; is it the right one?")
        counts = [sum(len(piece.tokens) for piece in of_shard) for _, _, of_shard in shards]
        return Recording(
            name=self.part.source.name,
            num_shards=len(shards),
            of_shards=self.part.source.num_shards,
            of_examples=self.of_examples,
            of_size=None if known is None else float(known.sum()),
            shard_sizes=None if known is None else known[[shard for shard, _, _ in shards]],
            is_whole=[is_whole for _, is_whole, _ in shards],
            starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            tokens=np.concatenate([piece.tokens for piece in pieces]),
            faults=np.concatenate([piece.faults for piece in pieces]),
            masks=[mask for piece in pieces for mask in piece.masks] if any(any(one.masks) for one in pieces) else None,
            sizes_of_examples=np.concatenate([piece.sizes for piece in pieces]).astype(np.int64),
            bad=self._bad,
        )


class _Piece:
    """Some consecutive examples of a shard."""

    def __init__(self, count: int, bytes_of_each: IntArray) -> None:
        self.tokens = np.zeros(count, dtype=np.int32)
        self.faults = np.full(count, _USED, dtype=np.uint8)
        self.masks = [b""] * count
        self.sizes = bytes_of_each


def _refuse_if_no_column(encoded: Sequence[Encoded | Fault], block: Block) -> None:
    """The first examples of a source have no such column: no policy for single examples is meant for that."""
    faults = [one for one in encoded if isinstance(one, Fault) and one.reason == "missing"]
    if faults and len(faults) == len(encoded):
        raise ValueError(f"{block.where(0)}: {faults[0].what}")
