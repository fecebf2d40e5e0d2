"""The code blocks of a page of the docs, as one script."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["script_of"]

_ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def script_of(page: str, *, without: str = r"(?!)") -> str:
    """The python blocks of ``page`` (a path below the root), leaving out lines that match ``without``."""
    blocks = _BLOCK.findall((_ROOT / page).read_text())
    lines = [line for block in blocks for line in block.splitlines()]
    return "\n".join(line for line in lines if not re.search(without, line))
