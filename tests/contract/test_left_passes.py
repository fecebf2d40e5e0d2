"""C22, A19: a rank that catches its own exception leaves the others in that pass: they hear of it, and all go on."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from shardwise.comm import rendezvous
from shardwise.comm.choose import close_all
from shardwise.errors import LeftPassError, PeerError
from tests.bed import ranks
from tests.bed.bomb import bomb
from tests.bed.fronts import over_the_group


def _raise(*_: Any) -> None:
    raise ValueError("bad batch")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        shardwise.fully_shard(layer)
    return shardwise.fully_shard(model)


def _step(model: nn.Module, number: int, rank: int) -> float:
    loss = model(torch.full((2, 8), float(number + rank))).square().mean()
    loss.backward()
    return loss.item()


@contextmanager
def _harmed(model: nn.Sequential, phase: str, on: bool) -> Iterator[None]:
    """On the rank where it is on, the middle layer raises."""
    if not on:
        yield
        return
    handle = (model[1].register_forward_pre_hook(_raise) if phase == "forward"
              else model[1].register_forward_hook(lambda *given: bomb(given[-1], ValueError("bad gradient"))))
    try:
        yield
    finally:
        handle.remove()


def _texts(model: nn.Sequential, phase: str, rank: int, meanwhile: Callable[[], None]) -> str:
    """A step that rank 1 leaves, and what each rank is told; ``meanwhile`` is what rank 1 does then."""
    _step(model, 0, rank)
    model.zero_grad()
    with _harmed(model, phase, rank == 1), pytest.raises(ValueError if rank == 1 else LeftPassError) as caught:
        _step(model, 1, rank)
    if rank == 1:
        meanwhile()
    return str(caught.value)


def _goes_on(model: nn.Sequential, rank: int) -> None:
    """The next batches give what they give in a model that nothing happened to."""
    calm = _model()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the last backward did not finish")
        model.zero_grad()
        for number in (2, 3):
            assert _step(model, number, rank) == _step(calm, number, rank)
    for ours, theirs in zip(model.parameters(), calm.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


@ranks(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_A19_a_rank_that_goes_on_with_the_next_batch(phase: str, rank: int) -> None:
    """The others are told as soon as it meets them there."""
    model = _model()
    text = _texts(model, phase, rank, lambda: None)
    _goes_on(model, rank)
    if rank == 0:
        where = ("forward of '1' by ValueError: bad batch, so there is no gather of '2'" if phase == "forward"
                 else r"backward of '\(root\)' by an exception in autograd, so there is no gather of '1'")
        assert re.match(rf"shardwise: rank 1 left pass \d+ in {where} in the group of ranks 0, 1\. ", text), text
        assert "All ranks live." in text


@ranks(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_A19_a_rank_that_waits_elsewhere(phase: str, rank: int) -> None:
    """The others read its note, when they have waited for a second."""
    model = _model()
    text = _texts(model, phase, rank, dist.barrier)
    if rank == 0:
        dist.barrier()
        assert re.match(rf"shardwise: rank 1 left pass \d+ in {phase} of ", text), text
    _goes_on(model, rank)


@ranks(2)
def test_C8_a_rank_that_goes_on_where_units_may_be_skipped(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model, allow_skipped_units=True)
    _texts(model, "forward", rank, lambda: None)
    _goes_on(model, rank)


@ranks(4)
def test_A19_all_others_are_told_wherever_they_are(rank: int) -> None:
    """Rank 1 comes late to its next batch, rank 2 is the first that gives up, and rank 3 is still computing."""
    model = _model()
    _step(model, 0, rank)
    model.zero_grad()
    slow = model[1].register_forward_pre_hook(lambda *_: dist.barrier()) if rank == 3 else None
    with _harmed(model, "forward", rank == 1), pytest.raises(ValueError if rank == 1 else LeftPassError) as caught:
        _step(model, 1, rank)
    if slow is None:
        dist.barrier()  # rank 3 goes on when all others have left
    else:
        slow.remove()
    if rank != 1:
        assert "rank 1 left pass" in str(caught.value)
    _goes_on(model, rank)


@ranks(2)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_A19_all_go_on_over_gloo_alone(phase: str, elsewhere: bool, rank: int) -> None:
    """The rank that goes on cuts the connections first, and meets the others over new ones."""
    with over_the_group():
        model = _model()
        text = _texts(model, phase, rank, dist.barrier if elsewhere else lambda: None)
        if rank == 0:
            if elsewhere:
                dist.barrier()
            error = "ValueError: bad batch" if phase == "forward" else "an exception in autograd"
            assert re.match(rf"shardwise: rank 1 left pass \d+ in {phase} of .* by {error}, so there is no", text), text
        _goes_on(model, rank)


@ranks(2)
def test_A19_over_gloo_a_rank_that_goes_on_alone_hears_why(rank: int) -> None:
    """The other is stopped where the two would meet again."""
    with over_the_group(), patch.dict(os.environ, SHARDWISE_LOST_AFTER="1"):
        model = _model()
        pids = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        _texts(model, "forward", rank, lambda: None)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            with pytest.raises(PeerError, match=r"rank 0 is stopped \(for .* during gather of '0'"):
                _step(model, 2, rank)
            os.kill(pids[0], signal.SIGCONT)
    dist.barrier()


@ranks(4)
def test_A19_all_go_on_on_several_hosts(rank: int) -> None:
    close_all()
    with patch.object(rendezvous, "host_name", lambda: "aabb"[rank]):
        model = _model()
        text = _texts(model, "forward", rank, lambda: None)
        if rank != 1:
            assert re.match(r"shardwise: rank 1 left pass \d+ in forward of '1' by ValueError: bad batch", text), text
        _goes_on(model, rank)
    close_all()


@ranks(2)
def test_A19_a_pass_that_all_ranks_left_is_nobodys_news_over_gloo(rank: int) -> None:
    with over_the_group():
        model = _model()
        _step(model, 0, rank)
        for _ in range(2):
            with _harmed(model, "forward", True), pytest.raises(ValueError):
                _step(model, 1, rank)
        _goes_on(model, rank)


@ranks(2)
def test_A19_an_exception_that_forward_itself_catches_leaves_no_pass(rank: int) -> None:
    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = shardwise.fully_shard(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except ValueError:
                return self.inner(x + 1)

    torch.manual_seed(0)
    model = shardwise.fully_shard(Patient())
    handle = model.inner.register_forward_pre_hook(_raise)
    with pytest.raises(ValueError):
        _step(model, 0, rank)
    handle.remove()
    raised = [False]

    def once(*_: Any) -> None:
        if not raised[0]:
            raised[0] = True
            _raise()

    model.inner.register_forward_pre_hook(once)
    _step(model, 1, rank)
    assert raised == [True]
    _step(model, 2, rank)
