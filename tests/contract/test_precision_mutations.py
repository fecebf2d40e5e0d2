"""Row B3: the checks of buffers are no coincidence. With the code made wrong they fail."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine import buffers, build
from shardwise.engine.buffers import CastBuffer, UnitBuffers, _ModuleBuffers
from tests.bed import ranks
from tests.contract import test_precision_buffers as right

Observed = Iterable[tuple[str, nn.Module]]


def _unprefixed(self: UnitBuffers, fqn: str) -> Tensor | None:
    """The local name decides."""
    local = fqn.rpartition(".")[2]
    return next((entry.exact() for entry in self.entries() if entry.name == local), None)


def _all_modules(self: UnitBuffers, modules: Observed, dtype: torch.dtype | None) -> None:
    """A unit takes the buffers of the units below it as well."""
    for prefix, module in modules:
        for name, inner in module.named_modules():
            known = _ModuleBuffers(inner._buffers, dtype, weakref.ref(self))
            known.note_all()
            buffers._MODULES[inner] = self._modules[".".join(filter(None, (prefix, name)))] = known
            self._mixed += [(known, dtype)] if dtype is not None else []


def _any_dtype(self: UnitBuffers) -> Iterator[tuple[CastBuffer, torch.dtype]]:
    """Integers and booleans are cast like the rest."""
    for module in self._modules.values():
        for name, now in module.table.items():
            if now is not None and not now.is_complex() and module.dtype not in (None, now.dtype):
                yield module.noted.setdefault(name, CastBuffer(module.table, name, now.dtype)), module.dtype


def _rounded(self: CastBuffer) -> Tensor | None:
    """The dtype comes back, the bits do not."""
    return self.now.to(self.dtype) if self.original is not None and self.now is not None else None


def _stale(self: CastBuffer) -> Tensor | None:
    """The original, whatever became of the buffer."""
    return self.original


def _all_fp32(self: CastBuffer) -> Tensor | None:
    """As if every buffer had been fp32."""
    return self.original.float() if self.original is not None else None


def _left_as_saved(self: UnitBuffers, fqn: str) -> Tensor | None:
    """A save casts back for good."""
    self.for_checkpoint()
    return None



def _nothing(self: UnitBuffers) -> Iterator[Any]:
    return iter(())


@dataclass(frozen=True)
class Mutation:
    """``owner.name`` replaced by ``wrong``, which ``check`` should notice."""

    owner: Any
    name: str
    wrong: Callable[..., Any]
    check: Callable[[int], None]


def _round_trip(rank: int) -> None:
    right.check_round_trip("orig", rank)


def _changed(rank: int) -> None:
    right.check_changed("orig", rank)


def _load(rank: int) -> None:
    right.check_load("orig", rank)


MUTATIONS = {
    "unprefixed keys": Mutation(UnitBuffers, "exact", _unprefixed, right.check_twins_in_one_unit),
    "a loop over all modules": Mutation(UnitBuffers, "observe", _all_modules, right.check_units_that_differ),
    "every dtype is cast": Mutation(UnitBuffers, "to_cast", _any_dtype, _round_trip),
    "nothing is cast": Mutation(UnitBuffers, "to_cast", _nothing, _round_trip),
    "norms are cast": Mutation(build, "kept_modules", lambda modules, precision: set(), _round_trip),
    "rounded values": Mutation(CastBuffer, "exact", _rounded, _round_trip),
    "rounded values, loaded": Mutation(CastBuffer, "exact", _rounded, _load),
    "rounded values behind wrappers": Mutation(CastBuffer, "exact", _rounded, right.check_nested_wrappers),
    "one original dtype": Mutation(CastBuffer, "exact", _all_fp32, right.check_twins_in_one_unit),
    "one original dtype, in units": Mutation(CastBuffer, "exact", _all_fp32, _round_trip),
    "stale values": Mutation(CastBuffer, "exact", _stale, _changed),
    "no cast behind a save": Mutation(UnitBuffers, "exact", _left_as_saved, _round_trip),
}


@ranks(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_B3_the_checks_fail_with(name: str, rank: int) -> None:
    mutation = MUTATIONS[name]
    with patch.object(mutation.owner, mutation.name, mutation.wrong), pytest.raises(AssertionError):
        mutation.check(rank)


@ranks(2)
def test_B3_the_checks_pass_without(rank: int) -> None:
    for check in dict.fromkeys(mutation.check for mutation in MUTATIONS.values()):
        check(rank)
