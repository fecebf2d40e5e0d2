"""U99: how tensors are cut for a checkpoint in memory, and ranges of tensors that lie in any order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.memory_parts import Parts
from shardwise.checkpoint.streams import row_major


@given(numel=st.integers(0, 60), count=st.integers(1, 9), data=st.data())
def test_u99_parts_are_even_and_cover_everything(numel: int, count: int, data: st.DataObject) -> None:
    parts = Parts(count)
    spans = [parts.span(numel, part) for part in range(count)]
    assert [element for span in spans for element in range(*span)] == list(range(numel))
    assert max(b - a for a, b in spans) - min(b - a for a, b in spans) <= 1
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    cuts = list(parts.cut(numel, start, stop))
    assert [element for _, a, b in cuts for element in range(a, b)] == list(range(start, stop))
    assert all(spans[part][0] <= a < b <= spans[part][1] for part, a, b in cuts)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_u99_ranges_of_any_memory_order(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    whole = torch.empty([shape[dim] for dim in order]).permute(back)
    whole.copy_(torch.arange(whole.numel()).view(shape))
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    views = list(row_major(whole, start, stop))
    assert [value for view in views for value in view.flatten().tolist()] == list(range(start, stop))
    for view in views:
        view.fill_(-1)  # views, and no copies
    assert (whole == -1).sum() == stop - start
