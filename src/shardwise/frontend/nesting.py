"""Units below a wrapper, as its ``auto_wrap_policy`` chooses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..engine.hooks import unit_of
from ..plan.policies import ApartPolicy
from .materialise import LeftToOuter
from .wrapper_options import WrapperOptions
from .wrapping import auto_wrap

__all__ = ["wrap_below"]


def wrap_below(
    module: nn.Module, options: WrapperOptions, policy: Any,
    ignored: tuple[set[nn.Module], set[nn.Parameter]], wrapper: Callable[..., nn.Module],
) -> None:
    """Wrap what ``policy`` chooses below ``module`` in ``wrapper``, with the outer one's ``options``."""
    mp = options.mixed_precision
    if mp is not None and mp._module_classes_to_ignore:
        # of its own, such a unit has nothing that a narrower wire could be asked for
        policy = ApartPolicy(policy, tuple(mp._module_classes_to_ignore),
                             mixed_precision=replace(mp, reduce_dtype=None))
        if any(isinstance(m, tuple(mp._module_classes_to_ignore)) for m in module.modules()):
            warnings.warn("shardwise: modules that mixed precision leaves alone become units of their own",
                          stacklevel=4)
    inherited = options.as_arguments()
    if not options.sync_module_states and not isinstance(options.param_init_fn, LeftToOuter):
        inherited["param_init_fn"] = LeftToOuter(options.param_init_fn)
    modules, parameters = ignored
    if parameters and not modules:
        inherited["ignored_states"] = tuple(parameters)
    elif modules:
        inherited["ignored_modules"] = tuple(modules)
    auto_wrap(
        module, policy, lambda child, overrides: wrapper(child, **(inherited | overrides)),
        ignored_modules=modules, ignored_parameters=parameters, is_unit=lambda m: unit_of(m) is not None,
    )
