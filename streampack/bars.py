"""Bars: a tqdm bar over a loader, of rows, with the rows that are still to come as far as they are known."""

from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from streampack.loader import PackedLoader


class ProgressBar(tqdm):  # type: ignore[misc]
    """A pass of a PackedLoader with a progress bar: `for batch in ProgressBar(loader)`.

    It is a tqdm bar with all its methods (`set_postfix(loss=...)`, `write`, `close`). It counts rows of this rank, from
    where the pass is (after a resume not from 0), to as many as the pass seems to have, which gets surer as it goes.

    Args:
        loader: the PackedLoader.
        desc, file, disable, leave, mininterval: as in tqdm; of several ranks, pass `disable=rank > 0`.
    """

    def __init__(
        self,
        loader: PackedLoader,
        *,
        desc: str | None = None,
        file: Any = None,
        disable: bool | None = False,
        leave: bool = True,
        mininterval: float = 0.1,
    ) -> None:
        self.loader = loader
        left = loader.remaining
        super().__init__(
            initial=left.rows_done,
            total=None if left.rows_left is None else left.rows_done + left.rows_left,
            desc=desc,
            file=file,
            disable=disable,
            leave=leave,
            mininterval=mininterval,
            unit="row",
            dynamic_ncols=True,
        )

    def __iter__(self) -> Iterator[Any]:
        """The batches of the pass."""
        try:
            for batch in self.loader:
                yield batch
                left = self.loader.remaining
                if left.rows_left is not None:
                    self.total = left.rows_done + left.rows_left
                self.update(left.rows_done - self.n)
        finally:
            self.close()
