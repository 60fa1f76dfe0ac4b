"""`python -m dovetail.train.run [--plan plan.json] [--spb POLICY] [-m] SCRIPT [args…]`: one rank, under torchrun.

Inside this process and those that it starts, and only there, constructing torch's DistributedDataParallel gives
dovetail's (see `descendants`), or with --spb a PartialBackprop (see `adopt`).
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from dovetail.core.errors import Error
from dovetail.core.processes import die_with_parent

from . import closing_line, descendants
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
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the script")
    given = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # A rank without torchrun would hang: the kernel ends it when torchrun dies.
        die_with_parent()
    partial = PartialOptions(given.spb, given.plan, given.epsilon, given.steps) if given.spb else None
    try:
        check_inputs(given.script, given.plan, partial, module=given.module)
    except Error as e:
        print(f"dovetail: {e}", file=sys.stderr)
        sys.exit(2)
    closing_line.begin()
    if partial is not None:
        from .adopt import adopt_partial  # torch takes seconds: not before the inputs are checked

        adopt_partial(partial)
    else:
        if given.plan:
            os.environ["DOVETAIL_PLAN"] = str(Path(given.plan).resolve())
        descendants.adopt()
        descendants.hand_down()
    if given.module:
        _run_module(given.script, given.args)
    else:
        _run_script(given.script, given.args)


def _run_script(script: str, args: Sequence[str]) -> None:
    """Runs the script as `python SCRIPT args…` would: with its own arguments, its own folder first on the path."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    _hide_our_frames(script)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        closing_line.refresh()


def _run_module(name: str, args: Sequence[str]) -> None:
    """Runs the module as `python -m NAME args…` would: the current folder first on the path, a package's __main__."""
    sys.path[0] = str(Path.cwd())
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        print(f"dovetail: {name}: expected a module that can be run, found none", file=sys.stderr)
        sys.exit(2)
    sys.argv = [spec.origin, *args]
    _hide_our_frames(spec.origin)
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        closing_line.refresh()


def _hide_our_frames(file: str) -> None:
    """Lets tracebacks begin in the script, as if it ran by itself."""

    def without_our_frames(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inside = trace
        while inside and inside.tb_frame.f_code.co_filename != file:
            inside = inside.tb_next
        sys.__excepthook__(kind, error.with_traceback(inside), inside)

    sys.excepthook = without_our_frames


if __name__ == "__main__":
    main()
