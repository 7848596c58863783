"""States: where a stream is, as references: a dict of plain values.

{"version": 3, "stream": {what identifies it}, "pass": [first epoch, epoch before which it ends], "row": the next row,
 "after": places of its cycle that are out (only of a worker alone), "rows": rows handed out by all ranks, "rank": 0,
 "world_size": 1, "worker": [0, 1], "ended": is the pass over, "totals": {counts of the passes before},
 "lanes": {"0": "...", "1": "...", ...}}
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from streampack.lane_state import LaneState

VERSION = 3
_KEYS = ("pass", "row", "after", "rows", "rank", "world_size", "worker", "ended", "totals")
_NUMBERS = ("row", "rows", "rank", "world_size")


class StateError(ValueError):
    """A saved state that cannot be continued here; the message names both values and the remedy."""


def check(state: Any, *, stream: Mapping[str, Any], change_weights: bool = False) -> None:
    """Refuse a state that is not one of this stream.

    Args:
        state: what `state_dict()` returned.
        stream: what identifies the stream here.
        change_weights: allow other weights of a mixture.

    Raises:
        StateError: naming what differs, both values and the remedy.
    """
    check_is_state(state)
    _check_numbers(state)
    _check_lanes(state)
    saved = state["stream"]
    # Lanes first: how a source is cut, and so what it is named, may depend on how many they are.
    for key in ["lanes", *saved, *(key for key in stream if key not in saved)]:
        if saved.get(key) == stream.get(key):
            continue
        both = key in saved and key in stream
        if key == "weights" and both and change_weights:
            continue
        remedy = "make them equal, or start without the state"
        if key == "weights" and both:
            remedy = "make them equal, or pass change_weights=True to mix by the new ones from here on"
        raise StateError(
            f"cannot resume: the state was saved with {key}={saved.get(key)!r}, this stream has "
            f"{key}={stream.get(key)!r}; {remedy}"
        )


def accept(state: Any, *, stream: Mapping[str, Any], change_weights: bool) -> dict[str, Any]:
    """A copy of a state of this stream. Where weights of its mixture change, what has entered so far counts no more.

    Raises:
        StateError: see `check`.
    """
    check(state, stream=stream, change_weights=change_weights)
    accepted = dict(state)
    before, after = state["stream"].get("weights"), stream.get("weights")
    if before != after:
        warnings.warn(
            f"the weights of the mixture change with row {state['row']}: from {before} to {after}", stacklevel=3
        )
        accepted["stream"] = dict(stream)
        accepted["lanes"] = {lane: _unmixed(LaneState.from_json(text)) for lane, text in state["lanes"].items()}
    return accepted


def _unmixed(lane: LaneState) -> str:
    feeds = [replace(feed, entered=(0, *feed.entered[1:])) for feed in lane.feeds]
    return replace(lane, feeds=tuple(feeds)).to_json()


def check_is_state(state: Any) -> None:
    """Refuse what is no state, or one of another version.

    Raises:
        StateError: saying what it is.
    """
    is_one = isinstance(state, Mapping) and {"version", "stream", "lanes"} <= set(state)
    if not is_one or not all(isinstance(state[key], Mapping) for key in ("stream", "lanes")):
        raise StateError(f"not a streampack state: {type(state).__name__}; pass what state_dict() returned")
    missing = [key for key in _KEYS if key not in state]
    if missing and state["version"] == VERSION:
        raise StateError(f"the state has no {missing[0]!r}: it is damaged; pass what state_dict() returned")
    if state["version"] != VERSION:
        raise StateError(
            f"cannot resume: the state has format version {state['version']}, this streampack reads version {VERSION}; "
            "resume with the streampack that saved it, or start without the state"
        )


def _check_numbers(state: Mapping[str, Any]) -> None:
    """Refuse numbers that are none: they would be an error of some arithmetic later."""
    totals = state["totals"]
    numbers = {key: state[key] for key in _NUMBERS}
    numbers |= (
        {f"totals.{key}": count for key, count in totals.items()} if isinstance(totals, Mapping) else {"totals": 0.5}
    )
    wrong = {key: number for key, number in numbers.items() if not _is_count(number)}
    if "totals" in wrong:
        wrong["totals"] = totals
    wrong |= {key: state[key] for key in ("pass", "worker") if not _is_pair(state[key], may_be_open=key == "pass")}
    if wrong:
        key, value = next(iter(wrong.items()))
        raise StateError(f"{key}={value!r} of the state is damaged; pass what state_dict() returned")


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _is_pair(value: Any, *, may_be_open: bool) -> bool:
    """Whether it is two counts; may_be_open: the second may be None."""
    is_two = isinstance(value, list | tuple) and len(value) == 2
    return is_two and _is_count(value[0]) and (_is_count(value[1]) or (may_be_open and value[1] is None))


def _check_lanes(state: Mapping[str, Any]) -> None:
    """Refuse damaged lanes, and a state that lacks lanes which have given rows already: they would begin anew."""
    count, lanes = state["stream"].get("lanes", 0), state["lanes"]
    for lane, text in lanes.items():
        try:
            good = 0 <= int(lane) < count and LaneState.from_json(text) is not None
        except (ValueError, TypeError, KeyError):
            good = False
        if not good:
            raise StateError(f"the state of lane {lane!r} (of {count}) is damaged; pass what state_dict() returned")
    if state["worker"][1] == 1 and not state["ended"]:
        row, rank, ranks = state["row"], state["rank"], state["world_size"]
        begun = [lane for lane in range(min(row, count)) if (lane - row) % ranks == rank]
        missing = [lane for lane in begun if str(lane) not in lanes]
        if missing:
            raise StateError(f"the state after row {row} lacks lane {missing[0]}; merge the states of all ranks")


def _has_no_more(state: Mapping[str, Any]) -> bool:
    """Whether a rank has given all its rows of the pass, be it that its loop has not asked for more yet."""
    mine = state["stream"]["lanes"] // state["world_size"]
    lanes = [LaneState.from_json(text) for text in state["lanes"].values()]
    return bool(state["ended"]) or (len(lanes) == mine and all(lane.done for lane in lanes))


def check_whole(state: Mapping[str, Any]) -> None:
    """Refuse an accepted state that is of one of several ranks."""
    if state["world_size"] > 1:
        raise StateError(
            f"the state is of rank {state['rank']} of {state['world_size']} alone; use "
            "streampack.merge_states([the state of every rank])"
        )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of all ranks, to be loaded on any number of ranks, from each rank's `state_dict()` after the same step.

    Raises:
        StateError: if a rank is missing or there twice, or they are of different streams or steps.
    """
    if not states:
        raise StateError("merge_states got no states; pass the state_dict() of every rank")
    for state in states:
        check_is_state(state)
        if state["worker"][1] > 1:
            raise StateError(
                f"merge_states got the state of worker {state['worker'][0]} of {state['worker'][1]} alone; use "
                "PackedLoader, whose states cover all workers"
            )
    worlds = sorted({state["world_size"] for state in states})
    ranks = sorted(state["rank"] for state in states)
    if len(worlds) > 1:
        raise StateError(f"the states are of runs with world_size={worlds[0]} and world_size={worlds[1]}")
    if ranks != list(range(worlds[0])):
        raise StateError(f"merge_states got the ranks {ranks} of world_size={worlds[0]}; pass each rank's state once")
    merged = {**states[0], "rank": 0, "world_size": 1, "lanes": {}}
    for state in states:
        check(state, stream=merged["stream"])
        if state["pass"] != merged["pass"]:
            raise StateError(f"the states are of different passes: epochs {merged['pass']} and {state['pass']}")
        merged["lanes"].update(state["lanes"])
    last = max(states, key=lambda state: state["rows"])
    for state in states:
        if state["rows"] != last["rows"] and not _has_no_more(state):
            raise StateError(
                f"the states are of different steps: rank {state['rank']} was after row {state['rows']}, rank "
                f"{last['rank']} after row {last['rows']}; save all ranks after the same step"
            )
    merged.update(row=max(state["row"] for state in states), rows=last["rows"])
    # Where lanes of one rank have ended, another may have lanes that have not begun, further back in the cycle.
    behind = [lane for lane in range(min(merged["row"], merged["stream"]["lanes"])) if str(lane) not in merged["lanes"]]
    if behind:
        merged["lanes"].update(dict.fromkeys(map(str, behind), _not_begun(merged)))
    merged["ended"] = all(state["ended"] for state in states)
    merged["totals"] = {key: sum(state["totals"][key] for state in states) for key in states[0]["totals"]}
    return merged


def _not_begun(state: Mapping[str, Any]) -> str:
    """The state of a lane that has not begun its pass, like the other lanes of the state."""
    like = LaneState.from_json(next(iter(state["lanes"].values())))
    return LaneState.start(state["pass"][0], feeds=len(like.feeds), mixed=bool(like.given)).to_json()
