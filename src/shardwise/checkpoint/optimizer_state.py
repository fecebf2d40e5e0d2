"""An optimizer's state by parameter name: full, sharded or local."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..plan.state_options import FullOptimStateDictConfig, StateDictSettings, StateDictType
from ..storage.flat_storage import FlatStorage
from .model_state import is_main_rank, takes_snapshots
from .model_tensors import ModelTensor, local_rows, model_tensors
from .optimizer_contents import owners_by_parameter
from .optimizer_looks import Form, Held, Key, Kind, agree, held_state
from .records import ShardedRecord
from .rows import placement_of

__all__ = ["OptimizerStateDict", "optimizer_state"]

OptimizerStateDict = dict[str, Any]
"""``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}``"""


@torch.no_grad()
def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: StateDictSettings
) -> OptimizerStateDict:
    """The state of ``optimizer`` by FQN, of the kind that ``settings`` name (full: a collective).

    By rows: whole tensors, records, or rows. Tensors of another shape, which each rank may have
    worked out from its own rows: as they are where the ranks agree, else their mean weighted by
    rows. All else: as the first rank that has it holds it. Empty on other ranks if ``rank0_only``.
    """
    config = settings.optim_state_dict_config
    tensors = model_tensors(model)
    held = held_state(tensors, optimizer)
    groups = _groups(tensors, optimizer)
    trained = [fqn for group in groups for fqn in group["params"]]
    forms = agree(held, tensors, trained)
    keep = is_main_rank(model) or not (isinstance(config, FullOptimStateDictConfig) and config.rank0_only)
    values = _Values(model, {t.fqn: t for t in tensors}, held, forms, settings.state_dict_type)
    state: dict[str, dict[str, Any]] = {}
    for key in forms:
        value = values.get(key)
        if keep:
            if isinstance(value, Tensor) and config.offload_to_cpu:
                value = value.cpu()
            state.setdefault(key[0], {})[key[1]] = value
    if not keep:
        return {}
    result: OptimizerStateDict = {
        "state": {fqn: state[fqn] for fqn in trained if fqn in state}, "param_groups": groups}
    return result


def _groups(tensors: list[ModelTensor], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups with names; those behind flat parameters in the order of the model."""
    place = {tensor.fqn: number for number, tensor in enumerate(tensors)}
    groups: list[dict[str, Any]] = []
    for group, pairs in zip(optimizer.param_groups, owners_by_parameter(tensors, optimizer), strict=True):
        names = [tensor.fqn for _, owners in pairs for tensor in owners]
        if any(len(owners) > 1 for _, owners in pairs):
            names.sort(key=place.__getitem__)
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({**options, "params": names})
    return groups


class _Values:
    """State values in the form that the state dict holds them."""

    def __init__(self, model: nn.Module, tensors: dict[str, ModelTensor], held: dict[Key, Held],
                 forms: dict[Key, Form], kind: StateDictType) -> None:
        self._tensors, self._held, self._forms, self._kind = tensors, held, forms, kind
        self._copies = takes_snapshots(model)
        self._flats: dict[tuple[FlatStorage, str], Tensor] = {}
        self._left: dict[tuple[FlatStorage, str], int] = {}
        for (fqn, name), form in forms.items():
            storage = tensors[fqn].storage
            if storage is not None and self._is_like(fqn, form):
                self._left[storage, name] = self._left.get((storage, name), 0) + 1

    def get(self, key: Key) -> Any:
        """One value; a collective for a full state dict, and for tensors that are not by rows."""
        tensor, form, held = self._tensors[key[0]], self._forms[key], self._held.get(key)
        storage = tensor.storage
        if form.kind is Kind.PLAIN:
            value = held.value if held is not None else form.value
            return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        if storage is None:
            assert held is not None
            return held.value.detach().clone() if self._copies else held.value.detach()
        if form.kind is Kind.OTHER:
            return _common(held, form, storage, tensor.index)
        rows = self._rows(held, form, storage, tensor.index)
        place = placement_of(storage, tensor.index).with_trailing(form.shape)
        if self._kind is not StateDictType.FULL_STATE_DICT:
            local = self._kind is StateDictType.LOCAL_STATE_DICT
            part = rows if local else ShardedRecord(rows, place)
            return part.clone() if self._copies else part
        if self._is_like(key[0], form):
            whole = self._whole(key, storage, tensor.index)
        else:
            whole = place.gather(rows.to(storage.compute_device))
        return whole if place.part is None else place.part.spread(whole)

    def _is_like(self, fqn: str, form: Form) -> bool:
        """Shaped like the parameter: such values of a flat parameter are gathered together."""
        return form.kind is Kind.ROWS and form.shape == self._tensors[fqn].shape[1:]

    @staticmethod
    def _rows(held: Held | None, form: Form, storage: FlatStorage, index: int) -> Tensor:
        """This rank's; none where it holds no state."""
        if held is not None:
            value: Tensor = held.value.detach()
            return value if value.dim() else value.reshape(1)
        first, last = placement_of(storage, index).rows
        return torch.zeros((last - first, *form.shape), dtype=form.dtype, device=storage.shard.device)

    def _whole(self, key: Key, storage: FlatStorage, index: int) -> Tensor:
        """Out of the gathered flat tensor of this name, which is gathered at its first use."""
        place = (storage, key[1])
        if place not in self._flats:
            dtype = self._forms[key].dtype
            flat = torch.zeros(storage.layout.shard_numel, dtype=dtype, device=storage.compute_device)
            for (fqn, name), held in self._held.items():
                tensor = self._tensors[fqn]
                form = self._forms[fqn, name]
                if tensor.storage is storage and name == key[1] and self._is_like(fqn, form):
                    target = local_rows(storage, tensor.index, flat)
                    target.copy_(held.value.reshape(target.shape))
            self._flats[place] = storage.gather_flat(flat)
        whole = storage.pick(self._flats[place], index).clone()
        self._left[place] -= 1
        if not self._left[place]:
            del self._flats[place]
        return whole


def _common(held: Held | None, form: Form, storage: FlatStorage, index: int) -> Tensor:
    """One tensor out of what each rank has, all of one shape (a collective)."""
    comm: Collectives = storage.comm
    device = storage.compute_device
    mine = torch.zeros(form.shape, dtype=form.dtype, device=device) if held is None else held.value.to(device)
    if comm.size == 1:
        return mine.detach().clone()
    everyone = torch.empty(comm.size * mine.numel(), dtype=mine.dtype, device=device)
    comm.all_gather(everyone, mine.detach().reshape(-1).contiguous()).wait()
    table = everyone.view(comm.size, *form.shape)
    present = [table[rank] for rank in form.ranks]
    if all(torch.equal(present[0], other) for other in present) or not mine.is_floating_point():
        return present[0].clone()
    bounds = placement_of(storage, index).bounds
    counts = [bounds[rank][1] - bounds[rank][0] for rank in form.ranks]
    weights = torch.tensor(counts, dtype=torch.float64, device=device) / max(sum(counts), 1)
    mean = torch.tensordot(weights, torch.stack(present).double(), dims=1)
    return mean.to(form.dtype)
