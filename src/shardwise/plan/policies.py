"""Wrap policies: which modules of a tree become units, and with which keyword overrides.

A policy comes in one of two forms, both accepted wherever an ``auto_wrap_policy`` is:

    Policy object    answers once for the whole tree: ``ModuleWrapPolicy``, ``CustomPolicy``, ``ApartPolicy``
    plain callable   ``(module, recurse, nonwrapped_numel) -> bool``, asked on the way down ("look inside?")
                     and on the way up ("make it a unit?"); ``policy_functions`` holds the ready ones

``select_modules`` turns either into ``{module: overrides}``. The answer depends on the tree and the
arguments alone, never on the rank, and nothing is changed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from shardwise.errors import ConfigurationError, OptionTypeError
from shardwise.plan.policy_functions import ModuleClasses, class_tuple

__all__ = [
    "ApartPolicy",
    "Candidates",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Overrides",
    "Policy",
    "WrapPolicy",
    "select_modules",
]

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Candidates:
    """What a policy may choose from: the tree under ``root`` without the ignored subtrees."""

    root: nn.Module
    ignored_modules: frozenset[nn.Module]  # with everything below them
    ignored_parameters: frozenset[nn.Parameter]  # those of the ignored modules included

    @classmethod
    def below(
        cls, root: nn.Module, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]
    ) -> Candidates:
        """Take the ignored modules and parameters as a user names them and add what they imply."""
        ignored = frozenset(inner for module in modules for inner in module.modules())
        owned = (p for module in ignored for p in module.parameters(recurse=False))
        return cls(root, ignored, frozenset(parameters).union(owned))

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Each candidate once with its name, parents first; ``root`` is the first."""
        return ((name, m) for name, m in self.root.named_modules() if m not in self.ignored_modules)

    def post_order(self) -> list[nn.Module]:
        """Each candidate once, children before parents, in order of registration; ``root`` is the last."""
        order: list[nn.Module] = []
        seen = set(self.ignored_modules)

        def visit(module: nn.Module) -> None:
            seen.add(module)
            for child in module.children():
                if child not in seen:
                    visit(child)
            order.append(module)

        visit(self.root)
        return order

    def without_parameters(self, parameters: Iterable[nn.Parameter]) -> Candidates:
        """The same modules, with more parameters that do not count."""
        return replace(self, ignored_parameters=self.ignored_parameters.union(parameters))


class Policy(ABC):
    """A rule that answers for a whole tree at once. Subclass it for a rule of your own."""

    @abstractmethod
    def select(self, candidates: Candidates) -> dict[nn.Module, Overrides]:
        """Return the modules that become units, each with its keyword overrides, in any order."""


WrapPolicy = Policy | Callable[..., bool]


class ModuleWrapPolicy(Policy):
    """Every instance of the given classes becomes a unit. Also usable as a plain callable."""

    def __init__(self, module_classes: ModuleClasses) -> None:
        self._classes = class_tuple(module_classes, "module_classes")

    def select(self, candidates: Candidates) -> dict[nn.Module, Overrides]:
        return {module: {} for _, module in candidates.named() if isinstance(module, self._classes)}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({', '.join(sorted(c.__name__ for c in self._classes))})"


