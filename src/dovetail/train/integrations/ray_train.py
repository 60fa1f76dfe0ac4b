"""Ray Train with dovetail's wrapper: this `prepare_model` in place of Ray's."""

from __future__ import annotations

from typing import Any

from .substitute import substituted


def prepare_model(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`ray.train.torch.prepare_model`, which wraps with `dovetail.DistributedDataParallel`.

    Options of the wrapper go where its other arguments go: `parallel_strategy_kwargs={"memory": "shard"}`. For the
    second line call `dovetail.optimizer(optimizer, model)` afterwards.
    """
    from ray.train.torch import prepare_model as rays

    with substituted():
        return rays(model, *args, **kwargs)
