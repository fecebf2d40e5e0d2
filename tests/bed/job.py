"""What travels between pytest and a worker: a job one way, a report the other."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Job", "Report"]


@dataclass(frozen=True)
class Job:
    """One test function, by place and name, with its arguments still pickled.

    They may hold classes of the test module, which a worker has to import first.
    """

    module: str
    path: Path
    qualname: str
    arguments: bytes
    filters: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, function: Callable[..., object], arguments: Mapping[str, Any] | None = None,
        filters: Iterable[str] = (),
    ) -> Job:
        """The job that calls ``function``; an argument that cannot travel is named in the error."""
        arguments = dict(arguments or {})
        for name, value in arguments.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(f"argument {name!r} of {function.__qualname__} cannot be sent to the ranks, "
                                f"because {type(value).__name__} cannot be pickled: {error}") from error
        path = Path(inspect.getfile(function))
        return cls(function.__module__, path, function.__qualname__, pickle.dumps(arguments), tuple(filters))

    def function(self) -> Callable[..., object]:
        """The function itself, in the process that calls this; a method comes bound to a new instance."""
        *outer, name = self.qualname.split(".")
        owner = reduce(getattr, outer, self._module())
        return getattr(owner() if isinstance(owner, type) else owner, name)

    def _module(self) -> ModuleType:
        if self.module in sys.modules:
            return sys.modules[self.module]
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {self.path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


@dataclass(frozen=True)
class Report:
    """How a job ended on one rank: passed, skipped, failed, stuck or died."""

    rank: int
    outcome: str
    text: str = ""
    output: str = ""
