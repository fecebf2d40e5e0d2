"""Wrapping the modules of a tree by policy (auto_wrap) and by hand (enable_wrap, wrap)."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigurationError, OptionTypeError
from shardwise.frontend.wrapping import auto_wrap, warn_without_forward
from shardwise.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy, enable_wrap, wrap


class Wrapped(nn.Module):
    """Stands in for the wrapper: keeps the module and the arguments."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.module = module
        self.arguments = arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def linear() -> nn.Linear:
    return nn.Linear(5, 5)


def nested() -> nn.Sequential:
    return nn.Sequential(linear(), linear(), nn.Sequential(linear(), linear()))


class Unit(Wrapped):
    pass


def is_unit(module: nn.Module) -> bool:
    return isinstance(module, Unit)


def wrap_one(module: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    return Wrapped(module, **arguments)


# Wrapping a tree


def test_auto_wrap_puts_the_wrapped_modules_in_place() -> None:
    root = nested()
    x, linears = torch.randn(2, 5), [m for m in root.modules() if isinstance(m, nn.Linear)]
    expected = root(x)
    result = auto_wrap(root, always_wrap_policy, wrap_one, {root[1]}, set(), strategy="full")
    assert [type(root[i]) for i in range(3)] == [Wrapped, nn.Linear, Wrapped]
    assert [type(m) for m in root[2].module] == [Wrapped, Wrapped]
    assert result == [root[0], root[2].module[0], root[2].module[1], root[2]]
    assert [m for m in root.modules() if isinstance(m, nn.Linear)] == linears
    assert torch.equal(root(x), expected)


def test_auto_wrap_sets_overrides_on_top_of_the_arguments_each_in_a_dict_of_its_own() -> None:
    root, received = nested(), []

    def keep(module: nn.Module, arguments: dict[str, Any]) -> nn.Module:
        received.append(arguments)
        return Wrapped(module)

    policy = CustomPolicy(lambda m: {"strategy": "other"} if m is root[0] else m is root[1])
    auto_wrap(root, policy, keep, set(), set(), strategy="full", prefetch=True)
    assert received == [{"strategy": "other", "prefetch": True}, {"strategy": "full", "prefetch": True}]
    assert received[0] is not received[1]


def test_a_shared_module_is_wrapped_once_and_replaced_under_every_name() -> None:
    root = nn.Module()
    shared = linear()
    root.first, root.again = shared, shared
    root.deep = nn.ModuleDict({"left": nn.Sequential(shared), "right": nn.Sequential(shared, linear())})
    result = auto_wrap(root, ModuleWrapPolicy({nn.Linear}), wrap_one)
    one = root.first
    assert isinstance(one, Wrapped) and one.module is shared
    assert root.again is one and root.deep["left"][0] is one and root.deep["right"][0] is one
    assert len(result) == 2 and result[0] is one
    assert not any(child is shared for m in root.modules() if m is not one for child in m.children())


def test_a_shared_parent_is_wrapped_once_around_its_wrapped_children() -> None:
    block = Block()
    root = nn.Sequential(block, nn.Sequential(block))
    auto_wrap(root, ModuleWrapPolicy({Block, nn.Linear}), wrap_one)
    assert root[1][0] is root[0] and root[0].module is block
    assert isinstance(block.inner, Wrapped) and isinstance(block.inner.module, nn.Linear)


def test_a_wrap_one_that_changes_in_place_leaves_the_tree_alone() -> None:
    root = nested()
    before = list(root.modules())
    assert auto_wrap(root, always_wrap_policy, lambda m, _: m) == [root[0], root[1], *root[2], root[2]]
    assert list(root.modules()) == before


def test_a_chosen_container_without_forward_warns() -> None:
    root = nn.Sequential(nn.ModuleList([linear()]))
    with pytest.warns(UserWarning, match="ModuleList has no forward of its own.*wrap the children"):
        auto_wrap(root, ModuleWrapPolicy({nn.ModuleList}), wrap_one)
    assert isinstance(root[0], Wrapped)


def test_modules_that_have_a_forward_do_not_warn() -> None:
    patched = nn.ModuleList([linear()])
    patched.forward = lambda x: x  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (linear(), nested(), patched):
            warn_without_forward(module)


def test_auto_wrap_of_a_wrapped_tree_is_refused_before_anything_changes() -> None:
    root = nn.Sequential(linear(), Unit(linear()))
    before = list(root.modules())
    with pytest.raises(ConfigurationError, match="a unit already"):
        auto_wrap(root, always_wrap_policy, wrap_one, set(), set(), is_unit)
    assert list(root.modules()) == before


# Wrapping by hand


def test_wrap_outside_a_context_returns_the_module() -> None:
    module = linear()
    assert wrap(module, strategy="full") is module


def test_wrap_takes_the_arguments_of_the_context_and_overrides_them() -> None:
    module = linear()
    with enable_wrap(wrapper_cls=Wrapped, strategy="full", auto_wrap_policy=always_wrap_policy):
        one, two = wrap(module), wrap(linear(), strategy="other", prefetch=True)
    assert isinstance(one, Wrapped) and one.module is module
    assert one.arguments == {"strategy": "full", "auto_wrap_policy": always_wrap_policy}
    assert two.arguments == {"strategy": "other", "auto_wrap_policy": always_wrap_policy, "prefetch": True}
    assert wrap(module) is module


def test_contexts_nest_and_the_outer_one_comes_back() -> None:
    with enable_wrap(wrapper_cls=Wrapped, strategy="outer", depth=1):
        with enable_wrap(wrapper_cls=Unit, strategy="inner"):
            inner = wrap(linear())
        outer = wrap(linear())
    assert type(inner) is Unit and inner.arguments == {"strategy": "inner"}
    assert type(outer) is Wrapped and outer.arguments == {"strategy": "outer", "depth": 1}


def test_an_error_ends_the_context() -> None:
    module = linear()
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapped):
        raise KeyError
    assert wrap(module) is module


def test_a_context_holds_for_its_own_thread_only() -> None:
    module, seen = linear(), []
    with enable_wrap(wrapper_cls=Wrapped):
        thread = threading.Thread(target=lambda: seen.append(wrap(module)))
        thread.start()
        thread.join()
    assert seen == [module]


def test_wrap_leaves_what_the_context_ignores() -> None:
    block, other = Block(), linear()
    with enable_wrap(wrapper_cls=Wrapped, ignored_modules=(m for m in [block])):
        assert wrap(block) is block and wrap(block.inner) is block.inner
        wrapped = wrap(other)
    assert wrapped.arguments == {"ignored_modules": [block]}  # read more than once, and handed on


def test_wrap_leaves_modules_among_the_ignored_states_and_passes_parameters() -> None:
    ignored, other = linear(), linear()
    with enable_wrap(wrapper_cls=Wrapped, ignored_states=ignored.parameters()):
        assert wrap(ignored).arguments == {"ignored_states": [ignored.weight, ignored.bias]}
        assert wrap(other, ignored_states=[other]) is other


def test_enable_wrap_refuses_a_wrapper_that_cannot_be_called() -> None:
    with pytest.raises(OptionTypeError, match="wrapper_cls: expected a wrapper class, got 3"), \
            enable_wrap(wrapper_cls=3):  # type: ignore[arg-type]
        pass
