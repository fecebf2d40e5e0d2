"""Folders of DeepSpeed's ZeRO stages 1 to 3, laid out as its own ``zero_to_fp32`` documents.

    latest                                              the name of the newest folder beside it
    <that>/[zero_pp_rank_0_]mp_rank_00_model_states.pt  shapes by name and group, buffers, the weights' names
    <that>/*zero_pp_rank_<r>_mp_rank_00_optim_states.pt fp32 parameters and optimizer state of rank r, flat

    stages 1, 2   of each group one flat vector, cut into equal parts, one for each rank
    stage 3       of each parameter one part for each rank, the parts of one rank behind each other

State that has as many elements as its flat parameters is cut as they are; other state is kept as it is.
Only pure data parallel runs: with tensor or pipeline parallelism a weight lies in several model files.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError
from .foreign import Table
from .safetensors_header import Entry
from .torch_file import Inert, load_inert

__all__ = ["is_deepspeed", "open_deepspeed"]

_OPTIMIZER = "optimizer_state_dict"


def is_deepspeed(path: Path) -> bool:
    """Does ``path`` hold such files, or name the folder that does?"""
    return bool(_optimizer_files(_folder(path)))


def _folder(path: Path) -> Path:
    latest = path / "latest"
    return path / latest.read_text().strip() if latest.is_file() else path


def _optimizer_files(folder: Path) -> list[Path]:
    def rank(file: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)", file.name)
        return int(found[1]) if found else 0

    return sorted(folder.glob("*_optim_states.pt"), key=rank)


@dataclass(frozen=True)
class _Spot:
    """Where a parameter's elements lie: ``numel`` at ``start`` of each rank's flat tensors of ``group``."""

    group: int
    start: int
    numel: int
    shape: tuple[int, ...]


class _Ranks:
    """The optimizer files of all ranks."""

    def __init__(self, folder: Path, shapes: list[dict[str, Any]]) -> None:
        self.files = [load_inert(file)[_OPTIMIZER] for file in _optimizer_files(folder)]
        first = self.files[0]
        stage = first.get("zero_stage", 0)
        self.stage = int(stage.made_of[0]) if isinstance(stage, Inert) else int(stage)
        count = first.get("partition_count", len(self.files))
        expected = max(cast("list[int]", count)) if isinstance(count, list) else int(count)
        if expected != len(self.files) or self.stage not in (1, 2, 3):
            raise CheckpointError(f"not the files of one ZeRO run: {folder}",
                                  expected=f"{expected} files *_optim_states.pt of stage 1, 2 or 3",
                                  got=f"{len(self.files)} of stage {self.stage}",
                                  remedy="Copy the files of all ranks into the folder.")
        self.spots = self._thirds(shapes) if self.stage == 3 else self._stretches(shapes)

    @staticmethod
    def _stretches(shapes: list[dict[str, Any]]) -> dict[str, _Spot]:
        spots: dict[str, _Spot] = {}
        for group, named in enumerate(shapes):
            at = 0
            for name, shape in named.items():
                spots[name] = _Spot(group, at, prod(shape), tuple(shape))
                at += prod(shape)
        return spots

    def _thirds(self, shapes: list[dict[str, Any]]) -> dict[str, _Spot]:
        spots: dict[str, _Spot] = {}
        at = 0
        for name, shape in ((n, s) for named in shapes for n, s in named.items()):
            each = -(-prod(shape) // len(self.files))
            spots[name] = _Spot(0, at, each, tuple(shape))
            at += each
        return spots

    def flat(self, key: str | None) -> list[list[Tensor]]:
        """For each rank and group the flat fp32 parameters (None) or the state ``key``."""
        if key is None:
            name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            found = [file[name] for file in self.files]
        else:
            found = [[self.state(file)[number][key] for number in sorted(self.state(file))] for file in self.files]
        return [[torch.cat(list(parts))] for parts in found] if self.stage == 3 else found

    def state(self, file: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """By number of the flat parameter."""
        base = file[_OPTIMIZER if self.stage == 3 else "base_optimizer_state"]
        return dict(enumerate(cast("list[Any]", base))) if isinstance(base, list) else base["state"]

    def groups(self) -> list[dict[str, Any]]:
        """Options of the optimizer's groups; none where only state was kept."""
        base = self.files[0][_OPTIMIZER if self.stage == 3 else "base_optimizer_state"]
        return [] if isinstance(base, list) else base["param_groups"]

    def whole(self, name: str, key: str | None) -> Tensor:
        """One parameter, or its state ``key``."""
        spot, flat = self.spots[name], self.flat(key)
        size, start = prod(spot.shape), spot.start
        if self.stage == 3:
            parts = [groups[0][start : start + spot.numel] for groups in flat]
        else:
            parts, at = [], 0
            for groups in flat:
                part = groups[spot.group]
                parts.append(part[max(start - at, 0) : max(start + size - at, 0)])
                at += part.numel()
        return torch.cat(parts)[:size].reshape(spot.shape).clone()


