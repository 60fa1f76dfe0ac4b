"""`dovetail train --emulate`: starts a script once per rank, on emulated accelerators and, if asked, shaped links."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dovetail.core.errors import Error
from dovetail.core.files import read
from dovetail.core.network import bits_per_second
from dovetail.core.profile import Profile
from dovetail.core.scratch import scratch
from dovetail.emulate.launch import LaunchError, launch
from dovetail.emulate.shaped_network import available, shaped
from dovetail.train.run import closing_line
from dovetail.train.run.launcher import PartialOptions, check_inputs

from .emulated_rank import EmulationSpec, RankEmulation, file_of

LONGEST = 20 * 86400.0  # seconds; a training has no time-out of its own
SHOWN = 5
"""Races, and places of host syncs, that are printed for each rank."""


@dataclass(frozen=True)
class Emulation:
    """What is emulated for a training."""

    profile: str | Path | None = None
    """File with the times of the layers; None: kernels take the processor's own time."""
    rate: str | None = None
    """Rate of every rank's link in both directions, such as "1gbit"; None: loopback, without a limit."""
    races: bool = False
    """Whether to look for races between streams and for host syncs."""


def train_emulated(
    script: str | Path,
    emulation: Emulation,
    *,
    workers: int | None = None,
    module: bool = False,
    plan: str | Path | None = None,
    spb: str | None = None,
    epsilon: float | None = None,
    steps: int | None = None,
    args: Sequence[str] = (),
    tell: Callable[[str], None],
) -> int:
    """Trains with `workers` ranks (2) on this machine and returns the exit code: a rank's, or 128 + its signal.

    Arguments are those of `train.run.launcher.train`. Every rank is one process with an emulated accelerator, which is
    the script's CUDA device; with a rate it has a network namespace of its own. The script's output passes through.
    Where links cannot be limited (`shaped_network.available`), the ranks talk over loopback. `tell` is given the
    closing line of `dovetail train`, one on what was emulated, and one for each race that was found, which makes the
    exit code 1.
    """
    partial = PartialOptions(policy=spb, plan=plan, epsilon=epsilon, steps=steps) if spb else None
    check_inputs(script, plan, partial, module=module)
    if partial is None and (epsilon is not None or steps is not None):
        raise Error("epsilon, steps: expected together with spb, which they belong to")
    if workers is not None and workers < 1:
        raise Error(f"workers: expected at least 1, got {workers}")
    ranks = workers or 2
    profile = read(emulation.profile, Profile) if emulation.profile is not None else None
    if emulation.rate is not None:
        bits_per_second(emulation.rate)
    options = {"--plan": plan, "--spb": spb, "--epsilon": epsilon, "--steps": steps}
    rank = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    rank += [*(["-m"] if module else []), str(script), *args]
    rate = emulation.rate if available() is None else None
    with (
        scratch("emulated") as folder,
        shaped(ranks, rate=rate) if rate is not None else contextlib.nullcontext() as network,
    ):
        spec, line = folder / "spec.json", folder / "closing-line"
        what = EmulationSpec(profile=profile, races=emulation.races, folder=str(folder))
        spec.write_bytes(msgspec.json.encode(what))
        argv = ["-m", "dovetail.emulate.training.emulated_rank", str(spec), *rank]
        env = {
            closing_line.FILE: str(line),
            # Compiled kernels would be a GPU's; the emulated accelerator runs every operator by itself.
            "TORCHDYNAMO_DISABLE": "1",
            # DDP would warn that it has no timer for this device.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        code = 0
        try:
            launch(argv, ranks=ranks, network=network, timeout=LONGEST, env=env, inherit=True)
        except LaunchError as e:
            code = _exit_code(e)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        finally:
            if line.is_file():
                tell(line.read_text(encoding="utf-8"))
            found = [_read(file_of(folder, number)) for number in range(ranks)]
            tell(summary(found, profile, rate))
            raced = _tell_races(found, tell) if emulation.races else False
    return code or int(raced)


def summary(ranks: Sequence[RankEmulation], profile: Profile | None, rate: str | None) -> str:
    """What was emulated and what was real, in one line."""
    first = ranks[0]
    links = f"links of {rate}" if rate is not None else "loopback without a limit"
    real = f"real: the arithmetic, on this machine's processor, and every byte of the collectives, over {links}"
    if not first.device:
        return "nothing was emulated: the script wrapped no model"
    if first.device != "emu":
        return f"the script trained on {first.device}, so no device was emulated; {real}"
    count = f"{len(ranks)} accelerator{'s' if len(ranks) > 1 else ''}, on which kernels queue as on a GPU"
    if profile is None:
        return f"emulated: {count} and take the processor's own time; {real}"
    taken = f" (backward took {first.stretch:.2f} times as long)" if first.stretch is not None else ""
    layers = f"{first.layers} layers take the times of profile {profile.name}{taken}"
    said = f"emulated: {count}; {layers}; {real}"
    return f"{said}; {first.mismatch}" if first.mismatch else said


def _read(file: Path) -> RankEmulation:
    """What a rank wrote down; nothing where it ended before that."""
    return msgspec.json.decode(file.read_bytes(), type=RankEmulation) if file.is_file() else RankEmulation()


def _tell_races(ranks: Sequence[RankEmulation], tell: Callable[[str], None]) -> bool:
    """Prints races and host syncs of every rank; whether there were races."""
    for number, rank in enumerate(ranks):
        if not rank.ended:
            tell(f"rank {number} did not come to its end: what it did to its streams is not known")
            continue
        total = sum(int(line.partition(" ")[0]) for line in rank.host_syncs)
        tell(f"rank {number}: {_count(len(rank.races), 'race')} between streams, {_count(total, 'host sync')}")
        for line in [*rank.races[:SHOWN], *rank.host_syncs[:SHOWN]]:
            tell(f"  {line}")
    return any(rank.races for rank in ranks)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _exit_code(failure: LaunchError) -> int:
    """The exit code of the rank that failed by itself: the launcher ends the others with SIGTERM."""
    codes = [result.code for result in failure.results if result.code not in (0, -signal.SIGTERM)]
    code = codes[0] if codes else 1
    return 128 - code if code < 0 else code
