"""``FSDPModule``: what a module can do once ``fully_shard`` was applied to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..checkpoint.model_tensors import clean_name
from ..comm.errands import Errand
from ..engine.build import session_of, start_session, units_below
from ..engine.hooks import unit_of
from ..engine.session import Session
from ..engine.settling import settle_unit
from ..engine.unit import Unit
from ..engine.unsent import watch_zero_grad
from ..engine.values import count_all_changes
from ..errors import ConfigurationError, LifecycleError, OptionTypeError
from ..plan.lifecycle import Pass, Residency
from ..storage.optimizer_watch import on_adoption
from ..torch_private import ignored_by_ddp
from .communication import CommunicationMethods
from .copying import copy_module, refuse_pickling
from .whole import apply_to_whole

__all__ = ["FSDPModule", "UnshardHandle", "before_naming", "forget_unsent", "session_at", "settle", "unit_at"]

on_adoption(watch_zero_grad)


def unit_at(module: nn.Module) -> Unit:
    """The unit of a sharded module. Raises ``LifecycleError`` for any other."""
    unit = unit_of(module)
    if unit is None:
        raise LifecycleError("this module is not sharded", unit=type(module).__name__,
                             remedy="Apply fully_shard or FullyShardedDataParallel to it first.")
    return unit


def session_at(module: nn.Module) -> Session:
    """The session of a sharded module, started now if need be."""
    unit = unit_at(module)
    return session_of(unit) or start_session(unit)


def forget_unsent(module: nn.Module) -> None:
    """Drop the gradients below ``module`` that were added up unsent, at rest."""
    settle(module)
    for _, unit in units_below(module):
        session = session_of(unit)
        if session is not None and session.pass_ is Pass.REST:
            unit.forget_unsent()


def settle(module: nn.Module) -> None:
    """If a backward of ``module`` was left by an exception, or a forward by an interrupt, throw it away."""
    unit = unit_of(module)
    if unit is not None:
        settle_unit(unit)


def before_naming(module: nn.Module, options: dict[str, Any]) -> None:
    """Parameters are named at rest, and not to ``DistributedDataParallel``: it would broadcast one rank's rows."""
    settle(module)
    if options.get("recurse", True):
        return
    ignored = ignored_by_ddp()
    if ignored is not None and not ignored:
        raise ConfigurationError(
            "DistributedDataParallel around a sharded model: its gradients are reduced already",
            unit=unit_at(module).name, expected="an unsharded model", got=type(module).__name__,
            remedy="Call the sharded model itself; to replicate as well, shard over a two-dimensional mesh.",
        )


class UnshardHandle:
    """A gather under way; ``wait`` makes the parameters ready for use."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are gathered. Safe to call twice."""
        self._unit.wait()


class FSDPModule(CommunicationMethods):
    """Methods of a module that ``fully_shard`` was applied to. Not to be instantiated."""

    def _units(self, recurse: bool) -> Iterator[Unit]:
        module: Any = self
        if recurse:
            for _, unit in units_below(module):
                yield unit
        else:
            yield unit_at(module)

    @Errand("unshard")
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's own parameters. With ``async_op`` return a handle to wait on."""
        module: Any = self
        unit, session = unit_at(module), session_at(module)
        unit.take_over_edits()
        if unit.residency is Residency.SHARDED:
            unit.asked = count_all_changes(unit.storages)
        elif unit.asked is None:
            unit.asked = -1  # gathered for something else before: its values may be older
        session.gather(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters."""
        module: Any = self
        unit = unit_at(module)
        settle_unit(unit)
        if unit.uses:
            raise LifecycleError("cannot reshard a unit that is in use", unit=unit.name,
                                 remedy="Call reshard() outside forward and backward.")
        unit.asked = None
        unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or adds them up on this rank (``no_sync``)."""
        for unit in self._units(recurse):
            unit.settings.sync_gradients = requires_gradient_sync
            unit.settings.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward combines gradients over replicas (hybrid), or in the shard group only."""
        for unit in self._units(recurse):
            unit.settings.all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the gathered parameters are freed after forward."""
        if not isinstance(reshard_after_forward, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionTypeError("reshard_after_forward has the wrong type", expected="bool",
                                  got=type(reshard_after_forward).__name__)
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.settings.keep_as_root = not reshard_after_forward
            unit.gather.small = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the gathered parameters are freed after backward.

        If not, later forwards use what was gathered until ``reshard()``: a change of the
        parameters is not seen before that.
        """
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Taken, and no order to anyone: every backward ends with its gradients reduced, the last or not."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks (this unit)."""
        module: Any = self
        if not factor > 0:
            raise OptionTypeError("the gradient divide factor must be positive", expected="> 0", got=factor)
        unit_at(module).reducer.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Begin to gather these units when this unit's forward begins."""
        module: Any = self
        unit_at(module).settings.forward_prefetch = _prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Begin to gather these units when this unit's backward begins."""
        module: Any = self
        unit_at(module).settings.backward_prefetch = _prefetched(modules)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(chunk)`` on this rank's reduced gradients [C], in place, before they are bound."""
        module: Any = self
        unit_at(module).reducer.all_reduce_hook = hook

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """``nn.Module.apply`` where ``fn`` sees whole parameters, one unit at a time. A collective."""
        module: Any = self
        apply_to_whole(module, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another sharded model of the same layout; inside ``summon_full_params`` an unsharded one."""
        module: Any = self
        return copy_module(module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        module: Any = self
        return refuse_pickling(module)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, without checkpoint wrappers; after a failed backward, at rest."""
        module: Any = self
        before_naming(module, kwargs)
        named: Any = super().named_parameters(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        yield from ((clean_name(name), parameter) for name, parameter in named)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that were added up unsent (``no_sync``) are forgotten too."""
        module: Any = self
        super().zero_grad(set_to_none)  # pyright: ignore[reportAttributeAccessIssue]
        forget_unsent(module)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module, without checkpoint wrappers."""
        named: Any = super().named_buffers(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        yield from ((clean_name(name), buffer) for name, buffer in named)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``half``, ``cuda`` …: from rest, and honoured at the next forward."""
        module: Any = self
        unit = unit_of(module)
        if unit is not None and not unit.uses:
            unit.come_to_rest()
        result = super()._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if unit is not None:
            unit.follow_off_meta()
        return result


def _prefetched(modules: Any) -> list[Unit]:
    if not isinstance(modules, (list, tuple)):
        raise OptionTypeError("prefetch takes a list of sharded modules", expected="a list",
                              got=type(modules).__name__)
    return [unit_at(module) for module in modules]
