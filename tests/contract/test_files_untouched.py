"""What does not fit on any rank changes nothing on every rank; and state that cannot be cut is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import checkpoint
from shardwise.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from shardwise.errors import CheckpointError
from tests.bed import ranks
from tests.bed.fronts import FRONTS, shard
from tests.bed.models import TinyMLP, loss, points
from tests.bed.parity import assert_same_tensors
from tests.contract.test_optimizer_state import Factored


def held(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what this rank holds."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "dtype"])
def test_load_changes_nothing_on_any_rank(front: str, fault: str, rank: int, tmp_path: Path) -> None:
    """The second rank alone has another model; the first one's stays as it was too."""
    saved = TinyMLP()
    saved.register_buffer("mean", torch.ones(3))
    checkpoint.save(tmp_path / "saved", saved)
    model = TinyMLP(seed=1)
    model.register_buffer("mean", torch.zeros(3))
    if rank == 1:
        if fault == "missing":
            model.register_buffer("more", torch.zeros(1))
        elif fault == "unexpected":
            del model.mean
        else:
            model.mean = torch.zeros(2) if fault == "shape" else torch.zeros(3, dtype=torch.float64)
    model = shard(model, front, [model.middle])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = held(model)
    with pytest.raises(CheckpointError, match=r"failed: got on rank 1: the checkpoint .*The model is as it was"):
        checkpoint.load(tmp_path / "saved", model)
    assert_same_tensors(held(model), before, bitwise=True)
    with pytest.raises(CheckpointError, match=r"on rank 1: the checkpoint .*"):
        checkpoint.load(tmp_path / "saved", model, optimizer)
    assert_same_tensors(held(model), before, bitwise=True)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_load_state_dict(front: str, rank: int) -> None:
    """Wrong shapes: nothing is written. Missing and unexpected keys: as in torch, what matches is loaded first."""
    model = TinyMLP(seed=1)
    model = shard(model, front, [model.middle])
    before = held(model)
    state = TinyMLP().state_dict()
    with pytest.raises(CheckpointError, match=r"size mismatch for outward\.weight"):
        model.load_state_dict({**state, "outward.weight": torch.zeros(2, 2)})
    assert_same_tensors(held(model), before, bitwise=True)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*outward\.bias.*Unexpected key.*nobody"):
        model.load_state_dict({n: v for n, v in state.items() if n != "outward.bias"} | {"nobody": torch.ones(1)})
    whole = checkpoint.get_model_state_dict(model, options=checkpoint.StateDictOptions(full_state_dict=True))
    assert torch.equal(whole["outward.weight"], state["outward.weight"])


@ranks(2)
def test_factored_state_for_other_ranks(rank: int, tmp_path: Path) -> None:
    """Rows' means are cut like the rows in a state dict; files name what they cannot cut."""
    plain = TinyMLP()
    model = shard(TinyMLP(), "orig")
    parameters = [p for p in model.parameters() if p.numel()]
    optimizer = Factored(parameters)
    loss(model, points(0, 0)).backward()
    optimizer.step()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    text = (r"state that is not shaped like its parameter cannot be cut for other ranks \(parameter "
            r"'inward.weight.row'\).*as many ranks as saved it")
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "saved", plain, Factored(plain.parameters()))
    assert_same_tensors(plain.state_dict(), TinyMLP().state_dict(), bitwise=True)


@ranks(2)
def test_factored_state_by_rows(rank: int) -> None:
    """In a full state dict: one mean for each row, right for any number of ranks."""
    model, plain = shard(TinyMLP(), "orig"), TinyMLP()
    ours, theirs = Factored(model.parameters()), Factored(plain.parameters())
    for one, optimizer in ((model, ours), (plain, theirs)):
        loss(one, points(0, 0)).backward()
        optimizer.step()
    options = checkpoint.StateDictOptions(full_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, ours, options=options)
    expected = get_optimizer_state_dict(plain, theirs)["state"]
    for name in ("inward.weight", "middle.weight"):
        for key in ("row", "column"):
            assert torch.allclose(state["state"][name][key], expected[name][key], atol=1e-6), (name, key)
    fresh = TinyMLP()
    second = Factored(fresh.parameters())
    set_optimizer_state_dict(fresh, second, state)
    assert torch.allclose(second.state[fresh.inward.weight]["row"], expected["inward.weight"]["row"], atol=1e-6)
