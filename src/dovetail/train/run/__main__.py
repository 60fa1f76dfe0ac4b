"""`python -m dovetail.train.run [--plan plan.json] [--spb POLICY] SCRIPT [args…]`: one rank, under torchrun.

Inside this process, and only there, constructing torch's DistributedDataParallel gives dovetail's, or with --spb a
PartialBackprop (see `adopt`).
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from dovetail.core.errors import Error
from dovetail.core.processes import die_with_parent

from .launcher import PartialOptions, check_inputs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.train.run",
        description="Runs a DistributedDataParallel script under torchrun, planned.",
    )
    parser.add_argument("--plan", metavar="plan.json", help="follow this plan instead of measuring and choosing one")
    parser.add_argument("--spb", metavar="POLICY", help="partial backpropagation: guard, ladder or balanced")
    parser.add_argument("--epsilon", type=float, help="with --spb: progress per step that the guard may give away")
    parser.add_argument("--steps", type=int, help="with --spb: length of the training, for a plan with phases")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the script")
    given = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # A rank without torchrun would hang: the kernel ends it when torchrun dies.
        die_with_parent()
    partial = PartialOptions(given.spb, given.plan, given.epsilon, given.steps) if given.spb else None
    try:
        check_inputs(given.script, given.plan, partial)
    except Error as e:
        print(f"dovetail: {e}", file=sys.stderr)
        sys.exit(2)
    from .adopt import adopt_partial, adopt_planned  # torch takes seconds: not before the inputs are checked

    if partial is not None:
        adopt_partial(partial)
    else:
        if given.plan:
            os.environ["DOVETAIL_PLAN"] = str(Path(given.plan).resolve())
        adopt_planned()
    _run(given.script, given.args)


def _run(script: str, args: Sequence[str]) -> None:
    """Runs the script as `python SCRIPT args…` would: with its own arguments, its own folder first on the path."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)

    def without_our_frames(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    sys.excepthook = without_our_frames
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
