"""The user's parameter while it is sharded: the same object, with a few more methods.

At wrap time the class of the user's ``nn.Parameter`` object is changed to ``ShardedParameter``.
Identity, ``isinstance`` and attributes stay; torch's fast paths stay as well, since the class
keeps ``Parameter``'s disabled ``__torch_function__``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..comm.errands import Errand
from ..errors import LifecycleError
from ..torch_private import WeakIdKeyDictionary, mark_foreach_supported
from .global_norm import ShardedGradient
from .saved_rows import tell_of_rows
from .whole_edits import EDITS, explains
from .whole_value import WholeValue, gather_one

if TYPE_CHECKING:
    from .flat_storage import FlatStorage

__all__ = ["BRINGERS", "FlatParameter", "ShardedMethods", "ShardedParameter", "enroll", "give_memory", "held_gradient",
           "hold_gradient", "home_of", "is_sharded", "withdraw"]

# parameter object -> (weakly, the storage that holds it; its index there)
_HOMES: Any = WeakIdKeyDictionary()


#: ``.grad`` of any parameter, read and written as it is
held_gradient, hold_gradient = cast(Any, Tensor.grad).__get__, cast(Any, Tensor.grad).__set__


#: to be called before a gradient is read or assigned: they bring what was reduced and is not ``.grad`` yet
BRINGERS: dict[object, Callable[[], None]] = {}


def _bring() -> None:
    while BRINGERS:
        BRINGERS.popitem()[1]()


def _read_grad(parameter: Any) -> Tensor | None:
    """``p.grad``; a hook may ask for it while the backward still runs."""
    if BRINGERS:
        _bring()
    return held_gradient(parameter)


def _assign_grad(parameter: Any, gradient: Tensor | None) -> None:
    """``p.grad = …``: a plain tensor of this rank's rows counts for all ranks from now on."""
    if BRINGERS:
        _bring()
    if type(gradient) is Tensor:
        home = home_of(parameter)
        if home is not None and not home[0].whole and gradient.shape == parameter.shape:
            gradient = home[0].kind.mark(gradient)
    hold_gradient(parameter, gradient)


class ShardedMethods:
    """What every sharded parameter can do."""

    __slots__ = ()

    grad: Any = property(_read_grad, _assign_grad)

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        storage, index = _home(self)
        if index < 0:
            return torch.Size((storage.layout.flat_numel,))
        part = storage.owned[index].parallel
        return torch.Size(storage.layout.parameters[index].shape if part is None else part.shape)

    def to_local(self) -> Tensor:
        """This rank's rows, without autograd history; shares memory with the parameter."""
        return cast(Tensor, self).detach()

    @Errand("full_tensor")
    def full_tensor(self) -> Tensor:
        """The whole parameter, gathered from all ranks of the shard group (a collective).

        Shape ``global_shape``, stored dtype. Every rank of the group must call it, and with tensor
        parallelism those of its mesh too. Inside ``summon_full_params`` a copy of what the parameter
        shows, without a collective of the shard group. In grad mode the value has a gradient, which
        goes to this rank's rows: compute the same from it on every rank (a penalty in the loss, say).
        """
        storage, index = _home(self)
        mine = cast(nn.Parameter, self)
        whole = self._gathered(storage, index)
        part = storage.owned[index].parallel if index >= 0 else None
        if mine.requires_grad and torch.is_grad_enabled():
            whole = cast(Tensor, WholeValue.apply(mine, whole, storage, index))
        return whole if part is None else part.whole(whole)

    def _gathered(self, storage: FlatStorage, index: int) -> Tensor:
        mine = cast(Tensor, self).detach()
        if storage.widened and (index < 0 or not storage.whole):
            raise LifecycleError(
                "this rank has no whole parameters inside summon_full_params", unit=storage.unit,
                rank=storage.rank, remedy="Ask the originals, and summon without rank0_only.",
            )
        if index < 0:
            return storage.gather_flat(mine)
        return mine.clone() if storage.widened else gather_one(storage, index, mine)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As an ordinary parameter of what this one shows."""
        home = home_of(cast(nn.Parameter, self))
        if home is not None and not home[0].whole:
            tell_of_rows(home[0].world_size)
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter with what this one shows: rows, or inside a summon the whole.

        A copy of the model makes it a parameter of its copied unit.
        """
        if id(self) not in memo:
            mine = cast(Tensor, self)
            with torch.no_grad():
                value = mine.detach().as_subclass(Tensor).clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(value, mine.requires_grad)
        return memo[id(self)]


