"""``torch.save`` of what shows rows: the file is one rank's, which is easily taken for the whole when it is too late.

Each rank may save its own, so it is no error; nobody can tell whether the others save too without asking them.
"""

from __future__ import annotations

import warnings

import torch

from ..torch_private import under_way

__all__ = ["tell_of_rows"]


def tell_of_rows(ranks: int) -> None:
    """Warn, if this is asked for by ``torch.save``, that it writes what one of ``ranks`` ranks has."""
    if ranks > 1 and under_way(torch.save):
        warnings.warn(
            f"shardwise: torch.save writes sharded tensors, of which this file gets one rank's rows only (of {ranks} "
            "ranks). It loads on that rank of as many ranks, where each saves a file of its own. One whole file: "
            "shardwise.checkpoint.save; or on all ranks get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)) of shardwise.checkpoint, and torch.save what it gives on one.", stacklevel=3)
