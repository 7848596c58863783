"""streampack: packed rows from streamed data, the same on any number of ranks and workers, resumable anywhere."""

from streampack.attention import block_mask, context_parallel_part, segment_ids, varlen_lengths
from streampack.bars import ProgressBar
from streampack.checkpoint import StreamState, load_json, load_stream, read_state, save_json, save_stream
from streampack.collate import Collator, PackedRow
from streampack.dataset import PackedDataset
from streampack.describe import describe_state, diff_states
from streampack.files import Files
from streampack.isolation import IsolationError, check_isolation
from streampack.loader import PackedLoader
from streampack.loss import global_sum, loss_normalizer, packed_cross_entropy
from streampack.mds import MDSSource
from streampack.mds_writer import read_packed_row, write_mds, write_packed_mds
from streampack.mixture import Mixture
from streampack.passes import count_batches
from streampack.plan import make_plan
from streampack.ranks import resolve_once
from streampack.report import make_report
from streampack.retry import Retry
from streampack.show import show_row
from streampack.sources import BadExample, FunctionSource, SequenceSource, Source
from streampack.state import StateError, merge_states
from streampack.trace import trace_rows, trace_step

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
