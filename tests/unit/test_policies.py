"""Wrap policies and the choice that they make over a tree."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import wrap as public
from shardwise.errors import ConfigurationError, OptionTypeError
from shardwise.plan.policies import ApartPolicy, Candidates, Policy, select_modules
from shardwise.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

LINEAR = 5 * 5 + 5  # elements of one nn.Linear(5, 5)


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


def names(root: nn.Module, policy: Any, **options: Any) -> list[str]:
    name_of = {module: name for name, module in root.named_modules()}
    return [name_of[module] for module in select_modules(root, policy, **options)]


def at_least(numel: int, **options: Any) -> Any:
    return partial(size_based_auto_wrap_policy, min_num_params=numel, **options)


# What each policy chooses


def test_always_wrap_takes_every_module_children_first_and_never_the_root() -> None:
    assert names(nested(), always_wrap_policy) == ["0", "1", "2.0", "2.1", "2"]


def test_module_wrap_policy_takes_just_its_classes() -> None:
    root = nn.Sequential(Block(), linear(), Block())
    assert names(root, ModuleWrapPolicy({Block})) == ["0", "2"]
    assert names(root, ModuleWrapPolicy([Block, nn.BatchNorm1d])) == ["0.norm", "0", "2.norm", "2"]
    assert names(root, ModuleWrapPolicy([])) == []


def test_subclasses_count_as_their_class() -> None:
    class SpecialBlock(Block):
        pass

    assert names(nn.Sequential(SpecialBlock()), ModuleWrapPolicy({Block})) == ["0"]


def test_transformer_policy_takes_just_the_layer_classes() -> None:
    root = nn.Sequential(Block(), linear())
    assert names(root, partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})) == ["0"]


def test_lambda_policy_takes_what_the_function_names() -> None:
    root = nested()
    assert names(root, partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m is root[2][1])) == ["2.1"]


def test_or_policy_takes_what_any_of_its_policies_takes() -> None:
    root = nn.Sequential(Block(), linear(), nn.ReLU())
    policies = [
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ModuleWrapPolicy({nn.ReLU}),
    ]
    assert names(root, partial(or_policy, policies=policies)) == ["0", "2"]


def test_or_policy_looks_inside_where_any_of_its_policies_would() -> None:
    root = nn.Sequential(nn.Sequential(linear()))
    policies = [at_least(10**9), ModuleWrapPolicy({nn.Linear})]
    assert names(root, partial(or_policy, policies=policies)) == ["0.0"]


def test_custom_policy_gives_overrides_per_module() -> None:
    root = nested()
    answers = {root[0]: True, root[1]: {"strategy": "other"}, root[2]: {}}
    chosen = select_modules(root, CustomPolicy(lambda m: answers.get(m, False)))
    assert chosen == {root[0]: {}, root[1]: {"strategy": "other"}}


def test_custom_policy_does_not_hand_out_the_users_dict() -> None:
    root, mine = nested(), {"strategy": "other"}
    chosen = select_modules(root, CustomPolicy(lambda m: mine))
    chosen[root[0]]["strategy"] = "changed"
    assert mine == {"strategy": "other"} and chosen[root[1]] == {"strategy": "other"}


def test_custom_policy_is_asked_in_the_order_of_modules() -> None:
    root, asked = nested(), []
    select_modules(root, CustomPolicy(lambda m: bool(asked.append(m))), ignored_modules={root[1]})
    assert asked == [m for m in root.modules() if m is not root[1]]


def test_apart_policy_adds_its_classes_and_keeps_other_overrides() -> None:
    root = nn.Sequential(Block(), nn.BatchNorm1d(5))
    answers = {root[1]: {"strategy": "other", "mixed_precision": "half"}}
    custom = CustomPolicy(lambda m: answers.get(m, False))
    chosen = select_modules(root, ApartPolicy(custom, [nn.BatchNorm1d], mixed_precision=None))
    assert chosen == {
        root[0].norm: {"mixed_precision": None},
        root[1]: {"strategy": "other", "mixed_precision": None},
    }


def test_apart_policy_reaches_below_what_a_size_policy_leaves_whole_and_counts_for_no_one_else() -> None:
    root = nn.Sequential(Block(), linear())
    assert names(root, ApartPolicy(at_least(LINEAR + 1), [nn.BatchNorm1d])) == ["0.norm"]
    assert names(root, at_least(LINEAR + 1)) == ["0"]  # linear and norm together are enough


def test_apart_policy_respects_ignored_modules() -> None:
    root = nn.Sequential(Block(), nn.BatchNorm1d(5))
    policy = ApartPolicy(always_wrap_policy, [nn.BatchNorm1d])
    assert names(root, policy, ignored_modules={root[0]}) == ["1"]


def test_a_policy_of_ones_own_decides_over_the_whole_tree() -> None:
    class EverySecondLinear(Policy):
        def select(self, candidates: Candidates) -> dict[nn.Module, dict[str, Any]]:
            found = [m for _, m in candidates.named() if isinstance(m, nn.Linear)]
            return {m: {} for m in found[::2]}

    assert names(nested(), EverySecondLinear()) == ["0", "2.0"]


# The size policy


def test_size_policy_wraps_at_the_threshold_and_not_below() -> None:
    root = nested()
    assert names(root, at_least(LINEAR)) == ["0", "1", "2.0", "2.1"]
    assert names(root, at_least(LINEAR + 1)) == ["2"]
    assert names(root, at_least(2 * LINEAR)) == ["2"]
    assert names(root, at_least(2 * LINEAR + 1)) == []


def test_size_policy_does_not_count_what_a_wrapped_child_took() -> None:
    inner = nn.Sequential(nn.Linear(10, 10), linear())  # 110 + 30 elements
    root = nn.Sequential(inner, linear())
    assert names(root, at_least(100)) == ["0.0"]
    assert names(root, at_least(LINEAR)) == ["0.0", "0.1", "1"]


def test_size_policy_default_threshold_is_a_hundred_million() -> None:
    with torch.device("meta"):
        root = nn.Sequential(nn.Linear(10_000, 10_000, bias=False), nn.Linear(10_000, 9_999, bias=False))
    assert names(root, size_based_auto_wrap_policy) == ["0"]


@pytest.mark.parametrize("container", [
    nn.ModuleList([linear(), linear()]), nn.ModuleDict({"a": linear(), "b": linear()}),
], ids=["list", "dict"])
def test_size_policy_wraps_children_of_a_container_and_never_the_container(container: nn.Module) -> None:
    root = nn.Sequential()
    root.add_module("box", container)
    children = [f"box.{name}" for name, _ in container.named_children()]
    assert names(root, at_least(LINEAR)) == children
    assert names(root, at_least(2 * LINEAR)) == []


def test_size_policy_honours_given_exclusions() -> None:
    assert names(nested(), at_least(LINEAR, exclude_wrap_modules={nn.Linear})) == ["2"]
    boxed = nn.Sequential(nn.ModuleList([linear(), linear()]))
    assert names(boxed, at_least(2 * LINEAR, exclude_wrap_modules=set())) == ["0"]


def test_size_policy_leaves_attention_whole_in_the_unit_around_it() -> None:
    root = nn.Sequential(nn.MultiheadAttention(8, 2), linear())
    assert names(root, at_least(LINEAR)) == ["1"]
    assert names(nn.Sequential(root), at_least(LINEAR)) == ["0.1", "0"]
    assert names(root, at_least(LINEAR, force_leaf_modules=set())) == ["0.out_proj", "0", "1"]


def test_size_policy_honours_extra_leaf_classes() -> None:
    leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES | {Block}
    root = nn.Sequential(nn.Sequential(Block(), nn.MultiheadAttention(8, 2)))
    assert names(root, at_least(LINEAR)) == ["0.0.inner", "0"]
    assert names(root, at_least(LINEAR, force_leaf_modules=leaves)) == ["0"]


def test_size_policy_shows_its_defaults() -> None:
    leaves, excluded = (getattr(size_based_auto_wrap_policy, name)
                        for name in ("FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"))
    assert leaves == {nn.MultiheadAttention} and excluded == {nn.ModuleList, nn.ModuleDict}


def test_size_policy_follows_a_changed_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Linear})
    assert names(nested(), at_least(LINEAR)) == ["2"]


def test_a_tied_parameter_counts_once_and_for_the_first_that_takes_it() -> None:
    root = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Sequential(nn.Linear(6, 6, bias=False), linear()))
    root[1][0].weight = root[0].weight
    assert names(root, at_least(36)) == ["0"]


def test_legacy_policies_choose_a_shared_module_once() -> None:
    shared = linear()
    assert names(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)), at_least(LINEAR)) == ["0.0"]


# Ignored modules and parameters


def test_ignored_modules_and_all_below_stay_out() -> None:
    root = nested()
    assert names(root, always_wrap_policy, ignored_modules={root[1], root[2][0]}) == ["0", "2.1", "2"]
    assert names(root, ModuleWrapPolicy({nn.Linear}), ignored_modules={root[2]}) == ["0", "1"]
    assert names(root, CustomPolicy(lambda m: True), ignored_modules={root[2]}) == ["0", "1"]
    assert names(root, always_wrap_policy, ignored_modules={root}) == []


def test_an_ignored_module_elsewhere_changes_nothing() -> None:
    assert names(nested(), always_wrap_policy, ignored_modules={linear()}) == ["0", "1", "2.0", "2.1", "2"]


def test_size_policy_does_not_count_ignored_modules() -> None:
    root = nested()
    assert names(root, at_least(2 * LINEAR), ignored_modules={root[2][0]}) == []


def test_size_policy_does_not_count_ignored_parameters() -> None:
    root = nested()
    assert names(root, at_least(2 * LINEAR), ignored_parameters={root[2][0].bias}) == []
    assert names(root, at_least(2 * LINEAR - 5), ignored_parameters={root[2][0].bias}) == ["2"]


# Refusals


class Unit(Wrapped):
    pass


def is_unit(module: nn.Module) -> bool:
    return isinstance(module, Unit)


def test_a_tree_that_holds_a_unit_is_refused_with_its_name() -> None:
    root = nn.Sequential(linear(), nn.Sequential(Unit(linear())))
    with pytest.raises(ConfigurationError, match=r"a unit already \(unit '1\.0'\).*got Unit.*ignored_mod"):
        select_modules(root, always_wrap_policy, is_unit=is_unit)
    assert names(root, always_wrap_policy, ignored_modules={root[1]}, is_unit=is_unit) == ["0"]


def test_a_root_that_is_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="the root"):
        select_modules(Unit(linear()), ModuleWrapPolicy({nn.Linear}), is_unit=is_unit)


@pytest.mark.parametrize("policy", [{Block}, None, 3])
def test_a_policy_that_cannot_be_called_is_refused(policy: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"expected a policy of shardwise\.wrap or a function .*, got "
                       f"{type(policy).__name__}.*ModuleWrapPolicy"):
        select_modules(nested(), policy)


@pytest.mark.parametrize("policy", [lambda module: True, ModuleWrapPolicy, transformer_auto_wrap_policy])
def test_a_policy_with_other_arguments_is_refused(policy: Any) -> None:
    with pytest.raises(OptionTypeError, match=r"cannot be called as a policy.*CustomPolicy.*functools"):
        select_modules(nested(), policy)


def test_a_callable_object_is_a_policy() -> None:
    class Picky:
        def __call__(self, *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return recurse or isinstance(module, nn.Sequential)

    assert names(nested(), Picky()) == ["2"]


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_custom_policy_refuses_other_answers_and_names_the_module(answer: Any) -> None:
    root = nested()
    policy = CustomPolicy(lambda m: answer if m is root[2][0] else True)
    with pytest.raises(OptionTypeError, match=rf"unit '2\.0'.*expected True, False or .*got {answer!r}"):
        select_modules(root, policy)


def test_custom_policy_refuses_what_it_cannot_call() -> None:
    with pytest.raises(OptionTypeError, match="lambda_fn: expected a function of one module, got set"):
        CustomPolicy({Block})  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [Block, ["Block"], 3])
def test_classes_that_are_none_are_refused(classes: Any) -> None:
    with pytest.raises(OptionTypeError, match="module_classes is no collection"):
        ModuleWrapPolicy(classes)
    with pytest.raises(OptionTypeError, match="transformer_layer_cls is no collection"):
        select_modules(nested(), partial(transformer_auto_wrap_policy, transformer_layer_cls=classes))


def test_or_policy_refuses_policies_that_can_be_read_only_once() -> None:
    policies = (policy for policy in [always_wrap_policy])
    with pytest.raises(OptionTypeError, match="expected a list of policies, got a one-time generator"):
        select_modules(nested(), partial(or_policy, policies=policies))


# Against the peer


def test_names_and_arguments_are_the_peers() -> None:
    from torch.distributed.fsdp import wrap as peer

    for name in peer.__all__:
        ours = inspect.signature(getattr(public, name)).parameters.values()
        theirs = inspect.signature(getattr(peer, name)).parameters.values()
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs], name
    assert public._or_policy is or_policy


@pytest.mark.parametrize("numel", [0, 1, 100, 200, 300, 500, 800, 1200, 5000, 10**6])
def test_size_policy_chooses_what_the_peers_chooses(numel: int) -> None:
    from torch.distributed.fsdp import wrap as peer

    def transformer() -> nn.Module:
        return nn.Transformer(d_model=8, nhead=2, num_encoder_layers=2, num_decoder_layers=2,
                              dim_feedforward=16, batch_first=True)

    theirs = transformer()
    policy = partial(peer.size_based_auto_wrap_policy, min_num_params=numel)
    peer._recursive_wrap(theirs, policy, Wrapped, set(), set(), only_wrap_children=True)
    wrapped = [name.replace("module.", "") for name, m in theirs.named_modules() if isinstance(m, Wrapped)]
    assert sorted(names(transformer(), at_least(numel))) == sorted(wrapped)


def test_the_printed_policy_names_its_classes() -> None:
    assert repr(ModuleWrapPolicy({nn.Linear, Block})) == "ModuleWrapPolicy(Block, Linear)"