class CustomPolicy(Policy):
    """The user's function decides module by module.

    ``lambda_fn(module)`` returns ``True`` (a unit with the root's arguments), a non-empty dict (a unit
    whose arguments differ from the root's by these), or ``False`` or ``{}`` (not a unit).
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Overrides]) -> None:
        if not callable(lambda_fn):
            raise OptionTypeError("CustomPolicy cannot call its lambda_fn",
                                  expected="a function of one module", got=type(lambda_fn).__name__)
        self._lambda_fn = lambda_fn

    def select(self, candidates: Candidates) -> dict[nn.Module, Overrides]:
        answers = ((module, self._ask(name, module)) for name, module in candidates.named())
        return {module: overrides for module, overrides in answers if overrides is not None}

    def _ask(self, name: str, module: nn.Module) -> Overrides | None:
        answer = cast(object, self._lambda_fn(module))
        if not isinstance(answer, bool | dict):
            raise OptionTypeError(
                "the lambda_fn of CustomPolicy gave an answer that is no decision", unit=name,
                expected="True, False or a dict of keyword overrides", got=repr(answer),
                remedy="Return False for a module that shall not become a unit.",
            )
        if not answer:
            return None
        return {} if answer is True else {**cast(Overrides, answer)}


class ApartPolicy(Policy):
    """Another policy, and besides, instances of the given classes are always units with these overrides.

    The use is to keep, say, batch norm out of mixed precision. What the other policy says about such
    a module is kept where the overrides do not contradict, and its parameters count for no other unit.
    """

    def __init__(self, policy: WrapPolicy, module_classes: ModuleClasses, **overrides: Any) -> None:
        self._policy = _as_policy(policy)
        self._classes = class_tuple(module_classes, "module_classes")
        self._overrides = overrides

    def select(self, candidates: Candidates) -> dict[nn.Module, Overrides]:
        apart = [module for _, module in candidates.named() if isinstance(module, self._classes)]
        parameters = (p for module in apart for p in module.parameters())
        chosen = self._policy.select(candidates.without_parameters(parameters))
        return chosen | {module: chosen.get(module, {}) | self._overrides for module in apart}


class _CallablePolicy(Policy):
    """A plain callable, walked through the tree.

    A module is looked into only if the callable says so; its children come first; ``nonwrapped_numel``
    counts each parameter once and leaves out the ignored and those that a unit has taken already.
    """

    def __init__(self, decide: Callable[..., bool]) -> None:
        self._decide = decide

    def select(self, candidates: Candidates) -> dict[nn.Module, Overrides]:
        chosen: dict[nn.Module, Overrides] = {}
        seen = set(candidates.ignored_modules)
        taken = set(candidates.ignored_parameters)

        def asked(module: nn.Module, *, recurse: bool) -> bool:
            left = sum(p.numel() for p in module.parameters() if p not in taken)
            return self._decide(module=module, recurse=recurse, nonwrapped_numel=left)

        def visit(module: nn.Module) -> None:
            seen.add(module)
            if not asked(module, recurse=True):
                return
            for child in module.children():
                if child not in seen:
                    visit(child)
            if module is not candidates.root and asked(module, recurse=False):
                chosen[module] = {}
                taken.update(module.parameters())

        visit(candidates.root)
        return chosen


def select_modules(
    root: nn.Module,
    policy: WrapPolicy,
    *,
    ignored_modules: AbstractSet[nn.Module] = frozenset(),
    ignored_parameters: AbstractSet[nn.Parameter] = frozenset(),
    is_unit: Callable[[nn.Module], bool] | None = None,
) -> dict[nn.Module, Overrides]:
    """Apply ``policy`` below ``root``.

    Returns the chosen modules with their keyword overrides, children before parents. ``root`` itself is
    not among them (its caller makes it a unit), nor is an ignored module or anything below one. A module
    that hangs at several places is chosen once. A tree that holds a unit already, by ``is_unit``, is refused.
    """
    rule = _as_policy(policy)
    candidates = Candidates.below(root, ignored_modules, ignored_parameters)
    if is_unit is not None:
        _refuse_units(candidates, is_unit)
    chosen = rule.select(candidates)
    return {m: chosen[m] for m in candidates.post_order() if m in chosen and m is not root}


def _refuse_units(candidates: Candidates, is_unit: Callable[[nn.Module], bool]) -> None:
    for name, module in candidates.named():
        if is_unit(module):
            raise ConfigurationError(
                "auto-wrapping met a module that is a unit already", unit=name or "the root",
                expected="a tree without units", got=type(module).__name__,
                remedy="Leave out auto_wrap_policy and wrap by hand, or name the module in ignored_modules.",
            )


def _as_policy(policy: object) -> Policy:
    if isinstance(policy, Policy):
        return policy
    expected = "a policy of shardwise.wrap or a function (module, recurse, nonwrapped_numel) -> bool"
    if not callable(policy):
        raise OptionTypeError("auto_wrap_policy is no policy", expected=expected,
                              got=type(policy).__name__,
                              remedy="For a set of classes use ModuleWrapPolicy(classes).")
    if not _takes_legacy_arguments(policy):
        raise OptionTypeError("auto_wrap_policy cannot be called as a policy", expected=expected,
                              got=repr(policy),
                              remedy="For a function of one module use CustomPolicy(function); bind options "
                                     "with functools.partial.")
    return _CallablePolicy(cast(Callable[..., bool], policy))


def _takes_legacy_arguments(policy: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # a builtin that does not tell its signature
        return True
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError:
        return False
    return True
