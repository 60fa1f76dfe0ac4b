"""torch's DistributedDataParallel, with what must outlive a reducer when another one takes its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

LOGGED_AT_FIRST = 10
"""torch's logger samples every iteration below this one."""
LOGGED_EVERY = 100
"""Every how many iterations it samples later on, unless the user chooses otherwise."""

REBUILT = "has_rebuilt_buckets"
"""In torch's log: whether buckets are in ready order."""


def last_logged(iteration: int, every: int) -> int:
    """The last iteration up to this one that torch's logger samples where no reducer is ever replaced.

    A new reducer is one that samples its own first iterations, whatever their number is in the training.
    """
    return iteration if iteration < LOGGED_AT_FIRST else max(iteration - iteration % every, LOGGED_AT_FIRST - 1)


class ReplaceableDDP(TorchDDP):
    """torch's class whose reducer can be replaced (see reducer.py) or taken away: to its user it is the same one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Set before torch's constructor, which asks for the parameters to reduce.
        self._reduced: tuple[list[nn.Parameter], list[bool]] | None = None
        self._reduced_names: dict[int, str] | None = None
        self.iterations_before = 0
        """Iterations that earlier reducers of this module have counted."""
        self.logged_before: dict[str, int] = {}
        """What the last reducer had logged and a new one has not before its first sample: times, in nanoseconds, and
        that buckets were rebuilt."""
        self.logging_sample_rate: int | None = None
        """Every how many iterations torch's logger samples, where the user has chosen that."""
        self.sparse_metadata: dict[str, torch.Tensor] | None = None
        super().__init__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_reduced": None, "_reduced_names": None, "iterations_before": 0}

    def reduced_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose gradients are reduced, by name, in the order of torch's reducer."""
        names = {id(p): n for n, p in self.module.named_parameters()}
        return [(names[id(p)], p) for p in self._build_params_for_reducer()[0]]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        # torch asks once, when the module is wrapped; parameters frozen or unfrozen later make no difference.
        if self._reduced is None:
            self._reduced = super()._build_params_for_reducer()
        parameters, sparse = self._reduced
        return [*parameters], [*sparse]

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        if self._reduced is None or [*map(id, parameters)] != [*map(id, self._reduced[0])]:
            others: dict[int, str] = super()._build_debug_param_to_name_mapping(parameters)
            return others
        if self._reduced_names is None:
            self._reduced_names = super()._build_debug_param_to_name_mapping(parameters)
        return dict(self._reduced_names)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        super()._set_ddp_runtime_logging_sample_rate(sample_rate)
        self.logging_sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {**self.logged_before, **super()._get_ddp_logging_data()}
        if self.iterations_before:  # a new reducer counts from one on
            total = data.get("iteration", 0) + self.iterations_before
            data["iteration"] = last_logged(total, self.logging_sample_rate or LOGGED_EVERY)
            data[REBUILT] = max(self.logged_before.get(REBUILT, 0), data.get(REBUILT, 0))
        return data

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> None:
        self.sparse_metadata = global_unique_ids  # a new reducer must be told again
        super()._set_sparse_metadata(global_unique_ids)
