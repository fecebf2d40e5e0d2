"""Comparison by name: names, shapes, dtypes and values, all differences in one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["assert_same_gradients", "assert_same_parameters", "assert_same_tensors"]

Named = Mapping[str, Tensor | None] | Iterable[tuple[str, Tensor | None]]


def assert_same_parameters(
    model_named: Named, reference_named: Named, *,
    bitwise: bool = False, rtol: float = 1e-5, atol: float = 1e-6,
) -> None:
    """The parameters (or buffers) of a model against a reference's, as ``named_parameters()`` gives them."""
    assert_same_tensors(model_named, reference_named, "parameter", bitwise=bitwise, rtol=rtol, atol=atol)


def assert_same_gradients(
    model_named: Named, reference_named: Named, *,
    bitwise: bool = False, rtol: float = 1e-5, atol: float = 1e-6,
) -> None:
    """The same for the gradients of those parameters; None equals only None."""
    assert_same_tensors(_gradients(model_named), _gradients(reference_named), "gradient",
                        bitwise=bitwise, rtol=rtol, atol=atol)


def assert_same_tensors(
    model_named: Named, reference_named: Named, what: str = "tensor", *,
    bitwise: bool = False, rtol: float = 1e-5, atol: float = 1e-6,
) -> None:
    """Names in order, shapes, dtypes and values. ``bitwise`` allows no difference at all, NaN included."""
    model, reference = _named(model_named), _named(reference_named)
    faults = _name_faults(list(model), list(reference))
    for name in reference:
        if name in model and (fault := _fault(model[name], reference[name], bitwise, rtol, atol)):
            faults.append(f"{name}: {fault}")
    if not reference:
        faults.append("the reference has no names, so nothing was compared")
    if faults:
        raise AssertionError(f"{len(faults)} {what} faults among {len(reference)}:\n  "
                             + "\n  ".join(faults))


def _named(named: Named) -> dict[str, Tensor | None]:
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    if len(dict(pairs)) != len(pairs):
        raise AssertionError(f"a name appears twice: {[name for name, _ in pairs]}")
    return dict(pairs)


def _gradients(named: Named) -> dict[str, Tensor | None]:
    return {name: None if value is None else value.grad for name, value in _named(named).items()}


def _name_faults(model: list[str], reference: list[str]) -> list[str]:
    faults = [f"{name}: missing" for name in reference if name not in model]
    faults += [f"{name}: unexpected" for name in model if name not in reference]
    if not faults and model != reference:
        faults.append(f"names in another order: {model}, expected {reference}")
    return faults


def _fault(ours: Tensor | None, theirs: Tensor | None, bitwise: bool, rtol: float, atol: float) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else f"is {_kind(ours)}, expected {_kind(theirs)}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"is {_kind(ours)}, expected {_kind(theirs)}"
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    if bitwise:
        differs = _bits(ours) != _bits(theirs)
    else:
        differs = ~torch.isclose(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return _where(ours, theirs, differs) if bool(differs.any()) else ""


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"


def _bits(value: Tensor) -> Tensor:
    """The element's bytes, one group for each element, so that NaN and −0 are compared too."""
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(*value.shape, value.element_size()) if flat.numel() else flat


def _where(ours: Tensor, theirs: Tensor, differs: Tensor) -> str:
    """How many elements differ, by how much at most, and where the first of them is."""
    if differs.dim() > ours.dim():
        differs = differs.any(dim=-1)
    first = tuple(differs.nonzero()[0].tolist())
    wide = torch.complex128 if ours.is_complex() else torch.float64
    gap = (ours.to(wide) - theirs.to(wide)).abs()
    return (f"{int(differs.sum())} of {ours.numel()} elements differ, by at most {gap.max().item():.3g}; "
            f"first at {list(first)}: {ours[first].item()!r}, expected {theirs[first].item()!r}")
