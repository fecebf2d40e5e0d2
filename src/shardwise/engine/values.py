"""What cannot be computed with now: parameters without values, or shown whole to the user, or of another precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from ..errors import LifecycleError, name_list
from ..storage.faces import OriginalFace
from ..storage.flat_storage import FlatStorage
from ..storage.visible import version_of
from ..torch_private import in_backward, in_tracing, without_torch_function

__all__ = ["count_all_changes", "count_changes", "refuse_other_values", "refuse_precision", "refuse_tracing",
           "require_values"]


def refuse_precision(unit: str, *, full: bool) -> NoReturn:
    """Raise ``LifecycleError``: the backward of a forward in another precision cannot run now.

    ``full``: full precision is on now.
    """
    raise LifecycleError(
        "forward and backward ran on different sides of full_precision()", unit=unit,
        expected=f"backward {'outside' if full else 'inside'} of it, as forward",
        got="inside" if full else "outside",
        remedy="Call backward() in the same context as the forward that it belongs to.",
    )


def count_changes(storages: Sequence[FlatStorage]) -> int:
    """Grows when a step, a load or a summon changes the parameters: looks at one of each storage, as all change."""
    changes = 0
    with without_torch_function():
        for storage in storages:
            changes += storage.edits + version_of(storage.visible[0].parameter)
    return changes


def count_all_changes(storages: Sequence[FlatStorage]) -> int:
    """The same with a look at every parameter: of some alone, too."""
    with without_torch_function():
        return sum([storage.edits + sum([version_of(seen.parameter) for seen in (*storage.visible, *storage.hidden)])
                    for storage in storages])


def refuse_other_values(unit: str) -> NoReturn:
    """Raise ``LifecycleError``: activations are of other parameters than those that were gathered for backward."""
    raise LifecycleError(
        "parameters were changed between a forward and its backward, so its gradients would be of neither",
        unit=unit, expected="the values of the forward", got="newer ones",
        remedy="Call optimizer.step(), and load or edit parameters, after the backward of every forward before it.",
    )


def refuse_tracing(unit: str) -> None:
    """Raise ``LifecycleError`` while operations are recorded with the memory that they use, which is freed soon."""
    if in_tracing():
        raise LifecycleError(
            "a sharded model cannot be traced (make_fx, torch.func.linearize, torch.export): the graph would use "
            "gathered parameters after they are freed", unit=unit,
            remedy="Trace an unsharded model: copy.deepcopy(model) inside summon_full_params.",
        )


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
