"""Settings of all tests. Laws are tried on the same cases each time; `--hypothesis-profile=default` takes new ones."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("ci")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other, ten times as long where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
