"""The checks by name, without torch, and how far a rank has come with them: what the two sides of the doctor share."""

from __future__ import annotations

from dovetail.core.files import Record, Seconds

from .diagnosis import AllReduceFit, CheckResult

CHECKLIST = {
    "network": "dovetail.doctor.checks:network",
    "torch's DDP": "dovetail.doctor.checks:torch_ddp",
    "planned DDP": "dovetail.doctor.checks:one_line",
    "second line": "dovetail.doctor.checks:two_lines",
    "kinds of buckets": "dovetail.doctor.checks:bucket_kinds",
    "PartialBackprop": "dovetail.doctor.checks:partial_backprop",
    "Burst": "dovetail.doctor.checks:burst",
}
"""Where each check is, by the name under which the report shows it, in this order."""

START = "start"
"""What goes on before the first check."""


class RankProgress(Record, frozen=True, kw_only=True):
    """How far a rank has come: its report to the launcher."""

    now: str
    """The check that is going on; empty when all are over."""
    done: tuple[CheckResult, ...] = ()
    network: AllReduceFit | None = None
    error: str = ""
    """What ended the check that was going on, in one line."""
    ended: Seconds = 0.0
    """When that was, by the clock that all processes of a machine share (time.monotonic)."""
