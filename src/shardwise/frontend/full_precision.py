"""Computing without mixed precision for a while, say to evaluate."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from ..engine.build import session_of, units_below
from ..engine.unit import Unit

__all__ = ["full_precision"]


@contextmanager
def full_precision(module: nn.Module) -> Generator[None]:
    """Inside, the units at and below ``module`` ignore their mixed-precision policies.

    Parameters are used, and gradients reduced and bound, in the stored dtype; buffers are those
    that were registered; inputs and outputs are not cast. Parameters, optimizer and unsent
    gradients stay as they are. A forward and its backward belong on the same side of the context.
    Every rank must enter it. Contexts may be nested.

    Raises:
        LifecycleError: entered or left inside a forward or backward of ``module``.
    """
    units = dict.fromkeys(unit for _, one in units_below(module) for unit in (one, *one.needs))
    changed: list[Unit] = []
    try:
        for unit in units:
            if not unit.in_full_precision:
                unit.set_full_precision(True)
                changed.append(unit)
        yield
    finally:
        for unit in changed:
            session = session_of(unit)
            if unit.uses and session is not None:
                session.recover()  # an exception left a step unfinished
            unit.set_full_precision(False)
