"""docs/torch-tests.md, made from the outcomes of torch's tests."""

from __future__ import annotations

from collections.abc import Mapping

CONTESTANTS = ("torch", "plain")
"""torch's class, and dovetail's in its place: whose outcomes are stored."""

Outcomes = Mapping[str, Mapping[str, Mapping[str, str]]]
"""By test and contestant: `outcome` and `reason`."""

TEXT = """\
# torch's own tests

torch ships its tests of DistributedDataParallel, in `torch.testing._internal.distributed.distributed_test`.
`make torch-tests` runs each of them that constructs a DDP twice, with gloo and two ranks:

* with torch's class;
* with `dovetail.DistributedDataParallel` in its place, planning after two steps (*plain*).

The table is what came out with torch {version}. The command compares with it and fails where an outcome differs;
`make test` does so for some of the tests.

Most of these tests ask for CUDA devices although nothing in them depends on one. They run here with the CPU in the
place of every device (`tests/torch_suite/host_device.py`). Those for which that makes a difference fail with torch's
class too; no test has been run on an accelerator.

| | torch's class | plain |
|---|---|---|
{counts}

Nearly all of these tests step no optimiser, so they say little of `dovetail.optimizer`, and no outcomes are stored for
it; `python -m tests.torch_suite.runner --contestant "second line"` runs them with it all the same.

| test | torch's class | plain | why |
|---|---|---|---|
{rows}
"""


def page(tests: Outcomes, version: str) -> str:
    """The whole text of the page."""
    kinds = ("passes", "fails", "skipped")
    counts = [
        f"| {kind} | " + " | ".join(str(sum(_kind(of, c) == kind for of in tests.values())) for c in CONTESTANTS) + " |"
        for kind in kinds
    ]
    rows = [
        f"| `{name}` | {' | '.join(_kind(of, c) for c in CONTESTANTS)} | {_plain_text(_why(of))} |"
        for name, of in tests.items()
    ]
    return TEXT.format(version=version, counts="\n".join(counts), rows="\n".join(rows))


def _kind(of: Mapping[str, Mapping[str, str]], contestant: str) -> str:
    return of.get(contestant, {}).get("outcome", "")


def _why(of: Mapping[str, Mapping[str, str]]) -> str:
    if _kind(of, "torch") != "passes":
        return of.get("torch", {}).get("reason", "")
    told = [found["reason"] for found in of.values() if found["outcome"] not in ("passes", "no optimiser")]
    return "; ".join(dict.fromkeys(told))


def _plain_text(text: str) -> str:
    for mark in "\\`*_|<":
        text = text.replace(mark, f"\\{mark}")
    return text
