"""What two ranks do in test_libraries.py: the examples' own training functions, with and without dovetail."""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dovetail
from dovetail.train.integrations import buckets
from tests.paths import EXAMPLES

from .test_integrations import plan_for

running: list[str] = []
"""The mode that runs now."""

Results = dict[str, dict[str, list[float]]]
"""Case → mode → losses, and the sum of all parameters where the library hands the model out."""


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shared_folder() -> str:
    """A new folder that all ranks know."""
    box = [tempfile.mkdtemp(prefix="dovetail-test-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(box)
    return box[0]


def in_every_mode(modes: list[str], cases: dict[str, Callable[[str], list[float]]]) -> Results:
    results: Results = {}
    for case, run in cases.items():
        results[case] = {}
        for mode in modes:
            running[:] = [mode]
            results[case][mode] = run(mode)
            gc.collect()  # trainers are full of cycles
            dist.barrier()
    return results


def with_lightning(modes: list[str]) -> Results:
    digits, folder = example("lightning_digits"), shared_folder()
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())

    class Looking(digits.Digits):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            expect_wrapper(running[0], self.trainer.strategy.model)

    class ByHand(Looking):
        """Manual optimisation: Lightning then prepares DDP's reducer itself, before each backward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    def by_hand(mode: str) -> list[float]:
        digits.Digits = ByHand
        return list(digits.train(mode, 2)[0])

    def resumed(mode: str) -> list[float]:
        path = str(Path(folder, f"{mode}.ckpt"))
        first, _ = digits.train(mode, 1, store=path)
        return [*first, *digits.train(mode, 2, resume=path)[0]]

    digits.Digits = Looking
    together = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    return in_every_mode(
        modes,
        {
            "plain": lambda mode: list(digits.train(mode, 2)[0]),
            "accumulated, clipped, bf16": lambda mode: list(digits.train(mode, 2, **together)[0]),
            "resumed": resumed,
            "by hand": by_hand,
        },
    )


def stored_plan_in_lightning() -> dict[str, list[int]]:
    """Bytes of the buckets that torch uses under Lightning's own strategies, and those of the plan."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
    from lightning.pytorch.strategies import DDPStrategy as TrainerDDP

    digits = example("lightning_digits")
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    plan, used = plan_for(digits.Digits(), [2, 4, 8]), {}

    class Looking(digits.Digits):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            used["trainer"] = buckets(self.trainer.strategy.model)

    digits.Digits = Looking
    digits.train(TrainerDDP(**plan.ddp_kwargs()), 1)
    fabric = Fabric(strategy=FabricDDP(**plan.ddp_kwargs()), accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    model = fabric.setup(Looking())
    for _ in range(3):
        fabric.backward(model(torch.randn(4, 64)).mean())
    return {"trainer": used["trainer"], "fabric": buckets(model), "planned": [b.bytes for b in plan.buckets]}


def with_fabric(modes: list[str]) -> Results:
    digits, folder = example("fabric_digits"), shared_folder()
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())

    class Looking(digits.Fabric):  # type: ignore[misc, name-defined]
        def setup(self, *args: Any, **kwargs: Any) -> Any:
            made = super().setup(*args, **kwargs)
            expect_wrapper(running[0], made[0]._forward_module)
            return made

    def resumed(mode: str) -> list[float]:
        path = str(Path(folder, f"{mode}.ckpt"))
        first, _ = digits.train(mode, 1, store=path)
        return [*first, *digits.train(mode, 2, resume=path)[0]]

    digits.Fabric = Looking
    return in_every_mode(
        modes,
        {
            "clipped": lambda mode: list(digits.train(mode, 2)[0]),
            "accumulated, clipped, bf16": lambda mode: list(
                digits.train(mode, 2, accumulate=2, precision="bf16-mixed")[0]
            ),
            "resumed": resumed,
        },
    )


def with_accelerate(modes: list[str]) -> Results:
    from accelerate.state import AcceleratorState

    digits, folder = example("accelerate_digits"), shared_folder()

    def run(mode: str, epochs: int, **options: Any) -> list[float]:
        losses, model = digits.train(preparation(mode), epochs, **options)
        AcceleratorState._reset_state(reset_partial_state=True)
        expect_wrapper(mode, model)
        return [*losses, total(model)]

    def resumed(mode: str) -> list[float]:
        path = str(Path(folder, mode))
        first = run(mode, 1, store=path)
        return [*first, *run(mode, 2, resume=(path, 1))]

    return in_every_mode(
        modes,
        {
            "clipped": lambda mode: run(mode, 2),
            "accumulated, clipped, bf16": lambda mode: run(mode, 2, accumulate=2, precision="bf16"),
            "resumed": resumed,
        },
    )


def with_trainer(modes: list[str]) -> Results:
    from accelerate.state import AcceleratorState

    gpt, folder = example("hf_trainer"), shared_folder()

    def run(mode: str, steps: int, name: str, **options: Any) -> list[float]:
        where = str(Path(folder, f"{mode}-{name}"))
        losses, trainer = gpt.train(preparation(mode), where, steps, logging_steps=5, **options)
        expect_wrapper(mode, trainer.model_wrapped)
        AcceleratorState._reset_state(reset_partial_state=True)
        return [*losses, total(trainer.model)]

    def resumed(mode: str) -> list[float]:
        first = run(mode, 10, "first", save_strategy="steps", save_steps=5)
        return [*first, *run(mode, 10, "second", resume=str(Path(folder, f"{mode}-first", "checkpoint-5")))]

    together = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "bf16": True}
    return in_every_mode(
        modes,
        {
            "as it comes": lambda mode: run(mode, 10, "plain", ddp_find_unused_parameters=None),
            "accumulated, clipped, bf16": lambda mode: run(mode, 10, "together", **together),
            "resumed": resumed,
        },
    )


def preparation(mode: str) -> Callable[[Any], object]:
    if mode == "ddp":
        return lambda target: target
    return lambda target: dovetail.prepare(target, overlap="forward" if mode == "dovetail_overlap" else None)


def expect_wrapper(mode: str, model: Any) -> None:
    kind = torch.nn.parallel.DistributedDataParallel if mode == "ddp" else dovetail.DistributedDataParallel
    assert type(model) is kind, type(model)
    assert mode == "ddp" or (model.optimizer is not None) == (mode == "dovetail_overlap")


def total(model: Any) -> float:
    return float(sum(p.detach().double().sum() for p in model.parameters()))
