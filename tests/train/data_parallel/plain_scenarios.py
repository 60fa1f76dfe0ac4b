"""What torch's DDP takes besides plain models: planned with, and bit for bit as torch has it. Run on every rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.integrations import buckets

from .scenarios import batch, net, preferring
from .tuner_scenarios import QUICK

AFTER = 4
"""Iterations with the kept plan."""
WRAPPERS: list[tuple[Any, dict[str, Any]]] = [(TorchDDP, {}), (DistributedDataParallel, {"tuning": QUICK})]


class Branches(nn.Module):
    """Every iteration goes through some of its layers only, on every rank through others; one is never used."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.never = nn.Linear(width, width)
        self.some = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.always = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)
        self.iteration = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for number, layer in enumerate(self.some):
            if (self.iteration + dist.get_rank() + number) % 3:
                x = layer(x).relu()
        self.iteration += 1
        return self.last(self.always(x).relu())  # type: ignore[no-any-return]


class Alternating(nn.Module):
    """A norm in 64 bits after every layer in 32."""

    def __init__(self, width: int = 48, depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width).double() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x).relu().double()).float()
        return x


class Two(nn.Module):
    """Two halves of about the same size, each of a dtype of its own, and one layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = net(), nn.Linear(3, 3)
        self.tail = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 48)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(x).double())  # type: ignore[no-any-return]


class Inner(nn.Module):
    """Layers inside a module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Idle(nn.Module):
    """A layer that nothing uses before those that are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.idle, self.net = nn.Linear(2, 2), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Words(nn.Module):
    """A table with sparse gradients before a model of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(64, 16, sparse=True), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.table((x * 10).long() % 64).sum(dim=1))  # type: ignore[no-any-return]


def delayed(model: nn.Module) -> dict[str, Any]:
    named = list(model.named_parameters())
    return {"delay_all_reduce_named_params": named[-2:], "param_to_hook_all_reduce": named[-3][1]}


UNUSED = {"find_unused_parameters": True}
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "may be unused": (net, UNUSED),
    "may be unused, gradient views": (net, {**UNUSED, "gradient_as_bucket_view": True}),
    "unused": (Branches, UNUSED),
    "unused are skipped": (Idle, {**UNUSED, "skip_all_reduce_unused_params": True}),
    "unused in a static graph": (Idle, {"static_graph": True}),
    "alternating dtypes": (Alternating, {}),
    "alternating dtypes, gradient views": (Alternating, {"gradient_as_bucket_view": True}),
    "alternating dtypes, static graph": (Alternating, {"static_graph": True}),
    "dtypes may be unused": (Two, UNUSED),
    "dtypes unused in a static graph": (Two, {"static_graph": True}),
    "sparse": (Words, {}),
    "sparse may be unused": (Words, UNUSED),
    "delayed": (net, delayed),
}


def in_force(ddp: TorchDDP) -> list[list[str]]:
    """The names in every bucket of the reducer."""
    names = {id(p): n.replace("_orig_mod.", "") for n, p in ddp.module.named_parameters()}
    return [[names[id(p)] for p in b.parameters()] for b in ddp.reducer._get_zeros_like_grad_buckets()]


def dense(value: torch.Tensor) -> torch.Tensor:
    return value.to_dense() if value.is_sparse else value


