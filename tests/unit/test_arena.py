"""Shared memory of one process: which bytes are free, and when they are free again."""

from __future__ import annotations

import gc
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.arena import Arena, Blocks

_PAGE = 4096


def _resident(arena: Arena) -> int:
    """Bytes of the arena's file that have pages."""
    return os.fstat(arena.descriptor).st_blocks * 512


@pytest.fixture
def arena() -> Arena:
    return Arena(64 * _PAGE)


def test_blocks_are_reused_and_joined() -> None:
    blocks = Blocks(300)
    first, second, third = (blocks.take(100) for _ in range(3))
    assert (first, second, third) == ((0, False), (100, False), (200, False))
    assert blocks.take(1) is None
    blocks.give_back(0)
    blocks.give_back(200)
    assert blocks.take(150) is None
    blocks.give_back(100)
    assert blocks.take(300) == (0, True)


def test_blocks_with_pages_are_used_before_those_without() -> None:
    blocks = Blocks(1000)
    for _ in range(3):
        blocks.take(100)
    blocks.give_back(0, ready=False)
    blocks.give_back(200)
    assert blocks.take(50) == (200, True)
    assert blocks.take(100) == (0, False)
    assert blocks.take(50) == (250, True)


def test_the_highest_surplus_goes_first_and_is_joined_with_what_has_no_pages() -> None:
    blocks = Blocks(1000)
    for _ in range(5):
        blocks.take(100)
    for start in (0, 200, 400):
        blocks.give_back(start)
    assert blocks.surplus(150) == [(400, 100), (200, 100)]
    assert blocks.surplus(150) == []
    assert blocks.take(600) == (400, False)
    assert blocks.take(100) == (0, True)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40))))
def test_blocks_never_overlap_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    blocks, live = Blocks(200), dict[int, int]()
    for taking, amount in steps:
        if taking:
            if taken := blocks.take(amount):
                live[taken[0]] = amount
        elif live:
            start = sorted(live)[amount % len(live)]
            blocks.give_back(start)
            del live[start]
        spans = sorted(live.items())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert blocks.used == sum(live.values())
    for start in live:
        blocks.give_back(start)
    blocks.surplus(0)
    assert blocks.take(200) == (0, False)


def test_a_tensor_lies_in_the_arena_and_gives_its_place_back(arena: Arena) -> None:
    tensor = arena.allocate(1000, torch.bfloat16)
    assert tensor is not None
    assert tensor.shape == (1000,)
    assert arena.offset_of(tensor[10:]) == arena.offset_of(tensor) + 20
    assert arena.offset_of(torch.empty(3)) is None
    assert arena.used == _PAGE
    del tensor
    assert arena.used == 0


def test_a_view_keeps_the_place(arena: Arena) -> None:
    view = arena.allocate(1000, torch.float32)[5:7].view(2, 1)
    gc.collect()
    assert arena.used == _PAGE
    view.fill_(3)
    assert arena.segment.tensor(20, 2, torch.float32).tolist() == [3, 3]


def test_a_tensor_outlives_its_arena() -> None:
    arena = Arena(4 * _PAGE)
    tensor = arena.allocate(4, torch.int64).fill_(7)
    del arena
    gc.collect()
    assert tensor.tolist() == [7, 7, 7, 7]


def test_no_room_is_an_answer(arena: Arena) -> None:
    kept = arena.allocate(60 * _PAGE, torch.uint8)
    assert kept is not None
    assert arena.allocate(5 * _PAGE, torch.uint8) is None
    assert arena.allocate(4 * _PAGE, torch.uint8) is not None


def test_room_in_pieces_with_and_without_pages_is_room(arena: Arena) -> None:
    for pages in range(1, 11):
        arena.allocate(pages * _PAGE, torch.uint8)
    assert arena.allocate(64 * _PAGE, torch.uint8) is not None


def test_a_thousand_buffers_leave_no_descriptor_and_no_file(arena: Arena) -> None:
    names, descriptors = sorted(Path("/dev/shm").iterdir()), len(os.listdir("/proc/self/fd"))
    for size in range(1000):
        arena.allocate(size, torch.float32)
    assert arena.used == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert sorted(Path("/dev/shm").iterdir()) == names


def test_freed_pages_are_kept_up_to_the_bound() -> None:
    arena = Arena(1000 * _PAGE, keep=10 * _PAGE)
    buffers = [arena.allocate(_PAGE, torch.uint8) for _ in range(100)]
    assert _resident(arena) == 100 * _PAGE
    del buffers
    assert arena.used == 0
    assert _resident(arena) <= 10 * _PAGE


def test_memory_that_came_back_is_whole_again() -> None:
    arena = Arena(1000 * _PAGE, keep=0)
    for value in range(3):
        tensor = arena.allocate(20 * _PAGE, torch.uint8).fill_(value + 1)
        assert int(tensor.sum()) == 20 * _PAGE * (value + 1)
        del tensor


def test_zeros_in_new_and_in_used_memory() -> None:
    arena = Arena(100 * _PAGE)
    for _ in range(2):
        tensor = arena.allocate(20 * _PAGE, torch.uint8, zeroed=True)
        assert not tensor.any()
        tensor.fill_(7)
        del tensor


def test_the_descriptors_go_with_the_arena() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = Arena(4 * _PAGE)
    assert len(os.listdir("/proc/self/fd")) > descriptors
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gets_private_memory_and_frees_nothing(arena: Arena) -> None:
    tensor = arena.allocate(4, torch.int64).fill_(7)
    child = os.fork()
    if child == 0:
        refused = arena.allocate(4, torch.int64) is None
        del tensor
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensor.tolist() == [7, 7, 7, 7]
    assert arena.used == _PAGE
