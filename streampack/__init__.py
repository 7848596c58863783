"""streampack: packed rows from streamed data, the same on any number of ranks and workers, resumable anywhere."""

from streampack.collate import Collator, PackedRow
from streampack.dataset import PackedDataset
from streampack.files import Files
from streampack.loader import PackedLoader
from streampack.mds import MDSSource
from streampack.mds_writer import read_packed_row, write_mds, write_packed_mds
from streampack.mixture import Mixture
from streampack.ranks import resolve_once
from streampack.retry import Retry
from streampack.sources import BadExample, FunctionSource, SequenceSource, Source
from streampack.state import StateError, merge_states

__version__ = "0.1.0"

__all__ = [
    "BadExample",
    "Collator",
    "Files",
    "FunctionSource",
    "MDSSource",
    "Mixture",
    "PackedDataset",
    "PackedLoader",
    "PackedRow",
    "Retry",
    "SequenceSource",
    "Source",
    "StateError",
    "merge_states",
    "read_packed_row",
    "resolve_once",
    "write_mds",
    "write_packed_mds",
]
