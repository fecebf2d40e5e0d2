"""Units by the order in which a forward uses parameters, whatever module they belong to.

`form_groups` cuts a sequence of uses into runs of about equal bytes; `ExecutionGroups` is the
answer: frozen, printable, and storable as a JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.errors import ConfigurationError, name_list

__all__ = ["ExecutionGroup", "ExecutionGroups", "form_groups"]

_FORMAT = "shardwise execution groups 1"


@dataclass(frozen=True)
class ExecutionGroup:
    """Modules that are gathered and freed as one unit, in the order in which forward calls them."""

    modules: tuple[str, ...]
    nbytes: int  #: of their parameters, as stored when they were observed


@dataclass(frozen=True)
class ExecutionGroups:
    """The units of a model in execution order.

    Give it to ``fully_shard(model, groups=…)`` or ``FullyShardedDataParallel(model, auto_wrap_policy=…)``.
    What no group holds belongs to the unit of the model itself.
    """

    unit_bytes: int  #: what was asked for
    groups: tuple[ExecutionGroup, ...]
    rest: tuple[str, ...] = ()  #: parameters that no group holds

    def __str__(self) -> str:
        lines = [f"group {number}: {group.nbytes:,} B, {len(group.modules)} modules: {', '.join(group.modules)}"
                 for number, group in enumerate(self.groups)]
        rest = f"; {len(self.rest)} parameters stay with the root: {', '.join(self.rest)}" if self.rest else ""
        return "\n".join([*lines, f"total: {len(self.groups)} groups of about {self.unit_bytes:,} B{rest}"])

    def to_json(self) -> str:
        """As text, for a file or another process."""
        return json.dumps({
            "format": _FORMAT, "unit_bytes": self.unit_bytes, "rest": self.rest,
            "groups": [{"modules": group.modules, "bytes": group.nbytes} for group in self.groups],
        }, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ExecutionGroups:
        """The counterpart of ``to_json``. Raises ``ConfigurationError`` for any other text."""
        try:
            read: dict[str, Any] = json.loads(text)
            groups = tuple(ExecutionGroup(tuple(map(str, g["modules"])), int(g["bytes"])) for g in read["groups"])
            made = cls(int(read["unit_bytes"]), groups, tuple(map(str, read["rest"])))
            known = read["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError("this is no file of execution groups", got=repr(error),
                                     remedy="Write one with ExecutionGroups.save().") from error
        if known != _FORMAT:
            raise ConfigurationError("execution groups of another format", expected=_FORMAT, got=known)
        return made

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ExecutionGroups:
        """Read what ``save`` wrote. Raises ``ConfigurationError`` if it is something else."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def modules_of(self, model: nn.Module, left_out: Iterable[nn.Module] = ()) -> list[list[nn.Module]]:
        """The modules of each group in ``model``, without those ``left_out`` and groups that are empty then.

        Raises ``ConfigurationError`` if ``model`` does not have them.
        """
        known, skip = dict(model.named_modules(remove_duplicate=False)), set(left_out)
        wanted = [name for group in self.groups for name in group.modules]
        missing = [name for name in wanted if name not in known]
        if missing:
            raise ConfigurationError(
                f"the model has no modules of the names in the execution groups ({name_list(missing)})",
                unit=type(model).__name__, remedy="Observe this model again with shardwise.group_by_execution.",
            )
        chosen = [[known[name] for name in group.modules if known[name] not in skip] for group in self.groups]
        return [modules for modules in chosen if modules]


def form_groups(uses: Sequence[tuple[str, int]], unit_bytes: int) -> tuple[ExecutionGroup, ...]:
    """Cut (module, bytes) pairs, in the order of use, into groups of about equal bytes.

    As many groups as come nearest to ``unit_bytes`` each; a module goes where its middle byte lies.
    """
    if unit_bytes < 1:
        raise ConfigurationError("a group must hold at least one byte", expected="unit_bytes of 1 or more",
                                 got=unit_bytes)
    total = sum(nbytes for _, nbytes in uses)
    number = max(1, round(total / unit_bytes))
    runs: dict[int, list[tuple[str, int]]] = {}
    before = 0
    for name, nbytes in uses:
        middle = 2 * before + nbytes  # twice, to stay with integers
        runs.setdefault(middle * number // (2 * total) if total else 0, []).append((name, nbytes))
        before += nbytes
    return tuple(ExecutionGroup(tuple(name for name, _ in run), sum(nbytes for _, nbytes in run))
                 for _, run in sorted(runs.items()))
