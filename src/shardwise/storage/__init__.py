"""Holds: shards, gathered buffers, and what a module shows under a parameter's name."""

from __future__ import annotations

__all__: list[str] = []
