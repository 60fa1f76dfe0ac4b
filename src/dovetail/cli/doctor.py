"""`dovetail doctor`: does everything that trains work on these devices?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import console


def doctor(
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the report.")] = Path(
        "doctor.json"
    ),
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda|emu|…", help="Type of the devices; default: torch's accelerator, else cpu."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks, each with a device of its own.")] = 2,
    json: console.Json = False,
) -> None:
    """Train a few steps in every way on this machine's devices, compare, and write a report to send.

    Two ranks run torch's DDP, dovetail's with one line and with two, partial backpropagation and burst, each against
    torch's DDP or its oracle, and measure the network between them. What fails gets one line, and the rest goes on.
    `--device emu` runs on the emulated accelerator, which also looks for races between streams; the first use builds
    it. Takes five minutes at most.
    """
    from dovetail.core import files
    from dovetail.core.errors import Error
    from dovetail.doctor import diagnosis_text
    from dovetail.doctor.examination import examine

    console.writable(output)
    with console.working("the doctor: five minutes at most") as tell:
        found = examine(device=device, ranks=ranks, tell=tell)
    files.write(output, found)
    console.wrote(output)
    if json:
        console.emit(console.builtins(found))
    else:
        console.show(*diagnosis_text.lines(found))
    if not found.passed:
        wrong = [check.name for check in found.checks if check.outcome != "passed"]
        raise Error(f"doctor: {', '.join(wrong)} did not pass; send {output} with your question")
