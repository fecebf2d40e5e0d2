"""Checksums of blocks: equal for equal bytes wherever they lie, another for whatever was altered."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.checksums import BLOCK_BYTES, checksum


def test_the_value_does_not_change_between_versions() -> None:
    """Files that were written stay readable."""
    assert checksum(bytearray()) == "0" * 32
    assert checksum(bytearray(range(256))) == "39164251345ac7505cdfd7325ccf96d8"
    assert checksum(bytearray(b"abc")) == checksum(bytearray(b"abc\0\0\0\0\0"))


@given(data=st.binary(min_size=1, max_size=200), at=st.integers(0, 199), bit=st.integers(0, 7))
def test_any_bit(data: bytes, at: int, bit: int) -> None:
    """Also in the last, incomplete word."""
    altered = bytearray(data)
    altered[at % len(data)] ^= 1 << bit
    assert checksum(altered) != checksum(bytearray(data))


@given(data=st.binary(min_size=1, max_size=200), offset=st.integers(0, 9))
def test_wherever_the_bytes_lie(data: bytes, offset: int) -> None:
    memory = memoryview(bytearray(bytes(offset) + data + b"tail"))
    assert checksum(memory[offset : offset + len(data)]) == checksum(bytearray(data))


@pytest.mark.parametrize("byte", [3, 7])
def test_signs_of_two_numbers(byte: int) -> None:
    """The highest bits of two words, which one sum of odd multiples cannot see; the other one does."""
    data = bytearray(os.urandom(4096))
    for first in range(0, 4096, 256):
        altered = bytearray(data)
        for place in (first + byte, first + byte + 8):
            altered[place] ^= 0x80
        assert checksum(altered) != checksum(data)


def test_blocks_that_were_swapped_zeroed_or_moved() -> None:
    source = random.Random(0)
    data = bytearray(source.randbytes(BLOCK_BYTES))
    seen = {checksum(data), checksum(data[4096:] + data[:4096]), checksum(data[8:] + bytes(8))}
    for size in (8, 512, 4096):
        a, b = data[:size], data[size : 2 * size]
        seen |= {checksum(b + a + data[2 * size :]), checksum(bytearray(size) + data[size:])}
    assert len(seen) == 9
