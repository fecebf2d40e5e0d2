"""The source as the guards see it: one parsed module after another."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

__all__ = ["GUARD", "ROOT", "Function", "Import", "Module", "allowed", "modules", "verdict"]

GUARD = Path(__file__).parent
ROOT = GUARD.parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One import: its line, the full names it asks for, and local name -> full name."""

    line: int
    targets: tuple[str, ...]
    names: dict[str, str]


@dataclass(frozen=True)
class Module:
    """A module by its dotted name and its text."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @property
    def public(self) -> bool:
        """Whether no part of the name begins with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))

    def imports(self) -> Iterator[Import]:
        """Every import statement, also those for types only and those inside functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    bound = {alias.asname: alias.name} if alias.asname else {top: top}
                    yield Import(node.lineno, (alias.name,), bound)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                bound = {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
                yield Import(node.lineno, tuple(bound.values()), bound)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Qualified name and node of every function, nested ones and methods too."""
        yield from _functions(self.tree, "")

    def enclosing(self, line: int) -> str:
        """The qualified name of the innermost function at a line; empty at module level."""
        around = [(node.lineno, name) for name, node in self.functions()
                  if node.lineno <= line <= (node.end_lineno or 0)]
        return max(around)[1] if around else ""


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        named = isinstance(child, Function | ast.ClassDef)
        yield from _functions(child, f"{prefix}{child.name}." if named else prefix)  # type: ignore[union-attr]


def modules() -> list[Module]:
    """Every module of the package."""
    found: list[Module] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return found


def allowed(section: str) -> dict[str, str]:
    """One section of the exceptions."""
    return tomllib.loads((GUARD / "allowed.toml").read_text())[section]


def verdict(found: dict[str, str], section: str) -> list[str]:
    """The faults (exception key -> message) that are not allowed, and the permissions without use."""
    permitted = allowed(section)
    faults = [f"{message}  [{section}: {key!r}]" for key, message in found.items() if key not in permitted]
    return faults + [f"allowed.toml [{section}] {key!r}: nothing needs this any more"
                     for key in permitted if key not in found]
