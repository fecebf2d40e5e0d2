"""The source keeps its floors, its keepers, its sizes and its manners."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.guard import checks
from tests.guard.source import Module, allowed, modules, verdict

MODULES = modules()


def _all(check: Callable[[Module], dict[str, str]]) -> dict[str, str]:
    return {f"{module.name} {key}" if check in (checks.banned_words, checks.no_face) else key: message
            for module in MODULES for key, message in check(module).items()}


def _report(faults: list[str]) -> None:
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_there_is_source_to_guard() -> None:
    assert {"shardwise.errors", "shardwise.plan"} <= {module.name for module in MODULES}


def test_imports_go_down_only() -> None:
    floors = {name: int(floor) for name, floor in allowed("floors").items()}
    _report(verdict(_all(lambda module: checks.upward_imports(module, floors)), "imports"))


def test_the_plan_talks_to_nobody() -> None:
    _report(list(_all(checks.plan_talks).values()))


def test_the_replaced_library_is_not_imported() -> None:
    _report(list(_all(checks.forbidden_peers).values()))


def test_private_torch_names_are_in_one_module() -> None:
    found = {key: message for key, message in _all(checks.private_torch).items()
             if not key.startswith("shardwise.torch_private ")}
    _report(verdict(found, "torch_private"))


def test_registries_have_one_keeper() -> None:
    _report(verdict(_all(checks.kept_by_one), "keepers"))


def test_files_are_short() -> None:
    _report(verdict(_all(checks.long_file), "long_files"))


def test_functions_are_short() -> None:
    _report(verdict(_all(checks.long_functions), "long_functions"))


def test_no_banned_words() -> None:
    _report(list(_all(checks.banned_words).values()))


def test_public_modules_say_what_they_are() -> None:
    _report(list(_all(checks.no_face).values()))


def test_raised_errors_are_our_own() -> None:
    errors = next(module for module in MODULES if module.name == "shardwise.errors")
    classes = {node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)}
    _report(verdict(_all(lambda module: checks.foreign_raises(module, classes)), "raises"))
