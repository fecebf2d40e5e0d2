"""Wrap policies that are plain functions ``(module, recurse, nonwrapped_numel) -> bool``.

With ``recurse`` the question is whether to look inside ``module``, without it whether to make ``module``
a unit, given that ``nonwrapped_numel`` elements of its parameters are in no unit yet. What else a function
takes is bound beforehand with ``functools.partial``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from shardwise.errors import OptionTypeError

__all__ = [
    "ModuleClasses",
    "always_wrap_policy",
    "class_tuple",
    "lambda_auto_wrap_policy",
    "module_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

ModuleClasses = Iterable[type[nn.Module]]


def class_tuple(classes: object, argument: str) -> tuple[type[nn.Module], ...]:
    """Check and freeze a collection of classes, for ``isinstance``."""
    if isinstance(classes, Iterable):
        members: tuple[Any, ...] = tuple(classes)
        if all(isinstance(member, type) for member in members):
            return members
    got = classes.__name__ if isinstance(classes, type) else repr(classes)
    raise OptionTypeError(f"{argument} is no collection of module classes",
                          expected="classes, such as {Block, Embedding}", got=got)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make every module a unit."""
    return True


def module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: ModuleClasses
) -> bool:
    """Make every instance of ``module_classes`` a unit."""
    return recurse or isinstance(module, class_tuple(module_classes, "module_classes"))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: ModuleClasses
) -> bool:
    """Make every transformer layer, an instance of ``transformer_layer_cls``, a unit."""
    return recurse or isinstance(module, class_tuple(transformer_layer_cls, "transformer_layer_cls"))


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Make every module for which ``lambda_fn(module)`` holds a unit."""
    return recurse or lambda_fn(module)


def or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Follow any of several plain callables: look inside, or make a unit, where one of them would."""
    if isinstance(policies, Iterator):
        raise OptionTypeError("or_policy needs its policies again for every module",
                              expected="a list of policies", got=f"a one-time {type(policies).__name__}")
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Make a unit wherever at least ``min_num_params`` elements are in no unit yet.

    ``force_leaf_modules`` stay whole, in the unit around them; ``exclude_wrap_modules`` do not become units
    though their children may. ``None`` stands for the defaults, this function's FORCE_LEAF_MODULES and
    EXCLUDE_WRAP_MODULES.
    """
    if nonwrapped_numel < min_num_params:
        return False
    if recurse:
        default: set[type[nn.Module]] = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # pyright: ignore[reportFunctionMemberAccess]
        barred = default if force_leaf_modules is None else force_leaf_modules
    else:
        default = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # pyright: ignore[reportFunctionMemberAccess]
        barred = default if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(barred))


# Where users read the defaults to extend them: `size_based_auto_wrap_policy.FORCE_LEAF_MODULES | {MyBlock}`.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # pyright: ignore[reportFunctionMemberAccess]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # pyright: ignore[reportFunctionMemberAccess]
