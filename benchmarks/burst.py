"""Burst parallelism: (a) plans on published A100 layer times, predicted; (b) plans run by real processes.

(b) has two parts. Exactness: random models, plans, rank sets and batches on 4 and 8 gloo processes against one process.
Time: 8 emulated devices (they wait for layer times that follow from VGG16's shapes) exchange real tensors over links
limited to a rate (network namespaces, so root is needed); data parallelism and burst plans take turns in the same
processes, and each is compared with its prediction.
Run: python benchmarks/burst.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from burst_model import model_study
from common import Check, arguments, console, finish, quantiles
from dovetail.core.errors import Error
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, Quantiles
from dovetail.simulate.burst_contest import Entry, Outcome, run
from dovetail.simulate.contest import Setting
from dovetail.simulate.shaped import available

RANKS, BATCH, RATE = 8, 32, "200mbit"
POLICIES = ["ddp", "dp:8", "dp:4", "burst", "burst:1.25"]
BYTES = 1 / 376
"""Emulated bytes for one of VGG16: so few that eight ranks fit on two cores, in proportion to the slower time."""
PER_FLOP, FIXED, PER_BYTE = 40e-3 / 92.8e9, 4e-3, 18e-3 / 411e6
"""Seconds, forward and backward together: per floating-point operation, per layer, and per byte of parameters."""


def main() -> None:
    args = arguments(__doc__ or "")
    cells, checks = model_study(args.quick)
    checks += exactness(8 if args.quick else 60)
    if reason := available():
        console.print(f"the run with emulated devices is left out: {reason}")
        checks.append(Check("a real run on 8 emulated devices", f"not run: {reason}", "prediction within 10 %", False))
    else:
        outcome = run(
            vgg16(),
            ["ddp", "dp:8", "burst"] if args.quick else POLICIES,
            Setting(ranks=RANKS, rate=RATE),
            batch=BATCH,
            bucket_bytes=25 * 2**20 * BYTES,
            rounds=2 if args.quick else 6,
            steps=3 if args.quick else 8,
        )
        rows = [row(entry, outcome) for entry in outcome.entries]
        show(rows)
        cells += rows
        checks += contest_checks(rows)
    finish("burst", args, cells, checks)


def vgg16() -> Profile:
    """VGG16's layers by shape; times follow floating-point operations and parameters, as emulated devices have them."""
    layers: list[tuple[str, float, float, float]] = []  # name, operations forward, parameters, outputs of one sample
    channels, side = 3, 224
    for block, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], start=1):
        for i in range(1, count + 1):
            weights = 9 * channels * width
            outputs = width * (side / (2 if i == count else 1)) ** 2  # the last one pools
            layers.append((f"conv{block}_{i}", 2 * weights * side**2, weights + width, outputs))
            channels = width
        side //= 2
    for i, (wide_in, wide_out) in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)], start=1):
        weights = wide_in * wide_out
        layers.append((f"fc{i}", 2 * weights, weights + wide_out, wide_out))
    made = [_layer(*layer) for layer in layers]
    tensors, ready = [], 0.0
    for i in reversed(range(len(made))):
        ready += made[i].backward(BATCH // RANKS)
        nbytes = made[i].parameter_bytes
        tensors.append(
            ParameterTensor(name=f"{made[i].name}.weight", layer=i, bytes=nbytes, dtype="float32", ready=ready)
        )
    return Profile(
        name="VGG16-like",
        device="emulated",
        emulated=True,
        source="VGG16's shapes; times by operations and parameters, bytes scaled with them",
        batch=BATCH // RANKS,
        layers=tuple(made),
        tensors=tuple(tensors),
    )


def _layer(name: str, operations: float, parameters: float, outputs: float) -> Layer:
    fixed = FIXED + PER_BYTE * 4 * parameters
    times = []
    for batch in (1, 2, 4, 8, 16, 32):
        both = fixed + PER_FLOP * 3 * operations * batch  # backward does twice the work of forward
        forward, backward = both / 3, both * 2 / 3
        times.append(LayerTime(batch=batch, forward=_once(forward), backward=_once(backward)))
    return Layer(
        name=name,
        type="Conv2d" if name.startswith("conv") else "Linear",
        parameter_bytes=4 * max(1, int(parameters * BYTES)),
        activation_bytes=4 * max(1, int(outputs * BYTES)),
        times=tuple(times),
    )


def _once(seconds: float) -> Quantiles:
    return Quantiles(median=seconds, low=seconds, high=seconds, samples=1)


def row(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    prediction = entry.plan.prediction
    idle = sum(s.duration for s in entry.predicted.spans if s.kind == "idle")
    return {
        "study": "emulated run",
        "policy": entry.policy,
        "emulated": True,
        "ranks": RANKS,
        "rate": RATE,
        "batch": BATCH,
        "counts": list(entry.plan.counts),
        "iteration": quantiles(entry.seconds),
        "steps": len(entry.seconds),
        "prediction": entry.predicted.duration,
        "planner_prediction": prediction.iteration,
        "device_time": prediction.device_time,
        "idle": entry.idle,
        "predicted_idle": idle,
        "moved_bytes": entry.moved,
        "predicted_moved_bytes": entry.predicted_moved,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"VGG16-like, global batch {BATCH}: {RANKS} emulated devices, {RATE} links", title_justify="left"
    )
    for column in ("plan", "devices per layer", "iteration", "10–90 %", "predicted", "error", "idle devices"):
        table.add_column(column, justify="left" if column in ("plan", "devices per layer") else "right")
    for r in sorted(rows, key=lambda r: r["iteration"]["median"]):
        q = r["iteration"]
        table.add_row(
            r["policy"],
            " ".join(map(str, r["counts"])),
            f"{q['median'] * 1e3:.0f} ms",
            f"{q['low'] * 1e3:.0f}–{q['high'] * 1e3:.0f}",
            f"{r['prediction'] * 1e3:.0f} ms",
            f"{r['prediction'] / q['median'] - 1:+.1%}",
            "" if r["idle"] is None else f"{r['idle'] / q['median']:.1f}",
        )
    console.print(table)


def contest_checks(rows: list[dict[str, Any]]) -> list[Check]:
    by_policy = {r["policy"]: r for r in rows}
    errors = {p: r["prediction"] / r["iteration"]["median"] - 1 for p, r in by_policy.items()}
    data_parallel, burst = by_policy["dp:8"], by_policy["burst"]
    ratio = burst["iteration"]["median"] / data_parallel["iteration"]["median"]
    over_ddp = burst["iteration"]["median"] / by_policy["ddp"]["iteration"]["median"]
    predicted = burst["prediction"] / data_parallel["prediction"]
    moved = {p: (r["moved_bytes"], r["predicted_moved_bytes"]) for p, r in by_policy.items() if p != "ddp"}
    return [
        Check(
            "a real run on 8 emulated devices, DP against burst: predicted against measured iteration",
            ", ".join(f"{p} {e:+.1%}" for p, e in errors.items()),
            "within 10 %, each",
            all(abs(e) <= 0.10 for e in errors.values()),
        ),
        Check(
            "a real run on 8 emulated devices: burst over data parallelism on 8, in time",
            f"{ratio:.3f} in the same executor (predicted {predicted:.3f}), {over_ddp:.3f} over torch's DDP",
            "< 1, both",
            max(ratio, over_ddp) < 1,
        ),
        Check(
            "a real run on 8 emulated devices: bytes moved equal the prediction",
            ", ".join(f"{p} {a}/{b}" for p, (a, b) in moved.items()),
            "equal",
            all(a == b for a, b in moved.values()),
        ),
    ]


def exactness(count: int) -> list[Check]:
    """The scenarios of the tests, with seeds of their own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.ranks import run_all
    from tests.train import burst_scenarios as scenarios

    found: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    for ranks in (4, 8):
        each = count if ranks == 4 else count // 2
        calls = [(f, {"first": 10_000 * ranks, "count": each}) for f in (scenarios.matches, scenarios.integers)]
        reports = run_all(calls, ranks=ranks, timeout=60 + 5 * each)
        found += reports[0][0]
        whole += reports[0][1]
    worst = max(found, key=lambda f: f["errors"]["grad"])
    moved = [f for f in found if f["moved"] != f["predicted"]]
    different = [w for w in whole if w["error"] != 0.0]
    return [
        Check(
            "execution: gradients equal one process, random plans, rank sets and batches, 4 and 8 gloo processes",
            f"{worst['errors']['grad']:.1e} relative at worst in {len(found)} scenarios ({worst['scenario']})",
            "≤ 1e-12 in fp64",
            worst["errors"]["grad"] <= 1e-12,
        ),
        Check(
            "execution: gradients equal one process bitwise on integer data",
            f"{len(whole) - len(different)} of {len(whole)} scenarios",
            "all",
            not different,
        ),
        Check(
            "execution: bytes moved equal the prediction",
            f"{len(found) - len(moved)} of {len(found)} scenarios, {sum(f['moved'] for f in found)} bytes",
            "all",
            not moved,
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except (Error, subprocess.SubprocessError) as e:
        console.print(f"benchmarks/burst.py: {e}", markup=False)
        sys.exit(1)
