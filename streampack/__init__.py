"""streampack: packed rows from streamed data, the same on any number of ranks and workers, resumable anywhere."""

from streampack.attention import block_mask, context_parallel_part, segment_ids, varlen_lengths
from streampack.checkpoint import StreamState, load_json, load_stream, save_json, save_stream
from streampack.collate import Collator, PackedRow
from streampack.dataset import PackedDataset
from streampack.files import Files
from streampack.isolation import IsolationError, check_isolation
from streampack.loader import PackedLoader
from streampack.loss import global_sum, loss_normalizer, packed_cross_entropy
from streampack.mds import MDSSource
from streampack.mds_writer import read_packed_row, write_mds, write_packed_mds
from streampack.mixture import Mixture
from streampack.passes import count_batches
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
    "IsolationError",
    "MDSSource",
    "Mixture",
    "PackedDataset",
    "PackedLoader",
    "PackedRow",
    "Retry",
    "SequenceSource",
    "Source",
    "StateError",
    "StreamState",
    "block_mask",
    "check_isolation",
    "context_parallel_part",
    "count_batches",
    "global_sum",
    "load_json",
    "load_stream",
    "loss_normalizer",
    "merge_states",
    "packed_cross_entropy",
    "read_packed_row",
    "resolve_once",
    "save_json",
    "save_stream",
    "segment_ids",
    "varlen_lengths",
    "write_mds",
    "write_packed_mds",
]
