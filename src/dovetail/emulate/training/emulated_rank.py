"""One rank of `dovetail train --emulate`: `python -m dovetail.emulate.training.emulated_rank SPEC …`.

It loads the accelerator, makes it the script's CUDA device, and then is a rank of `dovetail train` with the remaining
arguments (`train.run.__main__`). What was emulated it writes down for the launcher, at the first model that is wrapped
and again at the end, because a training can end in ways in which no code of this rank runs any more.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core.errors import Error
from dovetail.core.files import Record, write_text
from dovetail.core.profile import Profile

if TYPE_CHECKING:
    from .layer_times import LayerTimes


class EmulationSpec(Record, frozen=True, kw_only=True):
    """What a rank is to emulate."""

    profile: Profile | None
    """Whose times the layers take; None: kernels take the processor's own time."""
    races: bool
    """Whether to look for races between streams and for host syncs."""
    folder: str
    """Where the ranks write down what they did."""


class RankEmulation(Record, frozen=True, kw_only=True):
    """What one rank did."""

    device: str = ""
    """The type of the first wrapped model's device; empty where no model was wrapped."""
    mismatch: str = ""
    """What of the profile and the model does not match, in one line."""
    layers: str = ""
    """How many of the profile's layers the model has: "57 of 57"."""
    stretch: float | None = None
    """Time that backward passes took over the profile's."""
    races: tuple[str, ...] = ()
    host_syncs: tuple[str, ...] = ()
    """A line each, the most frequent first."""
    ended: bool = False
    """Whether the script came to its end."""


def file_of(folder: str | Path, rank: int) -> Path:
    """Where a rank writes down what it did."""
    return Path(folder) / f"rank-{rank}.json"


def main(argv: list[str]) -> None:
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=EmulationSpec)
    from dovetail.emulate import accelerator
    from dovetail.train.run.__main__ import main as train

    from . import cuda_stand_in

    try:
        accelerator.load(devices=int(os.environ["LOCAL_WORLD_SIZE"]), detector="collect" if spec.races else "off")
    except Error as e:
        print(f"dovetail: {e}", file=sys.stderr)
        sys.exit(2)
    cuda_stand_in.install()
    diary = _Diary(spec)
    _observe(diary)
    try:
        train(argv[1:])
    finally:
        diary.end()


class _Diary:
    """What this rank writes down."""

    def __init__(self, spec: EmulationSpec) -> None:
        self._spec = spec
        self._file = file_of(spec.folder, int(os.environ["RANK"]))
        self._known = RankEmulation()
        self._times: LayerTimes | None = None
        self._write()

    def wrapped(self, model: Any) -> None:
        """The script has wrapped a model; the first one takes the profile's times."""
        if self._known.device:
            return
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._known = msgspec.structs.replace(self._known, device=device)
        if self._spec.profile is not None and device == "emu":
            from .layer_times import LayerTimes

            self._times = LayerTimes(model, self._spec.profile)
            covered = self._times.coverage
            layers = f"{covered.layers} of {covered.of_layers}"
            self._known = msgspec.structs.replace(self._known, mismatch=covered.mismatch(), layers=layers)
        self._write()

    def end(self) -> None:
        from dovetail.emulate import accelerator

        stretch = self._times.stretch() if self._times is not None else None
        self._known = msgspec.structs.replace(self._known, stretch=stretch, ended=True)
        if self._spec.races:
            syncs = sorted(accelerator.host_syncs(), key=lambda sync: -sync.count)
            self._known = msgspec.structs.replace(
                self._known,
                races=tuple(accelerator.races()),
                host_syncs=tuple(f"{sync.count} × {sync.what} at {sync.where}" for sync in syncs),
            )
        self._write()

    def _write(self) -> None:
        write_text(self._file, msgspec.json.encode(self._known).decode())


def _observe(diary: _Diary) -> None:
    """Tells the diary of every model that is wrapped, by DistributedDataParallel or by PartialBackprop."""
    from torch.nn.parallel import DistributedDataParallel

    from dovetail.train.partial.module import PartialBackprop

    def observed(owner: Any) -> None:
        original = owner.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            diary.wrapped(self.module)

        owner.__init__ = init

    observed(DistributedDataParallel)
    observed(PartialBackprop)


if __name__ == "__main__":
    main(sys.argv[1:])
