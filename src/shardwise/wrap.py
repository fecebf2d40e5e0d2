"""Wrap policies and hand wrapping, under the names of ``torch.distributed.fsdp.wrap``."""

from __future__ import annotations

from shardwise.frontend.wrapping import enable_wrap, wrap
from shardwise.plan.policies import ApartPolicy, Candidates, CustomPolicy, ModuleWrapPolicy, Policy
from shardwise.plan.policy_functions import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    module_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "ApartPolicy",
    "Candidates",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "module_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

# Existing training code imports these two under their underscored names.
_or_policy = or_policy
_module_wrap_policy = module_wrap_policy
