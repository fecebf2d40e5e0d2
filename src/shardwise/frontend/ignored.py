"""Which modules and parameters a front end leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import ConfigurationError, OptionTypeError

__all__ = ["ignored_by_states"]


def ignored_by_states(
    root: nn.Module,
    ignored_modules: Iterable[Any] | None,
    ignored_states: Iterable[Any] | None,
    is_wrapper: type[nn.Module],
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The ignored modules (with all below them), and the parameters ignored by themselves.

    Checks the wrapper's two arguments.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigurationError(
            "ignored_modules and ignored_states exclude each other", expected="one of them", got="both",
            remedy="Pass everything as ignored_states.",
        )
    given = list(ignored_states if ignored_states is not None else ignored_modules or ())
    modules = [item for item in given if isinstance(item, nn.Module)]
    parameters = [item for item in given if isinstance(item, nn.Parameter)]
    others = [item for item in given if not isinstance(item, (nn.Module, nn.Parameter))]
    if others or (parameters and ignored_states is None):
        raise OptionTypeError(
            "ignored_modules takes modules" if ignored_states is None
            else "ignored_states takes parameters or modules",
            expected="nn.Module" if ignored_states is None else "nn.Parameter or nn.Module",
            got=type((others or parameters)[0]).__name__,
            remedy="Pass an iterable of nn.Module, or of nn.Parameter as ignored_states.",
        )
    if modules and parameters:
        raise OptionTypeError(
            "ignored_states mixes modules and parameters", expected="one kind", got="both",
            remedy="Pass only modules, or only parameters.",
        )
    for module in modules:
        if isinstance(module, is_wrapper):
            warnings.warn("shardwise: ignoring a module that is sharded already has no effect", stacklevel=3)
        if module is root:
            warnings.warn("shardwise: the ignored module is the one being sharded: nothing is left",
                          stacklevel=3)
    ignored = {below for module in modules if not isinstance(module, is_wrapper) for below in module.modules()}
    return ignored, set(parameters)
