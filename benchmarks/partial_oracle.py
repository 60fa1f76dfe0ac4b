"""Four data-parallel workers of partial depth in one process: the gradients that the distributed run computes.

Each worker has its micro-batch and its depth; a segment's gradient is the mean over the samples of the workers that
reach it. Models without batch statistics run all workers in one pass: a mask at each segment's entrance stops the
gradient of the samples whose worker stops there. Otherwise, and where single workers' gradients are wanted, workers
run in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dovetail.planning.depth import guard as guarding
from dovetail.planning.depth.guard import RelativeRate, fewest
from dovetail.planning.depth.segmentation import partition
from dovetail.planning.depth.shares import balance
from partial_tasks import WORKERS, Task

LADDER: tuple[int, ...] = (1, 2, 3, 4)
FULL: tuple[int, ...] = (4, 4, 4, 4)


@dataclass(frozen=True)
class Contestant:
    """A way to train. Contributor counts stand from the input to the output."""

    name: str
    counts: tuple[int, ...] = FULL
    begins: float = 0.0
    """Share of the steps before which all workers run at full depth."""
    balanced: bool = False
    steps: float = 1.0
    """Times the task's steps; the learning rate's schedule stretches with them."""
    workers: tuple[tuple[float, int], ...] = ((0.0, WORKERS),)
    """Numbers of workers: (share of the steps from which on, workers)."""
    epsilon: float | None = None
    """The guard's bound; None for no guard."""
    rule: str = "progress"
    """"progress": the guard of the library; "annealed": the bound counts at the present learning rate."""
    metric: str = "optimiser"


class Mask(torch.autograd.Function):
    """Identity; backward keeps the gradient of some samples only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return grad * keep.view(-1, *([1] * (grad.dim() - 1))), None


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


class Oracle:
    """A model in segments of equal work, and the gradients of partial workers."""

    def __init__(self, net: nn.ModuleList, example: Tensor, segments: int = WORKERS) -> None:
        self.net = net
        flops = forward_flops(net, example)
        ends = partition(flops, segments)
        self.starts = [0, *ends[:-1]]
        self.shares = [sum(flops[a:b]) / sum(flops) for a, b in pairwise([0, *ends])]
        """Share of the whole work, by segment."""
        self.parameters = [[p for b in net[a:e] for p in b.parameters()] for a, e in pairwise([0, *ends])]
        self.mixes_samples = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = block(x)
        return x

    def gradients(self, x: Tensor, y: Tensor, depths: Sequence[int], batches: Sequence[int]) -> None:
        """Leaves every parameter's mean over the contributing samples in `.grad`."""
        if self.mixes_samples:
            self.in_turn(x, y, depths, batches)
        else:
            self.masked(x, y, depths, batches)

    def masked(self, x: Tensor, y: Tensor, depths: Sequence[int], batches: Sequence[int]) -> None:
        count, total = len(self.starts), sum(batches)
        reach = torch.repeat_interleave(torch.tensor(depths), torch.tensor(batches))
        for i, block in enumerate(self.net):
            if i and i in self.starts:
                keep = reach > count - self.starts.index(i)  # samples of workers that go on into the segment before
                if not bool(keep.all()):
                    x = Mask.apply(x, keep.to(x.dtype))  # type: ignore[no-untyped-call]
            x = block(x)
        loss_of(x, y).backward()
        for s, parameters in enumerate(self.parameters):
            have = int((reach >= count - s).sum())
            if have < total:
                torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], total / have)

    def in_turn(
        self,
        x: Tensor,
        y: Tensor,
        depths: Sequence[int],
        batches: Sequence[int],
        metric: list[list[Tensor]] | None = None,
        measure: bool = False,
    ) -> list[guarding.Moments]:
        """Worker by worker, as they really run. Returns each segment's moments if asked to, at full depth."""
        count = len(self.starts)
        sums = [[torch.zeros_like(p) for p in parameters] for parameters in self.parameters]
        have = [0] * count
        squares: list[list[float]] = [[] for _ in range(count)]
        at = 0
        for depth, samples in zip(depths, batches, strict=True):
            h, target = x[at : at + samples], y[at : at + samples]
            at += samples
            cut = self.starts[count - depth]
            with torch.no_grad():
                for block in self.net[:cut]:
                    h = block(h)
            for block in self.net[cut:]:
                h = block(h)
            wanted = [p for parameters in self.parameters[count - depth :] for p in parameters]
            found = iter(torch.autograd.grad(loss_of(h, target), wanted))
            for s in range(count - depth, count):
                own = [next(found) for _ in self.parameters[s]]
                torch._foreach_add_(sums[s], own, alpha=samples)
                have[s] += samples
                if measure:
                    squares[s].append(_square(own, metric[s] if metric else None))
        for s, parameters in enumerate(self.parameters):
            torch._foreach_div_(sums[s], have[s])
            for p, mean in zip(parameters, sums[s], strict=True):
                p.grad = mean
        if not measure:
            return []
        means = [_square(total, metric[s] if metric else None) for s, total in enumerate(sums)]
        return [guarding.moments(squares[s], batches, means[s]) for s in range(count)]

    def cost(self, depths: Sequence[int], batches: Sequence[int]) -> list[float]:
        """Each worker's work in an iteration; forward costs 1 for each sample, a full backward 2."""
        return [b * (1 + 2 * sum(self.shares[len(self.shares) - d :])) for d, b in zip(depths, batches, strict=True)]


def forward_flops(net: nn.ModuleList, example: Tensor) -> list[float]:
    flops = []
    with torch.no_grad():
        for block in net:
            with FlopCounterMode(display=False) as counter:
                example = block(example)
            flops.append(float(counter.get_total_flops()))
    return flops