class ShardedParameter(ShardedMethods, nn.Parameter):
    """A parameter of which this rank holds whole rows: ``shape[0]`` is the number of local rows."""


class FlatParameter(ShardedParameter):
    """The flat parameter of ``use_orig_params=False``: this rank's slice of several parameters."""

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of the original parameters below the unit's module, in the order of ``shapes``."""
        return tuple(spec.fqn for spec in _home(self)[0].layout.parameters)

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Their whole shapes."""
        return tuple(torch.Size(spec.shape) for spec in _home(self)[0].layout.parameters)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each begins in ``full_tensor()``, in elements."""
        return _home(self)[0].layout.offsets

    @property
    def local_ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements of this flat parameter that each has on this rank; empty where it has none."""
        storage = _home(self)[0]
        spans = [storage.layout.span(index, storage.rank) for index in range(len(storage.parameters))]
        return tuple((span.shard_offset, span.shard_offset + span.numel) for span in spans)


def _home(parameter: Any) -> tuple[FlatStorage, int]:
    home = home_of(parameter)
    if home is None:
        raise LifecycleError(
            "this parameter is not sharded by shardwise",
            remedy="Only parameters of a model given to fully_shard or FullyShardedDataParallel are.",
        )
    return home


def enroll(parameter: nn.Parameter, storage: FlatStorage, index: int) -> None:
    """Note that ``storage`` holds ``parameter``, and give the object its sharded class."""
    _HOMES[parameter] = (weakref.ref(storage), index)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ShardedParameter if index >= 0 else FlatParameter


def withdraw(parameter: nn.Parameter) -> None:
    """Forget ``parameter``: it is an ordinary one again."""
    _HOMES.pop(parameter, None)
    if isinstance(parameter, ShardedParameter):
        parameter.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]


def give_memory(parameter: nn.Parameter, memory: Tensor) -> None:
    """Let ``parameter``, until now on the meta device, show ``memory``: the same object and attributes."""
    home = _HOMES.pop(parameter, None)  # two objects can only be swapped while nothing refers to them weakly
    made = nn.Parameter(memory, parameter.requires_grad)
    made.__class__ = parameter.__class__
    made.__dict__.update(parameter.__dict__)  # pyright: ignore[reportAttributeAccessIssue]
    torch.utils.swap_tensors(parameter, made)
    if home is not None:
        _HOMES[parameter] = home


def home_of(parameter: nn.Parameter) -> tuple[FlatStorage, int] | None:
    """The storage that holds ``parameter`` and its index there, or None."""
    home = _HOMES.get(parameter)
    if home is None:
        return None
    storage = home[0]()
    return None if storage is None else (storage, home[1])


def is_sharded(parameter: Tensor) -> bool:
    """Does ``parameter`` (one of the model's own objects, or its gradient) show this rank's rows only?

    False inside ``summon_full_params``, on one rank, and for tensors that shardwise does not manage.
    """
    if isinstance(parameter, ShardedGradient):
        return True
    home = home_of(parameter)  # pyright: ignore[reportArgumentType]
    return home is not None and not home[0].whole


for _name in EDITS:
    setattr(ShardedMethods, _name, explains(_name, home_of))

mark_foreach_supported(ShardedParameter)
mark_foreach_supported(FlatParameter)
