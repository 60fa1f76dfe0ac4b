"""What partial backpropagation saves, beside what was predicted: operations, memory, bytes on the wire, time.

Operations and activations are counted on real models, one worker after the other, with torch's own counter and hooks.
Traffic and time are those of four ranks on emulated devices whose real gradients cross links of limited rate (network
namespaces, so root is needed). What it costs in quality is the other half: benchmarks/partial_quality.py.
Run: python benchmarks/partial.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common import Check, arguments, console, finish, quantiles
from dovetail import measure
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.emulate.launch import launch
from dovetail.emulate.shaped_network import available, shaped
from dovetail.measure import zoo
from dovetail.planning.depth import planner
from dovetail.simulate.depth import savings
from dovetail.train.partial.segments import Segments

RANKS, RATE = 4, "2gbit"
LAYER_BYTES = {"compute-bound": 2**18, "communication counts": 2**20}
"""Bytes of each of the emulated device's eight layers, whose times are the same in both regimes."""


def main() -> None:
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    cells = [saved_work(name, args.quick) for name in ("transformer", "residual network")]
    show_work(cells)
    checks = work_checks(cells)
    if reason := available():
        console.print(f"traffic and time skipped: {reason}")
    else:
        for regime in LAYER_BYTES:
            cell = on_the_wire(regime, args.quick)
            show_wire(cell)
            cells.append(cell)
            checks += wire_checks(cell)
    finish("partial", args, cells, checks)


def workload(name: str) -> tuple[nn.Module, Any, Any]:
    """(model, batch, loss); both fit one core."""
    torch.manual_seed(0)
    if name == "transformer":
        model = zoo.GPT(vocabulary=128, width=128, depth=8)
        text = torch.randint(0, 128, (8, model.length + 1))
        return model, {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}, None
    return zoo.cnn(), torch.randn(16, 3, 32, 32), zoo.cross_entropy


def saved_work(name: str, quick: bool) -> dict[str, Any]:
    """Plans from a profile of this machine; then runs each depth and counts."""
    model, batch, loss = workload(name)
    size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
    profile = measure.profile(model, batch, loss=loss, batches=[size], steps=8 if quick else 20, name=name)
    plan = planner.plan(profile, workers=RANKS, policy="ladder")
    rows = [count(model, batch, loss, plan, d) for d in range(1, RANKS + 1)]
    backward, kept = (np.array([r[i] for r in rows], dtype=float) for i in range(2))
    predicted = savings(plan)
    return {
        "model": name,
        "workers": RANKS,
        "segments": [plan.layers[s.start] for s in plan.segments],
        "backward_flops": backward.tolist(),
        "activation_bytes": kept.tolist(),
        "backward_saved": float(1 - backward.mean() / backward[-1]),
        "backward_predicted": predicted.backward,
        "activations_saved": float(1 - kept.mean() / kept[-1]),
        "activations_predicted": predicted.activations,
        "largest_saved": float(1 - kept.max() / kept[-1]),
    }


