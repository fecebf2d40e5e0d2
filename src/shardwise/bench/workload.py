"""What is trained: the built-in GPT, or a model of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from .gpt import GPT, Block

__all__ = ["Batch", "Workload", "built_in", "named_object", "of_user"]

Batch = tuple[Any, ...]
"""What the model's forward is called with."""


@dataclass(frozen=True)
class Workload:
    """``build()`` makes the model anew; its forward gives the loss of ``batch(rank, number)``."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    kinds: tuple[type[nn.Module], ...]  #: the classes whose modules are units

    def items(self) -> tuple[int, str]:
        """How many items one rank's batch has, and what they are: tokens, or samples."""
        first = next(value for value in self.batch(0, 0) if isinstance(value, Tensor))
        return (first.shape[0], "samples") if first.is_floating_point() else (first.numel(), "tokens")


def built_in(*, width: int, layers: int, heads: int, context: int, vocabulary: int, batch: int) -> Workload:
    """The GPT on random tokens, ``batch`` sequences of ``context`` tokens on each rank."""
    if width % heads:
        raise ConfigurationError("the width must be a multiple of the number of heads",
                                 expected=f"a multiple of {heads}", got=width)

    def tokens(rank: int, number: int) -> Batch:
        generator = torch.Generator().manual_seed(1 + 100_003 * rank + number)
        ids = torch.randint(vocabulary, (batch, context + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Workload(f"GPT, {layers} blocks of width {width}, {batch} × {context} tokens",
                    lambda: GPT(width, layers, heads, context, vocabulary), tokens, (Block,))


def named_object(name: str) -> Any:
    """The object that ``module:object`` names; the working folder is searched too.

    Raises ``ConfigurationError`` where there is none.
    """
    place, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"nothing is found under {name!r} ({error})", expected="module:function",
                                 remedy="Run from the folder that holds the module, or set PYTHONPATH.") from error


def of_user(name: str) -> Workload:
    """The model of ``module:function``.

    The function takes nothing and gives ``(build, batch)`` or ``(build, batch, kinds)``:
    ``build()`` a model whose forward gives a scalar loss, ``batch(rank, number)`` the tuple that
    forward is called with, ``kinds`` the classes of its units (default: the repeated blocks).
    """
    made = named_object(name)()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(map(callable, made[:2])):
        raise ConfigurationError(f"{name} gave something else", expected="(build, batch) or (build, batch, kinds)",
                                 got=type(made).__name__)
    build, batch, *rest = made
    kinds: Any = rest[0] if rest else _repeated(build())
    return Workload(name, build, batch, tuple(kinds) if isinstance(kinds, list | tuple | set) else (kinds,))


def _repeated(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The class of the blocks: of those that a list repeats, the one with most parameters."""
    sizes: Counter[type[nn.Module]] = Counter()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len({type(child) for child in module}) == 1:
            for child in module:
                sizes[type(child)] += sum(p.numel() for p in child.parameters())
    if not sizes:
        raise ConfigurationError("the model has no list of equal blocks", got=type(model).__name__,
                                 remedy="Give the classes of the units: (build, batch, kinds).")
    return (sizes.most_common(1)[0][0],)
