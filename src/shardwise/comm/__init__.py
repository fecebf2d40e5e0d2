"""Talks: 1-D tensors, ranks and streams. It has never heard of a parameter."""

from __future__ import annotations

__all__: list[str] = []
