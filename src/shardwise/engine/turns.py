"""A unit of several modules stays gathered from its first module's forward to its last one's."""

from __future__ import annotations

__all__ = ["Turns"]


class Turns:
    """Counts the forwards of a unit's modules; the unit may be freed once each could have had one."""

    __slots__ = ("_modules", "_taken", "alone")

    def __init__(self, modules: int) -> None:
        self._modules, self._taken = modules, 0
        self.alone = modules == 1  #: each forward and backward is the only one: nobody need ask

    def begin(self) -> None:
        """A forward of the root begins: whatever was left out in the last one is not waited for."""
        self._taken = 0

    def forward_over(self) -> bool:
        """One module's forward ended; was it the last one's?"""
        self._taken = (self._taken + 1) % self._modules
        return self._taken == 0
