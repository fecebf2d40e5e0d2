"""What a user may choose, as frozen values: strategies, precision, offload, prefetch.

Names and fields follow ``torch.distributed.fsdp``, so that changing the import is enough.
Each field says its meaning, its default and the consequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto

import torch
from torch import nn

from ..errors import OptionTypeError

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Precision",
    "ShardingStrategy",
]


class ShardingStrategy(Enum):
    """What is sharded, and over which ranks."""

    FULL_SHARD = auto()  #: parameters, gradients, optimizer state; parameters freed after forward
    SHARD_GRAD_OP = auto()  #: the same at rest; parameters stay gathered from forward to backward
    NO_SHARD = auto()  #: nothing; gradients are all-reduced
    HYBRID_SHARD = auto()  #: FULL_SHARD inside a shard group, replicated across groups
    _HYBRID_SHARD_ZERO2 = auto()  #: SHARD_GRAD_OP inside a shard group, replicated across groups

    @property
    def reshards_after_forward(self) -> bool:
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(Enum):
    """When the next unit's gather starts in backward."""

    BACKWARD_PRE = auto()  #: before this unit's backward: most overlap, one more unit in memory
    BACKWARD_POST = auto()  #: after it: less overlap, less memory


def _check_dtypes(option: MixedPrecision | MixedPrecisionPolicy) -> None:
    for field in fields(option):
        dtype = getattr(option, field.name)
        if field.name.endswith("_dtype") and dtype is not None and (
                not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
            raise OptionTypeError(f"{type(option).__name__}.{field.name} is no dtype to compute in",
                                  expected="a floating-point torch.dtype or None", got=repr(dtype),
                                  remedy="Pass torch.bfloat16, torch.float16 or torch.float32.")


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of the wrapper front end.

    ``param_dtype``: parameters during forward and backward (None: as stored).
    ``reduce_dtype``: gradients on the wire (None: ``param_dtype``).
    ``buffer_dtype``: floating-point buffers during forward (None: as registered).
    ``keep_low_precision_grads``: leave ``.grad`` in ``reduce_dtype`` instead of the stored dtype.
    ``cast_forward_inputs``: each unit casts its floating-point inputs to its ``param_dtype``.
    ``cast_root_forward_inputs``: the root does so, whatever ``cast_forward_inputs`` says.
    ``_module_classes_to_ignore``: modules of these classes, and all below them, keep the stored dtype of
    their parameters and buffers; their inputs are cast to it and their outputs back. An
    ``auto_wrap_policy`` makes each a unit of its own.
    ``accumulate_dtype``: gradients of several backward passes while unsent, as under ``no_sync`` (None:
    fp32, or wider where the wire is).
    ``grad_dtype``: the final ``.grad`` (None: the stored dtype, or see ``keep_low_precision_grads``).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)
    accumulate_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_dtypes(self)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of the composable front end.

    ``param_dtype``, ``reduce_dtype``, ``accumulate_dtype``, ``grad_dtype``: as in ``MixedPrecision``.
    ``output_dtype``: the unit's floating-point outputs are cast to it (None: left).
    ``cast_forward_inputs``: the unit's floating-point inputs are cast to ``param_dtype``.
    ``kept_classes``: modules of these classes, and all below them, keep the stored dtype of their
    parameters; their inputs are cast to it and their outputs back. They stay in the unit and its collectives.
    Buffers are left as registered.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    accumulate_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    kept_classes: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)

    def __post_init__(self) -> None:
        _check_dtypes(self)


@dataclass(frozen=True)
class CPUOffload:
    """``offload_params``: shards of parameters, gradients and optimizer state live on the host."""

    offload_params: bool = False


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards live on the host; ``pin_memory`` page-locks them for faster copies on an accelerator."""

    pin_memory: bool = True


@dataclass(frozen=True)
class Precision:
    """The engine's one form of both precision options; None means: leave as it is."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    grad: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_inputs: bool = False
    cast_root_inputs: bool = False
    kept_classes: tuple[type[nn.Module], ...] = ()  #: modules that keep the stored dtypes

    @classmethod
    def of_wrapper(cls, mp: MixedPrecision | None) -> Precision:
        """From the wrapper's option."""
        if mp is None:
            return cls()
        return cls(
            param=mp.param_dtype,
            reduce=mp.reduce_dtype,
            accumulate=mp.accumulate_dtype,
            grad=mp.grad_dtype,
            buffer=mp.buffer_dtype,
            keep_low_precision_grads=mp.keep_low_precision_grads,
            cast_inputs=mp.cast_forward_inputs,
            cast_root_inputs=mp.cast_root_forward_inputs,
            kept_classes=tuple(mp._module_classes_to_ignore or ()),
        )

    @classmethod
    def of_policy(cls, mp: MixedPrecisionPolicy | None) -> Precision:
        """From the composable front end's option."""
        if mp is None:
            return cls()
        return cls(
            param=mp.param_dtype,
            reduce=mp.reduce_dtype,
            accumulate=mp.accumulate_dtype,
            grad=mp.grad_dtype,
            output=mp.output_dtype,
            cast_inputs=mp.cast_forward_inputs,
            cast_root_inputs=mp.cast_forward_inputs,
            kept_classes=tuple(mp.kept_classes),
        )

    def for_kept(self) -> Precision:
        """For parameters that keep their stored dtype in computation."""
        return replace(self, param=None)

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter stored as ``stored`` is used."""
        return self.param if self.param is not None and stored.is_floating_point else stored

    def wire_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which its gradient travels. Float8 cannot be added up; bfloat16 has all of its values."""
        if self.reduce is not None:
            return self.reduce
        dtype = self.compute_dtype(stored)
        return torch.bfloat16 if dtype.is_floating_point and dtype.itemsize == 1 else dtype

    def accumulation_dtype(self, wire: torch.dtype) -> torch.dtype:
        """The dtype in which gradients for the ``wire`` are added up while unsent."""
        return self.accumulate if self.accumulate is not None else torch.promote_types(wire, torch.float32)

    def final_dtype(self, stored: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """The dtype of ``.grad``."""
        if self.grad is not None:
            return self.grad
        return wire if self.keep_low_precision_grads else stored
