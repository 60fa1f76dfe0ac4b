"""`dovetail demo`: data parallelism with dovetail from start to end, on any Linux machine, without a GPU.

It profiles a real ResNet-50 on this machine, emulates four devices that take proportionate times, and lets torch's DDP
and dovetail train on them in turns over links of limited rate. Then it trains a small language model on real text
without emulation, once with each (`rank.py`), and compares the losses. It ends with a table of three lines and a page
of this run (`summary.py`). Needs torch, numpy, msgspec, rich and typer, and root for links of limited rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from dovetail.core.profile import Profile
from dovetail.emulate.contest import DOVETAIL, ContestOutcome, EmulatedCluster, run
from dovetail.emulate.shaped_network import available, bits_per_second
from dovetail.view.timeline import TimelineView

from . import summary

RANKS = 4
LOOPBACK_RATE = "2gbit"  # what four gloo ranks on loopback come close to on a small machine


@dataclass(frozen=True)
class RealTraining:
    """The small language model, trained for the same iterations with torch's DDP and with dovetail's."""

    losses: dict[str, list[float]]
    identical: bool
    """Whether both trainings ended with the same parameters, bit for bit."""
    explained: str


def main(
    *,
    quick: bool = False,
    rate: str = "2gbit",
    html: Path | None = None,
    timelines: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Runs the demonstration, prints each part as it ends, and returns all results as plain data.

    `html`: the file for its page; `timelines`: a folder for the recorded iteration of DDP and of dovetail.
    """
    say = _teller(console or Console())
    bits_per_second(rate)
    reason = available()
    setting = EmulatedCluster(ranks=RANKS, rate=None if reason else rate)
    say("[bold]dovetail demo[/]: data parallelism that plans its own gradient merging\n")
    if reason:
        say(f"[bold]Links are not limited[/]: {reason}. Ranks talk over loopback instead; gains will look different.\n")

    say("[bold]1  Profile[/]  ResNet-50 on this machine, for the proportions of its layers …")
    profile = _profile(LOOPBACK_RATE if reason else rate)
    say(f"   {len(profile.tensors)} tensors, {profile.parameter_bytes / 1e6:.0f} MB of gradients per iteration")
    say(f"   emulated devices take {profile.forward_time():.2f} s forward, {profile.backward_time():.2f} s backward\n")
    where = f"{RANKS} emulated devices, " + ("loopback" if reason else f"real links of {rate}")
    say(f"[bold]2  Plan and train[/]  torch's DDP against dovetail, {where} …")
    say("   (two minutes: dovetail measures, plans and tries its plans, then both take turns)")
    outcome = run(
        profile,
        ["ddp"],
        setting,
        rounds=2 if quick else 3,
        iterations=2 if quick else 4,
        tuning={"measure": 6, "steps": 2} if quick else {},
        on_line=_indented(say),
    )
    made = summary.demo_run(profile, outcome, network="loopback" if reason else f"a {rate} network")
    if timelines:
        summary.write_timelines(outcome, timelines)
    say("\n   One iteration of the first rank; exposed is communication that no computation hides:\n")
    say(TimelineView([outcome.timelines["ddp"], outcome.timelines[DOVETAIL], made.predicted]))

    say("\n[bold]3  The same losses[/]  a small language model, 2 ranks, nothing emulated …")
    training = _train_for_real(iterations=50 if quick else 100)
    _show_training(say, training)
    found = summary.lines(made)
    page = _end(say, made, found, where, html)
    return _as_json(outcome, training, setting) | {"lines": summary.as_json(found), "page": str(page) if page else None}


def _profile(rate: str) -> Profile:
    """ResNet-50 on a device whose backward pass takes as long as its communication: where overlap matters most."""
    import torch

    from dovetail import measure

    workload, threads = measure.load("resnet50"), torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other take minutes on a busy machine; only proportions matter
    try:
        measured = measure.profile(workload.model, workload.make_batch(2), batches=[2], steps=10, name="ResNet-50")
    finally:
        torch.set_num_threads(threads)
    # A ring all-reduce sends 2(n−1)/n of the gradients over every link.
    backward = 2 * (RANKS - 1) / RANKS * measured.parameter_bytes * 8 / bits_per_second(rate)
    return measured.scaled(forward=backward / 3, backward=backward)


def _train_for_real(iterations: int) -> RealTraining:
    from dovetail.emulate.launch import launch

    results = launch(["-m", "dovetail.demo.rank", str(iterations)], ranks=2, timeout=600)
    return msgspec.convert(results[0].report, RealTraining)


def _show_training(say: Callable[..., None], training: RealTraining) -> None:
    table = Table(box=None, padding=(0, 2))
    table.add_column("loss at iteration", justify="left", no_wrap=True)
    count = len(training.losses["torch"])
    marks = [0, *(count * quarter // 4 - 1 for quarter in (1, 2, 3, 4))]
    for mark in marks:
        table.add_column(str(mark + 1), justify="right")
    for name, losses in training.losses.items():
        table.add_row(name, *(f"{losses[m]:.4f}" for m in marks))
    say(table)
    same = "bit for bit the same parameters" if training.identical else "[red]different parameters[/]"
    say(f"   After training, both have {same}.")


def _end(
    say: Callable[..., None], made: summary.DemoRun, found: list[summary.Line], where: str, html: Path | None
) -> Path | None:
    say(summary.table(found, f"\nOne iteration of ResNet-50 on {where}"))
    for line in summary.footnotes(made, found):
        say(line, markup=False)
    say("In your own script:  [bold]from dovetail import DistributedDataParallel as DDP[/]")
    page, why = summary.export(made, html)
    if page:
        say(f"Look into this run:  [bold]{page.absolute().as_uri()}[/]", soft_wrap=True)
    else:
        say(f"There is no page of this run to look into: {why}", markup=False, soft_wrap=True)
    return page


def _as_json(outcome: ContestOutcome, training: RealTraining, setting: EmulatedCluster) -> dict[str, Any]:
    return {
        "emulated": True,
        "setting": {"ranks": setting.ranks, "rate": setting.rate or "loopback"},
        "contest": msgspec.to_builtins(outcome),
        "lesson": {"losses": training.losses, "identical": training.identical},
    }


def _teller(console: Console) -> Callable[..., None]:
    return lambda thing, markup=True, soft_wrap=False: console.print(
        thing, markup=markup, highlight=False, soft_wrap=soft_wrap
    )


def _indented(say: Callable[..., None]) -> Callable[[str], None]:
    return lambda line: say(f"   {line}", markup=False, soft_wrap=True)
