"""What another program's checkpoint holds, sorted into a model's weights and its optimizer's state.

A reader of a format gives a ``Table``: tensors and other values by flat names such as ``model.0.weight``,
``optim.state.0.weight.exp_avg``, ``optim.param_groups.0.lr``. ``arrange`` makes of it what our files hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from ..errors import CheckpointError
from .flattening import unflatten_optimizer_state
from .optimizer_contents import Described
from .plain_values import encode
from .safetensors_header import Entry

__all__ = ["Opened", "Table", "Tensors", "arrange"]

_MODELS = ("model", "module", "state_dict")  # keys under which training scripts put the weights
_OPTIMIZERS = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict")

Read = Callable[[str], Any]


@dataclass
class Tensors:
    """Tensors by name, read when asked for."""

    entries: list[Entry]
    read: Callable[[str], Tensor]

    def __iter__(self) -> Iterator[tuple[Entry, Tensor]]:
        for entry in self.entries:
            yield entry, self.read(entry.name)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass
class Opened:
    """A checkpoint of any format. ``described`` is None where there is no optimizer state."""

    model: Tensors
    optimizer: Tensors
    described: Described | None
    left_out: list[str] = field(default_factory=list[str])

    @property
    def nbytes(self) -> int:
        return self.model.nbytes + self.optimizer.nbytes


@dataclass
class Table:
    """Tensors by flat name, and the names of other values; ``read`` gives either."""

    tensors: dict[str, Entry]
    others: list[str]
    read: Read


def arrange(table: Table, prefix: str | None) -> Opened:
    """The model's weights, whose names lose ``prefix`` (None: the common ones), and the optimizer's state.

    Raises ``CheckpointError`` where no tensor has a name with the prefix.
    """
    names = [*table.tensors, *table.others]
    root = next((r for r in _OPTIMIZERS if any(n.startswith((f"{r}.state.", f"{r}.param_groups."))
                                               for n in names)), None)
    mine = [n for n in names if root is not None and n.startswith(f"{root}.")]
    weights = [e for n, e in table.tensors.items() if n not in set(mine)]
    if prefix is None:
        heads = {entry.name.partition(".")[0] for entry in weights}
        prefix = f"{next(iter(heads))}." if len(heads) == 1 and heads <= set(_MODELS) else ""
    chosen = [entry for entry in weights if entry.name.startswith(prefix)]
    left_out = [e.name for e in weights if not e.name.startswith(prefix)]
    left_out += [n for n in table.others if n not in set(mine)]
    if not chosen:
        raise CheckpointError("no tensor has a name with this prefix", expected=repr(prefix),
                              got=", ".join(left_out[:4]) or "no tensors")
    start = prefix
    model = Tensors([Entry(e.name.removeprefix(start), e.dtype, e.shape) for e in chosen],
                    lambda name: cast("Tensor", table.read(start + name)))
    optimizer, described = Tensors([], model.read), None
    if root is not None:
        optimizer, described = _optimizer(table, f"{root}.", mine, model, left_out)
    return Opened(model, optimizer, described, left_out)


def _optimizer(table: Table, root: str, names: list[str], model: Tensors, left_out: list[str]
               ) -> tuple[Tensors, Described | None]:
    shapes = {entry.name: entry.shape for entry in model.entries}
    groups = _groups(table, root, [n for n in names if n.startswith(f"{root}param_groups.")])
    state: dict[str, dict[str, Any]] = {}
    where: dict[str, str] = {}
    entries: list[Entry] = []
    for name in names:
        if not name.startswith(f"{root}state."):
            left_out += [name] if not name.startswith(f"{root}param_groups.") else []
            continue
        given, _, key = name.removeprefix(f"{root}state.").rpartition(".")
        fqn = _known(given, groups, shapes)
        if fqn is None:
            left_out.append(name)
            continue
        entry = table.tensors.get(name)
        if entry is None or (not entry.shape and (key == "step" or shapes[fqn])):
            state.setdefault(fqn, {})[key] = {"value": encode(table.read(name), name, _refuse)}
            continue
        dtype = str(entry.dtype).removeprefix("torch.")
        like = entry.shape == shapes[fqn]
        state.setdefault(fqn, {})[key] = {"like": dtype} if like else {"whole": [dtype, list(entry.shape)]}
        entries.append(Entry(f"{fqn}.{key}", entry.dtype, entry.shape))
        where[f"{fqn}.{key}"] = name
    for group in groups:
        known = [_known(str(name), groups, shapes) for name in group["params"]]
        group["params"] = [name for name in known if name is not None]
    groups = [group for group in groups if group["params"]]
    described = {"groups": groups, "state": state} if groups else None
    return Tensors(entries, lambda name: cast("Tensor", table.read(where[name]))), described


def _known(name: str, groups: list[dict[str, Any]], shapes: dict[str, Any]) -> str | None:
    """The FQN that an optimizer's ``name`` stands for; None if there is none, or only a position."""
    if name in shapes:
        return name
    if name.isdigit():
        for group in groups:
            places, called = group["params"], group["names"]
            if called and int(name) in places:
                return called[places.index(int(name))]
    return next((name.removeprefix(head) for head in ("module.", "model.")
                 if name.startswith(head) and name.removeprefix(head) in shapes), None)


def _groups(table: Table, root: str, names: list[str]) -> list[dict[str, Any]]:
    """As our files describe them, with names or positions as they are; ``names``: of positions, if known."""
    numbered: dict[int, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name in names:
        number, _, option = name.removeprefix(f"{root}param_groups.").partition(".")
        if number.isdigit() and option:
            numbered.setdefault(int(number), {})[option] = table.read(name)
        else:
            flat[name.removeprefix(root)] = table.read(name)
    found = [numbered[number] for number in sorted(numbered)]
    found += unflatten_optimizer_state(flat, ())["param_groups"]
    groups: list[dict[str, Any]] = []
    for group in found:
        options = {key: _nested(value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": list(group.get("params", ())), "names": group.get("param_names"),
                       "options": encode(options, "param_groups", _refuse)})
    return groups


def _nested(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def _refuse(name: str, tensor: Tensor) -> None:
    raise CheckpointError("an option of the optimizer is a tensor with dimensions", fqn=name,
                          got=tuple(tensor.shape), expected="a number or a 0-d tensor")
