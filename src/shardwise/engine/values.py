"""Parameters that cannot be gathered now: they have no values, or show whole ones to the user."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import LifecycleError, name_list
from ..storage.faces import OriginalFace
from ..storage.flat_storage import FlatStorage
from ..torch_private import in_backward

__all__ = ["require_values"]


def require_values(unit: str, storages: Sequence[FlatStorage], face: OriginalFace) -> None:
    """Raise ``LifecycleError`` unless ``unit`` can compute.

    Not on the meta device; and inside a summon a forward may run where the whole values are, and
    no backward.
    """
    meta = [spec.fqn for storage in storages if storage.on_meta
            for spec, shown in zip(storage.layout.parameters, face.shown(storage), strict=True) if shown.is_meta]
    if meta:
        raise LifecycleError(
            f"parameters on the meta device have no values to compute with ({name_list(meta)})",
            unit=unit, expected="materialised parameters", got="meta",
            remedy="Call shardwise.materialise(model), or model.to_empty(device=...) and initialise them.",
        )
    training = torch.is_grad_enabled() or in_backward()
    if training or not all(storage.whole for storage in storages):
        raise LifecycleError(
            "a forward that trains, or a backward, inside summon_full_params" if training else
            "a forward on a rank that summon_full_params(rank0_only=True) left without whole parameters",
            unit=unit, remedy="Leave the summon first" + (", or use torch.no_grad()." if training else "."),
        )
