"""The user's parameter while it is sharded: the same object, with a few more methods.

At wrap time the class of the user's ``nn.Parameter`` object is changed to ``ShardedParameter``.
Identity, ``isinstance`` and attributes stay; torch's fast paths stay as well, since the class
keeps ``Parameter``'s disabled ``__torch_function__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import LifecycleError
from ..torch_private import WeakIdKeyDictionary, mark_foreach_supported

if TYPE_CHECKING:
    from .flat_storage import FlatStorage

__all__ = ["ShardedParameter", "enroll", "home_of", "is_sharded", "withdraw"]

# parameter object -> (the storage that holds it, its index there)
_HOMES: Any = WeakIdKeyDictionary()


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank holds whole rows: ``shape[0]`` is the number of local rows."""

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        storage, index = _home(self)
        if index < 0:
            return torch.Size((storage.layout.flat_numel,))
        return torch.Size(storage.layout.parameters[index].shape)

    def to_local(self) -> Tensor:
        """This rank's rows, without autograd history; shares memory with the parameter."""
        return self.detach()

    def full_tensor(self) -> Tensor:
        """The whole parameter, gathered from all ranks of the shard group (a collective).

        Shape ``global_shape``, stored dtype, detached. Every rank of the group must call it.
        """
        storage, index = _home(self)
        return storage.gather_flat(self) if index < 0 else storage.gather_one(index, self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = super().__deepcopy__(memo)
        home = _HOMES.get(self)
        if home is not None:
            copied.__class__ = ShardedParameter
            _HOMES[copied] = home
        return copied


def _home(parameter: nn.Parameter) -> tuple[FlatStorage, int]:
    home = _HOMES.get(parameter)
    if home is None:
        raise LifecycleError(
            "this parameter is not sharded by shardwise",
            remedy="Only parameters of a model given to fully_shard or FullyShardedDataParallel are.",
        )
    return home


def enroll(parameter: nn.Parameter, storage: FlatStorage, index: int) -> None:
    """Note that ``storage`` holds ``parameter``, and give the object its sharded class."""
    _HOMES[parameter] = (storage, index)
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ShardedParameter


def withdraw(parameter: nn.Parameter) -> None:
    """Forget ``parameter``: it is an ordinary one again."""
    _HOMES.pop(parameter, None)
    if type(parameter) is ShardedParameter:
        parameter.__class__ = nn.Parameter


def home_of(parameter: nn.Parameter) -> tuple[FlatStorage, int] | None:
    """The storage that holds ``parameter`` and its index there, or None."""
    return _HOMES.get(parameter)


def is_sharded(parameter: Tensor) -> bool:
    """Does ``parameter`` (one of the model's own objects) show this rank's rows only?

    False inside ``summon_full_params`` and for parameters that shardwise does not manage.
    """
    home = _HOMES.get(parameter)
    return home is not None and home[0].world_size > 1 and not home[0].widened


mark_foreach_supported(ShardedParameter)
