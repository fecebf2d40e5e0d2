"""Casting what goes into and comes out of a unit's forward."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..plan.options import Precision
from .traverse import map_tensors, tensors_in
from .unit import Unit

__all__ = ["cast_floating", "cast_inputs", "cast_outputs", "cast_up", "kept_modules", "move"]


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; the same object where all are."""
    def change(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor
    return map_tensors(value, change)


def move(device: torch.device, value: Any) -> Any:
    """``value`` with its tensors on ``device``; the same object where all are."""
    return map_tensors(value, lambda t: t.to(device, non_blocking=True) if t.device != device else t)


def cast_inputs(unit: Unit, args: Any, kwargs: Any, *, is_root: bool) -> tuple[Any, Any]:
    """Floating-point inputs in the unit's compute dtype, where its policy says so.

    The root brings all inputs to its accelerator, if it computes on one.
    """
    precision = unit.precision
    if is_root and unit.storages and unit.storages[0].compute_device.type != "cpu":
        device = unit.storages[0].compute_device
        args, kwargs = move(device, args), move(device, kwargs)
    wanted = precision.cast_inputs or (is_root and precision.cast_root_inputs)
    if precision.param is None or not wanted:
        return args, kwargs
    return cast_floating(precision.param, args), cast_floating(precision.param, kwargs)


def cast_outputs(unit: Unit, output: Any) -> Any:
    """Floating-point outputs in the policy's ``output_dtype``."""
    dtype = unit.precision.output
    return output if dtype is None else cast_floating(dtype, output)


def kept_modules(modules: Iterable[nn.Module], precision: Precision) -> set[nn.Module]:
    """Those of ``modules`` that keep the stored dtypes: of a kept class, or below one that is."""
    if precision.param is None and precision.buffer is None:
        return set()
    kept: set[nn.Module] = set()
    for module in modules:  # parents come first
        if module not in kept and isinstance(module, precision.kept_classes):
            kept.update(module.modules())
    return kept


def cast_up(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, torch.dtype | None]:
    """Floating-point inputs in the dtype of ``module``, and the dtype that they had (None: that one)."""
    own = next((t.dtype for t in chain(module.parameters(), module.buffers()) if t.is_floating_point()),
               torch.float32)
    others = (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point() and t.dtype is not own)
    given = next(others, None)
    if given is None:
        return args, kwargs, None
    return cast_floating(own, args), cast_floating(own, kwargs), given
