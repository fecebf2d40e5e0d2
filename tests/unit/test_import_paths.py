"""The modules that code written for ``torch.distributed.fsdp`` imports from are here under the same names."""

from __future__ import annotations

import importlib

import pytest

import shardwise

PUBLIC_OF_THE_WRAPPER = ("BackwardPrefetch", "CPUOffload", "CustomPolicy", "FlatParameter", "FullyShardedDataParallel",
                         "MixedPrecision", "ModuleWrapPolicy", "OptimStateKeyType", "ShardingStrategy")


@pytest.mark.parametrize("name", ["api", "fully_sharded_data_parallel", "sharded_grad_scaler"])
def test_torchs_places(name: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.fsdp.{name}")
    ours = importlib.import_module(f"shardwise.{name}")
    wanted = set(getattr(theirs, "__all__", ())) | (
        set(PUBLIC_OF_THE_WRAPPER) if name == "fully_sharded_data_parallel" else set())
    assert wanted <= set(ours.__all__)
    for public in ours.__all__:
        assert getattr(ours, public) is getattr(shardwise, public, getattr(ours, public))
        assert getattr(ours, public).__module__.startswith("shardwise.")


def test_the_names_are_those_of_torchs_modules() -> None:
    theirs = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")
    ours = importlib.import_module("shardwise.fully_sharded_data_parallel")
    assert [name for name in ours.__all__ if getattr(theirs, name, None) is None] == []
