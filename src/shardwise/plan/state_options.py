"""What a user may choose about state dicts: their kind, where they live, who gets them.

Names, fields and defaults follow ``torch.distributed.fsdp``, so that changing the import is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..errors import OptionTypeError

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "settings_for",
]


class StateDictType(Enum):
    """What ``state_dict()`` gives for a sharded parameter."""

    FULL_STATE_DICT = auto()  #: the whole tensor, gathered one unit at a time
    LOCAL_STATE_DICT = auto()  #: this rank's rows as they are; no communication, only for the same layout
    SHARDED_STATE_DICT = auto()  #: a record of this rank's rows and their place; no communication


class OptimStateKeyType(Enum):
    """How an optimizer's state dict names parameters."""

    PARAM_NAME = auto()  #: by FQN
    PARAM_ID = auto()  #: by position, as ``torch.optim`` does


@dataclass
class StateDictConfig:
    """``offload_to_cpu``: tensors are moved to the host (default: left where they are)."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict (default: all ranks get everything)."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """For ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """For ``SHARDED_STATE_DICT``. ``_use_dtensor`` is accepted and has no effect: records serve both uses."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """``offload_to_cpu``: as for models, but the default is True."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """For ``LOCAL_STATE_DICT``; not offloaded by default."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """For ``SHARDED_STATE_DICT``. ``_use_dtensor`` is accepted and has no effect."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The present choice of one unit or of a tree of them."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_for(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Checked settings; a config left out is the default one of ``kind``.

    Raises ``OptionTypeError`` for a config that belongs to another kind.
    """
    if not isinstance(kind, StateDictType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionTypeError("the state dict type is unknown", expected="shardwise.StateDictType",
                              got=repr(kind))
    wanted, wanted_optim = _CONFIGS[kind]
    config = wanted() if config is None else config
    optim_config = wanted_optim() if optim_config is None else optim_config
    for name, given, fits in (("state_dict_config", config, wanted),
                              ("optim_state_dict_config", optim_config, wanted_optim)):
        if type(given) is not fits:
            raise OptionTypeError(
                f"{name} does not fit {kind.name}", expected=f"shardwise.{fits.__name__}",
                got=f"{type(given).__module__}.{type(given).__name__}",
                remedy=f"Pass shardwise.{fits.__name__}(), or leave it out.",
            )
    return StateDictSettings(kind, config, optim_config)
