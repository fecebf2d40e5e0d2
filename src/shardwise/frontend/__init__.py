"""What users call: the wrapper, fully_shard, and their controls."""

from __future__ import annotations

__all__: list[str] = []
