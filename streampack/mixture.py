"""Mixtures: several named sources in one stream, each with its own epochs and orders, in shares that weights say.

Each lane mixes by itself: the next example comes from the source that is farthest behind its weight, in tokens (or
examples) that have entered the lane. So the mixture is a function of what has entered: the same on every topology.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from streampack.arguments import check_choices
from streampack.feeds import Feed
from streampack.items import Item

Stop = Literal["endless", "first_exhausted", "all_seen", "each_once"]
By = Literal["tokens", "examples"]


class Mixture:
    """Several sources as one, for `PackedDataset`.

    With {"web": web, "code": code} and weights {"web": 3, "code": 1}, three quarters of the tokens come from `web`.

    Args:
        sources: name: what PackedDataset takes as a source.
        weights: name: share, relative to the sum of all; positive.
        by: count shares in "tokens" or in "examples".
        stop: when a pass ends, in each lane by itself. "endless": never (with `epochs=None`). "first_exhausted": when
            the first source has given all its examples (`epochs` times). "all_seen": when every source has;
            those that end before begin again. "each_once": like all_seen, but none begins again, so that every
            example comes exactly `epochs` times and the shares shift towards what is left.

    Raises:
        ValueError: for names that differ, or weights that are not positive.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float], *, stop: Stop, by: By = "tokens"
    ) -> None:
        if not sources or set(sources) != set(weights):
            raise ValueError(f"a Mixture of {list(sources)} got weights for {list(weights)}; give each source a weight")
        for name, weight in weights.items():
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
                raise ValueError(
                    f"the weight of {name!r} is {weight!r}: pass a number above 0, or leave the source out"
                )
        check_choices({"stop": (stop, get_args(Stop)), "by": (by, get_args(By))})
        if len(sources) > 255:
            raise ValueError(f"a Mixture of {len(sources)} sources: at most 255")
        total = sum(weights.values())
        self.sources = dict(sources)
        # Rounded, so that 0.6 of 1.0 stays 0.6, and weights of the same ratios are the same.
        self.weights = {name: round(weights[name] / total, 12) for name in sources}
        self.stop: Stop = stop
        self.by: By = by


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How a lane mixes."""

    weights: tuple[float, ...]
    by: By
    stop: Stop

    def feed_stop(self, stop_epoch: int | None) -> int | None:
        """The epoch up to which each source is read."""
        return None if self.stop == "all_seen" else stop_epoch

    def count(self, entered: list[int], item: Item) -> None:
        """An item enters: see `FeedState.entered`."""
        tokens, is_new = len(item.ids), item.start == 0
        entered[0] += tokens if self.by == "tokens" else is_new
        entered[1] += is_new
        entered[2] += tokens

    def choose(self, feeds: Sequence[Feed], *, stop_epoch: int | None) -> Feed | None:
        """The feed whose item enters next, a function of what has entered; None: the lane takes no more.

        Raises:
            ValueError: where a source that ends the pass has nothing for this lane.
        """
        inside = next((feed for feed in feeds if feed.is_inside_example), None)
        if inside is not None:  # the fragments of an example stay together
            return inside if inside.peek() is not None else None
        behind = sorted(range(len(feeds)), key=lambda place: feeds[place].entered[0] / self.weights[place])
        for place in behind:
            feed = feeds[place]
            item = feed.peek()
            if item is None and self.stop == "first_exhausted":
                _check_had_any(feed)
                return None
            if item is None:
                continue
            others = (other for other in feeds if other is not feed)
            if (
                self.stop == "all_seen"
                and stop_epoch is not None
                and item.epoch >= stop_epoch
                and all(other.epoch[0] >= stop_epoch for other in others)
            ):
                return None
            return feed
        return None


def _check_had_any(feed: Feed) -> None:
    if not feed.taken:
        blocks = feed.reader.blocks
        raise ValueError(
            f"lane {feed.reader.lane} of {blocks.deal.lanes} gets no example of source {blocks.reader.source.name!r}, "
            "so stop='first_exhausted' would end it before its first row; use fewer lanes (lanes=...), or another stop"
        )