def count(model: nn.Module, batch: Any, loss: Any, plan: DepthPlan, reach: int) -> tuple[float, float]:
    """Backward's operations and the bytes that autograd keeps for it, at one depth."""
    segments = Segments(model, plan)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    segments.freeze(reach)
    try:
        with (
            FlopCounterMode(display=False) as forward,
            segments.aliases(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            out = model(**batch) if isinstance(batch, dict) else model(batch)
            value = loss(out) if loss else out["loss"]
        with FlopCounterMode(display=False) as backward:
            value.backward()
    finally:
        segments.thaw()
        model.zero_grad(set_to_none=True)
    assert forward.get_total_flops() > 0
    return float(backward.get_total_flops()), float(sum(kept.values()))


def show_work(cells: list[dict[str, Any]]) -> None:
    table = Table(title=f"ladder of {RANKS} workers, counted on real models", title_justify="left")
    for column in ("model", "backward operations", "predicted", "activations, mean", "predicted", "largest worker"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for c in cells:
        table.add_row(
            c["model"],
            f"−{c['backward_saved']:.1%}",
            f"−{c['backward_predicted']:.1%}",
            f"−{c['activations_saved']:.1%}",
            f"−{c['activations_predicted']:.1%}",
            f"−{c['largest_saved']:.1%}",
        )
    console.print(table)


def work_checks(cells: list[dict[str, Any]]) -> list[Check]:
    transformer = next(c for c in cells if c["model"] == "transformer")
    checks = [
        _at_least("backward FLOPs saved on the transformer", transformer["backward_saved"], 0.35),
        _at_least(
            "activation memory saved on the transformer, mean over workers", transformer["activations_saved"], 0.33
        ),
    ]
    for c in cells:
        for what in ("backward", "activations"):
            checks.append(_predicted(f"{c['model']}: {what} saved", c[f"{what}_saved"], c[f"{what}_predicted"]))
    return checks


def on_the_wire(regime: str, quick: bool) -> dict[str, Any]:
    """All contestants in turns in the same four processes."""
    rank = Path(__file__).with_name("partial_rank.py")
    turns = ["2", "4"] if quick else ["5", "8"]
    with shaped(RANKS, rate=RATE) as network:
        results = launch([str(rank), *turns, str(LAYER_BYTES[regime])], ranks=RANKS, network=network, timeout=600)
    got: dict[str, Any] = results[0].report
    return {
        "model": f"8 layers of {LAYER_BYTES[regime] / 2**20:g} MiB, emulated",
        "regime": regime,
        "emulated": True,
        "workers": RANKS,
        "rate": RATE,
        "iteration": {name: quantiles(times) for name, times in got["seconds"].items()},
        **{name: got[name] for name in ("wire", "predicted", "predicted_sent", "batches", "all_reduce", "steps")},
    }


def show_wire(cell: dict[str, Any]) -> None:
    table = Table(title=f"{cell['regime']}: {cell['model']}, {RANKS} workers, {RATE} links", title_justify="left")
    for column in ("contestant", "local batches", "iteration", "10–90 %", "predicted", "sent per step", "of DDP"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for name, q in cell["iteration"].items():
        predicted = cell["predicted"].get(name)
        table.add_row(
            name,
            " ".join(map(str, cell["batches"].get(name, []))),
            f"{q['median']:.3f} s",
            f"{q['low']:.3f}–{q['high']:.3f}",
            f"{predicted:.3f} s" if predicted else "",
            f"{cell['wire'][name] / cell['steps'] / 2**20:.1f} MiB",
            f"{cell['wire'][name] / cell['wire']['ddp']:.3f}",
        )
    console.print(table)


def wire_checks(cell: dict[str, Any]) -> list[Check]:
    wire, iteration, predicted = cell["wire"], cell["iteration"], cell["predicted"]
    saved = 1 - wire["ladder"] / wire["ddp"]
    sent = cell["predicted_sent"]
    # Against the faster of torch's own DDP and full depth with merged gradients.
    ratio = iteration["balanced"]["median"] / min(iteration[name]["median"] for name in ("ddp", "full"))
    expected = predicted["balanced"] / predicted["full"]
    where = cell["regime"]
    checks = [
        Check(
            f"{where}: bytes on the wire, counted at the interfaces, against all-reduce",
            f"−{saved:.1%}",
            "−25 % ± 3",
            abs(saved - 0.25) <= 0.03,
        ),
        _predicted(f"{where}: bytes on the wire saved", saved, 1 - sent["ladder"] / sent["full"]),
        _predicted(f"{where}: balanced, iteration over full's", ratio, expected),
        *(_predicted(f"{where}: {n}, iteration in seconds", iteration[n]["median"], predicted[n]) for n in predicted),
    ]
    if where == "compute-bound":
        name = "balanced: iteration time over full backpropagation's at equal global batch (emulated devices)"
        checks.insert(0, Check(name, f"{ratio:.3f}", "≤ 0.78", ratio <= 0.78))
    return checks


def _at_least(name: str, value: float, target: float) -> Check:
    return Check(name, f"{value:.1%}", f"≥ {target:.0%}", value >= target)


def _predicted(name: str, measured: float, predicted: float) -> Check:
    error = predicted / measured - 1
    return Check(
        f"{name}: predicted against measured",
        f"{predicted:.3f} against {measured:.3f} ({error:+.1%})",
        "within 10 %",
        abs(error) <= 0.10,
    )


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/partial.py: {e}", markup=False)
        sys.exit(1)