def follows(ours: Any, theirs: Any, *, called: Sequence[Any] = (), accumulate: bool = True) -> dict[str, Any]:
    """Trains both until planning has ended and a bit longer, every third step with a silent pass before it.

    `called` has what to call in place of torch's and of our wrapper.
    """
    trained = [(m, torch.optim.SGD(m.parameters(), lr=0.05)) for m in (theirs, ours)]
    call = called or (theirs, ours)
    different, after = [], 0
    for step in range(QUICK.most + AFTER):
        for (model, optimizer), run in zip(trained, call, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with preferring(1):
                if accumulate and step % 3 == 2:
                    with model.no_sync():
                        run(batch(step + 1)).square().mean().backward()
                run(batch(step)).square().mean().backward()
        for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            same = p.grad is q.grad is None
            if p.grad is not None and q.grad is not None:
                same = torch.equal(dense(p.grad), dense(q.grad))
            if not (same and torch.equal(p, q)):
                different.append((step, name))
        for _, optimizer in trained:
            optimizer.step()
        after += ours.report.state in ("done", "off")
        if after == AFTER:
            break
    plan = ours.report.plan
    return {
        "different": different[:5],
        "state": ours.report.state,
        "reason": ours.report.reason,
        "planned": plan and [sorted(plan.tensors[b.start : b.stop]) for b in plan.buckets],
        "sizes": plan and [b.bytes for b in plan.buckets],
        "explained": ours.explain(),
    }


@contextmanager
def waiting_for_all_reduces() -> Iterator[None]:
    """torch does not wait for the all-reduce of delayed gradients: on gloo the optimiser could come first."""
    asynchronous = dist.all_reduce

    def waited(*args: Any, **kwargs: Any) -> Any:
        if (work := asynchronous(*args, **kwargs)) is not None:
            work.wait()
        return work

    dist.all_reduce = waited
    try:
        yield
    finally:
        dist.all_reduce = asynchronous


def case(name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    build, keywords = CASES[name]
    models: list[Any] = []
    for kind, more in WRAPPERS:
        model = build()
        given = keywords(model) if callable(keywords) else keywords
        models.append(kind(model, **given, **more))
    theirs, ours = models
    with waiting_for_all_reduces() if name == "delayed" else nullcontext():
        found = follows(ours, theirs, accumulate="delayed" not in name)
    has_sparse = any(ours._build_params_for_reducer()[1])
    return {
        **found,
        "in force": None if has_sparse else [sorted(bucket) for bucket in in_force(ours)],
        "told": buckets(ours),
    }


def again() -> dict[str, Any]:
    """A plan that was kept is given to another run, where caps do not say what its buckets are."""
    warnings.simplefilter("ignore")
    found = {}
    for name in ("may be unused", "alternating dtypes"):
        build, keywords = CASES[name]
        ours: Any = DistributedDataParallel(build(), tuning=QUICK, **keywords)
        follows(ours, TorchDDP(build(), **keywords))
        plan = ours.report.plan
        given, theirs = DistributedDataParallel(build(), plan=plan, **keywords), TorchDDP(build(), **keywords)
        equal = True
        for step in range(4):
            for model in (given, theirs):
                model.zero_grad()
                model(batch(step)).sum().backward()
            pairs = zip(given.parameters(), theirs.parameters(), strict=True)
            equal &= all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)
        planned = [list(plan.tensors[b.start : b.stop]) for b in plan.buckets]
        found[name] = {"equal": equal, "followed": in_force(given) == planned, "buckets": len(planned)}
    return found


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What Python and torch's compiler warn of."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logs = [logging.getLogger(name) for name in ("torch._dynamo", "torch._functorch", "torch._inductor", "dovetail")]
    for log in logs:
        log.addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield heard
        heard += [str(w.message) for w in caught]
    finally:
        for log in logs:
            log.removeHandler(ear)


def compiled(way: str, backend: str = "aot_eager") -> dict[str, Any]:
    """The module, its blocks, or the wrapper compiled; both wrappers in the same way."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    counts, models, calls, heard = [], [], [], []
    for kind, more in WRAPPERS:
        model: Any = Inner()
        if way == "before":
            model = torch.compile(model, backend=backend)
        elif way == "blocks":
            for n, layer in enumerate(model.net):
                model.net[n] = torch.compile(layer, backend=backend)
        elif way == "in place":
            model.compile(backend=backend)
        wrapped: Any = kind(model, **more)
        models.append(wrapped)
        calls.append(torch.compile(wrapped, backend=backend) if way == "after" else wrapped)
    for call in calls:
        before = dynamo.utils.counters["stats"]["unique_graphs"]
        with complaints() as told:
            call(batch(0)).square().mean().backward()
        heard.append(told)
        counts.append(dynamo.utils.counters["stats"]["unique_graphs"] - before)
    with complaints() as later, dynamo.config.patch(error_on_recompile=True):
        found = follows(models[1], models[0], called=calls, accumulate=False)
    whole = dynamo.utils.counters["stats"]["unique_graphs"]
    return {
        **found,
        "heard": [line for line in heard[1] if line not in heard[0]] + later,
        "graphs": counts,
        "later": whole - sum(counts),
        "in force": len(in_force(models[1])),
    }


def fused() -> dict[str, Any]:
    """An optimiser inside the communication hook: parameters are updated while gradients are still on their way."""
    models: list[Any] = [TorchDDP(net()), DistributedDataParallel(net(), tuning=QUICK)]
    for model in models:
        model._register_fused_optim(torch.optim.SGD, 0.01, momentum=0.9)
    different, after = [], 0
    for step in range(QUICK.most + AFTER):
        for model in models:
            model.zero_grad()
            with preferring(1):
                model(batch(step)).square().mean().backward()
        if not all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True)):
            different.append(step)
        after += models[1].report.state in ("done", "off")
        if after == AFTER:
            break
    report = models[1].report
    return {"different": different, "state": report.state, "reason": report.reason, "plan": report.plan is not None}


def nothing_to_plan() -> str:
    """Where torch's own buckets stay, the reason is given and training goes on."""
    model = DistributedDataParallel(net(), bucket_cap_mb_list=[0.01, 1.0])
    for step in range(3):
        model(batch(step)).sum().backward()
    return model.report.reason
