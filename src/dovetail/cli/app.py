"""The command `dovetail`, and what it does when something goes wrong.

Exit codes: 0 done, 1 failed (one line on stderr), 2 wrong use, 130 interrupted. Results go to stdout, everything else
to stderr, so that a pipe or `--json` gets nothing but the result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from dovetail.core.errors import Error

from . import measure, plan, run, schedule, view
from .cluster import app as cluster
from .fabric import app as fabric


class Commands(TyperGroup):
    """Commands in the order in which a user meets them; their errors as one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Error as e:
            _fail(str(e))
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of the pipe has closed it. Files are written before anything is printed, so nothing is lost.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as e:
            _fail(f"{e.filename}: {(e.strerror or str(e)).lower()}" if e.filename else str(e.strerror or e).lower())


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Makes training jobs fit together: measure a model and a network, plan, simulate, train, look.",
    epilog="Every command explains itself: dovetail COMMAND --help",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from dovetail import __version__

        typer.echo(f"dovetail {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and end.")
    ] = False,
) -> None:
    pass


for name, command, short, kind in (
    ("demo", run.demo, "the main job: a real model against DDP on a shaped network", TyperCommand),
    ("profile", measure.profile, "measure a model", TyperCommand),
    ("network", measure.network, "measure a network, or take a preset", TyperCommand),
    ("plan", plan.plan, "compare every policy, choose, explain, write the plan", plan.PlanCommand),
    ("simulate", plan.simulate, "predict one iteration of a plan", TyperCommand),
    ("scale", plan.scale, "predict the speed-up on many workers", TyperCommand),
    ("train", run.train, "run a DDP script with planned buckets", TyperCommand),
    ("doctor", run.doctor, "check every way to train on your devices; a report to send", TyperCommand),
    ("schedule", schedule.schedule, "simulate a cluster under a trace of jobs", schedule.ScheduleCommand),
    ("view", view.view, "look at files: tables, the page, pictures, Perfetto traces", TyperCommand),
):
    app.command(name, short_help=short, cls=kind)(command)
app.add_typer(cluster, name="cluster", short_help="many jobs on shared devices: a service")
app.add_typer(fabric, name="fabric", short_help="policy-compliant routing in the data plane, emulated")


def main() -> NoReturn:
    """Runs the command line and ends the process."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a sign shows "?"
    try:
        app(prog_name="dovetail")
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        code = 130
    except Terminated as e:
        code = 128 + e.signum
    else:
        code = 0
    sys.exit(code)


class Terminated(BaseException):
    """Raised on SIGTERM, so that temporary files and child processes are cleaned up as after any exception.

    It is no SystemExit, because a SystemExit of the user's script is reported as the script's failure.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise Terminated(signum)


def _fail(line: str) -> NoReturn:
    typer.echo(f"dovetail: {' '.join(line.split())}", err=True)
    raise typer.Exit(1)
