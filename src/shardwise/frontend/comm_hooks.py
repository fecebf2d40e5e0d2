"""Communication hooks: what may stand in for the reduction of gradients, and the four usual ones.

A hook is called as ``hook(state, gradient)`` where nothing is sharded (``NO_SHARD``, a group of
one rank), and as ``hook(state, full_gradient, shard_gradient)`` elsewhere: ``full_gradient``
[N * C] holds one chunk for each rank of the shard group, ``shard_gradient`` [C] is this rank's,
empty. It leaves the *mean* over its group in its last argument before it returns. On hybrid
strategies it does the shard group's part, and the replicas are averaged after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.choose import collectives_for
from ..comm.collectives import Collectives
from ..comm.mesh import default_group
from ..engine.reduce import CommHook, balanced_divisor
from ..engine.unit import Unit
from ..errors import ConfigurationError, LifecycleError, OptionTypeError
from .module import forget_unsent, session_at, unit_at

__all__ = ["CommHookMethods", "DefaultState", "LowPrecisionState", "allreduce_hook", "bf16_compress_hook",
           "fp16_compress_hook", "reduce_scatter_hook"]


class DefaultState:
    """The state of ``allreduce_hook`` and ``reduce_scatter_hook``: the group, and how sums are divided.

    Half of the division is done before the sum, so that a narrow dtype does not overflow.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """``process_group``: the ranks to average over (default: all); hybrid strategies' shard group."""
        self.process_group = process_group if process_group is not None else default_group()
        self.world_size = dist.get_world_size(self.process_group)
        self.gradient_predivide_factor = balanced_divisor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor

    def transport(self, gradient: Tensor) -> Collectives:
        """What moves ``gradient`` among the ranks of the group."""
        return collectives_for(self.process_group, gradient.device)


class LowPrecisionState(DefaultState):
    """The state of the compressing hooks. ``parameter_type``: the dtype that gradients come back in."""

    def __init__(self, process_group: dist.ProcessGroup | None = None,
                 parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Average ``grad`` over the group, in place."""
    grad.div_(state.gradient_predivide_factor)
    state.transport(grad).all_reduce(grad).wait()
    grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """Average ``grad`` [N * C] over the group; this rank's chunk goes to ``output`` [C]."""
    grad.div_(state.gradient_predivide_factor)
    state.transport(grad).reduce_scatter(output, grad).wait()
    output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in fp16: half the bytes of fp32. Divided by part of the group's size before the cast."""
    _compressed(state, grad, output, torch.float16)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in bf16: half the bytes of fp32, and its range."""
    _compressed(state, grad, output, torch.bfloat16)


def _compressed(state: LowPrecisionState, grad: Tensor, output: Tensor | None, dtype: torch.dtype) -> None:
    transport = state.transport(grad)
    narrow = grad.div_(state.gradient_predivide_factor).to(dtype)
    if output is None:
        transport.all_reduce(narrow).wait()
        result, into = narrow, grad
    else:
        result, into = torch.empty(output.shape, dtype=dtype, device=output.device), output
        transport.reduce_scatter(result, narrow).wait()
    into.data = result.div_(state.gradient_postdivide_factor).to(state.parameter_type)


class CommHookMethods:
    """What the wrapper can do about communication."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients with ``hook`` in this and all units below; see ``shardwise.comm_hooks``.

        Only on the root, and once. Raises ``LifecycleError`` otherwise.
        """
        module: Any = self
        _register(module, CommHook(state, hook))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that were added up unsent (``no_sync``) are forgotten too."""
        module: Any = self
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]
        forget_unsent(module.module)


def _register(module: nn.Module, chosen: CommHook) -> None:
    unit, session = unit_at(module), session_at(module)
    if session.root is not unit:
        raise LifecycleError("register_comm_hook must be called on the root", unit=unit.name,
                             remedy="Call it on the outermost wrapper.")
    if not callable(chosen.hook):
        raise OptionTypeError("the communication hook must be callable", expected="hook(state, ...)",
                              got=type(chosen.hook).__name__)
    for one in session.units:
        if one.reducer.comm_hook is not None:
            raise LifecycleError("a communication hook is registered already", unit=one.name,
                                 remedy="Register one hook, once.")
        _check_state(chosen.state, one)
    for one in session.units:
        one.reducer.comm_hook = chosen


def _check_state(state: object, unit: Unit) -> None:
    """A state of ours names the group that ``unit``'s gradients are averaged over."""
    group = unit.groups.shard
    if group.size == 1 and unit.groups.replicate is not None:
        group = unit.groups.replicate
    if isinstance(state, DefaultState):
        members = tuple(dist.get_process_group_ranks(state.process_group))
        if members != group.members and group.size > 1:
            raise ConfigurationError(
                "the state's process group is not the one that this unit's gradients are averaged over",
                unit=unit.name, expected=f"ranks {group.members}", got=f"ranks {members}",
                remedy="Make the state with the wrapper's process group (hybrid: the shard group).",
            )
