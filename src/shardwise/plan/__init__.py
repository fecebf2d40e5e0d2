"""Decides: layouts, ownership, policies, options, legal moves. No process group, no tensor memory."""

from __future__ import annotations

__all__: list[str] = []
