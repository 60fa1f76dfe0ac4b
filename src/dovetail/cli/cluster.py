"""`dovetail cluster`: start a cluster, submit jobs, watch them, ask why one waits."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dovetail.core.errors import InputError

from . import console, inputs

if TYPE_CHECKING:
    from dovetail.cluster.client import Client

app = typer.Typer(
    name="cluster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Many training jobs on shared devices: start a cluster, submit jobs, watch them, ask why one waits.",
)
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", metavar="DIR", help="The cluster's folder; default: $DOVETAIL_HOME, or your state folder."),
]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="A cluster on another machine; needs --token-file.")]
Token = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="The token of the cluster at --url.")]
JobNumber = Annotated[int, typer.Argument(metavar="JOB", min=1, help="The job's number.")]


def _client(home: Path | None, url: str, token_file: Path | None, **options: Any) -> Client:
    from dovetail.cluster.client import Client
    from dovetail.cluster.home import read_token

    return Client(url or home, read_token(token_file) if token_file else "", **options)


@app.command()
def up(
    devices: Annotated[int, typer.Option(min=0, max=4096, help="Default: one per core, or 8 emulated ones.")] = 0,
    emulated: Annotated[
        bool,
        typer.Option("--emulated", help="Devices that wait for the times of a job's profile instead of computing."),
    ] = False,
    accelerators: Annotated[
        str, typer.Option(metavar="NAMES", help="Accelerators as devices: cuda:0,cuda:1 …; emu:0 is an emulated one.")
    ] = "",
    policy: Annotated[str, typer.Option(metavar="NAME", help="jigsaw, gang-fifo-backfill, …")] = "jigsaw",
    memory: Annotated[
        float,
        typer.Option(min=0.0, help="GiB of each device; default: the machine's, shared, or 90 % of an accelerator's."),
    ] = 0.0,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="local: this machine; ray: a Ray cluster.")] = "local",
    ray: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray's address; auto: this machine's Ray.")] = "auto",
    host: Annotated[str, typer.Option(help="Where the API listens; not loopback: needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Every request must carry the token in this file."),
    ] = None,
    home: HomeOption = None,
    json: console.Json = False,
) -> None:
    """Start a cluster and continue its jobs. Prints the address if it runs already."""
    from dataclasses import asdict

    from dovetail.cluster import up_down

    start = time.monotonic()
    address, ran = up_down.up(
        home, devices=devices, emulated=emulated, accelerators=accelerators, policy=policy,
        device_bytes=inputs.memory_bytes(memory), engine=engine, ray=ray, host=host, port=port, token_file=token_file,
    )  # fmt: skip
    took = time.monotonic() - start
    status = _client(home, "", None).status(jobs=False)
    count, kind = len(status["devices"]), "emulated devices" if status["emulated"] else "devices"
    named = ",".join(d["accelerator"] for d in status["devices"] if d["accelerator"])
    kind += f" ({named})" if named else ""
    facts = {**asdict(address), "url": address.url, "ran_already": ran, "devices": count, "policy": status["policy"]}
    start_line = "runs already" if ran else f"up in {took:.1f} s"
    line = f"{start_line}: {count} {kind}, policy {status['policy']}, {address.url}"
    asked = {"--devices": devices in (0, count), "--emulated": emulated <= status["emulated"],
             "--accelerators": accelerators.replace(" ", "") in ("", named),
             "--policy": policy in ("jigsaw", status["policy"])}  # fmt: skip
    other = [option for option, same in asked.items() if not same]
    if ran and other:
        line += f"\n{', '.join(other)}: not as asked for; `dovetail cluster down` first"
    console.result(facts, json, line, _where_to_look(address.url))


def _where_to_look(url: str) -> str:
    from dovetail.view.page.html import BUNDLE, HOW

    return f"to watch it in a browser: {url}/" if (BUNDLE / "app.js").exists() else f"to watch it in a browser: {HOW}"


@app.command()
def down(
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for running jobs to write checkpoints.")] = 10.0,
    home: HomeOption = None,
    json: console.Json = False,
) -> None:
    """End the cluster. Jobs stay in its store and continue with the next `up`."""
    from dovetail.cluster import up_down

    ran = up_down.down(home, grace=grace)
    console.result({"down": True, "ran": ran}, json, "down" if ran else "no cluster was running")


@app.command(context_settings={"ignore_unknown_options": True})
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job file, or with --gang any training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]…", help="Arguments of a gang's script.")
    ] = None,
    name: Annotated[str, typer.Option(help="Default: the file's name.")] = "",
    workers: Annotated[int | None, typer.Option(min=1, max=4096, help="Instead of the file's own.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the file's own.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per step; instead of the file's own.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's own.")] = None,
    spb: Annotated[
        Literal["off", "ladder", "balanced", "guard"] | None, typer.Option(help="Partial backpropagation.")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Promise the job's speed: only background jobs share its devices.")
    ] = False,
    background: Annotated[bool, typer.Option("--background", help="Run the job only in gaps of others.")] = False,
    bound: Annotated[
        float | None, typer.Option(min=0.0001, max=10.0, help="Slow-down that a foreground job accepts; default 0.05.")
    ] = None,
    gang: Annotated[int, typer.Option(min=0, max=4096, help="Run a script as under torchrun, with so many ranks.")] = 0,
    task_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds after which a task counts as endless.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job has ended; exit code 1 unless it finished.")
    ] = False,
    home: HomeOption = None,
    url: Url = "",
    token_file: Token = None,
    json: console.Json = False,
) -> None:
    """Submit a job. It is stored on disk when this returns."""
    import uuid

    if bound is not None and not foreground:
        raise typer.BadParameter("--bound: only for --foreground")
    if foreground and background:
        raise typer.BadParameter("expected one of --foreground and --background, got both")
    if arguments and not gang:
        raise typer.BadParameter(f"no such option or argument: {arguments[0]} (scripts with arguments: --gang N)")
    given = {"workers": workers, "steps": steps, "batch": batch, "seed": seed, "spb": spb}
    options: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    if options and gang:
        raise typer.BadParameter(f"--{next(iter(options))}: not for gangs; a script's own options follow after --")
    if task_timeout is not None:
        options["task_timeout"] = task_timeout
    submission = {
        "text": _text(file), "name": name or _name(file), "kind": "gang" if gang else "tasks", "gang": gang,
        "share": "foreground" if foreground else "background" if background else "normal", "bound": bound or 0.05,
        "options": options, "arguments": arguments or [], "request": str(uuid.uuid4()),
    }  # fmt: skip
    client = _client(home, url, token_file)
    job = _retrying(lambda: client.submit(submission))
    if wait:
        number = job["job"]
        while job["state"] not in ("finished", "failed", "cancelled"):
            time.sleep(0.1)
            job = _retrying(lambda: client.job(number), limit=60.0)
    line = f"job {job['job']} ({job['name']}): {job['state']}"
    console.result(job, json, f"{line}: {job['reason']}" if job.get("reason") else line)
    if wait and job["state"] != "finished":
        raise typer.Exit(1)


def _text(file: Path) -> str:
    from dovetail.cluster.job.submission import MOST_TEXT

    try:
        if file.exists() and not file.is_file():  # a pipe or a device might have no end
            raise InputError(file, "", "expected a Python file")
        with file.open("rb") as opened:
            data = opened.read(MOST_TEXT + 1)
        if not data or len(data) > MOST_TEXT or b"\0" in data:
            got = "none" if not data else "a zero byte" if b"\0" in data else "more"
            raise InputError(file, "", f"expected 1 to {MOST_TEXT} bytes of Python text, got {got}")
        text = data.decode("utf-8")
        compile(text, str(file), "exec", dont_inherit=True)
    except OSError as e:
        raise InputError(file, "", f"cannot be read: {(e.strerror or str(e)).lower()}") from None
    except UnicodeDecodeError:
        raise InputError(file, "", "expected Python text in UTF-8") from None
    except SyntaxError as e:
        raise InputError(file, f"line {e.lineno}", f"expected valid Python: {e.msg}") from None
    except (ValueError, RecursionError, MemoryError) as e:
        raise InputError(file, "", f"expected valid Python: {e}") from None
    return text


def _name(file: Path) -> str:
    return re.sub(r"[^A-Za-z0-9 ._-]", "-", file.stem).lstrip(" ._-")[:64] or "job"


def _retrying(ask: Callable[[], dict[str, Any]], *, limit: float = 10.0) -> dict[str, Any]:
    """Asks again, for `limit` seconds, while the coordinator is being restarted; its address stays the same."""
    from dovetail.cluster.client import Unreachable

    end = time.monotonic() + limit
    while True:
        try:
            return ask()
        except Unreachable as e:
            if time.monotonic() > end or "no cluster runs" in str(e):
                raise
            time.sleep(0.1)


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it live until Ctrl-C.")] = False,
    home: HomeOption = None,
    url: Url = "",
    token_file: Token = None,
    json: console.Json = False,
) -> None:
    """Show devices and jobs."""
    client = _client(home, url, token_file)
    found = client.status()
    if json:
        console.emit(found)
        return
    from .cluster_table import draw

    if not watch:
        console.show(*draw(found))
        return
    from rich.console import Group
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(console=console.console(), screen=False) as shown:
        while True:
            shown.update(Group(*draw(found)), refresh=True)
            time.sleep(0.5)
            found = _retrying(client.status)


@app.command()
def page(
    job: Annotated[
        int | None, typer.Argument(metavar="[JOB]", min=1, help="The number of a job that the page should show.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    home: HomeOption = None,
    url: Url = "",
    token_file: Token = None,
    json: console.Json = False,
) -> None:
    """Print the address of the cluster's page: what runs on which device, jobs' progress, why others wait."""
    from dovetail.cluster.client import Client, RequestRefused

    client = _client(home, url, token_file)
    if job is not None:
        client.job(job)
    client.raw("/")  # an error is printed here rather than in a browser
    where = f"{client.url}/" + (f"#job-{job}" if job else "")
    console.result({"url": where}, json, where)
    try:
        Client(client.url).status(jobs=False)
    except RequestRefused:
        console.say("the browser asks for a name and a password: any name, and the cluster's token")
    if open_:
        console.browse(where)


@app.command()
def why(
    job: JobNumber, home: HomeOption = None, url: Url = "", token_file: Token = None, json: console.Json = False
) -> None:
    """Say why a job waits, or is slow."""
    found = _client(home, url, token_file).why(job)
    console.result(
        found, json, f"job {found['job']} ({found['name']}): {found['state']}", *(f"  {w}" for w in found["why"])
    )


@app.command()
def logs(
    job: JobNumber,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    home: HomeOption = None,
    url: Url = "",
    token_file: Token = None,
    json: console.Json = False,
) -> None:
    """Print a job's output and what happened to it."""
    client = _client(home, url, token_file)
    found = client.logs(job)
    if json:
        console.emit(found)
        return
    while True:
        sys.stdout.write(found["text"])
        sys.stdout.flush()
        ended = found["state"] in ("finished", "failed", "cancelled")
        if not follow or (ended and not found["text"]):
            return
        if not found["text"]:
            time.sleep(0.2)
        found = _retrying(partial(client.logs, job, offset=found["offset"]))


