"""The command line on real files (the standard library as JSONL, Parquet, Arrow, MDS), and its page in a browser."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import streampack
from streampack.cli import main
from streampack.views import row_view

from .chat_templates import CHATML
from .streams import examples, write_jsonl
from .tiny_tokenizers import byte_tokenizer, word_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES = ("ast", "bisect", "calendar", "dis", "enum", "fractions", "heapq", "inspect", "json/decoder", "queue")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def functions():
    """Functions of the standard library, one an example."""
    for name in MODULES:
        text = Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield {"file": name, "text": ast.get_source_segment(text, node)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """functions.jsonl, functions.parquet, saved/ (save_to_disk), ids.jsonl, tokenizer/."""
    import datasets

    folder = tmp_path_factory.mktemp("cli")
    rows = list(functions())
    assert 400 < len(rows) < 1200
    (folder / "functions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "functions.parquet", row_group_size=50)
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    write_jsonl(folder, [examples(200)])
    (folder / "part-000.jsonl").rename(folder / "ids.jsonl")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs a command in that folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(folder)

    def run(command):
        status = main(command.split() if isinstance(command, str) else command)
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def output_of(run, command):
    status, output, error = run(command)
    assert (status, error) == (0, ""), error
    assert all(line == line.rstrip() for line in output.splitlines())
    return output


def loader_of(folder, **settings):
    settings = {"seq_len": 512, "lanes": 4} | settings
    source = streampack.Files(str(folder / "functions.jsonl"))
    tokenizer = byte_tokenizer()
    return streampack.PackedLoader(streampack.PackedDataset(source, tokenizer, **settings), batch_size=3)


# ---- report ------------------------------------------------------------------------------------------------------

REPORT = "report functions.jsonl --tokenizer tokenizer --seq-len 512 --lanes 4 --ranks 2 4 --workers 2"


def test_a_report_is_read_from_top_to_bottom(run, folder):
    output = output_of(run, f"{REPORT} --seq-lens 256 512 --buffer-sizes 16 256")
    loader = loader_of(folder)
    rows = sum(len(loader.provenance) for _ in loader)
    stats = loader.stats
    assert output.splitlines()[1] == f"read {stats['examples']} examples in 1 shard: all of it"
    assert re.search(rf"^An epoch\n +examples +{stats['examples']}\n", output, re.MULTILINE)
    assert re.search(rf"^ +tokens in rows +{stats['tokens']:,}\n +rows +{rows}$", output, re.MULTILINE)
    assert re.findall(r"^([A-Z][\w ]+?)(?:  .*)?$", output, re.MULTILINE) == [
        *("Lengths", "Not as they are", "An epoch", "Rows of 512", "Row lengths", "Buffer sizes", "Lanes"),
    ]
    assert re.search(r"over-long +\d+ of more than 512 tokens \(overlong='auto'\)", output)
    assert f"between {stats['lane_rows_min']} and {stats['lane_rows_max']} rows each" in output


@pytest.mark.parametrize("source", ["functions.jsonl", "functions.parquet", "saved", "mds"])
def test_sources_of_every_kind_have_the_same_lengths(run, folder, source):
    if source == "mds":
        streaming = pytest.importorskip("streaming")
        if not (folder / "mds").exists():
            columns = {"text": "str"}
            with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=1 << 16) as writer:
                for row in functions():
                    writer.write({"text": row["text"]})
    command = f"report {source} --tokenizer tokenizer --seq-len 512 --seq-lens 512 --buffer-sizes 256 --all --json -"
    report = json.loads(output_of(run, command))
    rows = list(functions())
    lengths = [len(ids) + 1 for ids in byte_tokenizer()([row["text"] for row in rows])["input_ids"]]
    assert report["epoch"]["examples"]["value"] == len(rows)
    assert report["epoch"]["tokens"]["value"] == sum(lengths)
    assert report["lengths"]["quantiles"]["100"] == max(lengths)
    assert report["read"]["is_all"]


def test_a_chat_set_is_reported_planned_shown_and_traced_as_it_is_trained_on(run, folder):
    chats = [
        [
            {"role": "user", "content": f"What is {n} + {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}." * (n % 5)},
        ]
        for n in range(1, 60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "chat_tokenizer")
    source = streampack.Files(str(folder / "chats.jsonl"))
    dataset = streampack.PackedDataset(source, tokenizer, format="messages", seq_len=256, lanes=2)
    loader = streampack.PackedLoader(dataset, batch_size=2)
    steps = [loader.provenance for _ in loader]
    stats = loader.stats
    command = "chats.jsonl --tokenizer chat_tokenizer --format messages --seq-len 256 --lanes 2"

    report = json.loads(output_of(run, f"report {command} --seq-lens 256 --buffer-sizes 256 --all --json -"))
    assert report["epoch"]["rows"]["value"] == stats["rows"]
    assert report["epoch"]["tokens"]["value"] == stats["tokens"]
    assert re.search(rf"^ +rows +{stats['rows']}$", output_of(run, f"plan {command}"), re.MULTILINE)
    shown = output_of(run, f"show {command} --rows 1")
    assert "What is " in shown
    assert re.search(r"«It is \d+\.", shown)  # the answer is a target
    traced = output_of(run, f"trace --source {command} --step 1 --batch-size 2")
    indices = [index for row in steps[1] for _, _, index in row]
    assert [int(found) for found in re.findall(r"chats\.jsonl, (\d+)", traced)] == indices
    status, _, error = run("report chats.jsonl --tokenizer chat_tokenizer --seq-len 256")
    assert status == 2
    assert "no column 'text' (there are: messages); pass --format 'messages'" in error


def test_token_ids_need_no_tokenizer_and_a_sample_says_that_it_is_one(run):
    output = output_of(run, "report ids.jsonl --seq-len 64 --lanes 2 --sample 50")
    assert output.splitlines()[1] == "read 200 examples in 1 shard: all of it"  # it has no more
    with_more = output_of(run, "report ids.jsonl --seq-len 64 --lanes 2 --sample 10")
    assert with_more.splitlines()[1] == "read 40 examples in 1 shard: a sample; --all reads all, for exact numbers"
    assert "this sample does not tell how much there is: read more of it, or --all" in with_more


@pytest.fixture(scope="module")
def page(folder):
    status = main(
        f"report {folder}/functions.jsonl --tokenizer {folder}/tokenizer --seq-len 512 --lanes 4 --html "
        f"{folder}/report.html".split()
    )
    assert status == 0
    return folder / "report.html"


def test_it_is_one_file_that_asks_for_nothing_else(page):
    text = page.read_text()
    assert re.findall(r"(?:src|href)=\"(?!data:image/svg)[^\"]*", text) == []
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "<script" not in text


def test_the_pictures_are_there_and_not_empty_in_a_browser(page, tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no chromium here to open the page with")
    look = tmp_path / "look.html"
    look.write_text(page.read_text().replace("</body>", f"<script>{LOOK}</script></body>"))
    found = json.loads(re.search(r"<pre id=\"found\">(.*?)</pre>", browse(tmp_path, "--dump-dom", look))[1])
    assert [picture["alt"] for picture in found] == [
        "a histogram of lengths",
        "a strip of packed rows, the examples in colours",
        "fill against the buffer size",
        "fill and padding saved against the row length",
    ]
    for picture in found:
        assert picture["width"] > 300, picture
        assert picture["shown"] > 300, picture
        assert picture["ink"] > 0.01, picture  # of its pixels are neither white nor clear
    strip = found[1]
    assert strip["ink"] > 0.7
    assert strip["colours"] >= 6


def test_the_page_looks_like_one(page, tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no chromium here to open the page with")
    import matplotlib.image

    shot = tmp_path / "shot.png"
    browse(tmp_path, f"--screenshot={shot}", page, "--window-size=1100,2400")
    pixels = matplotlib.image.imread(shot)[:, :, :3]
    assert pixels.shape == (2400, 1100, 3)
    bars = (abs(pixels - [0x4C / 255, 0x78 / 255, 0xA8 / 255]) < 0.02).all(axis=2)
    assert bars.mean() > 0.01  # the colour of the histogram and of the first example in each row


LOOK = """
addEventListener("load", () => {
  const found = [...document.images].map((image) => {
    const canvas = document.createElement("canvas");
    canvas.width = 600; canvas.height = Math.round(600 * image.naturalHeight / image.naturalWidth);
    const context = canvas.getContext("2d", {willReadFrequently: true});
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
    let ink = 0; const colours = {};
    for (let at = 0; at < data.length; at += 4) {
      if (data[at + 3] && data[at] + data[at + 1] + data[at + 2] < 3 * 250) ink++;
      const colour = [data[at] >> 5, data[at + 1] >> 5, data[at + 2] >> 5].join();
      colours[colour] = (colours[colour] || 0) + 1;
    }
    return {alt: image.alt, width: image.naturalWidth, shown: image.clientWidth, ink: 4 * ink / data.length,
            colours: Object.values(colours).filter((count) => count > 500).length};
  });
  const shown = document.createElement("pre");
  shown.id = "found"; shown.textContent = JSON.stringify(found); document.body.append(shown);
});
"""
"""What is in the pictures of the page: how large they are, how much of them is not white, in how many colours."""


def browse(folder, what, page, *more):
    command = [CHROMIUM, *BROWSER, f"--user-data-dir={folder / 'browser'}", *more, what, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


# ---- plan, trace, show, state ------------------------------------------------------------------------------------


def test_a_plan_tells_the_schedule(run, folder):
    command = "plan functions.jsonl --tokenizer tokenizer --seq-len 512 --lanes 4 --batch-size 3 --accumulation 2"
    output = output_of(run, f"{command} --epochs 2")
    loader = loader_of(folder)
    steps = sum(-(-sum(1 for _ in loader) // 2) for _ in range(2))
    assert re.search(rf"^The schedule\n +num_training_steps +{steps}$", output, re.MULTILINE)
    budget = json.loads(output_of(run, f"{command} --tokens 2M --json -"))
    assert budget["budget"] == 2_000_000
    assert budget["num_training_steps"] == -(-2_000_000 // budget["tokens_per_step"])


def test_a_plan_and_a_report_say_what_would_stop_training_and_what_is_left_out(run, folder):
    (folder / "bad.jsonl").write_text('{"text": "ok fine"}\n{bad\n{"text": null}\n{"text": "fine too"}\n')
    command = "bad.jsonl --tokenizer tokenizer --seq-len 64 --lanes 1"
    for name in ("plan", "report"):
        output = " ".join(output_of(run, f"{name} {command}").split())
        assert "this would stop training: 2 examples are bad: mend the data, or choose bad='drop'" in output
    output = output_of(run, f"plan {command} --bad drop")
    assert re.search(r"examples +4, 50.0% of them left out\n", output)
    assert "stop training" not in output


def test_a_stream_of_datasets_is_traced_from_its_files_by_the_name_it_had(run, folder):
    import datasets

    data = datasets.load_dataset("json", data_files=str(folder / "ids.jsonl"), split="train", streaming=True)
    loader = streampack.PackedLoader(streampack.PackedDataset(data, seq_len=64, lanes=2, seed=1), batch_size=2)
    trained = []
    for _ in zip(range(4), loader, strict=False):
        trained.append([[index for _, _, index in row] for row in loader.provenance])
        if len(trained) == 2:
            streampack.save_json(loader, folder / "streamed.json")
    name = streampack.read_state(folder / "streamed.json")["stream"]["source"]
    command = [
        "trace",
        "streamed.json",
        "--source",
        "ids.jsonl",
        "--source-name",
        name,
        "--step",
        "3",
        "--batch-size",
        "2",
    ]
    output = output_of(run, [*command, "--json", "-"])
    assert [[one["index"] for one in row["examples"]] for row in json.loads(output)] == trained[3]


def test_a_state_says_whether_a_source_takes_it(run, folder):
    loader = loader_of(folder)
    next(iter(loader))
    streampack.save_json(loader, folder / "one.json")
    taken = output_of(run, "state one.json --source functions.jsonl --tokenizer tokenizer")
    assert "a stream over it, with these settings, takes the state" in taken
    assert "how much is not known: the source does not know how many examples it has" in taken
    refused = output_of(run, "state one.json --source functions.jsonl --tokenizer tokenizer --seed 77")
    assert "cannot resume: the state was saved with seed=" in " ".join(refused.split())
    assert "takes the state" not in refused


@pytest.mark.parametrize("packing", ["none", "by_length"])
def test_rows_that_are_not_packed_are_traced_and_shown_from_a_state_too(run, folder, packing):
    loader = loader_of(folder, packing=packing)
    trained = []
    for step, _ in enumerate(loader):
        trained.append(loader.provenance)
        if step == 1:
            streampack.save_json(loader, folder / f"{packing}.json")
        if step == 4:
            break
    command = f"trace {packing}.json --source functions.jsonl --tokenizer tokenizer --step 4 --batch-size 3 --json -"
    rows = json.loads(output_of(run, command))
    found = [[one["index"] for one in row["examples"]] for row in rows]
    assert found == [[index for _, _, index in row] for row in trained[4]]
    shown = output_of(run, f"show functions.jsonl --tokenizer tokenizer --state {packing}.json --rows 1")
    assert shown.startswith("Row 6, ")


def test_control_characters_of_texts_and_names_do_not_reach_the_terminal(run, folder, monkeypatch):
    (folder / "\x1b[31mred.jsonl").write_text('{"text": "a\\u001b]0;owned\\u0007b\\u009bc"}\n')
    monkeypatch.setenv("COLUMNS", "200")
    stream = "--tokenizer tokenizer --seq-len 64 --lanes 1"
    for command in (
        f"show *red.jsonl {stream}",
        f"trace --source *red.jsonl {stream} --step 0",
        f"report *red.jsonl {stream}",
    ):
        output = output_of(run, command)
        assert "␛[31mred.jsonl" in output
        assert not {"\x1b", "\x07", "\x9b"} & set(output)
        assert command.startswith("report") or "␛]0;owned␇b\\x9bc" in output


def test_a_trace_is_what_a_run_trained_on(run, folder):
    loader = loader_of(folder, seed=5, buffer_size=32)
    trained = []
    for step, _ in enumerate(loader):
        trained.append(loader.provenance)
        if step == 3:
            streampack.save_json(loader, folder / "stream.json")
        if step == 9:
            break
    for step in (4, 9):  # seq_len, lanes, seed and all that are taken from the state
        command = f"trace stream.json --source functions.jsonl --tokenizer tokenizer --step {step} --batch-size 3"
        rows = json.loads(output_of(run, f"{command} --json - --characters 0"))
        named = [[(one["source"], one["shard"], one["index"]) for one in row["examples"]] for row in rows]
        there = [[(source, os.path.basename(shard), index) for source, shard, index in row] for row in trained[step]]
        assert named == there
        texts = list(functions())
        for example in (example for row in rows for example in row["examples"]):
            whole = texts[example["index"]]["text"] + "</s>"
            assert example["text"] in whole
            assert example["first_token"] or whole.startswith(example["text"])
        shown = output_of(run, command)
        assert shown.startswith(f"\nStep {step}  3 rows, {3 * step} .. {3 * step + 2}; ")
        assert f"Row {3 * step}  rank 0, batch 0, place 0, lane {3 * step % 4}; " in shown


def test_rows_are_shown_as_text(run, folder):
    output = output_of(
        run, "show functions.jsonl --tokenizer tokenizer --seq-len 512 --lanes 4 --rows 2 --characters 40"
    )
    assert re.match(
        r"Row 0, lane 0: \d+ examples?, \d+ of 512 tokens, \d+ targets\n\[1\] functions.jsonl, \d+\n", output
    )
    assert output.count("«") == output.count("»") >= 2
    assert "\nRow 1, lane 1: " in output


def test_on_a_terminal_examples_have_colours_and_targets_are_underlined():
    rows = [{"text": "a b c"}, {"text": "d"}]
    dataset = streampack.PackedDataset(rows, word_tokenizer(), seq_len=8, lanes=1, shuffle=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    console.print(row_view("Row 0", next(iter(dataset)), word_tokenizer(), characters=None))
    cyan, yellow = "36", "33"
    stretches = re.findall(r"\x1b\[([\d;]+)m([^\x1b]*)", out.getvalue())
    assert [(codes.split(";"), text) for codes, text in stretches if text.strip()] == [
        (["1"], "Row 0"),
        (["2"], ": 2 examples, 6 of 8 tokens, 4 targets"),
        ([cyan], "a"),
        (["4", cyan], " b c </s>"),
        ([yellow], "d"),
        (["4", yellow], " </s>"),
        (["2"], "░░ 2 cells of padding ░░"),
    ]


def test_a_state_is_told_in_words_and_two_are_compared(run, folder):
    loader = loader_of(folder)
    for step, _ in enumerate(loader):
        if step in (1, 5):
            torch.save(loader.state_dict(), folder / f"after-{step}.pt")
        if step == 5:
            break
    output = output_of(run, "state after-5.pt")
    assert re.search(r"rows +18 handed out; the next one is row 18, of lane 2$", output, re.MULTILINE)
    assert "name the source, with --source" in output
    again = output_of(run, "state after-5.pt --source functions.jsonl --tokenizer tokenizer")
    assert "the source does not know how many examples it has" in again
    output = output_of(run, "state after-5.pt --source functions.parquet --tokenizer tokenizer")
    assert "cannot resume: the state was saved with source='functions.jsonl:" in output
    output = output_of(run, "state diff after-1.pt after-5.pt")
    assert re.search(r"lane 0 +2 +5 +\+3$", output, re.MULTILINE)
    assert output_of(run, "state diff after-1.pt after-1.pt") == "The states say the same.\n"


# ---- errors ------------------------------------------------------------------------------------------------------

ERRORS = {
    "report missing.jsonl --seq-len 64": r"no file matches 'missing.jsonl' \(in /.*\)",
    "report functions.jsonl --tokenizer tokenizer --seq-len 64 --text-column body": (
        r"source 'functions.jsonl:\d+', functions.jsonl, line 1: no column 'body' \(there are: file, text\); "
        r"pass --text-column '...'"
    ),
    "report functions.jsonl --seq-len 64": (
        r"source .* no column 'input_ids' \(there are: file, text\); pass --tokenizer for examples of text"
    ),
    "report ids.jsonl --tokenizer tokenizer --seq-len 64": (
        r"source .* no column 'text' \(there are: input_ids\); the examples have token ids: leave --tokenizer out"
    ),
    "report functions.jsonl --tokenizer nowhere --seq-len 64": (
        r"no tokenizer 'nowhere', neither a folder here nor on the Hub: .*"
    ),
    "report empty.jsonl --seq-len 64": r"empty.jsonl: there is nothing in it",
    "report blank.jsonl --seq-len 64": r"source 'blank.jsonl:3' has no examples; is it the right one\?",
    "report hollow --seq-len 64": (
        r"hollow is a folder without JSONL, Parquet or Arrow files, MDS shards \(index.json\) or what save_to_disk "
        r"writes \(dataset_info.json\)"
    ),
    "report ids.jsonl": r"how long are rows\? pass --seq-len \.\.\.",
    "report ids.jsonl --seq-len 1": r"seq_len=1: must be at least 2",
    "plan ids.jsonl --seq-len 64 --ranks 3": r"lanes=16 cannot be dealt evenly to world_size=3 ranks; .*",
    "trace old.json --source ids.jsonl --step 3": (
        r"old.json: cannot resume: the state has format version 1, this streampack reads version 3; resume with .*"
    ),
    "trace nothing.json --source ids.jsonl --step 3": r".*No such file or directory: 'nothing.json'",
    "state hollow": r"hollow is a folder without stream.json or a checkpoint of torch.distributed.checkpoint",
    "state ids.jsonl": r"ids.jsonl is damaged, no whole JSON: .*",
    "trace --source ids.jsonl --seq-len 64 --lanes 1 --step 99999": r"the pass ends after \d+ steps, before step 99999",
    "plan ids.jsonl --seq-len 64 --epochs 0": r"epochs=0: must be at least 1",
    "plan ids.jsonl --seq-len 64 --epochs endless": (
        r"an endless stream has no steps of its own: pass --tokens, or a number of --epochs"
    ),
    "state diff one": r"streampack state diff takes two states: streampack state diff A B",
}


@pytest.mark.parametrize("command", list(ERRORS))
def test_an_error_is_one_line_that_says_what_to_do(run, folder, command):
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text("\n\n\n")
    (folder / "hollow").mkdir(exist_ok=True)
    (folder / "old.json").write_text('{"version": 1, "stream": {}, "lanes": {}}')
    status, output, error = run(command)
    assert (status, output) == (2, "")
    assert re.fullmatch(rf"streampack: {ERRORS[command]}\n", error), error


def program(folder, command, **streams):
    """Run the command line as a program of its own."""
    path = os.pathsep.join(filter(None, (str(Path(streampack.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "streampack", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        **streams,
    )


def test_the_program_exits_with_2_and_without_a_traceback(folder):
    done = program(folder, "report missing.jsonl --seq-len 64", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"streampack: no file matches 'missing.jsonl' (in {folder})\n"


def test_a_reader_that_has_seen_enough_ends_the_program_without_a_word(folder):
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does once it has its lines
    done = program(folder, "show ids.jsonl --seq-len 64 --rows 3", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_rich_and_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in ("streampack.terminal", "streampack.views"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(streampack, name.partition(".")[2], raising=False)
    status, _, error = run("state ids.jsonl")
    assert status == 2
    assert error == "streampack: the command line needs rich and matplotlib: pip install 'streampack[report]'\n"


@pytest.mark.parametrize(
    "option", ["--tokens inf", "--tokens nan", "--sample 0", "--ranks 0", "--batch-size -1", "--accumulation x"]
)
def test_numbers_that_cannot_be_used_are_refused(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "ids.jsonl", "--seq-len", "64", *option.split()])
    assert stopped.value.code == 2
    name, value = option.split()
    assert re.search(rf"argument {name}: '{value}': (must be|pass a number of) at least 1", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["", "report", "plan", "trace", "show", "state"])
def test_help_is_there(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert "usage: streampack" in capsys.readouterr().out
