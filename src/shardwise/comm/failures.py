"""c10d's errors as ours."""

from __future__ import annotations

from ..errors import CommunicationError
from .agreement import Call, peer_error
from .collectives import Collectives
from .errands import in_errand
from .last_words import lost

__all__ = ["explained"]

_LOST_PEER = ("closed by peer", "connection reset", "connection closed", "broken pipe", "timed out",
              "timeout", "connection refused", "remote process", "socket closed", "no route to host")


def explained(error: RuntimeError, call: Call, owner: Collectives) -> CommunicationError:
    """c10d's error as ours: which operation, of what, among whom."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". This ")[0]
    rank = owner.members[owner.rank]
    if any(sign in str(error).lower() for sign in _LOST_PEER):
        who, words = lost(owner.members, error)
        return peer_error(who, call, owner.members, owner.describe_tag, words)
    ranks = ", ".join(map(str, owner.members))
    return CommunicationError(
        f"{call.subject(owner.describe_tag)}{in_errand()} failed in the group of ranks {ranks} ({text})", rank=rank)
