"""Execution-order grouping: one forward is observed, and the uses of parameters become units.

Every operation of the forward is looked at, so that a parameter is put where it is *used*: with
its own module, if that computes with it, or with the innermost module around all of its uses (an
output layer's weight that is applied by a parent, attention that reads the weight of a child).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ..comm.collectives import Collectives
from ..comm.errands import Errand
from ..engine.hooks import unit_of
from ..engine.traverse import map_tensors, tensors_in
from ..errors import LifecycleError
from ..plan.execution import ExecutionGroups, form_groups

__all__ = ["agree_on_groups", "group_by_execution"]


def group_by_execution(model: nn.Module, *inputs: Any, unit_bytes: int = 64 * 2**20, **kwargs: Any) -> ExecutionGroups:
    """Run ``model(*inputs, **kwargs)`` once and group its parameters by the order of their use.

    A model on the meta device is traced there: nothing is computed, the inputs may be real ones. Any
    other runs for real, without gradients; its buffers and the random state are as before afterwards.
    No process group is needed, and no traffic runs: when the groups are used, the first rank's count.

    Args:
        model: not sharded yet.
        inputs: of one forward, with ``kwargs``.
        unit_bytes: about how many bytes of parameters, as they are stored now, make a unit.

    Raises:
        LifecycleError: the model is sharded already.
    """
    if any(unit_of(module) is not None for module in model.modules()):
        raise LifecycleError("the model is sharded already, so the order cannot be observed",
                             unit=type(model).__name__, remedy="Call group_by_execution before sharding.")
    watcher = _Watcher(model)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta:
        inputs, kwargs = map_tensors((inputs, kwargs), lambda tensor: tensor.to("meta"))
    buffers = {name: b.to("meta") if on_meta else b.clone() for name, b in model.named_buffers()}
    device = torch.device("meta") if on_meta else torch.get_default_device()  # of what forward makes itself
    with torch.no_grad(), torch.random.fork_rng(), device, watcher.listening(), watcher:
        torch.func.functional_call(model, buffers, inputs, kwargs)
    return watcher.groups(unit_bytes)


@Errand("group_by_execution")
def agree_on_groups(
    groups: ExecutionGroups, comms: Sequence[Collectives | None], device: torch.device
) -> ExecutionGroups:
    """The groups of the first rank: what forward does may depend on a rank's data. Collective."""
    text = list(groups.to_json().encode())
    for comm in comms:
        if comm is not None and comm.size > 1:
            length = torch.tensor([len(text)], device=device)
            comm.broadcast(length, 0).wait()
            data = torch.zeros(int(length), dtype=torch.uint8, device=device)
            if comm.rank == 0:
                data.copy_(torch.tensor(text, dtype=torch.uint8))
            comm.broadcast(data, 0).wait()
            text = data.tolist()
    return ExecutionGroups.from_json(bytes(text).decode())


@dataclass
class _Use:
    """A parameter under all its names, and the path of the module around all of its uses (None: not used)."""

    fqns: list[str]
    nbytes: int
    around: str | None = None
    order: int = field(default=-1)  #: of its first use


class _Watcher(TorchFunctionMode):
    """Sees every operation of a forward, and in which module it ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[str] = []
        self._called: dict[str, int] = {}
        self._clock = 0
        self._uses: dict[int, _Use] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            self._uses.setdefault(id(p), _Use([], p.numel() * p.element_size())).fqns.append(name)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Follow which modules of the model are being called."""
        def enter(module: nn.Module, args: Any) -> None:
            if module in self._names:
                self._open.append(self._names[module])
                self._called.setdefault(self._names[module], self._tick())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module in self._names:
                self._open.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) or any(True for _ in tensors_in(result)):  # not p.shape, p.dtype …
            for tensor in tensors_in((args, kwargs)):
                use = self._uses.get(id(tensor))
                if use is not None:
                    self._note(use, self._open)
        return result

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _note(self, use: _Use, stack: Sequence[str]) -> None:
        """Keep the innermost open module that contains the parameter and all earlier uses of it."""
        inside = use.fqns if use.around is None else [_below(use.around)]
        use.around = next((name for name in reversed(stack) if _contains(name, *inside)), "")
        use.order = self._tick() if use.order < 0 else use.order

    def _settle(self) -> None:
        """What no visible operation used (a custom autograd function is opaque): the module called around it."""
        for use in self._uses.values():
            if use.order < 0:
                path = use.fqns[0].rpartition(".")[0]
                while path and path not in self._called:
                    path = path.rpartition(".")[0]
                use.around, use.order = path, self._called.get(path, 0)

    def groups(self, unit_bytes: int) -> ExecutionGroups:
        """Modules with all that is used in them, the outermost that fit into a unit."""
        self._settle()
        uses = list(self._uses.values())
        paths = sorted({cast(str, use.around) for use in uses} - {""}, key=lambda path: path.count("."))
        chosen: dict[str, list[_Use]] = {}
        for path in paths:
            inside = [use for use in uses if _contains(path, *use.fqns)]
            alone = all(_contains(path, _below(cast(str, use.around))) for use in inside)
            whole = all(use.around == path for use in inside) or sum(use.nbytes for use in inside) <= unit_bytes
            if alone and whole and not any(_contains(name, _below(path)) for name in chosen):
                chosen[path] = inside
        held = {id(use) for inside in chosen.values() for use in inside}
        order = sorted(chosen, key=lambda path: min(use.order for use in chosen[path]))
        formed = form_groups([(path, sum(use.nbytes for use in chosen[path])) for path in order], unit_bytes)
        return ExecutionGroups(unit_bytes, formed, tuple(use.fqns[0] for use in uses if id(use) not in held))


def _contains(module: str, *names: str) -> bool:
    """Is one of the parameters or modules ``names`` below ``module``?"""
    return not module or any(name.startswith(module + ".") for name in names)


def _below(module: str) -> str:
    """A name that just what contains or is ``module`` contains."""
    return f"{module}." if module else ""
