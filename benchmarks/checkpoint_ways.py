"""Each contender's way to save a sharded model and to load it into one that begins on the meta device."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import CONTENDERS, Block

__all__ = ["WAYS", "Way"]

Build = Callable[[], nn.Module]


class Way(ABC):
    """``shards`` names how the model is sharded; ways that shard alike save one and the same model."""

    name: str
    shards: str

    def sharded(self, build: Build) -> nn.Module:
        """A sharded model on the meta device."""
        with torch.device("meta"):
            model = build()
        return CONTENDERS[self.shards](model, Block)

    def blank(self, build: Build) -> nn.Module:
        """A sharded model whose parameters have memory and no values."""
        return self.sharded(build).to_empty(device="cpu")

    def filled(self, build: Build) -> nn.Module:
        """One with values."""
        model = self.blank(build)
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            for value in self.local_values(model).values():
                value.normal_()
        return model

    def local_values(self, model: nn.Module) -> dict[str, Tensor]:
        """What this rank holds."""
        return {name: getattr(p, "_local_tensor", p.detach()) for name, p in model.named_parameters()}

    @abstractmethod
    def save(self, model: nn.Module, path: Path) -> None:
        """All ranks call it; nothing is left to do when it returns."""

    @abstractmethod
    def load(self, build: Build, path: Path) -> nn.Module:
        """A new model with the values in ``path``."""


class Shardwise(Way):
    name, shards = "shardwise", "fully_shard"

    def local_values(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: p.data for name, p in model.named_parameters()}

    def save(self, model: nn.Module, path: Path) -> None:
        from shardwise import checkpoint

        checkpoint.save(path, model)

    def load(self, build: Build, path: Path) -> nn.Module:
        from shardwise import checkpoint

        model = self.sharded(build)
        checkpoint.load(path, model)
        return model


class FullFile(Way):
    """FSDP1: the full state dict on rank 0, one file of ``torch.save``; loaded from the mapped file."""

    name, shards = "fsdp1-torch.save", "fsdp1"

    def blank(self, build: Build) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        with torch.device("meta"):
            model = build()
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu"),
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False) and None)

    def _chosen(self, model: nn.Module, *, rank0_only: bool) -> Any:
        from torch.distributed import fsdp

        # offload_to_cpu must be off: on CPU ranks it hands out memory that is freed already
        return fsdp.FullyShardedDataParallel.state_dict_type(
            model, fsdp.StateDictType.FULL_STATE_DICT,
            fsdp.FullStateDictConfig(rank0_only=rank0_only))

    def save(self, model: nn.Module, path: Path) -> None:
        with warnings.catch_warnings(), self._chosen(model, rank0_only=True):
            warnings.simplefilter("ignore")
            state = model.state_dict()
            if dist.get_rank() == 0:
                with path.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
        dist.barrier()

    def load(self, build: Build, path: Path) -> nn.Module:
        model = self.blank(build)
        state = torch.load(path, weights_only=True, mmap=True)
        with warnings.catch_warnings(), self._chosen(model, rank0_only=False):
            warnings.simplefilter("ignore")
            model.load_state_dict(state)
        return model


class Dcp(Way):
    """FSDP2 with ``torch.distributed.checkpoint``."""

    name, shards = "fsdp2-dcp", "fsdp2"

    def save(self, model: nn.Module, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": model.state_dict()}, storage_writer=self.writer(path))

    def writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(str(path))

    def load(self, build: Build, path: Path) -> nn.Module:
        import torch.distributed.checkpoint as dcp

        model = self.blank(build)
        dcp.load({"model": model.state_dict()}, storage_reader=self.reader(path))  # in place
        return model

    def reader(self, path: Path) -> Any:
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(str(path))


class Consolidated(Dcp):
    """The same into safetensors, which are put together into standard ones afterwards."""

    name = "fsdp2-dcp-hf"

    def save(self, model: nn.Module, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        path.mkdir(parents=True, exist_ok=True)
        dcp.save(model.state_dict(), storage_writer=self.writer(path))
        dist.barrier()

    def writer(self, path: Path) -> Any:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        return HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)

    def load(self, build: Build, path: Path) -> nn.Module:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        model = self.blank(build)
        dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(path)))
        return model


WAYS: dict[str, Way] = {way.name: way for way in (Shardwise(), FullFile(), Dcp(), Consolidated())}
