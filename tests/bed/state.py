"""The process-wide settings that a test must leave as it found them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import torch

__all__ = ["changes", "seed", "snapshot"]


def seed() -> None:
    """Every test starts from the same random numbers, on every rank."""
    random.seed(0)
    torch.manual_seed(0)


def snapshot() -> dict[str, object]:
    """The settings by name; the environment one variable at a time."""
    state: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "thread count": torch.get_num_threads(),
        "working directory": os.getcwd(),
    }
    # the first optimizer of a process sets variables for the compiler: torch's doing, no test's
    return state | {f"environment variable {name}": value for name, value in os.environ.items()
                    if not name.startswith(("TORCHINDUCTOR_", "TRITON_"))}


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """One line for each setting that is not as it was."""
    return [f"{name}: was {before.get(name)}, is {after.get(name)}"
            for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
