"""The test bed: a test says how many ranks it wants, and runs on every one of them.

    @ranks(2)                       # or @ranks(2, 4): once on each
    def test_sum(rank, world):      # parametrized values and picklable fixtures may follow
        ...

The ranks are processes that live for the whole session, one pool for each world size, with
a gloo group already set up (`torch.distributed` is initialised when the test begins). A
failure on any rank fails the test and names the rank; a rank that hangs or dies is reported
with its Python stacks, and its pool is replaced.
"""

from __future__ import annotations

import pytest

__all__ = ["ranks"]


def ranks(*counts: int, timeout: float = 90.0) -> pytest.MarkDecorator:
    """Run the test on every rank of a group, once for each of ``counts``; ``timeout`` in seconds."""
    if not counts or any(count < 1 for count in counts):
        raise ValueError(f"ranks(…) needs world sizes of at least 1, got {counts}")
    return pytest.mark.ranks(*counts, timeout=timeout)
