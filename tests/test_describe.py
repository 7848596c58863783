"""States in words, and how two of them differ."""

import copy
import json

import pytest
import torch

from streampack import (
    Mixture,
    PackedDataset,
    PackedLoader,
    StateError,
    StreamState,
    describe_state,
    diff_states,
    merge_states,
    read_state,
    save_json,
    save_stream,
)

from .streams import Shards, examples, split_evenly

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"seq_len": 64, "lanes": 4, "buffer_size": 8, "shuffle_block": 20, "seed": 3}


def loader_after(batches, *, rank=0, world_size=1, **settings):
    source = settings.pop("source", None) or Shards(split_evenly(examples(300), 12))
    dataset = PackedDataset(source, rank=rank, world_size=world_size, **SETTINGS | settings)
    loader = PackedLoader(dataset, batch_size=2)
    for _ in zip(range(batches), loader, strict=False):
        pass
    return loader


def test_a_description_says_where_the_stream_is_and_what_it_gave():
    loader = loader_after(10)
    stats = loader.stats
    said = describe_state(loader.state_dict())
    assert (said.rows, said.next_row, said.epochs, said.ended) == (20, 20, (0, 1), False)
    assert (said.rank, said.world_size, said.worker, said.lanes_begun) == (0, 1, (0, 1), 4)
    assert said.totals == {name: stats[name] for name in said.totals}
    assert said.fill == stats["fill"]
    assert [(place.lane, place.epoch, place.rows) for place in said.places] == [(lane, 0, 5) for lane in range(4)]
    taken = [place.taken for place in said.places]
    assert sum(taken) == stats["examples"]
    assert json.loads(json.dumps(said.as_dict()))["rows"] == 20


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_share_of_the_first_epoch_is_not_known_until_a_shard_is_read_and_then_about_right(shuffle):
    source = Shards(split_evenly(examples(3000), 61))  # 15 for each lane, and one that is dealt to all
    source.num_examples = 3000
    found = []
    for batches in (4, 30, 120, 240):
        loader = loader_after(batches, source=source, shuffle=shuffle)
        said = describe_state(loader.state_dict())
        found.append((said.share, loader.stats["epoch"]))
        known = [place.share for place in said.places if place.share is not None]
        assert said.share == (sum(known) / len(known) if known else None)
    assert found[0][0] is None
    assert 0.01 < found[0][1] < 0.02
    for said, epoch in found[1:]:
        assert said == pytest.approx(epoch, rel=0.1)


def test_the_places_of_the_lanes_are_where_a_resume_reads():
    loader = loader_after(10, shuffle=False)
    state = loader.state_dict()
    places = {place.lane: place for place in describe_state(state).places}
    resumed = loader_after(0, shuffle=False)
    resumed.load_state_dict(state)
    left = {lane: [] for lane in range(4)}
    for _ in resumed:
        for row in resumed.provenance:
            for _, shard, index in row:
                left[shard % 4].append((shard, index))  # as they are dealt where nothing is shuffled
    for lane, coming in left.items():
        place = places[lane]
        oldest_shard, oldest_index = min(coming)
        assert (place.shard, place.index) <= (oldest_shard, oldest_index)
        assert 25 * (oldest_shard - place.shard) / 4 + oldest_index - place.index < 20  # in its block


def test_a_state_before_the_first_row_and_after_the_last_says_so():
    before = describe_state(PackedDataset(Shards([examples(30)]), **SETTINGS).state_dict())
    assert (before.rows, before.lanes_begun, before.share, before.fill) == (0, 0, 0.0, 0.0)
    loader = loader_after(1000)
    after = describe_state(loader.state_dict())
    assert (after.ended, after.share, {place.done for place in after.places}) == (True, 1.0, {True})


def test_what_it_would_refuse_names_the_values():
    said = describe_state(loader_after(3).state_dict())
    assert said.refuses == [
        "another source (12 lists)",
        "another tokenizer (none)",
        "other settings: num_shards, seq_len, lanes, buffer_size, packing, max_examples_per_row, pad_to_multiple_of, "
        "max_example_len, shuffle, shuffle_block, seed, epochs, format, targets, chat_template, text_column, "
        "append_eos, overlong, truncate_keep, empty, no_target, bad, vocab_size, pad_token_id",
        "a number of ranks that does not divide lanes=4: use 1, 2 or 4",
    ]
    one = describe_state(loader_after(3, rank=1, world_size=2).state_dict())
    assert one.refuses[0] == (
        "it is of rank 1 of 2 alone: any other rank, until merge_states() has put the states of all ranks together"
    )
    assert describe_state(loader_after(3, transform=dict).state_dict()).refuses[0] == (
        "a stream without the transform 'dict'"
    )


