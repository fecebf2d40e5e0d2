"""Run on every rank by test_hosts: trains over the transport that was chosen, and over gloo alone."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.choose import close_all, collectives_for
from shardwise.comm.collectives import Collectives
from shardwise.engine.build import Choices, build_unit
from shardwise.engine.reduce import Groups

_CPU = torch.device("cpu")


def trained(comm: Collectives) -> list[torch.Tensor]:
    """This rank's rows after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 40))
    for module in (model[0], model):
        build_unit([module], Choices(Groups(comm), _CPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    """Print the transport's name and whether all bits are the same."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    chosen = collectives_for(group, _CPU)
    pairs = zip(trained(chosen), trained(collectives_for(group, _CPU, shared_memory=False)), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print(type(chosen).__name__, "same" if same else "different", flush=True)
    dist.barrier()
    close_all()
    dist.destroy_process_group()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
