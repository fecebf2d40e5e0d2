"""How the engine meets user code: by hooks, in four separate places (rows A6, B20, B27, B28)."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import shardwise
from shardwise.engine.hooks import UnitHooks
from shardwise.storage.flat_storage import FlatStorage
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points

_SOURCE = Path(shardwise.__file__).parent
_PLACES = ("before_forward", "after_forward", "enter_backward", "leave_backward")


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_B20_forward_is_not_overridden(front: str) -> None:
    """The class's forward, and no other one on the object; two hooks on the module of each unit."""
    plain = TinyMLP()
    shard(plain, front, [plain.middle])
    assert type(plain).forward is TinyMLP.forward and "forward" not in vars(plain)
    for module in (plain, plain.middle if front == "fully_shard" else plain.middle.module):
        assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_B27_four_separate_places(front: str, rank: int) -> None:
    """Before and after forward, before and after backward: each is a function of its own, once a unit."""
    order: list[str] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(hooks: UnitHooks, *args: Any, **kwargs: Any) -> Any:
            order.append(f"{name} {hooks.unit.name}")
            return original(hooks, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _PLACES:
            stack.enter_context(patch.object(UnitHooks, name, noted(name, getattr(UnitHooks, name))))
        plain = TinyMLP()
        model = shard(plain, front, [plain.middle])
        model(points(rank, 0)[0])  # from here on units have their names
        order.clear()
        loss(model, points(rank, 1)).backward()
    assert order == ["before_forward (root)", "before_forward middle", "after_forward middle", "after_forward (root)",
                     "enter_backward (root)", "enter_backward middle", "leave_backward middle"]


def test_B28_streams_are_made_in_one_place() -> None:
    """In the lanes, and nowhere else."""
    makers = [path.relative_to(_SOURCE) for path in _SOURCE.rglob("*.py")
              if re.search(r"\bStream\(|\.Stream\b\(", path.read_text(encoding="utf-8"))]
    assert makers == [Path("comm/lanes.py")]


def test_A6_the_switch_of_storage_is_explained_where_it_happens() -> None:
    """The one function that points a user's object at other memory says what it does to it and what not."""
    text = FlatStorage.point_at_shard.__doc__ or ""
    assert "switch of a variable's storage" in text and "the object is not" in text
