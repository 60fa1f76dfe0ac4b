"""The program of every rank in the test of announced gaps."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail import Burst
from dovetail.train.burst import gap_board


def announces(plan: list[int], steps: int) -> dict[str, Any]:
    """Trains under a plan; returns what was announced (busy or idle) and the places whose gaps were learnt."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gap")
        path.write_bytes(bytes(gap_board.SharedGap.BYTES))
        os.environ[gap_board.VARIABLE] = str(path)
        try:
            layers = [nn.Linear(8, 8) for _ in plan]
            burst = Burst(layers, plan, loss=partial(F.cross_entropy, reduction="none"), timeout=300)
        finally:
            del os.environ[gap_board.VARIABLE]
        gaps = burst._comm.gaps
        assert gaps is not None
        written: list[str] = []
        gap = gaps._shared
        real = gap.write

        def note(until: float, now: float) -> None:
            written.append("idle" if until > now else "busy")
            real(until, now)

        gap.write = note  # type: ignore[method-assign]
        for iteration in range(steps):
            torch.manual_seed(iteration)
            burst.step(torch.randn(8, 8), torch.randint(0, 8, (8,)))
        return {"written": written, "places": sorted(map(str, gaps._learnt)), "last": gap.until}
