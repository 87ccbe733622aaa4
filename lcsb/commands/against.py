"""Judging a user's own logs: the part of `lcsb judge` and `lcsb validate` that reads no run folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from lcsb.commands.common import FAILED, console, print_json


def claim_names(claims: str | None) -> list[str] | None:
    """The names in C1,C4, checked before anything is run; None for all."""
    if claims is None:
        return None
    from reports.claims import BY_ID

    names = [name.strip().upper() for name in claims.split(",")]
    for name in names:
        if name not in BY_ID:
            raise ValueError(f"--claims: found {name!r}, expected some of {', '.join(BY_ID)}")
    return names


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def judge_user_logs(
    against: list[str], names: list[str] | None, bench: Path | None, gate: bool, as_json: bool
) -> None:
    """Judge logs; nothing is run and nothing is written."""
    from reports.against import describe, judge_logs, read_log
    from reports.claims import BY_ID
    from reports.judge import read_bench

    logs = [read_log(argument) for argument in against]
    words = ["lcsb", "judge", *(word for argument in against for word in ("--against", argument))]
    verdicts = judge_logs(
        logs,
        list(BY_ID) if names is None else names,
        lambda claim: shlex.join([*words, "--claims", claim]),
        None if bench is None else read_bench(bench),
    )
    said = [describe(log) for log in logs]
    if as_json:
        found = [
            {"claim": v.claim, "title": v.title, "paper": v.paper.verdict, "ours": v.ours.verdict,
             "paper_reason": v.paper.reason, "ours_reason": v.ours.reason}
            for v in verdicts
        ]  # fmt: skip
        print_json({"logs": said, "verdicts": found})
    else:
        for log in said:
            at = "" if log["diverged_at"] is None else f" from step {log['diverged_at']}"
            final = "" if log["final_loss"] is None else f", held-out loss {log['final_loss']:.4f}"
            _say(f"{log['file']}: {log['arm']}, seed {log['seed']}: {log['status']}{at}{final}")
            for note in log["notes"]:
                _say(f"  {note}")
        for v in verdicts:
            _say(f"{v.claim} {v.title}: the paper's claim {v.paper.verdict}, our prediction {v.ours.verdict}")
            _say(f"  {v.paper.reason}")
            if v.ours.reason != v.paper.reason:
                _say(f"  {v.ours.reason}")
    if gate and any("refuted" in (v.paper.verdict, v.ours.verdict) for v in verdicts):
        raise typer.Exit(FAILED)
