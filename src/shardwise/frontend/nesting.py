"""Units below a wrapper, as its ``auto_wrap_policy`` chooses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..checkpoint.model_state import install
from ..comm.mesh import transports
from ..engine.build import build_unit
from ..engine.hooks import unit_of
from ..plan.execution import ExecutionGroups
from ..plan.policies import ApartPolicy
from ..plan.state_options import StateDictType
from .execution import agree_on_groups
from .materialise import LeftToOuter, materialise_with
from .placing import all_on_meta, move_to_device, sync_states
from .wrapper_options import WrapperOptions, choices_of, groups_of, initialiser_of
from .wrapping import auto_wrap

__all__ = ["wrap_below"]


def wrap_below(
    module: nn.Module, options: WrapperOptions, policy: Any,
    ignored: tuple[set[nn.Module], set[nn.Parameter]], wrapper: Callable[..., nn.Module],
) -> None:
    """Wrap what ``policy`` chooses below ``module`` in ``wrapper``, with the outer one's ``options``.

    Execution groups become units of several modules, which no wrapper can stand for.
    """
    if isinstance(policy, ExecutionGroups):
        _shard_groups(module, options, policy, ignored)
        return
    mp = options.mixed_precision
    if mp is not None and mp._module_classes_to_ignore:
        # of its own, such a unit has nothing that a narrower wire could be asked for
        policy = ApartPolicy(policy, tuple(mp._module_classes_to_ignore),
                             mixed_precision=replace(mp, reduce_dtype=None))
        kinds = {type(m).__name__ for m in module.modules() if isinstance(m, tuple(mp._module_classes_to_ignore))}
        if kinds:
            warnings.warn(f"shardwise: modules that mixed precision leaves alone ({', '.join(sorted(kinds))}) become "
                          "units of their own", stacklevel=5)
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


def _shard_groups(
    module: nn.Module, options: WrapperOptions, groups: ExecutionGroups,
    ignored: tuple[set[nn.Module], set[nn.Parameter]],
) -> None:
    """Make units of several modules. What is on meta is left to the root, which comes next."""
    device = move_to_device(module, options.device_id, *ignored)
    both = transports(groups_of(options), device)
    for members in agree_on_groups(groups, both, device).modules_of(module, left_out=ignored[0]):
        if options.sync_module_states or not all(all_on_meta(member, *ignored) for member in members):
            for member in members:
                materialise_with(member, initialiser_of(options, device, *ignored))
                if options.sync_module_states:
                    sync_states(member, [comm for comm in both if comm is not None], *ignored)
        install(build_unit(members, choices_of(options, both, device, ignored)),
                StateDictType.FULL_STATE_DICT, snapshot=True)
