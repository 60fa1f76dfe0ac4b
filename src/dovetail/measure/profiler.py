"""A PyTorch model and an example batch → Profile: layers with their times, gradients in the order they become ready."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dovetail.core.errors import Error, typed_line
from dovetail.core.profile import Layer, ParameterTensor, Profile

from .pass_rounds import Rounds, now
from .stats import SETTLED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .batches import Batch, Loss
    from .clock import Clock
    from .passes import ModelLayers

R = TypeVar("R")

MOST_ROUNDS = 3
"""At most so many times the steps that were asked for are made where others disturb."""

READY_QUANTILE = 0.1
"""Quantile that is taken of each gap between two gradients. A low one: an interruption of a single pass does not belong
to the model, and would make planners split buckets where nothing is gained."""


def profile(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    batches: Sequence[int] | None = None,
    steps: int = 20,
    warmup: int = 3,
    budget: float = 10.0,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measures forward and backward time of every layer, and when each parameter's gradient is ready.

    One pass forward finds the layers and their order. Then `warmup` passes of each local batch size run unmeasured, and
    `steps` rounds follow. A round is one pass of each size, with a stamp at the entry of every layer, forward and
    backward, and one at every gradient: so a busy moment hits all sizes alike. The device is never waited for within a
    pass. If the result has not settled by then, because other processes disturb, up to twice as many rounds more
    follow, for at most `budget` seconds. Disturbed passes are left out layer by layer, and no layer takes longer than
    with a larger batch. `Profile.noise` says what error is left, `Profile.lost` how much time went to others.
    Afterwards the model is as before: gradients, buffers, modes, random state, no hooks.

    `batch` is a tensor, a tuple (positional arguments) or a dict (keyword arguments) of tensors whose first dimension
    counts the samples; it is cut or repeated for other batch sizes. `batches` are the sizes to measure: by default the
    example's own, a half and a quarter of it. `loss` makes a scalar of the model's output: by default the output's own
    `loss`, or the sum of the means of its float tensors. `clock` replaces the device's clock.
    """
    from . import passes
    from .batches import size, training_pass
    from .clock import Clock as DeviceClock

    model = _unwrapped(model)
    own = size(batch)
    asked = sorted({own, own // 2, own // 4} - {0} if batches is None else set(batches))
    if not asked or asked[0] < 1:
        raise Error(f"batches: expected at least one size, each at least 1, got {list(batches or ())}")
    if steps < 1 or warmup < 0:
        raise Error(f"steps and warmup: expected at least 1 and at least 0, got {steps} and {warmup}")
    name = name or type(model).__name__
    device = next(model.parameters()).device
    tell = progress or (lambda _: None)
    at = own if own in asked else asked[-1]

    with passes.untouched(model, device):
        once = training_pass(model, batch, at, device, loss)
        layers = _attempt(name, at, functools.partial(passes.find_layers, model, once))
        runs = {samples: training_pass(model, batch, samples, device, loss) for samples in reversed(asked)}
        # The host's clocks say nothing of an accelerator, nor of a clock that somebody else moves.
        taken = Rounds(list(layers.modules), watched=clock is None and device.type == "cpu")
        left_out: dict[int, str] = {}
        with passes.recording(model, layers, clock or DeviceClock(device)) as recorder:

            def one_round(*, measured: bool) -> None:
                for samples, forward in list(runs.items()):
                    model.zero_grad(set_to_none=True)
                    begin = now()
                    try:
                        done = _attempt(name, samples, functools.partial(recorder.run, forward))
                    except Error as e:
                        if batches is not None or samples == own:
                            raise
                        # Nobody asked for this size: a batch norm cannot train on one sample.
                        del runs[samples]
                        taken.drop(samples)
                        left_out[samples] = str(e)
                        continue
                    if measured:
                        taken.add(samples, done, begin, now())

            tell(f"{name}: local batches {', '.join(map(str, runs))}, {warmup + steps} steps each")
            for _ in range(warmup):
                one_round(measured=False)
            for _ in range(steps):
                one_round(measured=True)
            until, more = time.perf_counter() + budget, (MOST_ROUNDS - 1) * steps
            if budget > 0 and taken.noise() > SETTLED:
                tell(f"{name}: not settled yet, up to {more} steps more")
            while more and time.perf_counter() < until and taken.noise() > SETTLED:
                for _ in range(min(more, max(1, steps // 2))):
                    one_round(measured=True)
                    more -= 1
                    if time.perf_counter() > until:
                        break
    return _summary(model, layers, taken, at, name=name, device=device, left_out=left_out)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module that can be profiled, or an Error that says why it cannot."""
    import torch
    from torch import nn
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if not isinstance(model, nn.Module):
        raise Error(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    for path, module in model.named_modules():
        where = f"model {type(model).__name__}" + (f", part {path}" if path else "")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise Error(f"{where}: compiled modules run no hooks: profile the module before torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise Error(f"{where}: scripted modules run no hooks: profile the module before torch.jit")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise Error(f"model {type(model).__name__}: has lazy parameters: run it once on a batch before profiling")
    if not any(p.requires_grad for p in model.parameters()):
        raise Error(f"model {type(model).__name__}: expected parameters that require gradients, got none")
    return model


def _attempt(name: str, samples: int, run: Callable[[], R]) -> R:
    """An exception of the model becomes an Error of one line, chained to the original."""
    try:
        return run()
    except Error:
        raise
    except (Exception, SystemExit) as e:
        raise Error(f"model {name} fails on a batch of {samples}: {typed_line(e)}") from e


def _summary(
    model: nn.Module,
    layers: ModelLayers,
    taken: Rounds,
    at: int,
    *,
    name: str,
    device: torch.device,
    left_out: dict[int, str],
) -> Profile:
    import torch

    homes, sizes = _homes(layers)
    times = {layer: taken.times(layer) for layer in layers.modules}
    done = taken.passes[at]
    order, ready, unstable = ready_times(
        [p.ready for p in done],
        backward=sum(t.backward.median for own in times.values() for t in own if t.batch == at),
        totals=[sum(p.backward.values()) for p in done],
    )
    parameters = dict(model.named_parameters())
    notes = [f"measured by dovetail with torch {torch.__version__}", f"{len(done)} steps per batch size"]
    if unstable:
        notes.append(f"gradients came in another order in {unstable} of {len(done)} steps: the most common is given")
    notes += [f"left out batch {samples} ({reason})" for samples, reason in left_out.items()]
    return Profile(
        name=name,
        device=_describe(device),
        source="; ".join(notes),
        batch=at,
        layers=tuple(
            Layer(
                name=layer,
                type=type(module).__name__,
                parameter_bytes=sizes[layer],
                activation_bytes=max(p.outputs.get(layer, 0) for p in done) // at,
                times=times[layer],
            )
            for layer, module in layers.modules.items()
        ),
        tensors=tuple(
            ParameterTensor(
                name=tensor,
                layer=homes[id(parameters[tensor])],
                bytes=parameters[tensor].nbytes,
                dtype=str(parameters[tensor].dtype).removeprefix("torch."),
                ready=when,
            )
            for tensor, when in zip(order, ready, strict=True)
        ),
        noise=taken.noise(),
        lost=taken.lost(),
    )


def ready_times(
    runs: Sequence[dict[str, float]], *, backward: float, totals: Sequence[float]
) -> tuple[list[str], list[float], int]:
    """(names in ready order, seconds from the start of backward, runs that had another order).

    The order is the most common one. Of every gap between neighbours in it the low quantile over its runs is taken,
    which leaves out what interrupted single runs. The gaps are then put end to end and stretched so that the last
    gradient comes at its usual part of `backward`, the layers' sum: both describe the same pass.
    """
    orders = Counter(tuple(run) for run in runs)
    order, count = orders.most_common(1)[0]
    same = [i for i, run in enumerate(runs) if tuple(run) == order]
    stamps = np.array([list(runs[i].values()) for i in same], dtype=np.float64).reshape(len(same), len(order))
    if not order:
        raise Error("no parameter got a gradient: expected a loss that depends on the parameters")
    gaps = np.quantile(np.diff(stamps, axis=1, prepend=0.0), READY_QUANTILE, axis=0)
    ready = np.cumsum(np.maximum(gaps, 0.0))
    usual = np.median([min(1.0, stamps[k, -1] / totals[i]) if totals[i] > 0 else 1.0 for k, i in enumerate(same)])
    if ready[-1] > 0:
        ready *= backward * float(usual) / ready[-1]
    # Rounding may carry the last a digit beyond the end.
    return list(order), [min(float(t), backward) for t in ready], len(runs) - count


def _homes(layers: ModelLayers) -> tuple[dict[int, int], dict[str, int]]:
    """Which layer each parameter belongs to (id → index of the layer), and each layer's bytes.

    A parameter that several layers share counts once, at the first of them.
    """
    homes: dict[int, int] = {}
    sizes: dict[str, int] = {}
    for index, (layer, module) in enumerate(layers.modules.items()):
        fresh = [p for p in module.parameters(recurse=False) if id(p) not in homes]
        homes.update({id(p): index for p in fresh})
        sizes[layer] = sum(p.nbytes for p in fresh)
    return homes, sizes


def _describe(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    # Not tested on the hardware at hand: needs an accelerator.
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device.type}, {named(device)}" if named else str(device)