@contextmanager
def open_deepspeed(path: Path) -> Generator[Table]:
    """fp32 weights, buffers and optimizer state. Raises ``CheckpointError``."""
    folder = _folder(path)
    models = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    others = [f for f in models if "mp_rank_00" not in f.name]
    if not models or others:
        raise CheckpointError(f"cannot read the model of this ZeRO run: {folder}",
                              expected="mp_rank_00_model_states.pt, for one model parallel rank",
                              got=", ".join(f.name for f in others[:2]) or "no such file",
                              remedy="Convert it with DeepSpeed's own zero_to_fp32 first.")
    try:
        model = load_inert(models[0])
        shapes: Any = model["param_shapes"]
        ranks = _Ranks(folder, shapes if isinstance(shapes, list) else [shapes])
        values = {f"model.{name}": model["module"][name] for name in model.get("buffer_names", ())
                  if name in model["module"]}
        values |= _optimizer(ranks)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the files are not laid out as known: {folder}", got=f"{type(error).__name__}: {error}",
                              expected="those of ZeRO stage 1, 2 or 3") from error
    weights = {f"model.{name}": (name, None) for name in ranks.spots}
    tied = {f"model.{a}": (b, None) for a, b in dict(model.get("shared_params") or ()).items() if b in ranks.spots}
    state = {f"optim.state.{name}.{key}": (name, key) for name in ranks.spots for key in _flat_keys(ranks)}
    lazy: dict[str, tuple[str, str | None]] = {**weights, **tied, **state}
    tensors = {flat: Entry(flat, ranks.flat(key)[0][0].dtype, ranks.spots[name].shape)
               for flat, (name, key) in lazy.items()}
    tensors |= {n: Entry(n, v.dtype, tuple(v.shape)) for n, v in values.items() if isinstance(v, Tensor)}

    def read(name: str) -> Any:
        return ranks.whole(*lazy[name]) if name in lazy else values[name]

    yield Table(tensors, [name for name in values if name not in tensors], read)


def _flat_keys(ranks: _Ranks) -> list[str]:
    """State that is as long as the flat parameters."""
    state = ranks.state(ranks.files[0])
    first = state[min(state)] if state else {}
    return [key for key, value in first.items() if isinstance(value, Tensor) and value.dim()]


def _optimizer(ranks: _Ranks) -> dict[str, Any]:
    """Numbers of each parameter, and groups by name."""
    values: dict[str, Any] = {}
    flat, first = _flat_keys(ranks), ranks.files[0]
    state = ranks.state(first)
    step = {"step": first["base_optimizer_state_step"]} if "base_optimizer_state_step" in first else {}
    members: dict[int, list[str]] = {}
    for name, spot in ranks.spots.items():
        members.setdefault(spot.group, []).append(name)
        for key, value in (step | state.get(spot.group, {})).items():
            if key not in flat and not isinstance(value, Inert):
                values[f"optim.state.{name}.{key}"] = value
    options = ranks.groups()
    for number, names in members.items():
        values[f"optim.param_groups.{number}.params"] = names
        for key, value in (options[number] if number < len(options) else {}).items():
            if key != "params" and not isinstance(value, Inert):
                values[f"optim.param_groups.{number}.{key}"] = value
    return values
