import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import streampack

FOLDER = Path(streampack.__file__).parent
CORE = [
    *("order", "arguments", "sources", "storage", "lines", "columnar", "files", "huggingface", "mds_cache", "mds"),
    *("tables", "dealing", "rows", "token_ids", "spans", "byte_level", "texts", "conversations", "turns"),
    *("templates", "chats", "encode", "retry", "reading", "blocks"),
    *("packing", "items", "lane_state", "feeds", "mixture", "lanes"),
    *("hosting", "stream", "settings", "state", "progress"),
    *("interval", "remaining", "wording", "recording", "replay", "totals"),
]
"""Plain Python, NumPy and Arrow, in the order in which they may import each other."""
WITH_TORCH = [
    *("callers", "ranks", "epochs", "loss", "collate", "attention", "isolation", "dataset", "messages"),
    *("ahead", "ending", "loader", "mds_writer", "checkpoint", "passes"),
]
ENGINES = ["trainer_checkpoints", "trainer", "lightning"]
"""For engines, which they import; nothing else imports them."""
SEEING = [
    *("report", "plan", "trace", "show", "describe", "bars", "opening"),
    *("terminal", "views", "page", "options", "cli", "__main__"),
]
"""What the stream does, as numbers and as text, and the command line."""
ORDER = [*CORE, *WITH_TORCH, *ENGINES, *SEEING]
WHEN_NEEDED = {("sources", "huggingface"), ("sources", "mds")}
"""The imports against the order: inside a function, when a dataset of that library is there."""
FILES = sorted(path.stem for path in FOLDER.rglob("*.py") if path.stem != "__init__")
LONGEST = 350


def tree_of(name):
    return ast.parse((FOLDER / f"{name}.py").read_text())


def imports_of(name):
    """(module, is it imported when the file is) for each import in a file."""
    tree = tree_of(name)
    at_once = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}.py imports relatively"
            modules = [node.module]
            if node.module == "streampack":  # `from streampack import rows`
                modules = [f"streampack.{alias.name}" for alias in node.names]
        found += [(module, id(node) in at_once) for module in modules]
    return found


def test_every_file_has_its_place_in_the_order():
    assert sorted(ORDER) == FILES


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_files_before_it(name):
    used = {module.removeprefix("streampack.") for module, _ in imports_of(name) if module.startswith("streampack.")}
    before = ORDER[: ORDER.index(name)]
    against = {(name, module) for module in used if module not in before}
    assert against <= WHEN_NEEDED
    assert all(not at_once for module, at_once in imports_of(name) if (name, module[11:]) in WHEN_NEEDED)


def test_the_imports_against_the_order_are_still_needed():
    assert all((f"streampack.{module}", False) in imports_of(name) for name, module in WHEN_NEEDED)


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_import_torch(name):
    imported = [(module.partition(".")[0], at_once) for module, at_once in imports_of(name)]
    assert not [module for module, _ in imported if module == "torch"]
    # A chat template with marks is rendered by the function that the tokenizer's own method calls.
    assert [at_once for module, at_once in imported if module == "transformers"] == [False] * (name == "templates")


@pytest.mark.parametrize("name", ORDER)
def test_datasets_is_imported_only_by_the_file_that_adapts_it(name):
    uses = any(module.partition(".")[0] == "datasets" for module, _ in imports_of(name))
    assert uses == (name == "huggingface")


@pytest.mark.parametrize("name", ORDER)
def test_mosaicml_streaming_is_imported_only_by_the_files_that_adapt_it_and_only_when_needed(name):
    uses = [at_once for module, at_once in imports_of(name) if module.partition(".")[0] == "streaming"]
    assert bool(uses) == (name in ("mds_cache", "mds"))
    assert not any(uses)


def test_the_core_packs_rows_where_there_is_no_torch_and_no_datasets():
    code = f"""
        import sys, types

        for missing in ("torch", "datasets", "transformers"):
            sys.modules[missing] = None  # importing it is an error
        package = types.ModuleType("streampack")  # without what its __init__ imports
        package.__path__ = [{str(FOLDER)!r}]
        sys.modules["streampack"] = package

        from streampack.encode import Encoder, Policies
        from streampack.hosting import Host
        from streampack.packing import Packer
        from streampack.progress import Progress
        from streampack.settings import Settings
        from streampack.sources import SequenceSource
        from streampack.stream import Part, Stream

        source = SequenceSource([{{"input_ids": [number, number]}} for number in range(4)])
        encoder = Encoder(None, text_column="text", append_eos=False, limit=4, policies=Policies())
        stream = Stream(
            parts=[Part(source=source, encoder=encoder)],
            packer=Packer(seq_len=4),
            lanes=1,
            shuffle=False,
        )
        for given in stream.rows(Host(lanes=1, first_row=0, rank=0, world_size=1)):
            print(given.row.ids.tolist() if given.row else "end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[0, 0, 1, 1]\n[2, 2, 3, 3]\nend\n", "")


# ---- habits -----------------------------------------------------------------------------------------------------


def test_no_file_is_long():
    long = {
        path.name: lines for path in FOLDER.rglob("*.py") if (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert long == {}


def test_files_are_named_after_what_they_do():
    assert not {"utils", "util", "base", "common", "types", "registry", "helpers", "misc", "core"} & set(FILES)


def passes_on(function, kwarg):
    """Whether a call in it gets all of `**kwarg`, so that a misspelt argument is an error there."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    given = [keyword.value for call in calls for keyword in call.keywords if keyword.arg is None]
    return any(isinstance(value, ast.Name) and value.id == kwarg for value in given)


@pytest.mark.parametrize("name", [*ORDER, "__init__"])
def test_a_file_says_what_it_is_and_prints_nothing_and_swallows_no_arguments(name):
    tree = tree_of(name)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            kwarg = node.args.kwarg
            assert kwarg is None or passes_on(node, kwarg.arg), f"line {node.lineno}: **{kwarg.arg} swallows arguments"
