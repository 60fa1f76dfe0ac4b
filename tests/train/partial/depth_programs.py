"""Random training programs under partial backpropagation, the same on every rank, checked after every action.

A program accumulates, drops graphs and gradients, evaluates, fails in forward and asks for other gradients in between.
After every synchronised step each `.grad` must be the masked oracle's, over all passes that count.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dovetail.planning.depth.guard import Guard
from dovetail.train.partial.lifecycle import BackpropState
from dovetail.train.partial.module import PartialBackprop

from .depth_models import inputs, loss
from .depth_scenarios import difference, gradients, identical, oracle, partial

ACTIONS = (
    "train",
    "accumulate",
    "accumulate twice through one graph",
    "zero_grad",
    "zero_grad to zeros",
    "optimizer step",
    "drop a graph",
    "drop a graph inside no_sync",
    "evaluate",
    "raise in forward",
    "gradient of the input",
    "backward through the module itself",
)
Gradients = dict[str, torch.Tensor]


class _Broken(Exception):
    """What the user's model raises."""


@dataclass
class Program:
    """One random program on a module, with an account of what its gradients must be."""

    ours: PartialBackprop
    chance: random.Random
    failures: list[str] = field(default_factory=list)
    played: list[str] = field(default_factory=list)
    passes: list[tuple[list[torch.Tensor], int]] = field(default_factory=list)
    """Local passes that wait for the next step: every rank's batch, and how often backward ran."""
    base: Gradients = field(default_factory=dict)
    """Gradients of former steps that were not zeroed."""
    idle: bool = True
    """No forward pass has run since the last step, on any rank."""
    states: set[str] = field(default_factory=set)
    depths_seen: list[tuple[int, ...]] = field(default_factory=list)
    seed: int = 0

    def play(self, action: str) -> None:
        rank, workers = dist.get_rank(), dist.get_world_size()
        ours, model = self.ours, self.ours.module
        someone = self.chance.randrange(workers) == rank
        data = self._batches()
        local = action.startswith("accumulate") or action == "drop a graph inside no_sync"
        if action == "backward through the module itself" and not self.idle:
            return  # here it would be taken for a backward pass of the training
        self.played.append(action)
        if action == "train":
            self._train(data)
        elif action.startswith("accumulate"):
            times = 1 + action.endswith("one graph")
            with ours.no_sync():
                value = loss(ours(data[rank]))
            for turn in range(times):
                value.backward(retain_graph=turn + 1 < times)
            self.passes.append((data, times))
            self._expect_state(BackpropState.ACCUMULATED)
        elif action.startswith("zero_grad"):
            ours.zero_grad(set_to_none=action == "zero_grad")
            self.passes, self.base = [], {}
        elif action == "optimizer step" and not self.passes:
            torch.optim.SGD(ours.parameters(), lr=0.01).step()
        elif action.startswith("drop") and someone:
            with ours.no_sync() if local else nullcontext():
                ours(data[rank])
            self._expect_state(BackpropState.LOCAL if local else BackpropState.ARMED)
        elif action == "evaluate" and someone:
            before = ours.state
            with torch.no_grad():
                ours(data[rank])
            self._expect_state(before)
        elif action == "raise in forward":
            self._raise(data[rank])
        elif action == "gradient of the input":
            x = data[rank].requires_grad_()
            torch.autograd.grad(ours(x).sum(), x, allow_unused=True)
            self._expect_state(BackpropState.ARMED)
        elif action == "backward through the module itself":
            loss(model(data[rank])).backward()
            self._expect_state(BackpropState.IDLE)
            ours.zero_grad()
            self.base = {}
        if action == "train" or action.startswith(("accumulate", "drop", "gradient")):
            self.idle = action == "train"
        self.states.add(ours.state.name)

    def _train(self, data: list[torch.Tensor]) -> None:
        ours = self.ours
        passes = [*self.passes, (data, 1)]
        weights = [float(sum(len(batches[w]) for batches, _ in passes)) for w in range(len(data))]
        expected = dict(self.base)
        self.depths_seen.append(ours.depths)
        # A dropped graph leaves the first segments out of autograd until the next forward pass.
        whole = copy.deepcopy(ours.module).requires_grad_()
        for batches, times in passes:
            part = oracle(whole, ours.plan, list(ours.depths), batches, weights)
            expected = {name: expected.get(name, 0) + times * gradient for name, gradient in part.items()}
        step = ours.step
        loss(ours(data[dist.get_rank()])).backward()
        wrong, same = difference(ours.module, expected), identical(ours.module)
        if not (wrong <= 1e-11 and same and ours.step == step + 1):
            self.failures.append(f"{self.played}: gradients are off by {wrong}")
        self._expect_state(BackpropState.IDLE)
        self.passes = []
        self.base = gradients(ours.module)

    def _raise(self, batch: torch.Tensor) -> None:
        before = self.ours.state

        def fail(*_: Any) -> None:
            raise _Broken("on purpose")

        hook = self.ours.module.register_forward_pre_hook(fail)
        try:
            self.ours(batch)
            self.failures.append(f"{self.played}: forward did not raise")
        except Exception as e:
            if "on purpose" not in str(e):
                self.failures.append(f"{self.played}: {e}")
        finally:
            hook.remove()
        self._expect_state(before)

    def _batches(self) -> list[torch.Tensor]:
        self.seed += 1
        sizes = [self.chance.randint(1, 4) for _ in range(dist.get_world_size())]
        return [inputs("skips", size, 100 * self.seed + w) for w, size in enumerate(sizes)]

    def _expect_state(self, expected: BackpropState) -> None:
        if self.ours.state is not expected:
            self.failures.append(f"{self.played}: expected {expected.name}, got {self.ours.state.name}")


def random_programs(seeds: list[int]) -> dict[str, Any]:
    """Plays one program for each seed; some with a guard that changes depths, some with depths that go round."""
    failures: list[str] = []
    played: Counter[str] = Counter()
    states: set[str] = set()
    steps = changes = 0
    variants: list[dict[str, Any]] = [
        {},
        {"rotate": "depth"},
        {"guard": Guard(every=2, patience=1, epsilon=0.9, annealed=False)},
    ]
    for seed in seeds:
        chance = random.Random(seed)
        program = Program(partial("skips", [1, 2], **variants[seed % len(variants)]), chance)
        for _ in range(20):
            program.play(chance.choice([*ACTIONS, "train", "train", "accumulate"]))
        program.play("train")
        failures += program.failures
        played.update(program.played)
        states |= program.states
        steps += program.ours.step
        changes += sum(a != b for a, b in zip(program.depths_seen, program.depths_seen[1:], strict=False))
    return {
        "failures": failures,
        "played": dict(played),
        "states": sorted(states),
        "steps": steps,
        "depth_changes": changes,
    }
