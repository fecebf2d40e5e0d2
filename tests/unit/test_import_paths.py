"""The modules that code written for ``torch.distributed.fsdp`` imports from are here under the same names."""

from __future__ import annotations

import importlib
import subprocess
import sys

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


def test_they_are_there_after_import_shardwise_alone() -> None:
    """As ``torch.distributed.fsdp.wrap`` is after ``import torch.distributed.fsdp``; in a fresh interpreter."""
    seen = ("import shardwise; print(shardwise.wrap.ModuleWrapPolicy, shardwise.api.ShardingStrategy, "
            "shardwise.fully_sharded_data_parallel.FullyShardedDataParallel, "
            "shardwise.sharded_grad_scaler.ShardedGradScaler, shardwise.comm_hooks.DefaultState, "
            "shardwise.checkpoint.save, shardwise.errors.DivergenceError)")
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ModuleWrapPolicy" in done.stdout
