"""Moves: gathers, reductions, and their order in time."""

from __future__ import annotations

__all__: list[str] = []
