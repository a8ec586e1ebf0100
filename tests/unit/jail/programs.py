"""Programs that tests run to their end."""

from __future__ import annotations

from megarl.jail.sandbox import JailedProcess, Limits, Run


def run_program(source: str, stdin: str, limits: Limits) -> Run:
    return JailedProcess(source, limits, stdin=stdin).run()
