"""``shardwise doctor``: is this machine, and this launch, fit for training?"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from .machine import FAIL, OK, WARN, Finding, examine, examine_launch

__all__ = ["doctor"]

_COLOUR = {OK: "green", WARN: "yellow", FAIL: "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the other ranks.", min=1.0)] = 30.0,
) -> None:
    """Check this machine, and under torchrun the launch: versions, network, shared memory, clocks, GPUs.

    Exit code 1 if anything would keep training from running.
    """
    findings = examine(os.environ)
    broken = any(finding.level == FAIL for finding in findings)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not broken:
        findings += examine_launch(timeout)
        broken = any(finding.level == FAIL for finding in findings)
    if os.environ.get("RANK", "0") == "0" or broken:
        _show(findings, as_json=as_json, broken=broken)
    sys.exit(int(broken))


def _show(findings: list[Finding], *, as_json: bool, broken: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"ok": not broken, "findings": [finding._asdict() for finding in findings]}, indent=2))
        return
    console = Console(highlight=False)
    for finding in findings:
        colour = _COLOUR[finding.level]
        console.print(f"[{colour}]{finding.level:8s}[/] {finding.check:14s}", end="")
        console.print(finding.text, markup=False, soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':24s}{finding.remedy}", markup=False, soft_wrap=True)
    worst = sum(finding.level != OK for finding in findings)
    console.print("nothing to mend" if not worst else f"{worst} to look at")
