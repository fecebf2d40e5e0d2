"""Casting what goes into and comes out of a unit's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .traverse import map_tensors
from .unit import Unit

__all__ = ["cast_inputs", "cast_outputs"]


def _to(dtype: torch.dtype, value: Any) -> Any:
    def change(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor
    return map_tensors(value, change)


def cast_inputs(unit: Unit, args: Any, kwargs: Any, *, is_root: bool) -> tuple[Any, Any]:
    """Floating-point inputs in the unit's compute dtype, where its policy says so."""
    precision = unit.precision
    wanted = precision.cast_root_inputs if is_root else precision.cast_inputs
    if precision.param is None or not (wanted or precision.cast_inputs):
        return args, kwargs
    return _to(precision.param, args), _to(precision.param, kwargs)


def cast_outputs(unit: Unit, output: Any) -> Any:
    """Floating-point outputs in the policy's ``output_dtype``."""
    dtype = unit.precision.output
    return output if dtype is None else _to(dtype, output)
