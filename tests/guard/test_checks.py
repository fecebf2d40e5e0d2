"""Each guard sees the fault it is there for, and lets its lawful neighbour pass."""

from __future__ import annotations

import pytest

from tests.guard import checks
from tests.guard.source import Module, verdict

FLOORS = {"shardwise.errors": 0, "shardwise.plan": 1, "shardwise.engine": 4, "shardwise.frontend": 5,
          "shardwise.checkpoint": 5, "shardwise": 7, "shardwise.cli": 8}


@pytest.mark.parametrize(("name", "text", "faults"), [
    ("shardwise.plan.layout", "from shardwise.errors import X", []),
    ("shardwise.plan.layout", "from shardwise.plan.options import X", []),
    ("shardwise.plan.layout", "from . import options", []),
    ("shardwise.plan.layout", "def f():\n    from shardwise import engine",
     ["shardwise.plan.layout -> shardwise.engine"]),
    ("shardwise.plan.layout", "from ..engine.unit import U", ["shardwise.plan.layout -> shardwise.engine"]),
    ("shardwise.plan.layout", "import shardwise.engine", ["shardwise.plan.layout -> shardwise.engine"]),
    ("shardwise.plan.layout", "from shardwise import fully_shard", ["shardwise.plan.layout -> shardwise"]),
    ("shardwise.plan.layout", "import shardwise", ["shardwise.plan.layout -> shardwise"]),
    ("shardwise.frontend.wrapper", "import shardwise.checkpoint.files",
     ["shardwise.frontend.wrapper -> shardwise.checkpoint"]),
    ("shardwise.cli", "from shardwise import fully_shard", []),
    ("shardwise.stray", "", ["shardwise.stray"]),
])
def test_upward_imports(name: str, text: str, faults: list[str]) -> None:
    assert list(checks.upward_imports(Module(name, text), FLOORS)) == faults


def test_relative_import_in_a_package() -> None:
    module = Module("shardwise.plan", "from .. import engine\nfrom .layout import Layout", is_package=True)
    assert list(checks.upward_imports(module, FLOORS)) == ["shardwise.plan -> shardwise.engine"]


@pytest.mark.parametrize(("check", "good", "bad"), [
    (checks.plan_talks, "import torch", "import torch.distributed as dist"),
    (checks.plan_talks, "from torch import nn", "from torch import distributed"),
    (checks.forbidden_peers, "import torch.distributed as dist", "from torch.distributed import fsdp"),
    (checks.forbidden_peers, "from torch.distributed import checkpoint",
     "from torch.distributed._composable.fsdp import x"),
    (checks.private_torch, "import torch\ntorch.nn.Module.__init__", "import torch\ntorch._C.x"),
    (checks.private_torch, "import torch.nn as n\nn.x", "import torch.nn as n\nn._x"),
    (checks.private_torch, "from torch import nn\nnn.x\nself._x", "from torch.nn import _reduction"),
    (checks.kept_by_one, "self.parameters", "module._parameters['w'] = x"),
    (checks.kept_by_one, "register_buffer()", "module.register_forward_pre_hook(x)"),
    (checks.long_file, "\n" * 300, "\n" * 301),
    (checks.long_functions, "def f():\n    '''a\n" + "\n" * 50 + "'''\n" + "    x\n" * 39,
     "def f():\n" + "    x\n" * 40),
    (checks.long_functions, "class C:\n" + "    x = 1\n" * 60, "class C:\n  def f(self):\n" + "    x\n" * 40),
    (checks.banned_words, "getattr(x, 'y', None)", "hasattr(x, 'y')"),
    (checks.banned_words, "x = 1  # done", "x = 1  # TODO: y"),
    (checks.banned_words, "return NotImplemented", "raise NotImplementedError"),
    (checks.no_face, "'''What it is.'''\n__all__ = []\nx = 1", "'''What it is.'''\nx = 1"),
    (checks.no_face, "'''What it is.'''", ""),
])
def test_planted_faults(check, good: str, bad: str) -> None:
    assert check(Module("shardwise.plan.sample", good)) == {}
    assert len(check(Module("shardwise.plan.sample", bad))) == 1


def test_names_that_say_nothing() -> None:
    assert checks.banned_words(Module("shardwise.plan.shape_utils", ""))
    assert not checks.banned_words(Module("shardwise.plan.shapes", ""))


@pytest.mark.parametrize(("text", "raised"), [
    ("raise ConfigurationError('x')", None),
    ("from shardwise import errors\nraise errors.ConfigurationError('x')", None),
    ("try:\n    f()\nexcept OSError as error:\n    raise", None),
    ("try:\n    f()\nexcept OSError as error:\n    raise error", None),
    ("def refused() -> ConfigurationError: ...\nraise refused()", None),
    ("class A:\n    def __getattr__(self, name):\n        raise AttributeError(name)", None),
    ("class Special(ConfigurationError): ...\nraise Special('x')", None),
    ("class Special(ValueError): ...\nraise Special('x')", "Special"),
    ("raise ValueError('x')", "ValueError"),
    ("raise RuntimeError", "RuntimeError"),
    ("def refused() -> ValueError: ...\nraise refused()", "refused"),
    ("def get(name):\n    raise AttributeError(name)", "AttributeError"),
])
def test_raises(text: str, raised: str | None) -> None:
    found = checks.foreign_raises(Module("shardwise.plan.sample", text), {"ConfigurationError"})
    assert [key.rpartition(" ")[2] for key in found] == ([raised] if raised else [])


def test_a_permission_without_use_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.guard.source.allowed", lambda section: {"a": "used", "b": "stale"})
    faults = verdict({"a": "fault a", "c": "fault c"}, "raises")
    assert faults == ["fault c  [raises: 'c']", "allowed.toml [raises] 'b': nothing needs this any more"]
