"""What stands at `model.reducer` and `model.logger` while the exchange carries the gradients.

torch's own methods and training libraries reach for both: Lightning asks for logging data when a run ends and prepares
the reducer for each backward pass of manual optimisation; Accelerate prepares it to synchronise in a later backward
pass. Each gets here what it would get from torch's reducer, without the memory that one takes for its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from dovetail.core.errors import Error

if TYPE_CHECKING:
    from .exchange import GradientExchange


@dataclass
class ExchangeReducer:
    """The methods of torch's Reducer that others call, for a model whose gradients the exchange carries."""

    _exchange: GradientExchange

    def prepare_for_forward(self) -> None:
        """A forward pass of the model arms the exchange itself."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """The next backward pass synchronises gradients, as one does after a forward pass of the model."""
        self._exchange.arm()

    def _rebuild_buckets(self) -> bool:
        """Buckets change between iterations only, in `optimizer.step()`."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing was delayed: the exchange needs no first iteration to learn the graph."""

    def _set_static_graph(self) -> None:
        """With a static graph torch finds out by itself which parameters are not used."""
        self._exchange.find_unused = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """The exchange takes no such samples; `model.record()` records iterations."""

    def _install_post_backward_futures(self, futures: Iterable[Any]) -> None:
        """Waits for what a communication hook for buffers has begun."""
        for future in futures:
            future.wait()

    def _check_reducer_finalized(self) -> None:
        if self._exchange.unfinished:
            raise Error("overlap: the last backward pass is not finished: some parameters have no gradient yet")

    def _remove_autograd_hooks(self) -> None:
        """torch's reducer has none at the moment."""


@dataclass
class ExchangeLogger:
    """The methods of torch's Logger, with what torch's last one knew and what is true now."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]
    now: Callable[[], Mapping[str, str | int]]
    """What has changed since torch's reducer was in charge."""
    said: dict[str, str | int] = field(default_factory=dict)

    def _get_ddp_logging_data(self) -> ExchangeLogger:
        """Texts and numbers in two maps, as in torch."""
        everything = {**self.strs_map, **self.ints_map, **self.said, **self.now()}
        texts = {k: v for k, v in everything.items() if isinstance(v, str)}
        numbers = {k: v for k, v in everything.items() if not isinstance(v, str)}
        return ExchangeLogger(texts, numbers, self.now)

    def set_runtime_stats_and_log(self) -> None:
        """Times are taken by `model.record()`."""

    def set_error_and_log(self, error: str) -> None:
        """The error that torch is about to raise says it."""

    def _set_static_graph(self) -> None:
        self.said["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self.said["join_uneven_inputs"] = 1

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self.said["comm_hook"] = comm_hook


class ExchangeAfterJoin(JoinHook):
    """torch's hook for a block of `join`, at whose end, where all ranks are together, the exchange takes over again."""

    def __init__(self, hook: JoinHook, after: Callable[[], None]) -> None:
        self._hook, self._after = hook, after

    def main_hook(self) -> None:
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._after()


def stand_ins(exchange: GradientExchange, known: Any) -> tuple[ExchangeReducer, ExchangeLogger]:
    """What others find at `model.reducer` and `model.logger`; `known` is the logging data of torch's reducer."""
    before = known.ints_map.get("iteration", 0) - exchange.passes

    def now() -> dict[str, str | int]:
        sizes = ", ".join(str(bucket.bytes) for bucket in exchange.buckets)
        return {"iteration": before + exchange.passes, "has_rebuilt_buckets": 1, "rebuilt_bucket_sizes": sizes}

    numbers = {**known.ints_map, "can_set_static_graph": 0}
    return ExchangeReducer(exchange), ExchangeLogger(dict(known.strs_map), numbers, now)


def convert(
    model: nn.Module, exchange: GradientExchange, function: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    """Applies `function` to buffers and frozen parameters of the model, as `nn.Module._apply` does.

    The exchange's parameters must come out of it where they are: else it is refused before anything has changed.
    """
    for slot in exchange.slots:
        with torch.no_grad():
            made = function(slot.parameter)
        if made.dtype != slot.parameter.dtype or made.data_ptr() != slot.parameter.data_ptr():
            raise Error(
                f"overlap: {slot.name!r} would get new memory or another dtype; move or convert a model before it is "
                "wrapped (nothing was changed)"
            )
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in exchange.index:
                parameter.data = function(parameter.data)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
    return model


def explained(exchange: GradientExchange) -> list[str]:
    """Lines for `explain()`: the link, gradients that were gathered, and who waits for values before they are used."""
    lines, count = [], len(exchange.read_elsewhere)
    if exchange.active and exchange.link_idle:
        lines.append(f"  link      idle for {exchange.link_idle:.0%} of a step")
        if exchange.precision_use is not None:
            lines.append(f"  precision {exchange.precision_use}")
    if exchange.shares.reads:
        lines.append(f"  gradients {exchange.shares}")
    if exchange.active and count:
        lines.append(f"  waits     {count} parameters are read through other references: step() waits for these")
    if exchange.active and exchange.compiled:
        lines.append(f"  waits     {exchange.compiled} parameters are in compiled modules: these wait at their start")
    return lines
