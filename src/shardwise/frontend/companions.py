"""Policies, configs and strategies have namesakes elsewhere: which one was passed?"""

from __future__ import annotations

__all__ = ["companion_remedy"]


def companion_remedy(value: object, other: str) -> str | None:
    """What to do about ``value``, an option of a wrong class; ``other``: the front end that ours may belong to."""
    home = type(value).__module__
    if home.startswith("torch.distributed"):
        return "Import the companion classes from shardwise."
    return f"That class belongs to {other}." if home.startswith("shardwise") else None
