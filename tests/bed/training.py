"""A sharded model beside its unsharded twin: the same steps, then the same gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.bed.fronts import full_gradients, full_parameters, shard
from tests.bed.models import loss, points
from tests.bed.parity import assert_same_tensors

__all__ = ["Twins"]

Run = Callable[[Any, int, int], Tensor]


def _on_points(model: Any, rank: int, step: int) -> Tensor:
    return loss(model, points(rank, step))


class Twins:
    """``plain`` sees the data of all ranks, ``model`` is sharded and sees its own rank's.

    ``build()`` gives equal modules; ``inner(module)`` those that become units of their own;
    ``run(model, rank, step)`` is the loss of one rank.
    """

    def __init__(
        self, build: Callable[[], nn.Module], front: str, place: tuple[int, int], *,
        inner: Callable[[Any], Sequence[nn.Module]] = lambda module: (),
        run: Run = _on_points, **arguments: Any,
    ) -> None:
        self.plain, self.front, self.run = build(), front, run
        self.rank, self.world = place
        twin = build()
        self.names = [name for name, _ in twin.named_parameters()]
        self.model = shard(twin, front, inner(twin), **arguments)
        self.optimizers = [self._sgd(self.plain), self._sgd(self.model)]

    def _sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum goes on without a gradient, but not past a None; in a flat parameter there is none."""
        chosen = [p for p in model.parameters() if p.is_floating_point()]
        return torch.optim.SGD(chosen, lr=0.1, momentum=0.0 if self.front == "flat" else 0.9)

    def backward(self, step: int = 0, runs: Sequence[Run] | None = None) -> None:
        """One backward of the sum of ``runs`` (default: the one given) on both."""
        runs = runs or [self.run]
        mine = torch.stack([run(self.model, self.rank, step) for run in runs]).sum()
        mine.backward()
        parts = [run(self.plain, rank, step) for run in runs for rank in range(self.world)]
        (torch.stack(parts).sum() / self.world).backward()

    def check_gradients(self, **tolerance: Any) -> None:
        """None equals None; a flat parameter has zeros where an unused parameter has None."""
        ours: dict[str, Tensor | None] = full_gradients(self.model, self.names)
        theirs = {name: p.grad for name, p in self.plain.named_parameters()}
        if self.front == "flat":
            ours = {n: g for n, g in ours.items() if theirs[n] is not None or (g is not None and g.any())}
            theirs = {n: g for n, g in theirs.items() if g is not None}
        assert_same_tensors(ours, theirs, "gradient", **tolerance)

    def check_parameters(self, **tolerance: Any) -> None:
        """By their names in the unsharded module."""
        assert_same_tensors(full_parameters(self.model, self.names), dict(self.plain.named_parameters()),
                            "parameter", **tolerance)

    def update(self) -> None:
        """Step and zero both optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 3, **tolerance: Any) -> None:
        """Steps with all checks."""
        for step in range(steps):
            self.backward(step)
            self.check_gradients(**tolerance)
            self.update()
            self.check_parameters(**tolerance)
