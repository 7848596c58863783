"""Opening: what a person names on a command line (a source, a tokenizer, settings) as the objects of the library."""

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streampack.dataset import PackedDataset
from streampack.files import Files
from streampack.huggingface import open_hub, open_saved
from streampack.mds import MDSSource
from streampack.packing import UNPACKED
from streampack.storage import is_url

_FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", ".bz2", ".xz")


def open_source(
    names: Sequence[str], *, config: str | None = None, split: str | None = None, revision: str | None = None
) -> Any:
    """A source by its name: files, globs and URLs (JSONL, Parquet, Arrow); a folder of MDS shards, of `save_to_disk`,
    or of such files; a dataset of the Hub.

    Args:
        names: several files, or one of the others.
        config, revision: of a dataset of the Hub.
        split: of that, or of what `save_to_disk` wrote, or the subfolder of MDS.

    Raises:
        ValueError: if there is no such thing, or nothing in it.
        ImportError: for MDS without mosaicml-streaming.
    """
    name = os.path.expanduser(names[0])
    if len(names) == 1 and os.path.isdir(name):
        return _open_folder(Path(name), split=split)
    if len(names) > 1 or os.path.exists(name) or is_url(name) or glob.has_magic(name) or name.endswith(_FILE_ENDINGS):
        return Files(list(names))
    return open_hub(name, config=config, split=split, revision=revision)


def _open_folder(folder: Path, *, split: str | None) -> Any:
    inner = folder / (split or "")
    if (inner / "index.json").is_file():
        return MDSSource(inner)
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return open_saved(str(folder), split=split)
    files = sorted(str(path) for path in folder.rglob("*") if path.name.endswith(_FILE_ENDINGS) and path.is_file())
    if not files:
        raise ValueError(
            f"{folder} is a folder without JSONL, Parquet or Arrow files, MDS shards (index.json) or what save_to_disk "
            "writes (dataset_info.json)"
        )
    return Files(files)


def open_tokenizer(name: str) -> Any:
    """A tokenizer by its folder or its name on the Hub.

    Raises:
        ValueError: if there is none, with the reason.
    """
    from transformers import AutoTokenizer  # it takes seconds, and token ids do without

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise ValueError(f"no tokenizer {name!r}, neither a folder here nor on the Hub: {reason}") from error


SETTINGS = (
    *("seq_len", "format", "targets", "text_column", "lanes", "buffer_size", "shuffle", "shuffle_block", "seed"),
    *("epochs", "overlong", "truncate_keep", "packing", "append_eos", "empty", "no_target", "bad", "vocab_size"),
    *("max_example_len", "max_examples_per_row", "pad_to_multiple_of", "pad_token_id"),
)
"""The arguments of PackedDataset that a saved state holds, all under these names."""


def open_dataset(
    source: Any, tokenizer: Any, *, given: Mapping[str, Any], saved: Mapping[str, Any] | None = None
) -> PackedDataset:
    """The stream of a source: settings are those given, else those of a saved state, else the defaults.

    Args:
        source, tokenizer: as in PackedDataset.
        given: arguments of PackedDataset.
        saved: what identifies the stream in a state (`state["stream"]`).

    Raises:
        ValueError: for a state whose stream cannot be built from names, and as PackedDataset.
    """
    before: dict[str, Any] = {}
    if saved is not None:
        for what in ("weights", "transform"):
            if saved.get(what) is not None:
                raise ValueError(
                    f"the state is of a stream with {'a Mixture' if what == 'weights' else 'a transform'} "
                    f"({saved[what]}), which cannot be built from names: call streampack.trace_step(dataset, state, "
                    "...) with your dataset"
                )
        before = {name: saved[name] for name in SETTINGS if saved.get(name) is not None or name == "epochs"}
        if saved.get("packing") in UNPACKED:  # they say themselves that there is one in a row
            before.pop("max_examples_per_row", None)
    settings = {**before, **given}
    if "source_name" in settings and isinstance(getattr(source, "name", None), str):
        source.name = settings.pop("source_name")
    if "seq_len" not in settings:
        raise ValueError("how long are rows? pass seq_len=...")
    return PackedDataset(source, tokenizer, **settings)
