"""State that survives: state dicts and files."""

from __future__ import annotations

__all__: list[str] = []
