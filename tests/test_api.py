import inspect
import re
import types

import pytest

import streampack


def test_all_is_sorted_and_complete():
    public = {
        name
        for name, value in vars(streampack).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert streampack.__all__ == sorted(public)


def test_these_are_the_names_of_the_library():
    assert streampack.__all__ == [
        "BadExample",
        "Collator",
        "Files",
        "FunctionSource",
        "IsolationError",
        "MDSSource",
        "Mixture",
        "PackedDataset",
        "PackedLoader",
        "PackedRow",
        "ProgressBar",
        "Retry",
        "SequenceSource",
        "Source",
        "StateError",
        "StreamState",
        "block_mask",
        "check_isolation",
        "context_parallel_part",
        "count_batches",
        "describe_state",
        "diff_states",
        "global_sum",
        "load_json",
        "load_stream",
        "loss_normalizer",
        "make_plan",
        "make_report",
        "merge_states",
        "packed_cross_entropy",
        "read_packed_row",
        "read_state",
        "resolve_once",
        "save_json",
        "save_stream",
        "segment_ids",
        "show_row",
        "trace_rows",
        "trace_step",
        "varlen_lengths",
        "write_mds",
        "write_packed_mds",
    ]


@pytest.mark.parametrize("name", streampack.__all__)
def test_a_public_name_says_what_it_is(name):
    documentation = vars(getattr(streampack, name)).get("__doc__") or getattr(streampack, name).__doc__
    inherited = [base.__doc__ for base in getattr(getattr(streampack, name), "__mro__", [])[1:]]
    assert documentation
    assert documentation not in inherited


@pytest.mark.parametrize("owner", ["PackedDataset", "PackedLoader", "Source"])
def test_a_public_method_says_what_it_does(owner):
    own = {name: value for name, value in vars(getattr(streampack, owner)).items() if not name.startswith("_")}
    documented = {name for name, value in own.items() if inspect.getdoc(value)}
    assert documented
    assert documented == {name for name, value in own.items() if callable(value) or isinstance(value, property)}


@pytest.mark.parametrize(
    ("name", "positional"),
    [
        ("Collator", ["layout"]),
        ("Files", ["files"]),
        ("FunctionSource", ["function"]),
        ("MDSSource", ["local", "remote"]),
        ("Mixture", ["sources", "weights"]),
        ("PackedDataset", ["source", "tokenizer"]),
        ("PackedLoader", ["dataset", "batch_size"]),
        ("ProgressBar", ["loader"]),
        ("Retry", []),
        ("SequenceSource", ["sequence"]),
        ("describe_state", ["state"]),
        ("diff_states", ["a", "b"]),
        ("make_plan", ["dataset"]),
        ("make_report", ["dataset"]),
        ("merge_states", ["states"]),
        ("read_packed_row", ["sample"]),
        ("read_state", ["path"]),
        ("resolve_once", ["function"]),
        ("show_row", ["row", "tokenizer"]),
        ("trace_rows", ["dataset", "state"]),
        ("trace_step", ["dataset", "state"]),
        ("write_mds", ["examples", "out"]),
        ("write_packed_mds", ["rows", "out"]),
    ],
)
def test_settings_are_passed_by_name(name, positional):
    parameters = inspect.signature(getattr(streampack, name)).parameters.values()
    assert [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY] == positional


CLASSES = [name for name in streampack.__all__ if isinstance(getattr(streampack, name), type)]
WITHOUT_ARGUMENTS = {"BadExample", "IsolationError", "PackedRow", "Source", "StateError"}


@pytest.mark.parametrize("name", sorted(set(CLASSES) - WITHOUT_ARGUMENTS))
def test_each_argument_of_a_public_class_is_explained(name):
    parameters = inspect.signature(getattr(streampack, name)).parameters
    assert parameters
    if name != "SequenceSource":  # its one argument is what its first line says
        documentation = getattr(streampack, name).__doc__
        assert [one for one in parameters if not re.search(rf"\b{one}\b[^:]*:", documentation)] == []


def test_a_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match="seqlen"):
        streampack.PackedDataset([{"input_ids": [1, 2]}], seqlen=8)


def test_the_version_is_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", streampack.__version__)