def _square(gradients: Sequence[Tensor], metric: Sequence[Tensor] | None) -> float:
    if metric is None:
        return float(sum(float(g.double().square().sum()) for g in gradients))
    return float(sum(float((g.double().square() * m).sum()) for g, m in zip(gradients, metric, strict=True)))


def adam_metric(optimiser: torch.optim.Optimizer, parameters: list[list[nn.Parameter]]) -> list[list[Tensor]] | None:
    """1/√v for every element; None before the first step and for SGD."""
    if any("exp_avg_sq" not in optimiser.state.get(p, {}) for segment in parameters for p in segment):
        return None
    return [[1 / (optimiser.state[p]["exp_avg_sq"].double().sqrt() + 1e-8) for p in s] for s in parameters]


def _seconds(oracle: Oracle, depths: Sequence[int], worker: int, batch: int) -> float:
    return oracle.cost([depths[worker]], [batch])[0]


def depths_of(counts: Sequence[int], workers: int) -> list[int]:
    """The last workers go deepest."""
    return [sum(c >= workers - i for c in counts) for i in range(workers)]


def train(task: Task, contestant: Contestant, seed: int) -> dict[str, Any]:
    """One run. `work` is in full runs of the task; `held` too, but with all workers waiting for the slowest."""
    began = time.process_time()
    torch.manual_seed(seed)
    net = task.build()
    generator = torch.Generator().manual_seed(1000 + seed)
    oracle = Oracle(net, task.test[0][:4])
    optimiser = task.optimiser(list(net.parameters()))
    peak = optimiser.param_groups[0]["lr"]
    steps = round(task.steps * contestant.steps)
    whole = 3.0 * WORKERS * task.batch * task.steps
    options = None
    if contestant.epsilon is not None:
        options = guarding.Guard(epsilon=contestant.epsilon, annealed=contestant.rule == "annealed")
    running: list[guarding.Moments] = []
    falling_rate = RelativeRate()
    seen, counts, had_metric = 0, FULL, False
    work = held = 0.0
    curve: list[tuple[int, float, float, float]] = []
    log: list[str] = []
    for step in range(steps):
        rate = min(1.0, (step + 1) / (0.05 * steps)) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = peak * rate
        falling = falling_rate(peak * rate)
        workers = next(w for begins, w in reversed(contestant.workers) if step >= begins * steps)
        total = workers * task.batch
        late = step >= contestant.begins * steps
        probe = options is not None and step % options.every == 0
        if options is None:
            counts = contestant.counts if late and workers == WORKERS else (workers,) * len(oracle.starts)
        depths = [len(oracle.starts)] * workers if probe else depths_of(counts, workers)
        batches = [task.batch] * workers
        if contestant.balanced and late:
            batches = list(balance(partial(_seconds, oracle, depths), total, caps=[None] * workers))
        x, y = task.sample(total, generator)
        optimiser.zero_grad(set_to_none=True)
        if probe:
            assert options is not None
            metric = adam_metric(optimiser, oracle.parameters) if contestant.metric == "optimiser" else None
            found = oracle.in_turn(x, y, depths, batches, metric, measure=True)
            if (metric is not None) != had_metric:  # norms in two metrics cannot be compared
                running, had_metric = [], metric is not None
            before: list[guarding.Moments | None] = [*running] if running else [None] * len(found)
            running = [guarding.smoothed(a, b, options.smoothing) for a, b in zip(before, found, strict=True)]
            seen += 1
            if seen >= options.patience and late:
                annealed = contestant.rule == "annealed"
                rate_counts = fewest(running, batches, epsilon=options.epsilon, rate=falling) if annealed else None
                decision = guarding.decide(
                    options,
                    running,
                    batches,
                    step=step,
                    before=counts,
                    backward=[2 * s for s in oracle.shares],
                    metric="optimiser's" if had_metric else "plain",
                    counts=rate_counts,
                    rate=falling if annealed else None,
                )
                log.append(str(decision))
                counts = decision.counts
        else:
            oracle.gradients(x, y, depths, batches)
        if task.clip:
            nn.utils.clip_grad_norm_(net.parameters(), task.clip)
        optimiser.step()
        costs = oracle.cost(depths, batches)
        work += sum(costs) / whole
        held += max(costs) * workers / whole
        if (step + 1) % max(1, steps // 8) == 0 or step == steps - 1:
            loss, right = evaluate(oracle, task, most=None if step == steps - 1 else 1000)
            curve.append((step + 1, round(work, 5), round(loss, 5), round(right, 5)))
    return {
        "task": task.name,
        "contestant": contestant.name,
        "seed": seed,
        "options": asdict(contestant) | {"task_steps": task.steps, "task_batch": task.batch},
        "steps": steps,
        "loss": curve[-1][2],
        "accuracy": curve[-1][3],
        "work": work,
        "held": held,
        "curve": curve,
        "guard": log[:: max(1, len(log) // 6)],
        "seconds": round(time.process_time() - began, 1),
    }


@torch.no_grad()
def evaluate(oracle: Oracle, task: Task, *, most: int | None) -> tuple[float, float]:
    """Test loss and the share of right answers; of the first `most` samples."""
    oracle.net.eval()
    inputs, targets = (t[:most] for t in task.test)
    loss = right = 0.0
    for at in range(0, len(inputs), 500):
        out, target = oracle.forward(inputs[at : at + 500]), targets[at : at + 500]
        loss += float(loss_of(out, target)) * target.numel()
        right += float((out.argmax(-1) == target).sum())
    oracle.net.train()
    return loss / targets.numel(), right / targets.numel()
