"""The checks. Each takes one module and returns faults: exception key -> message."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from tests.guard.source import Function, Module

__all__ = ["FILE_LINES", "FUNCTION_LINES", "banned_words", "forbidden_peers", "foreign_raises", "kept_by_one",
           "long_file", "long_functions", "no_face", "plan_talks", "private_torch", "upward_imports"]

FILE_LINES, FUNCTION_LINES = 300, 40
_PEERS = ("torch.distributed.fsdp", "torch.distributed._composable")
#: attribute or call -> the one module that may touch it
_KEEPERS = {"_parameters": "shardwise.storage.faces"}
_HOOK_KEEPER = "shardwise.engine.hooks"
#: protocols of Python that prescribe an exception: method -> exceptions
_PROTOCOLS = {"__getattr__": {"AttributeError"}, "__getattribute__": {"AttributeError"},
              "__delattr__": {"AttributeError"}, "__setattr__": {"AttributeError"},
              "__getitem__": {"KeyError", "IndexError"}, "__delitem__": {"KeyError", "IndexError"},
              "__missing__": {"KeyError"}, "__next__": {"StopIteration"}}


def upward_imports(module: Module, floors: Mapping[str, int]) -> dict[str, str]:
    """Imports of a higher floor or of a sibling on the same floor; modules without a floor."""
    home = _package(module.name, floors)
    if home is None:
        return {module.name: f"{module.name}: has no floor; give it one in allowed.toml"}
    faults: dict[str, str] = {}
    for line, targets, _ in module.imports():
        for target in targets:
            if target.partition(".")[0] != "shardwise":
                continue
            package = _package(target, floors) or "shardwise"  # a name that the top package exports
            if package != home and floors[package] >= floors[home]:
                faults[f"{module.name} -> {package}"] = (
                    f"{module.name}:{line}: imports {target}, which is on no floor below {home}")
    return faults


def _package(name: str, floors: Mapping[str, int]) -> str | None:
    """The entry of the floors that a name falls under; one beside all of them has none."""
    for entry in floors:
        if name == entry or (entry != "shardwise" and name.startswith(entry + ".")):
            return entry
    return None


def plan_talks(module: Module) -> dict[str, str]:
    """Imports of torch.distributed by the plan, which decides and never communicates."""
    if not module.name.startswith("shardwise.plan"):
        return {}
    return {f"{module.name} -> {target}": f"{module.name}:{line}: the plan talks to nobody; imports {target}"
            for line, targets, _ in module.imports() for target in targets
            if f"{target}.".startswith("torch.distributed.")}


def forbidden_peers(module: Module) -> dict[str, str]:
    """Imports of the library that this one replaces."""
    return {f"{module.name} -> {target}": f"{module.name}:{line}: imports {target}"
            for line, targets, _ in module.imports() for target in targets
            if any(f"{target}.".startswith(f"{peer}.") for peer in _PEERS)}


def private_torch(module: Module) -> dict[str, str]:
    """Names of torch that begin with an underscore, imported or reached through a module of torch."""
    found: dict[str, int] = {}
    known: dict[str, str] = {}
    for line, targets, names in module.imports():
        if targets[0].partition(".")[0] == "torch":
            known |= names
            found |= {name: line for name in targets if _is_private(name)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _is_private(full := _dotted(node, known)):
            found.setdefault(full, node.lineno)
    # torch._C._x contains torch._C: the longest name says it all
    longest = [name for name in found if not any(other.startswith(name + ".") for other in found)]
    return {f"{module.name} -> {name}": f"{module.name}:{found[name]}: uses {name}" for name in longest}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str:
    """``torch.x.y`` for an attribute chain that starts at a name imported from torch, else nothing."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value, known)):
        return f"{before}.{node.attr}"
    return ""


def kept_by_one(module: Module) -> dict[str, str]:
    """Registries with one keeper: a module's parameters, and the registration of hooks."""
    faults: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute):
            continue
        is_hook = re.fullmatch(r"register_\w*hook", node.attr)
        keeper = _HOOK_KEEPER if is_hook else _KEEPERS.get(node.attr, module.name)
        if module.name != keeper:
            faults[f"{module.name} -> {node.attr}"] = (
                f"{module.name}:{node.lineno}: touches {node.attr}, which only {keeper} may")
    return faults


def long_file(module: Module) -> dict[str, str]:
    """A file over its budget."""
    lines = len(module.text.splitlines())
    return {module.name: f"{module.name}: {lines} lines, budget {FILE_LINES}"} if lines > FILE_LINES else {}


def long_functions(module: Module) -> dict[str, str]:
    """Functions over their budget; the docstring is free."""
    faults: dict[str, str] = {}
    for name, node in module.functions():
        first = node.body[0]
        has_docstring = ast.get_docstring(node) is not None
        lines = _lines(node) - (_lines(first) if has_docstring else 0)
        if lines > FUNCTION_LINES:
            faults[f"{module.name}:{name}"] = (
                f"{module.name}:{node.lineno}: {name} has {lines} lines, budget {FUNCTION_LINES}")
    return faults


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def banned_words(module: Module) -> dict[str, str]:
    """Guesses at types, unfinished work, and drawers for everything."""
    faults: dict[str, str] = {}
    if re.search(r"(^|_)utils?$", module.name.rpartition(".")[2]):
        faults["name"] = f"{module.name}: says nothing about what it holds"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in ("hasattr", "NotImplementedError"):
            faults[f"{node.id} {node.lineno}"] = f"{module.name}:{node.lineno}: uses {node.id}"
    for number, line in enumerate(module.text.splitlines(), 1):
        if word := re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
            faults[f"{word[0]} {number}"] = f"{module.name}:{number}: leaves a {word[0]}"
    return faults


def no_face(module: Module) -> dict[str, str]:
    """Public modules without a docstring or without a list of what they export."""
    faults: dict[str, str] = {}
    if not module.public or module.name.endswith("__main__"):
        return faults
    if not ast.get_docstring(module.tree):
        faults["docstring"] = f"{module.name}: has no docstring"
    targets = [target.id for node in module.tree.body if isinstance(node, ast.Assign | ast.AnnAssign)
               for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
               if isinstance(target, ast.Name)]
    has_content = any(not isinstance(node, ast.Expr) for node in module.tree.body)
    if "__all__" not in targets and has_content:
        faults["__all__"] = f"{module.name}: has no __all__"
    return faults


def foreign_raises(module: Module, errors: set[str]) -> dict[str, str]:
    """Raises of anything but a shardwise error, a re-raise, or what a protocol of Python prescribes."""
    ours = errors | {local for _, _, names in module.imports() for local, full in names.items()
                     if full.startswith("shardwise.")}
    ours |= {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
             and any(ast.unparse(base) in ours for base in node.bases)}
    makers = {name.rpartition(".")[2]: node for name, node in module.functions()}
    faults: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        inside = module.enclosing(node.lineno)
        what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = what.attr if isinstance(what, ast.Attribute) else ast.unparse(what)
        if isinstance(node.exc, ast.Name) and name.islower():
            continue  # an error caught or made before
        prescribed = _PROTOCOLS.get(inside.rpartition(".")[2], set())
        if name not in ours | prescribed and not _makes(makers.get(name), ours):
            faults[f"{module.name}:{inside} -> {name}"] = f"{module.name}:{node.lineno}: raises {name}"
    return faults


def _makes(maker: Function | None, errors: set[str]) -> bool:
    """Whether a function of this module is annotated to return a shardwise error."""
    return maker is not None and maker.returns is not None and ast.unparse(maker.returns) in errors
