"""The frozen list of exported names. `python -m tests.guard.exports` writes it anew; review the diff."""

from __future__ import annotations

import ast

from tests.guard.source import GUARD, ROOT

__all__ = ["FROZEN", "exported", "frozen"]

FROZEN = GUARD / "exports.txt"


def exported() -> list[str] | None:
    """The package's ``__all__``, read without importing it; None where there is none yet."""
    path = ROOT / "src" / "shardwise" / "__init__.py"
    if not path.exists():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return None


def frozen() -> list[str] | None:
    """The list on file; None where there is none yet."""
    return FROZEN.read_text().split() if FROZEN.exists() else None


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{name}\n" for name in exported() or []))
