"""The random states of one rank: torch, accelerator, Python, NumPy."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["capture_random_state", "restore_random_state"]


def capture_random_state() -> dict[str, Any]:
    """All of them; NumPy's global one only if NumPy is loaded."""
    state: dict[str, Any] = {"torch": _to_bytes(torch.get_rng_state()), "python": random.getstate()}
    if torch.accelerator.is_available():
        device = torch.get_device_module()
        state["accelerator"] = _to_bytes(device.get_rng_state())
    if "numpy" in sys.modules:
        import numpy as np

        legacy: Any = np.random.get_state(legacy=True)
        kind, keys, *rest = legacy
        state["numpy"] = (kind, keys.tobytes(), *rest)
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on where ``capture_random_state`` was called."""
    torch.set_rng_state(_from_bytes(state["torch"]))
    random.setstate(state["python"])
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(_from_bytes(state["accelerator"]))
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
