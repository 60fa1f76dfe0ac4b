"""Burst: trains a model with its own number of ranks for every layer, as one process would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.errors import Error, first_line
from dovetail.core.files import replacing
from dovetail.core.sample_layout import parts
from dovetail.measure.clock import Clock
from dovetail.train.recording import Recording, SpanRecorder

from . import state
from . import step as steps
from .communicator import Communicator
from .norm import Context
from .split import split, tensors
from .stages import StagePart, finish_all

PlanLike: TypeAlias = BurstPlan | Sequence[int] | Sequence[Sequence[int]]

BUCKET = 25 * 2**20
"""Bytes of gradients after which an all-reduce starts while the rest of the stage goes on; torch's own cap."""


class Burst:
    """Trains `model` with layer i on the ranks that the plan gives it; gradients are those of one process.

    At the start all ranks take the model of rank 0, and each keeps the parameters of the layers it runs. A step passes
    the samples from stage to stage (each stage's ranks hold an even share; as few samples as possible move), takes the
    loss as the sum over samples divided by the global batch, and goes back the same way: after each part of a stage
    the all-reduce of its gradients over the stage's ranks starts, while earlier layers go on. BatchNorm sees the global
    batch, dropout is keyed by sample, labels follow their samples. What a step computes does not depend on the plan.

        burst = dovetail.Burst(layers, plan, loss=partial(F.cross_entropy, reduction="none"))
        optimizer = torch.optim.AdamW(burst.parameters())
        for inputs, labels in data:
            optimizer.zero_grad()
            loss = burst.step(inputs, labels)
            optimizer.step()

    Every rank makes the same calls. When one fails, all end with its line. Without torch.distributed there is one rank.

    Args:
        model: layers in execution order (a list or an nn.Sequential; what one returns, a tensor or a tuple, the next
            takes), or a model that torch.fx can trace and whose modules the plan names. Burst changes it in place.
        plan: a BurstPlan (layer i on ranks 0 .. counts[i] − 1), the counts alone, or the ranks of every layer.
        loss: loss(output, labels), one value per sample.
        seed: seed of dropout.
        device: where this rank computes; by default where its model is.
        bucket_bytes: gradients are all-reduced in buckets of at least this size.
        timeout: seconds that any single wait may take.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        plan: PlanLike,
        *,
        loss: steps.Loss,
        seed: int = 0,
        device: torch.device | str | None = None,
        bucket_bytes: float = BUCKET,
        timeout: float = 300.0,
    ) -> None:
        count = len(plan.counts if isinstance(plan, BurstPlan) else plan)
        given = model.parameters() if isinstance(model, nn.Module) else (p for m in model for p in m.parameters())
        where = next((p.device for p in given if not p.is_meta), torch.device("cpu"))
        self._comm = Communicator(torch.device(device) if device is not None else where, timeout=timeout)
        with self._together("model"):
            self.module, self._layers = split(model, plan.layers if isinstance(plan, BurstPlan) else None, count)
            self._tensors = state.layer_tensors(self.module, self._layers)
        self.steps = 0
        """Steps taken so far; dropout depends on it."""
        self._loss, self._seed, self._bucket_bytes = loss, seed, bucket_bytes
        self._recorder = SpanRecorder("burst", self._comm.rank, Clock(self._comm.device), idle=True)
        self._ranks = self._agree(plan)
        with self._together("start"):
            state.distribute(self._comm, self._tensors, self._ranks)
            self._apply_plan()

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the model, in the same order on every rank; those of other ranks' layers hold no data."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def samples(self, batch: int) -> tuple[int, ...]:
        """The samples of a global batch that this rank gives to `step`, for scripts that load only these."""
        return self._route(batch).layouts[0].samples(self._comm.rank)

    def step(self, inputs: Any, labels: Any, *, batch: int | None = None) -> Tensor:
        """Forward, loss and backward; adds to `.grad` and returns the loss of the global batch on every rank.

        `inputs` and `labels` (a tensor, or a tuple of tensors with the sample first) hold the whole global batch on
        every rank. With `batch` they hold only the rows `samples(batch)`, and labels travel; a rank without rows gives
        empty tensors of the same shape otherwise.
        """
        comm, step = self._comm, self.steps
        with self._together(f"step {step}"), torch.enable_grad():
            comm.catch_up(f"step {step - 1}")
            route, rows, marks = self._enter(inputs, labels, batch)
            ends = steps.forward(comm, self._parts, route, rows, step, self._recorder)
            total = torch.zeros((), dtype=torch.float64, device=comm.device)
            named = tuple(marks) if isinstance(labels, (tuple, list)) else marks[0]
            steps.losses(route, ends, named, self._loss, comm.rank, total)
            arriving = comm.all_reduce(total, tuple(range(comm.size)))
            pending = steps.backward(comm, self._parts, route, ends, step, self._recorder)
            for name, reduction in pending:
                for work, _ in reduction.works:
                    comm.wait(work, f"step {step}: gradients of {name}")
            finish_all([reduction for _, reduction in pending])
            comm.wait(arriving, f"step {step}: loss")
            comm.leave_mark()
            self._recorder.end_iteration()
            if comm.gaps is not None:
                comm.gaps.end()
            self.steps += 1
            return total

    @torch.no_grad()
    def predict(self, inputs: Any) -> tuple[Tensor, ...]:
        """Outputs for a whole global batch in evaluation mode, on every rank, in the order of the samples."""
        modes = [(m, m.training) for m in self.module.modules()]
        unrecorded = SpanRecorder("predict", self._comm.rank, self._recorder.clock)
        self.module.eval()
        try:
            with self._together("predict"):
                route, rows, _ = self._enter(inputs, inputs, None)
                ends = steps.forward(self._comm, self._parts, route, rows, self.steps, unrecorded)
                mine = route.layouts[-1].samples(self._comm.rank)
                held = self._comm.collect((mine, [e.cpu() for e in ends]), "predictions")
        finally:
            for part in self._parts:
                part.leaves, part.outputs = [], []
            for m, mode in modes:
                m.training = mode
        rows_of = {sample: (values, row) for ids, values in held for row, sample in enumerate(ids)}
        every = [rows_of[sample] for sample in range(route.batch)]
        return tuple(torch.stack([values[i][row] for values, row in every]) for i in range(len(ends)))

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """As torch's function of that name, over the whole model: a rank alone sees only its own layers.

        With `error_if_nonfinite` all ranks raise an Error if the norm is infinite or NaN, and training can go on.
        """
        with self._together("clip_grad_norm_"):
            total = torch.zeros((), dtype=torch.float64, device=self._comm.device)
            held = [(t, t.tensor.grad) for t in self._tensors if t.tensor.grad is not None]
            for entry, grad in held:
                if self._ranks[entry.layer][0] == self._comm.rank:
                    total += grad.double().square().sum()
            everyone = tuple(range(self._comm.size))
            self._comm.wait(self._comm.all_reduce(total, everyone), "norm of the gradients")
            norm = total.sqrt()
            refused = error_if_nonfinite and not norm.isfinite()
            if not refused:
                factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # unlike min(), clamp keeps NaN
                for _, grad in held:
                    grad.mul_(factor)
        if refused:
            raise Error(f"clip_grad_norm_: the norm of the gradients is {norm.item()}")
        return norm

    def replan(self, plan: PlanLike, *optimizers: Optimizer) -> None:
        """Changes to another plan between two steps; parameters, gradients and optimiser state move where it needs
        them.

        Works for optimisers whose state per parameter consists of tensors and numbers: all of torch.optim but LBFGS.
        """
        ranks = self._agree(plan)
        with self._together("replan"):
            state.redistribute(self._comm, self._tensors, self._ranks, ranks, optimizers)
            self._ranks = ranks
            self._apply_plan()

    def state_dict(self) -> dict[str, Any]:
        """The plain model's `state_dict` on rank 0 (every rank calls it; the others get an empty one)."""
        with self._together("state_dict"):
            return state.model_state(self._comm, self.module, self._tensors, self._ranks)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The `state_dict` that the optimiser of one process would have, on rank 0 (the others get an empty one)."""
        with self._together("optimizer_state_dict"):
            return state.optimizer_state(self._comm, optimizer, self._tensors, self._ranks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a plain model's `state_dict`; every rank gives the whole one."""
        state.load_model(self.module, state_dict)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a plain optimiser's `state_dict`; every rank gives the whole one."""
        state.load_optimizer(optimizer, state_dict)

    def save(self, path: str | Path, optimizer: Optimizer | None = None) -> None:
        """Writes one file in torch's format, {"model", "optimizer", "burst"}; rank 0 writes it atomically."""
        model = self.state_dict()
        content = {
            "model": model,
            "optimizer": None if optimizer is None else self.optimizer_state_dict(optimizer),
            "burst": {"steps": self.steps, "seed": self._seed},
        }
        with self._together("save"):
            if self._comm.rank == 0:
                with replacing(path) as temporary:
                    torch.save(content, temporary)
            self._comm.share(None, 0, "save")

    def load(self, path: str | Path, optimizer: Optimizer | None = None) -> None:
        """Loads what `save` wrote, under whatever plan; every rank reads the file.

        If one rank finds no checkpoint there, all ranks raise its line, nothing has changed, and training can go on.
        """
        with self._together("load"):
            held, wrong = _checkpoint(path, optimizer is not None)
            said = self._comm.collect(wrong, "load")
            refused = next((f"burst rank {rank}: load: {line}" for rank, line in enumerate(said) if line), "")
            if not refused:
                self.steps, self._seed = held["burst"]["steps"], held["burst"]["seed"]
                self.load_state_dict(held["model"])
                if optimizer is not None:
                    self.load_optimizer_state_dict(optimizer, held["optimizer"])
                self._apply_plan()
        if refused:
            raise Error(refused)

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Records the steps inside the block as a Timeline of this rank: `recording.timeline()`.

        All ranks must record the same steps. Before samples move, their ranks wait for each other, so that waiting
        shows as idle time. Recordings can be nested: an inner one has its own steps, the outer one has all.
        """
        with self._recorder.record() as recording:
            yield recording

    @property
    def moved_bytes(self) -> int:
        """Bytes that this rank has sent in re-sharding, over all steps so far."""
        return self._comm.moved_bytes

    def predicted_moved_bytes(self, batch: int) -> int:
        """Bytes that all ranks together send in re-sharding in one step like the last one of this batch size."""
        return self._route(batch).moved_bytes()

    def _agree(self, plan: PlanLike) -> list[state.Ranks]:
        """The ranks of every layer, checked, and the same on all ranks."""
        with self._together("plan"):
            ranks = rank_sets(plan, len(self._layers), self._comm.size)
            shapes = [(h.name, tuple(h.tensor.shape), str(h.tensor.dtype)) for h in self._tensors]
            for rank, theirs in enumerate(self._comm.collect((ranks, shapes), "plan")):
                for what, one, other in zip(("plan", "model"), theirs, (ranks, shapes), strict=True):
                    if one != other:
                        raise Error(f"{what}: expected the same on all ranks, but rank {rank} has another")
            return ranks

    def _apply_plan(self) -> None:
        """Cuts the model into the parts of the current plan and makes all process groups that they need."""
        sizes = [0] * len(self._layers)
        for entry in self._tensors:
            if isinstance(entry.tensor, nn.Parameter) and entry.tensor.requires_grad:
                sizes[entry.layer] += entry.tensor.numel() * entry.tensor.element_size()
        self._parts = [
            StagePart(
                name=f"layer {p.start}" if p.stop - p.start == 1 else f"layers {p.start}–{p.stop - 1}",
                layers=self._layers[p.start : p.stop],
                ranks=p.ranks,
                context=Context(self._comm, p.ranks, self._seed),
            )
            for p in parts(self._ranks, sizes, self._bucket_bytes)
        ]
        self._comm.prepare(steps.groups(self._parts))
        self._routes: dict[int, steps.Route] = {}

    def _route(self, batch: int) -> steps.Route:
        if batch < 1:
            raise Error(f"batch: expected at least one sample, got {batch}")
        if batch not in self._routes:
            self._routes[batch] = steps.Route(self._comm, self._parts, batch)
        return self._routes[batch]

    def _enter(self, inputs: Any, labels: Any, batch: int | None) -> tuple[steps.Route, list[Tensor], list[Tensor]]:
        """(route of this batch, this rank's inputs of the first part, this rank's labels in the last part)."""
        given, marks = tensors(inputs, "inputs"), tensors(labels, "labels")
        route, device = self._route(len(given[0]) if batch is None else batch), self._comm.device
        expected = route.batch if batch is None else len(route.layouts[0].samples(self._comm.rank))
        for name, held in (("inputs", given), ("labels", marks)):
            if any(len(t) != expected for t in held):
                rows = [len(t) for t in held]
                raise Error(f"{name}: expected {expected} rows for a global batch of {route.batch}, got {rows}")
        if batch is None:
            given, marks = [route.rows(t, 0) for t in given], [route.rows(t, -1) for t in marks]
        given, marks = ([t.to(device, non_blocking=True) for t in held] for held in (given, marks))
        if batch is not None:
            marks = route.direct(marks, "labels")
        shapes = tuple((t.dtype, tuple(t.shape[1:])) for t in given)
        trained = tuple(p.requires_grad for p in self.module.parameters())
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(device.type))
        route.select((shapes, trained, modes))
        return route, given, marks

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """If this rank fails inside, it tells all ranks, and each ends with the same line."""
        if self._comm.broken:
            raise Error(self._comm.broken)
        try:
            yield
        except BaseException as e:
            if not isinstance(e, Exception):
                # Ctrl-C or an exit passes unchanged; but the others must not wait for a rank that was interrupted.
                self._comm.fail(f"burst rank {self._comm.rank}: {what}: {type(e).__name__}")
                raise
            known = isinstance(e, Error) and str(e).startswith("burst rank ")
            line = str(e) if known else f"burst rank {self._comm.rank}: {what}: {first_line(e)}"
            self._comm.fail(line)
            raise Error(line) from (None if isinstance(e, Error) and e.__cause__ is None else e)


def rank_sets(plan: PlanLike, layers: int, ranks: int) -> list[state.Ranks]:
    """The ranks of every layer, ascending."""
    given = plan.counts if isinstance(plan, BurstPlan) else plan
    if len(given) != layers:
        raise Error(f"plan: expected one entry for each of {layers} layers, got {len(given)}")
    sets = [tuple(range(g)) if isinstance(g, int) else tuple(sorted(set(g))) for g in given]
    for i, found in enumerate(sets):
        if not found or found[0] < 0 or found[-1] >= ranks:
            raise Error(f"plan: layer {i}: expected ranks among the job's {ranks}, got {given[i]!r}")
    return sets


def _checkpoint(path: str | Path, optimizer: bool) -> tuple[dict[str, Any], str]:
    """(what `save` wrote, the error): a line and not an Error, since ranks have to agree on it."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        found = {"model": held["model"], "optimizer": held["optimizer"]}
        found["burst"] = {"steps": int(held["burst"]["steps"]), "seed": int(held["burst"]["seed"])}
    except Exception as e:
        return {}, f"{path}: expected a checkpoint written by Burst.save ({first_line(e)})"
    if optimizer and found["optimizer"] is None:
        return {}, f"{path}: optimizer: expected the state of an optimiser, but none was saved"
    return found, ""