def test_the_sources_of_a_mixture_are_told_apart():
    sources = {"web": Shards([examples(60)]), "code": Shards([examples(60, seed=1)])}
    mixture = Mixture(sources, {"web": 3, "code": 1}, stop="each_once")
    said = describe_state(loader_after(4, source=mixture).state_dict())
    assert [(place.lane, place.source) for place in said.places[:4]] == [
        (0, "web"),
        (0, "code"),
        (1, "web"),
        (1, "code"),
    ]
    assert said.share is None
    assert said.allows[-1] == "other weights of the mixture, with change_weights=True"


def test_two_states_of_a_run_differ_by_what_came_between():
    early, late = loader_after(4).state_dict(), loader_after(10).state_dict()
    difference = diff_states(early, late)
    assert difference.stream == {}
    assert difference.place == {"rows": (8, 20), "next_row": (8, 20)}
    assert difference.counts["rows"] == (8, 20)
    assert difference.lanes == dict.fromkeys(range(4), (2, 5))
    assert diff_states(late, late).is_empty


def test_states_of_two_streams_differ_by_what_is_refused():
    one, other = loader_after(4).state_dict(), loader_after(4, seed=4, seq_len=32).state_dict()
    assert diff_states(one, other).stream == {"seq_len": (64, 32), "seed": (3, 4)}


def test_a_state_is_found_in_the_checkpoint_of_a_training_loop(tmp_path):
    loader = loader_after(3)
    torch.save({"model": {"weight": torch.ones(2)}, "step": 3, "stream": loader.state_dict()}, tmp_path / "step.pt")
    assert read_state(tmp_path / "step.pt") == loader.state_dict()


@pytest.mark.parametrize("packing", ["none", "by_length"])
def test_of_rows_without_a_fixed_length_no_fill_is_told(packing):
    loader = loader_after(4, packing=packing)
    assert describe_state(loader.state_dict()).fill is None
    assert loader.stats["fill"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["stream"].pop("seq_len"), "the state has no 'seq_len' of its stream: it is damaged"),
        (lambda state: state.update({"pass": [0]}), r"pass=\[0\] of the state is damaged"),
        (lambda state: state.update({"pass": ["a", "b"]}), r"pass=\['a', 'b'\] of the state is damaged"),
        (lambda state: state.update(worker=[0, None]), r"worker=\[0, None\] of the state is damaged"),
        (lambda state: state.update(stream=None), "not a streampack state: dict"),
        (lambda state: state.update(lanes=[1]), "not a streampack state: dict"),
    ],
)
def test_a_damaged_state_is_refused_in_a_line(change, message):
    state = copy.deepcopy(loader_after(2).state_dict())
    change(state)
    with pytest.raises(StateError, match=message):
        describe_state(state)


def test_what_is_no_state_of_this_version_is_refused():
    state = loader_after(2).state_dict()
    with pytest.raises(StateError, match="format version 1, this streampack reads version 3"):
        describe_state({**state, "version": 1})
    with pytest.raises(StateError, match="not a streampack state: dict"):
        describe_state({"rows": 3})
    broken = copy.deepcopy(state)
    broken["lanes"]["0"] = "["
    with pytest.raises(StateError, match=r"the state of lane '0' .* is damaged"):
        describe_state(broken)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["json", "torch", "folder", "dcp", "trainer"])
def test_a_state_is_read_from_wherever_it_was_saved(tmp_path, way):
    loader = loader_after(5)
    path = tmp_path / "saved"
    if way == "json":
        save_json(loader, path)
    elif way == "torch":
        torch.save(loader.state_dict(), path)
    elif way == "folder":
        save_stream(loader, path)
    elif way == "trainer":
        save_json(loader, path / "stream.json")
    else:
        values = {"stream": StreamState(loader), "model": {"weight": torch.zeros(2)}}
        torch.distributed.checkpoint.save(values, checkpoint_id=path, no_dist=True)
    assert read_state(path) == merge_states([loader.state_dict()])


def test_a_file_without_a_state_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_state(tmp_path / "nothing")
    for name, content, says in (
        ("text", "hello", "text is damaged, no whole JSON"),
        ("other", '{"a": 1}', "other: not a streampack state: dict"),
        ("old", '{"version": 1, "stream": {}, "lanes": {}}', "old: cannot resume: the state has format version 1"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(StateError, match=says):
            read_state(tmp_path / name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StateError, match=r"folder is a folder without stream.json or a checkpoint of"):
        read_state(tmp_path / "folder")
    torch.save({"model": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(StateError, match="weights: not a streampack state: dict"):
        read_state(tmp_path / "weights")
