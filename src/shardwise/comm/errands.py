"""Which call of the library this thread is in, so that a message about a collective can name it.

A collective knows its unit, if any, and nothing of who asked for it. Here the outermost call counts: the user made it.
It travels as a number beside what each rank tells of its collectives anyway. It is never compared, for one collective
may be a part of several calls; the training forward and backward are no errand, and change nothing here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["HERE", "Errand", "in_errand"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

#: by number, the same on all ranks
_CALLS = (
    "",
    "OwnerExchange.gather",
    "OwnerExchange.scatter",
    "apply",
    "check_numbers",
    "checkpoint.load",
    "checkpoint.load_from_memory",
    "checkpoint.save",
    "checkpoint.save_to_memory",
    "clip_grad_norm_",
    "reading a norm of gradients (float, print)",
    "compare_replicas",
    "full_optim_state_dict",
    "full_tensor",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "group_by_execution",
    "iter_full_tensors",
    "iter_units_full",
    "load_state_dict",
    "materialise",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "optimizer.load_state_dict",
    "optimizer.state_dict",
    "scatter_full_optim_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "sharded_optim_state_dict",
    "state_dict",
    "summon_full_params",
    "sync_module_states",
    "the comparison of models before the first forward",
    "unscale_ of the gradient scaler",
    "unshard",
)
_NUMBERS = {call: number for number, call in enumerate(_CALLS)}


class _Here(threading.local):
    """Of each thread: a save in the background goes on beside training."""

    number = 0  #: of the call that this thread is in; 0 for none


HERE = _Here()


class Errand:
    """In ``with Errand("state_dict"):``, or a function that it decorates, collectives belong to that call.

    Or to a call around it.
    """

    __slots__ = ("_number", "_outer")

    def __init__(self, call: str) -> None:
        self._number, self._outer = _NUMBERS[call], 0

    def __enter__(self) -> None:
        self._outer = HERE.number
        HERE.number = self._outer or self._number

    def __exit__(self, *_: object) -> None:
        HERE.number = self._outer

    def __call__(self, function: Callable[Given, Result]) -> Callable[Given, Result]:
        number = self._number

        @wraps(function)
        def inside(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            outer = HERE.number
            HERE.number = outer or number
            try:
                return function(*args, **kwargs)
            finally:
                HERE.number = outer
        return inside


def in_errand(number: int | None = None) -> str:
    """The words `in clip_grad_norm_` with a space before them, or nothing; without a number, of this thread now."""
    call = _CALLS[HERE.number if number is None else number]
    return f" in {call}" if call else ""