def _change(verb: str, past: str) -> Callable[..., None]:
    def change(
        job: JobNumber, home: HomeOption = None, url: Url = "", token_file: Token = None, json: console.Json = False
    ) -> None:
        found = getattr(_client(home, url, token_file), verb)(job)
        console.result(found, json, f"job {found['job']} ({found['name']}): {past}")

    change.__name__ = verb
    return change


for _verb, _past, _help in (
    ("cancel", "cancelled", "End a job for good."),
    ("pause", "paused", "Let a job write a checkpoint and release its devices."),
    ("resume", "in the queue again", "Let a paused job continue from its checkpoint."),
):
    app.command(_verb, help=_help)(_change(_verb, _past))


@app.command()
def replay(
    policy: Annotated[
        str, typer.Option(metavar="NAME,…", help="Policies to predict besides the recorded one.")
    ] = "jigsaw,gang-fifo-backfill",
    since: Annotated[float, typer.Option(min=0.0, help="Leave out jobs submitted before this time.time().")] = 0.0,
    home: Annotated[
        Path | None, typer.Option("--home", metavar="DIR", help="The cluster's folder; it need not be running.")
    ] = None,
    json: console.Json = False,
) -> None:
    """Replay the recorded jobs in the simulator: predicted and measured makespan, and those of other policies."""
    from dovetail.cluster.home import default_home
    from dovetail.cluster.replay import play, read

    run = read(home or default_home(), since=since)
    others = [name for name in dict.fromkeys(policy.split(",")) if name and name != run.policy]
    plays = [play(run, policy=name) for name in (run.policy, *others)]
    kind = "emulated devices" if run.emulated else "devices"
    lines = [f"{len(run.jobs)} jobs on {run.cluster.devices} {kind} under {run.policy}: {run.makespan:.2f} s measured"]
    for p in plays:
        same = p.policy == run.policy
        note = f"{p.comparison.error:+.1%} of the measured" if same else "had it run"
        lines.append(f"  {p.policy}: {p.comparison.predicted:.2f} s predicted, {note}")
    data = {
        "policy": run.policy,
        "emulated": run.emulated,
        "devices": run.cluster.devices,
        "jobs": len(run.jobs),
        "measured": run.makespan,
        "overhead": run.overhead,
        "jitter": run.jitter,
        "error": plays[0].comparison.error,
        "predicted": {p.policy: p.comparison.predicted for p in plays},
    }
    console.result(data, json, *lines)
