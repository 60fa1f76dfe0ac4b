"""A diagnosis for people: the machine, a row for each check with what was found below it, and the sum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from dovetail.view import units

from .diagnosis import CheckResult, Diagnosis

SIGNS = {"passed": "ok", "failed": "FAILED", "not run": "not run"}
ROW = "{:<18}{:<9}{:>10}  {:>12}  {:>8}"


def lines(found: Diagnosis) -> Iterator[str]:
    """The whole report."""
    yield from _heading(found)
    yield ""
    yield ROW.format("check", "", "difference", "host syncs", "time").rstrip()
    # Checks that did not run for the same reason share the line that says it.
    for (outcome, line), alike in groupby(found.checks, key=lambda check: (check.outcome, _what(found, check))):
        checks = list(alike)
        for check in checks:
            yield _row(check)
            if outcome != "not run":
                yield f"    {line}"
        if outcome == "not run":
            yield f"    {line}"
    yield ""
    yield from _footnotes(found)


def _heading(found: Diagnosis) -> Iterator[str]:
    machine = found.machine
    yield f"dovetail {machine.dovetail}, torch {machine.torch}, Python {machine.python}, {machine.system}"
    kinds = dict.fromkeys(machine.devices)
    devices = f"{len(machine.devices)} × {machine.devices[0]}" if len(kinds) == 1 else "; ".join(machine.devices)
    where = f"{found.ranks} ranks on {machine.device} ({devices or units.count(machine.cores, 'core')})"
    more = [f"{name} {version}" for name, version in machine.runtime.items()]
    yield ", ".join([where, f"backend {machine.backend}", *more])


def _row(check: CheckResult) -> str:
    syncs = "" if check.host_syncs is None else f"{check.host_syncs:g} a step"
    took = units.seconds(check.seconds) if check.seconds else ""
    return ROW.format(check.name, SIGNS[check.outcome], _difference(check), syncs, took).rstrip()


def _difference(check: CheckResult) -> str:
    if check.difference is None:
        return ""
    return "none" if check.difference == 0 else f"{check.difference:.0e}"


def _what(found: Diagnosis, check: CheckResult) -> str:
    if check.name != "network" or found.network is None:
        return check.line + (f"; the host waited for {'; '.join(check.sync_places)}" if check.sync_places else "")
    fit = found.network
    speed = units.rate(1 / fit.bytes_per_second) if fit.bytes_per_second else "no limit found"
    law = f"all-reduce: {units.seconds(fit.latency)} + bytes / {speed}, up to {units.size(fit.largest)}"
    return f"{law}, within {units.percent(fit.error)}"


def _footnotes(found: Diagnosis) -> Iterator[str]:
    tolerance = next((check.tolerance for check in found.checks if check.tolerance is not None), None)
    if tolerance is not None:
        yield (
            "difference: the largest of any parameter from its reference, as a share of the largest value "
            f"in its tensor; {tolerance:.0e} passes"
        )
    passed = sum(check.outcome == "passed" for check in found.checks)
    yield f"{passed} of {units.count(len(found.checks), 'check')} passed in {units.seconds(found.seconds)}"
