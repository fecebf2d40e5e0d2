"""The page on mixed precision is true: its code runs, with every assertion in it."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest

from shardwise import FullyShardedDataParallel, MixedPrecision
from tests.bed import ranks
from tests.bed.models import TinyMLP
from tests.bed.pages import script_of

PAGE = "docs/mixed-precision.md"


@ranks(1, 2)
@pytest.mark.filterwarnings("ignore:.*the group has one rank")
def test_page_runs(rank: int) -> None:
    script = script_of(PAGE)
    assert script.count("assert ") == 14
    exec(compile(script, PAGE, "exec"), {"__name__": "page"})


@ranks(2)
def test_U36_the_environment_variable_is_not_passed_over_in_silence(rank: int) -> None:
    text = r"FSDP_USE_FULL_PREC_IN_EVAL is not read.*full_precision\(model\)"
    with patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"), pytest.warns(UserWarning, match=text):
        FullyShardedDataParallel(TinyMLP(), mixed_precision=MixedPrecision())
