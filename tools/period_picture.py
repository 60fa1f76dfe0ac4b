"""Draws the picture of docs/overlap.md: one predicted period of ResNet-50 with all buckets whole, all split, and both.

Layer times have the proportions of this machine's, scaled until one all-reduce of everything takes as long as computing
on four ranks with 10 Gbit Ethernet (the preset). Run: python tools/period_picture.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dovetail import measure, planning
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline
from dovetail.emulate.layered import in_layer_order
from dovetail.measure.presets import preset
from dovetail.simulate.iteration import simulate
from dovetail.view.png import Theme, timeline_png

NETWORK = preset("10gbe-4")
WAYS: dict[str, dict[str, Any]] = {
    "all whole (merging)": {"overlap": "backward"},
    "all split": {"overlap": "forward", "kinds": ("split",)},
    "every bucket its own way": {"overlap": "forward"},
}
THEMES: tuple[Theme, ...] = ("light", "dark")


def profile() -> Profile:
    """ResNet-50 whose computing takes as long as its communication, a third of it forward."""
    workload = measure.load("resnet50")
    found = in_layer_order(measure.profile(workload.model, workload.make_batch(2), batches=[2], steps=10))
    seconds = float(NETWORK.cost("all_reduce")(found.parameter_bytes))
    return found.scaled(forward=seconds / 3, backward=seconds * 2 / 3)


def timelines(job: Profile) -> list[Timeline]:
    made = []
    for name, options in WAYS.items():
        plan = planning.plan(job, NETWORK, policy="fewest", **options)
        timeline = simulate(plan, job, NETWORK)
        iteration = plan.prediction.iteration / (job.forward_time() + job.backward_time())
        made.append(Timeline(name=f"{name}: {iteration:.2f} × computing", source="predicted", spans=timeline.spans))
    return made


def main() -> None:
    folder, drawn = Path(sys.argv[1]), timelines(profile())
    for theme in THEMES:
        timeline_png(drawn, folder / f"period-{theme}.png", theme=theme)


if __name__ == "__main__":
    main()
