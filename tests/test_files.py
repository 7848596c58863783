"""Files: what is found, how it is cut into shards, and that each shard can be read from anywhere."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import streampack.files
from streampack import PackedDataset, PackedLoader, StateError
from streampack.files import Files
from streampack.sources import Fault, Source, as_source, where

from .loopback import Server
from .streams import examples, files_in_ranges, split_evenly, write_jsonl, write_parquet

ROWS = [{"text": text} for text in ("a", "bc", "", "déf", "ghij", "k")]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def read(source: Files, shard: int, start: int = 0) -> list[Any]:
    """Examples as dicts, faults as (reason, text)."""
    found: list[Any] = []
    for item in source.read(shard, start):
        if isinstance(item, pa.Table):
            found += item.to_pylist()
        else:
            found.append((item.reason, item.what) if isinstance(item, Fault) else item)
    return found


def read_all(source: Files) -> list[list[Any]]:
    return [read(source, shard) for shard in range(source.num_shards)]


def together(shards: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(shards))


def assert_reads_from_anywhere(source: Files) -> None:
    for shard, whole in enumerate(read_all(source)):
        for start in range(len(whole) + 2):
            assert read(source, shard, start) == whole[start:], f"shard {shard} from {start}"


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_globs_paths_and_lists_of_them_find_each_file_once_in_the_order_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/down/c.jsonl", "other.txt"):
        write(tmp_path / "data" / name, jsonl([{"text": name}]))
    monkeypatch.chdir(tmp_path)
    a, b, c = ([{"text": name}] for name in ("a.jsonl", "b.jsonl", "deep/down/c.jsonl"))
    assert read_all(Files("data/*.jsonl")) == [a, b]
    assert read_all(Files("data/**/*.jsonl")) == [a, b, c]
    assert read_all(Files(tmp_path / "data" / "b.jsonl")) == [b]
    twice = [
        Path("data/b.jsonl"),
        str(tmp_path / "data/*.jsonl"),
        "data/deep/../b.jsonl",
        "file://" + str(tmp_path / "data/a.jsonl"),
    ]
    assert read_all(Files(twice)) == [a, b]
    assert isinstance(Files("data/*.jsonl"), Source)
    assert as_source(source := Files("data/*.jsonl"), lanes=4) is source


def test_a_name_with_the_letters_of_globs_is_a_name_where_such_a_file_exists(tmp_path: Path) -> None:
    assert read_all(Files(write(tmp_path / "a[1].jsonl", jsonl(ROWS)))) == [ROWS]


def test_files_of_several_formats_are_one_source(tmp_path: Path) -> None:
    write(tmp_path / "c.jsonl", jsonl(ROWS[:2]))
    pq.write_table(pa.Table.from_pylist(ROWS[2:5]), tmp_path / "b.parquet")
    write(tmp_path / "a.json.gz", gzip.compress(jsonl(ROWS[5:])))
    assert read_all(Files(str(tmp_path / "*"))) == [ROWS[5:], ROWS[2:5], ROWS[:2]]


def test_what_finds_nothing_or_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / "a.jsonl", jsonl(ROWS))
    write(tmp_path / "a.txt", b"text")
    write(tmp_path / "a.parquet.gz", b"")
    write(tmp_path / "empty.jsonl", b"")
    for error, match, arguments in [
        (ValueError, rf"no file matches 'no/\*\.jsonl' \(in {tmp_path}\)", {"files": ["data/*.jsonl", "no/*.jsonl"]}),
        (ValueError, "no file matches 'memory://no/a.jsonl'$", {"files": "memory://no/a.jsonl"}),
        (ValueError, r"no file matches 'memory://no/\*.jsonl'$", {"files": "memory://no/*.jsonl"}),
        (ValueError, r"'data' is a folder: say which of its files, e\.g\. 'data/\*\.jsonl'", {"files": "data"}),
        (ValueError, r"files=\[\]: pass at least one", {"files": []}),
        (TypeError, r"files: 3 is int, not a path or URL", {"files": [3]}),
        (
            ValueError,
            r"a\.txt: its ending is not one of \.jsonl, \.json, .*\.arrow.*format='jsonl'",
            {"files": "a.txt"},
        ),
        (ValueError, r"a\.parquet\.gz: its ending", {"files": "a.parquet.gz"}),
        (ValueError, r"empty\.jsonl: there is nothing in it", {"files": "empty.jsonl"}),
        (TypeError, r"columns='text': pass a list of names", {"files": "data/*", "columns": "text"}),
        (ValueError, r"columns=\[\]: name at least one", {"files": "data/*", "columns": []}),
        (ValueError, r"format='csv': pass one of 'jsonl', 'parquet', 'arrow'", {"files": "data/*", "format": "csv"}),
    ]:
        with pytest.raises(error, match=match):
            Files(**arguments)


def test_the_format_can_be_given_where_the_ending_does_not_tell(tmp_path: Path) -> None:
    assert read_all(Files(write(tmp_path / "a.txt", jsonl(ROWS)), format="jsonl")) == [ROWS]
    assert read_all(Files(write(tmp_path / "a.txt.GZ", gzip.compress(jsonl(ROWS))), format="jsonl")) == [ROWS]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.pq")
    assert read_all(Files(tmp_path / "a.pq", format="parquet")) == [ROWS]


# ---- what identifies the data ----------------------------------------------------------------------------------------


def test_the_name_holds_names_and_sizes_and_not_where_the_data_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("x/a.jsonl", "y/a.jsonl", "y/b.jsonl"):
        write(tmp_path / "here" / name, jsonl(ROWS))
        write(tmp_path / "there" / "deeper" / name, jsonl(ROWS))
        memory.pipe(f"/identity/{name}", jsonl(ROWS))
    expected = f"x/a.jsonl:{len(jsonl(ROWS))} y/a.jsonl:{len(jsonl(ROWS))} y/b.jsonl:{len(jsonl(ROWS))}"
    assert Files(str(tmp_path / "here/**/*.jsonl")).name == expected
    assert Files(str(tmp_path / "there/**/*.jsonl")).name == expected
    assert Files("memory://identity/**/*.jsonl").name == expected
    monkeypatch.chdir(tmp_path / "here")
    assert Files(["x/a.jsonl", "y/*.jsonl"]).name == expected
    assert Files("y/b.jsonl").name == f"b.jsonl:{len(jsonl(ROWS))}"
    assert Files("y/b.jsonl", name="mine").name == "mine"


def test_the_name_of_many_files_is_short_and_differs_where_a_name_or_size_does(tmp_path: Path) -> None:
    for folder in "abc":
        for number in range(5):
            write(tmp_path / folder / f"{number}.jsonl", jsonl(ROWS))
    write(tmp_path / "b" / "2.jsonl", jsonl([*ROWS, *ROWS]))
    (tmp_path / "c" / "2.jsonl").rename(tmp_path / "c" / "2a.jsonl")
    names = [Files(str(tmp_path / folder / "*.jsonl")).name for folder in "abc"]
    size = len(jsonl(ROWS))
    assert names[0].startswith(f"0.jsonl:{size} .. 4.jsonl:{size}, 5 files (")
    assert len(names[0]) < 60
    assert len(set(names)) == 3


def test_the_size_of_ranges_is_part_of_the_name_and_grows_with_all_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"{}\n" * 100)
    assert files_in_ranges(path, range_bytes=300).name == "a.jsonl:300"
    assert files_in_ranges(path, range_bytes=7).name == "a.jsonl:300 in ranges of 7 bytes"
    assert files_in_ranges(path, range_bytes=7).num_shards == 43
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streampack.files, "MOST_RANGES", 10)
        assert files_in_ranges(path, range_bytes=7).num_shards == 6
        assert files_in_ranges(path, range_bytes=7).name == "a.jsonl:300 in ranges of 56 bytes"
        for number in range(20):  # each is one range at least
            write(tmp_path / f"b{number}.jsonl", b"{}\n")
        assert files_in_ranges(str(tmp_path / "*.jsonl"), range_bytes=7).num_shards == 21


def test_a_state_of_files_that_changed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(examples(40)))
    settings: dict[str, Any] = {"seq_len": 64, "lanes": 2}
    state = PackedLoader(PackedDataset(Files(path), None, **settings)).state_dict()
    write(tmp_path / "a.jsonl", jsonl(examples(41)))
    with pytest.raises(StateError, match=r"source='a.jsonl:\d+'.*source='a.jsonl:\d+'"):
        PackedLoader(PackedDataset(Files(path), None, **settings)).load_state_dict(state)


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_a_range_holds_the_lines_that_begin_in_it(tmp_path: Path) -> None:
    lines = [b'[0]\n{"a": 1}\n', b'{"long": "%s"}\n' % (b"x" * 20), b'{"b": 2}\n{"c": 3}']
    path = write(tmp_path / "a.jsonl", b"".join(lines)[4:])  # lines begin at 0, 9, 41 and 50
    source = files_in_ranges(path, range_bytes=10)
    assert read_all(source) == [[{"a": 1}, {"long": "x" * 20}], [], [], [], [{"b": 2}], [{"c": 3}]]
    assert_reads_from_anywhere(source)


line_texts = st.one_of(
    st.sampled_from(["", " ", "\t\r"]),
    st.dictionaries(st.text(max_size=3), st.text(max_size=12), max_size=2).map(
        lambda row: json.dumps(row, ensure_ascii=False)
    ),
    st.integers(0, 60).map(lambda size: json.dumps({"long": "é" * size}, ensure_ascii=False)),
)


@given(
    texts=st.lists(line_texts, min_size=1, max_size=8),
    newline=st.sampled_from(["\n", "\r\n"]),
    ends=st.booleans(),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)),
)
@settings(deadline=None, max_examples=150)
def test_shards_together_are_the_lines_whatever_the_ranges(
    texts: list[str], newline: str, ends: bool, sizes: tuple[int, int, int]
) -> None:
    data = (newline.join(texts) + newline * ends).encode()
    expected = [json.loads(text) for text in texts if text.strip()]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("streampack.storage.LOCAL_PIECE", sizes[1])
        patch.setattr("streampack.lines.MARGIN", sizes[2])
        if not data:
            return
        source = files_in_ranges(write(Path(folder) / "a.jsonl", data), range_bytes=sizes[0])
        assert source.num_shards == -(-len(data) // sizes[0])
        assert [row for shard in read_all(source) for row in shard] == expected
        assert_reads_from_anywhere(source)


@pytest.mark.parametrize("range_bytes", [1, 2, 3, 5, 1000])
def test_a_byte_order_mark_is_no_content(tmp_path: Path, range_bytes: int) -> None:
    source = files_in_ranges(write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS)), range_bytes=range_bytes)
    assert together(read_all(source)) == ROWS
    assert source.describe(0, 0) == f"{tmp_path}/a.jsonl, line 1"
    source = Files(write(tmp_path / "a.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + jsonl(ROWS))))
    assert read_all(source) == [ROWS]


def test_a_bad_line_is_a_fault_in_its_place_and_says_what_is_wrong(tmp_path: Path) -> None:
    lines = [
        b'{"text": "first"}',
        b"{bad json}",
        b'{"text": "cut',
        b"[1, 2]",
        b'"text"',
        b'{"text": "\xff' + b"x" * 100 + b'"}',
        b"",
        b"[" * 100_000,
        b"{",
        b'{"text": "last"}',
    ]
    source = Files(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    [found] = read_all(source)
    assert [item if isinstance(item, dict) else item[0] for item in found] == [
        {"text": "first"},
        *["malformed"] * 7,
        {"text": "last"},
    ]
    whats = [item[1] for item in found if not isinstance(item, dict)]
    assert whats[:4] == [
        "the line is not JSON: Expecting property name enclosed in double quotes (character 1), in '{bad json}'",
        'the line is not JSON: Invalid control character (character 13), in \'{"text": "cut\'',
        "the line is a JSON list, not an object: '[1, 2]'",
        "the line is a JSON str, not an object: '\"text\"'",
    ]
    assert whats[4].startswith('the line is not UTF-8: invalid start byte (byte 10), in \'{"text": "\\\\xffxxx')
    assert len(whats[4]) < 200
    assert whats[5].startswith("the line cannot be parsed: ")
    assert len(whats[5]) < 250
    assert whats[6].endswith("(is this one document over several lines?)")
    assert_reads_from_anywhere(source)


def test_columns_that_come_and_go_and_change_their_type_stop_nothing(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "meta": None},
        {"text": "b", "meta": {"x": 1}},
        {"meta": [1], "more": 2},
    ]
    path = write(tmp_path / "a.jsonl", jsonl(rows))
    assert read_all(Files(path)) == [rows]
    assert read_all(Files(path, columns=["more", "text", "text"])) == [[{"text": "a"}, {"text": "b"}, {"more": 2}]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow", "memory://changed/a.jsonl"])
def test_a_file_that_changed_its_size_since_is_refused(tmp_path: Path, name: str) -> None:
    path = name if "://" in name else str(tmp_path / name)
    with fsspec.open(path, "wb") as file:
        file.write(content_of(name, ROWS))
    source = Files(path)
    assert read_all(source) == [ROWS]
    with fsspec.open(path, "wb") as file:
        file.write(content_of(name, ROWS * 50))
    before, now = len(content_of(name, ROWS)), len(content_of(name, ROWS * 50))
    with pytest.raises(ValueError, match=rf"a\.\S+ has {now} bytes, and had {before} when it was listed"):
        read_all(source)


# ---- compressed lines ------------------------------------------------------------------------------------------------

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": lambda data: bz2.compress(data, 1),  # blocks of 100 kB
    ".xz": lzma.compress,
}


def content_of(name: str, rows: list[dict[str, Any]], *, group: int = 100) -> bytes:
    """A file of the format that its name says; row groups and record batches have `group` rows."""
    ending = os.path.splitext(name)[1]
    if ending in COMPRESS:
        return COMPRESS[ending](jsonl(rows))
    if ending == ".jsonl":
        return jsonl(rows)
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    if ending == ".parquet":
        pq.write_table(table, out, row_group_size=group)
    else:
        new = pa.ipc.new_stream if name.endswith(".stream.arrow") else pa.ipc.new_file
        with new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    return out.getvalue()


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_file_is_one_shard(tmp_path: Path, ending: str) -> None:
    source = Files(write(tmp_path / f"a.jsonl{ending}", COMPRESS[ending](b"\n" + jsonl(ROWS) + b' \r\n{"last": 1}')))
    assert read_all(source) == [[*ROWS, {"last": 1}]]
    assert_reads_from_anywhere(source)
    assert (source.num_shards, source.num_examples) == (1, None)
    assert source.locate(0, 2) == (f"{tmp_path}/a.jsonl{ending}", 2)
    assert source.describe(0, 2) == f"{tmp_path}/a.jsonl{ending}, line 4"


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_a_file_of_several_compressed_ones_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, piece: int
) -> None:
    monkeypatch.setattr("streampack.lines._COMPRESSED_PIECE", piece)
    parts = [jsonl(ROWS)[:11], b"", jsonl(ROWS)[11:]]
    data = b"".join(map(COMPRESS[ending], parts)) + b"\0" * 8
    assert read_all(Files(write(tmp_path / f"a.jsonl{ending}", data))) == [ROWS]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_file_that_ends_early_gives_its_whole_lines_and_then_a_fault(tmp_path: Path, ending: str) -> None:
    rows = [{"text": os.urandom(2000).hex()} for _ in range(100)]
    whole = COMPRESS[ending](jsonl(rows))
    for size, least, most in [(len(whole) * 3 // 4, 1, 99), (len(whole) - 1, 1, 100), (0, 0, 0)]:
        source = Files(write(tmp_path / f"a.jsonl{ending}", whole[:size]))
        [found] = read_all(source)
        count = len(found) - 1
        assert least <= count <= most
        assert found[:-1] == rows[:count]
        assert found[-1] == ("cut_short", f"the {ending} file ends early: what came after its {size} bytes is lost")
        for start in (0, count // 2, count, count + 1):
            assert read(source, 0, start) == found[start:]
        assert source.describe(0, count) == f"{tmp_path}/a.jsonl{ending}, example {count}"


@pytest.mark.parametrize("ending", COMPRESS)
def test_damaged_compressed_data_is_an_error_that_names_the_file(tmp_path: Path, ending: str) -> None:
    data = bytearray(COMPRESS[ending](jsonl([{"text": os.urandom(50).hex()} for _ in range(500)])))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    source = Files(write(tmp_path / f"a.jsonl{ending}", bytes(data)))
    with pytest.raises(
        ValueError, match=rf"a\.jsonl{ending} is damaged near its byte \d+: .*; fetch or write it again"
    ):
        read_all(source)


def test_a_file_with_a_window_of_gigabytes_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(jsonl(ROWS)) + compressor.flush()
    assert zstandard.get_frame_parameters(data).window_size > 1 << 27  # more than zstandard allows by itself
    assert read_all(Files(write(tmp_path / "a.jsonl.zst", data))) == [ROWS]


def test_a_missing_zstandard_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl.zst", COMPRESS[".zst"](jsonl(ROWS)))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"a\.jsonl\.zst is compressed with Zstandard: pip install zstandard"):
        Files(path)


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def test_each_row_group_of_a_parquet_file_is_a_shard(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS[:5]), ("b", ROWS[5:])):
        write(tmp_path / f"{name}.parquet", content_of("a.parquet", rows, group=2))
    source = Files(str(tmp_path / "*.parquet"))
    assert read_all(source) == [ROWS[:2], ROWS[2:4], ROWS[4:5], ROWS[5:]]
    assert_reads_from_anywhere(source)
    assert (source.num_examples, source.random_access) == (6, False)
    assert source.locate(1, 1) == (f"{tmp_path}/a.parquet row group 1", 1)
    assert source.describe(1, 1) == f"{tmp_path}/a.parquet, row group 1, row 1"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream.arrow"])
def test_a_part_that_is_read_to_its_end_is_not_opened_again(tmp_path: Path, name: str) -> None:
    source = Files(write(tmp_path / name, content_of(name, ROWS, group=2)))
    (tmp_path / name).unlink()
    assert read(source, 2, 2) == []
    with pytest.raises(FileNotFoundError):
        read(source, 2, 1)


def test_a_long_row_group_is_read_in_tables_of_256_from_anywhere(tmp_path: Path) -> None:
    rows = [{"n": number} for number in range(700)]
    source = Files(write(tmp_path / "a.parquet", content_of("a.parquet", rows, group=700)))
    assert [len(table) for table in source.read(0, 0)] == [256, 256, 188]
    for start in (1, 255, 256, 257, 511, 512, 699, 700, 701):
        assert read(source, 0, start) == rows[start:]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream.arrow"])
def test_only_the_columns_asked_for_are_in_the_tables_where_a_file_has_them(tmp_path: Path, name: str) -> None:
    ending = name.removeprefix("a")
    rows = [{"text": "a", "n": 1, "meta": {"text": "b"}, "meta.x": 2}]
    write(tmp_path / f"a{ending}", content_of(name, rows))
    write(tmp_path / f"b{ending}", content_of(name, [{"n": 3}]))
    for columns, expected in [
        (["meta", "text"], [{"meta": {"text": "b"}, "text": "a"}, {}]),
        (["n", "none"], [{"n": 1}, {"n": 3}]),
    ]:
        tables = [
            table for shard in (0, 1) for table in Files(str(tmp_path / f"*{ending}"), columns=columns).read(shard, 0)
        ]
        assert [table.column_names for table in tables] == [list(row) for row in expected]
        assert [table.num_rows for table in tables] == [1, 1]
        assert [row for table in tables for row in table.to_pylist()] == expected


@pytest.mark.parametrize("size", [0, 3, 200, -1])
def test_a_parquet_file_that_ends_early_is_a_fault(tmp_path: Path, size: int) -> None:
    data = content_of("a.parquet", ROWS)
    data = data[: size if size >= 0 else len(data) - 1]
    source = Files(write(tmp_path / "a.parquet", data))
    message = f"{tmp_path}/a.parquet ends early: what came after its {len(data)} bytes is lost; fetch it again"
    assert read_all(source) == [[("cut_short", message)]]
    assert_reads_from_anywhere(source)
    assert (source.num_shards, source.num_examples) == (1, 1)
    assert where(source, 0, 0) == f"source 'a.parquet:{len(data)}', {tmp_path}/a.parquet"


def test_a_damaged_row_group_or_footer_is_an_error_that_names_it(tmp_path: Path) -> None:
    rows = [{"text": os.urandom(50).hex()} for _ in range(300)]
    data = bytearray(content_of("a.parquet", rows, group=100))
    places = pq.read_metadata(io.BytesIO(bytes(data))).row_group(1).column(0)
    data[places.data_page_offset : places.data_page_offset + 60] = b"\xff" * 60
    source = Files(write(tmp_path / "a.parquet", bytes(data)))
    assert read(source, 0) == rows[:100]
    with pytest.raises(
        ValueError, match=r"a\.parquet, row group 1: cannot be read \(.*\); fetch or write the file again"
    ):
        read(source, 1)

    out = io.BytesIO()
    pq.write_table(pa.table({"n": [5] * 100}), out, compression="none", use_dictionary=False, write_page_checksum=True)
    one_bit = bytearray(out.getvalue())
    one_bit[one_bit.index(b"\5\0\0\0\0\0\0\0") + 8] ^= 1
    with pytest.raises(ValueError, match=r"row group 0: cannot be read \(.*CRC checksum.*\)"):
        read_all(Files(write(tmp_path / "b.parquet", bytes(one_bit))))

    data[-60:-20] = b"\xff" * 40
    with pytest.raises(ValueError, match=r"a\.parquet, its footer: cannot be read"):
        Files(write(tmp_path / "a.parquet", bytes(data)))


# ---- Arrow -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_each_record_batch_of_an_arrow_file_is_a_shard(tmp_path: Path, kind: str, compression: str | None) -> None:
    table = pa.Table.from_pylist(ROWS)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with new(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)
    source = Files(tmp_path / "a.arrow")
    assert read_all(source) == [ROWS[:4], ROWS[4:]]
    assert_reads_from_anywhere(source)
    assert (source.num_examples, source.random_access) == (6, True)
    assert source.locate(1, 1) == (f"{tmp_path}/a.arrow record batch 1", 1)
    assert source.describe(1, 1) == f"{tmp_path}/a.arrow, record batch 1, row 1"


def test_what_save_to_disk_writes_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS * 100).save_to_disk(tmp_path / "saved", num_shards=2)
    source = Files(str(tmp_path / "saved" / "*.arrow"))
    assert together(read_all(source)) == ROWS * 100
    assert source.num_examples == 600


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_dictionaries_are_read(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": pa.array(["x", "y", "x", "y"]).dictionary_encode()})
    new = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with new(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    source = Files(tmp_path / "a.arrow")
    assert (
        source.num_shards == {"file": 2, "stream": 1}[kind]
    )  # of a stream they are known only to who reads it through
    assert together(read_all(source)) == [{"text": text} for text in "xyxy"]
    assert_reads_from_anywhere(source)


@pytest.mark.parametrize("kind", ["a.arrow", "a.stream.arrow"])
def test_an_arrow_file_that_ends_early_gives_its_whole_batches_and_then_a_fault(tmp_path: Path, kind: str) -> None:
    data = content_of(kind, ROWS, group=2)
    whole = [ROWS[:2], ROWS[2:4], ROWS[4:]]
    seen = set()
    for size in range(0, len(data) - 8, 16):
        source = Files(write(tmp_path / kind, data[:size]))
        message = f"{tmp_path}/{kind} ends early: what came after its {size} bytes is lost; fetch it again"
        found = read_all(source)
        fault = [] if found == whole[: len(found)] else [[("cut_short", message)]]
        assert found == [*whole[: source.num_shards - len(fault)], *fault]
        seen.add((source.num_shards, bool(fault)))
    assert {(1, True), (2, True), (3, True)} <= seen


def test_a_damaged_record_batch_is_an_error_that_names_it(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{number:0100}" for number in range(200)]})
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table, max_chunksize=100)
    data = out.getvalue()
    frame = data.rindex(b"\x04\x22\x4d\x18")  # of the last compressed buffer
    source = Files(write(tmp_path / "a.arrow", data[:frame] + b"\0\0\0\0" + data[frame + 4 :]))
    assert read(source, 0) == table.slice(0, 100).to_pylist()
    with pytest.raises(ValueError, match=r"a\.arrow, record batch 1: cannot be read"):
        read(source, 1)


def test_rows_are_not_counted_where_the_head_of_a_record_batch_is_damaged(tmp_path: Path) -> None:
    data = content_of("a.arrow", ROWS, group=2)
    head = [place for place in range(0, len(data), 8) if data[place : place + 4] == b"\xff" * 4][2]  # schema, 0, 1
    source = Files(write(tmp_path / "a.arrow", data[: head + 4] + b"\xff\xff\xff\x7f" + data[head + 8 :]))
    assert (source.num_shards, source.num_examples, source.random_access) == (3, None, False)
    assert read(source, 0) == ROWS[:2]


# ---- remote ----------------------------------------------------------------------------------------------------------

SCHEMES = ["loopback", "http"]


@pytest.fixture(params=SCHEMES)
def scheme(request: Any) -> str:
    if request.param == "http":
        pytest.importorskip("aiohttp")
    return str(request.param)


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.stream.arrow"]


@pytest.mark.parametrize("name", NAMES)
def test_a_remote_file_gives_what_the_local_one_gives(tmp_path: Path, scheme: str, name: str) -> None:
    data = content_of(name, ROWS, group=2)
    local = files_in_ranges(write(tmp_path / name, data), range_bytes=16)
    with Server({f"/data/{name}": data}) as server:
        remote = files_in_ranges(f"{scheme}://{server.address}/data/{name}", range_bytes=16)
        assert remote.name == local.name
        assert together(read_all(remote)) == together(read_all(local)) == ROWS
        assert_reads_from_anywhere(remote)
        assert remote.random_access is False
    assert remote.num_shards == {"a.jsonl": 6, "a.parquet": 3, "a.arrow": 3}.get(name, 1)
    assert remote.num_examples == (6 if name == "a.parquet" else None)


def test_to_resume_in_the_middle_of_a_remote_file_asks_for_no_byte_before(scheme: str) -> None:
    data = jsonl([{"text": f"line {number}"} for number in range(20_000)])
    with Server({"/a.jsonl": data}) as server:
        source = files_in_ranges(f"{scheme}://{server.address}/a.jsonl", range_bytes=40_000)
        assert server.asked == []  # nor is anything read to list it
        middle = source.num_shards // 2
        expected = data[data.index(b"\n", middle * 40_000 - 1) + 1 :].splitlines()
        assert read(source, middle, 100)[:5] == [json.loads(line) for line in expected[100:105]]
        assert server.asked == [("/a.jsonl", middle * 40_000 - 1, (middle + 1) * 40_000 + (16 << 10))]
        server.asked.clear()
        rows = together(read_all(source))
        assert len(rows) == 20_000
        assert len(server.asked) == source.num_shards


def test_a_long_remote_line_is_read_once_by_the_range_in_which_it_begins(scheme: str) -> None:
    data = jsonl([{"text": "a"}, {"text": "b" * 300_000}, {"text": "c"}])
    with Server({"/a.jsonl": data}) as server:
        source = files_in_ranges(f"{scheme}://{server.address}/a.jsonl", range_bytes=50_000)
        assert [len(rows) for rows in read_all(source)] == [2, *[0] * (source.num_shards - 2), 1]
        assert sum(stop - first for _, first, stop in server.asked) < 3 * len(data)
        assert len(server.asked) < source.num_shards + 6  # pieces of a long line grow


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_remote_part_is_read_without_the_others_and_without_other_columns(scheme: str, name: str) -> None:
    rows = [{"text": os.urandom(100).hex(), "other": os.urandom(1000).hex()} for _ in range(600)]
    data = content_of(name, rows, group=200)
    with Server({f"/{name}": data}) as server:
        source = Files(f"{scheme}://{server.address}/{name}", columns=["text"])
        server.asked.clear()
        assert read(source, 2, 150) == [{"text": row["text"]} for row in rows[550:]]
        footer = 64 << 10
        assert sum(stop - first for _, first, stop in server.asked) - footer < 200 * 250


def test_remote_parquet_files_that_end_early_are_faults_and_those_that_cannot_be_reached_are_errors(
    scheme: str,
) -> None:
    data = content_of("a.parquet", ROWS)
    with Server({"/a.parquet": data[:-9], "/b.parquet": data, "/c.arrow": content_of("c.arrow", ROWS)[:-9]}) as server:
        url = f"{scheme}://{server.address}"
        source = Files([f"{url}/a.parquet", f"{url}/b.parquet", f"{url}/c.arrow"])
        first, second, third = read_all(source)
        assert [first[0][0], second, third[0][0]] == ["cut_short", ROWS, "cut_short"]
        server.broken.add("/b.parquet")
        with pytest.raises(Exception) as error:  # noqa: PT011 - of the filesystem's own type
            Files(f"{url}/b.parquet")
        assert not isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_a_server_come_as_they_are_and_reading_goes_on_where_it_was(scheme: str, name: str) -> None:
    with Server({f"/{name}": content_of(name, ROWS)}) as server:
        source = Files(f"{scheme}://{server.address}/{name}")
        server.broken.add(f"/{name}")
        found = []
        with pytest.raises(Exception) as error:  # noqa: PT011 - of the filesystem's own type
            found = read(source, 0)
        assert not isinstance(error.value, ValueError)
        assert "Arrow" not in type(error.value).__name__
        server.broken.clear()
        server.short.add(f"/{name}")
        with pytest.raises(OSError, match=rf"{name}: \d+ bytes came where bytes \d+ to \d+ were asked for"):
            read(source, 0)
        server.short.clear()
        assert found + read(source, 0, len(found)) == ROWS


def test_a_remote_arrow_stream_that_ends_early_gives_its_whole_batches_and_then_a_fault(scheme: str) -> None:
    data = content_of("a.stream.arrow", ROWS, group=2)
    with Server({"/a.arrow": data[: len(data) - 40]}) as server:
        source = Files(f"{scheme}://{server.address}/a.arrow")
        [found] = read_all(source)
        assert found[:4] == ROWS[:4]
        assert [item[0] for item in found[4:]] == ["cut_short"]
        assert_reads_from_anywhere(source)


def test_the_query_of_a_web_address_is_sent_and_is_in_no_name(scheme: str) -> None:
    if scheme == "loopback":
        pytest.skip("only http:// has queries")
    with Server({"/a.jsonl": jsonl(ROWS)}) as server:
        source = Files(f"http://{server.address}/a.jsonl?signature=secret")
        assert read_all(source) == [ROWS]
        assert source.name == f"a.jsonl:{len(jsonl(ROWS))}"
        assert source.locate(0, 3) == (f"http://{server.address}/a.jsonl", 3)
        assert source.describe(0, 3) == f"http://{server.address}/a.jsonl, byte 42"


def test_readers_of_one_remote_file_do_not_disturb_each_other() -> None:
    memory = fsspec.filesystem("memory")
    for name in NAMES:
        memory.pipe(f"/shared/{name}", content_of(name, ROWS, group=2))
        source = Files(f"memory://shared/{name}")
        readers = [source.read(0, 0) for _ in range(3)]
        found: list[list[Any]] = [[], [], []]
        for _ in range(6):
            for reader, rows in zip(readers, found, strict=True):
                item = next(reader, None)
                rows += item.to_pylist() if isinstance(item, pa.Table) else [item] if item else []
        assert found == [read(source, 0)] * 3
        assert found[0][:2] == ROWS[:2]


def test_hidden_files_are_not_found_by_globs_and_files_in_archives_and_behind_caches_are(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/chain/a.jsonl", jsonl(ROWS))
    memory.pipe("/chain/._a.jsonl", b"\0\5\6\7")
    memory.mkdirs("/chain/folder.jsonl")
    write(tmp_path / ".b.jsonl", b"\0")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/b.jsonl", jsonl(ROWS))
    cached = Files(
        "simplecache::memory://chain/*.jsonl", storage_options={"simplecache": {"cache_storage": str(tmp_path)}}
    )
    zipped = Files(f"zip://in/*.jsonl::{tmp_path}/a.zip")
    assert read_all(Files("memory://chain/*.jsonl")) == read_all(cached) == read_all(zipped) == [ROWS]
    assert cached.name == f"a.jsonl:{len(jsonl(ROWS))}"
    assert zipped.name == f"b.jsonl:{len(jsonl(ROWS))}"
    with pytest.raises(ValueError, match="no file matches"):
        Files(str(tmp_path / "*.jsonl"))


# ---- where an example is ---------------------------------------------------------------------------------------------


def test_a_bad_line_of_a_local_file_is_told_by_its_number_and_of_a_remote_one_by_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [b"", b'{"n": 0}', b" ", b'{"n": 1}', b'{"n": 2}\r', b"", b'{"n": 3}']
    write(tmp_path / "data" / "a.jsonl", b"\n".join(lines))
    fsspec.filesystem("memory").pipe("/lines/a.jsonl", b"\n".join(lines))
    local = files_in_ranges("data/a.jsonl", range_bytes=16)
    assert read_all(local) == [[{"n": 0}, {"n": 1}], [{"n": 2}], [{"n": 3}]]
    assert [local.locate(shard, 0) for shard in range(3)] == [
        (f"data/a.jsonl from byte {byte}", 0) for byte in (0, 16, 32)
    ]
    places = [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [local.describe(*place) for place in places] == [f"data/a.jsonl, line {number}" for number in (2, 4, 5, 7)]
    assert local.describe(1, 5) == "data/a.jsonl, from byte 16, example 5"
    remote = files_in_ranges("memory://lines/a.jsonl", range_bytes=16)
    assert [remote.describe(*place) for place in places] == [
        f"memory:///lines/a.jsonl, byte {byte}" for byte in (1, 12, 21, 32)
    ]
    assert where(local, 2, 0) == f"source '{local.name}', data/a.jsonl, line 7"
    assert where(local, 2, 0, may_read=False) == f"source '{local.name}', shard data/a.jsonl from byte 32, index 0"
    assert Files("data/a.jsonl").locate(0, 2) == ("data/a.jsonl", 2)

    monkeypatch.setattr("streampack.files._MOST_COUNTED", 20)  # further on counting would take long
    assert local.describe(2, 0) == "data/a.jsonl, byte 32"
    (tmp_path / "data" / "a.jsonl").unlink()
    assert local.describe(2, 0) == "data/a.jsonl, from byte 32, example 0"


def test_an_error_of_the_data_names_file_and_line(tmp_path: Path) -> None:
    source = Files(write(tmp_path / "a.jsonl", b'{"input_ids": [1, 2]}\n\n{"input_ids": null}\n'))
    dataset = PackedDataset(source, None, seq_len=4, lanes=1, shuffle=False)
    with pytest.raises(ValueError, match=rf"source '{source.name}', {tmp_path}/a.jsonl, line 3: "):
        list(dataset)


def test_an_error_of_reading_names_the_place_without_reading_again(tmp_path: Path) -> None:
    source = Files(write(tmp_path / "a.jsonl", b'{"input_ids": [1, 2]}\n' * 5))
    write(tmp_path / "a.jsonl", b"\n")
    dataset = PackedDataset(source, None, seq_len=4, lanes=1, shuffle=False)
    with pytest.raises(ValueError, match="was changed since") as error:
        list(dataset)
    place = f"while reading source '{source.name}', shard {tmp_path}/a.jsonl, index 0"
    assert place in " ".join([str(error.value), *getattr(error.value, "__notes__", [])])


# ---- in processes ----------------------------------------------------------------------------------------------------


def test_many_files_are_a_small_object_without_lists(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"part-{number:06}-of-100000.jsonl").write_bytes(b"{}\n")
    source = Files(str(tmp_path / "*.jsonl"))
    assert len(pickle.dumps(source)) < 3000 * 80
    assert [name for name, value in vars(source).items() if isinstance(value, list | tuple | dict) and len(value)] == []
    assert read(pickle.loads(pickle.dumps(source)), 2999) == [{}]
    assert source.locate(2999, 0) == (f"{tmp_path}/part-002999-of-100000.jsonl", 0)


def test_relative_paths_hold_in_a_process_with_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", jsonl(ROWS))
    monkeypatch.chdir(tmp_path)
    source = Files("a.jsonl")
    monkeypatch.chdir("/")
    assert read_all(pickle.loads(pickle.dumps(source))) == [ROWS]


@pytest.mark.parametrize("name", NAMES)
def test_files_are_open_only_while_they_are_read(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, content_of(name, ROWS * 200))

    def times_open() -> int:
        return [file.path for file in psutil.Process().open_files()].count(path)

    source = Files(path)
    reader = source.read(0, 0)
    assert times_open() == 0
    next(reader)
    assert times_open() <= 1
    del reader
    assert times_open() == 0


def rows_of(loader: Any) -> list[list[int]]:
    return [row for batch in loader for row in batch["input_ids"].reshape(-1, 64).tolist()]


def packed(source: Files) -> PackedDataset:
    return PackedDataset(source, None, seq_len=64, buffer_size=8, shuffle_block=10, seed=3, lanes=4)


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:source .* processes read all of them")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_give_the_rows_of_one_process_and_a_state_goes_from_one_to_the_other(
    tmp_path: Path, method: str
) -> None:
    parts = split_evenly(examples(300), 3)
    write_jsonl(tmp_path, parts[:1])
    write_parquet(tmp_path, parts[1:2], row_group_size=30)
    write(tmp_path / "c.jsonl.gz", gzip.compress(jsonl(parts[2])))
    source = files_in_ranges(str(tmp_path / "*"), range_bytes=500)
    alone = rows_of(PackedLoader(packed(source), 2))
    assert len(alone) > 40
    loader = PackedLoader(packed(source), 2, num_workers=2, multiprocessing_context=method)
    batches, rows = iter(loader), []
    for _ in range(7):
        rows += rows_of([next(batches)])
    again = PackedLoader(packed(files_in_ranges(str(tmp_path / "*"), range_bytes=500)), 2)
    again.load_state_dict(loader.state_dict())
    assert rows_of(again) == alone[14:]
    assert rows + rows_of(batches) == alone


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:source .* processes read all of them")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_a_remote_file_that_was_read_before_they_were_started(scheme: str, method: str) -> None:
    if (scheme, method) == ("loopback", "spawn"):
        pytest.skip("a spawned process does not know the filesystem of these tests")
    with Server({"/a.jsonl": jsonl(examples(300)), "/b.parquet": content_of("b.parquet", examples(100))}) as server:
        source = files_in_ranges(
            [f"{scheme}://{server.address}/{name}" for name in ("a.jsonl", "b.parquet")], range_bytes=2000
        )
        alone = rows_of(PackedLoader(packed(source), 2))
        loader = PackedLoader(packed(source), 2, num_workers=2, multiprocessing_context=method, timeout=60)
        assert rows_of(loader) == alone
