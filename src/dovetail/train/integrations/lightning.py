"""Lightning's Trainer and Fabric with dovetail's wrapper: `strategy="dovetail"`, or with options a DovetailStrategy.

    import dovetail                                        # registers the names "dovetail" and "dovetail_overlap"
    trainer = lightning.Trainer(strategy="dovetail")
    trainer = lightning.Trainer(strategy=DovetailStrategy(overlap="forward", memory="shard"))

A strategy is Lightning's DDPStrategy. What is given to it beyond Lightning's own arguments goes to
`dovetail.DistributedDataParallel`. With `overlap="forward"` the optimisers are wrapped with `dovetail.optimizer` too.
`strategy.explain()` reports what was measured, tried and kept, also when training is over and the model is unwrapped.

Lightning can be installed as `lightning` or in two parts (`pytorch_lightning`, `lightning_fabric`), whose classes
differ; so the classes are made for the part in use, when it is first asked for.
"""

from __future__ import annotations

import functools
import weakref
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import Error

from .substitute import substituted, wrap_optimizer

if TYPE_CHECKING:
    from dovetail.train.data_parallel.module import DistributedDataParallel

    DovetailStrategy: Any
    DovetailFabricStrategy: Any

_PARTS = {
    "DovetailStrategy": ("lightning.pytorch.strategies", "pytorch_lightning.strategies"),
    "DovetailFabricStrategy": ("lightning.fabric.strategies", "lightning_fabric.strategies"),
}


class TrainerStrategy:
    """What DovetailStrategy adds to the DDPStrategy of Lightning's Trainer."""

    _ddp_kwargs: dict[str, Any]
    model: Any
    lightning_module: Any
    optimizers: list[Any]
    _explained = "dovetail: no model was trained with this strategy yet"

    def _setup_model(self, model: Any) -> Any:
        with substituted():
            return super()._setup_model(model)  # type: ignore[misc]

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        if self._ddp_kwargs.get("overlap"):
            self.optimizers = [wrap_optimizer(optimizer, [self.model]) for optimizer in self.optimizers]

    def explain(self) -> str:
        """A few lines on what was measured, what was tried and what was kept."""
        return self.model.explain() if hasattr(self.model, "explain") else self._explained

    def pre_backward(self, closure_loss: Any) -> None:
        # Manual optimisation: Lightning prepares torch's reducer here. Without one, forward has prepared everything.
        if getattr(self.model, "reducer", self) is not None:
            super().pre_backward(closure_loss)  # type: ignore[misc]

    def teardown(self) -> None:
        self._explained = self.explain()
        if self._ddp_kwargs.get("overlap"):
            self.model = self.lightning_module  # Lightning would ask torch's reducer for advice first
        super().teardown()  # type: ignore[misc]


class FabricStrategy:
    """What DovetailFabricStrategy adds to the DDPStrategy of Fabric."""

    _ddp_kwargs: dict[str, Any]

    def __init__(self, *args: Any, precision: Any = None, **kwargs: Any) -> None:
        """`precision` is Fabric's plugin, or a string for the wrapper's `precision`: what may travel."""
        own = isinstance(precision, str)
        super().__init__(*args, precision=None if own else precision, **kwargs)  # type: ignore[call-arg]
        if own:
            self._ddp_kwargs["precision"] = precision
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def setup_module(self, module: Any) -> Any:
        with substituted():
            made = super().setup_module(module)  # type: ignore[misc]
        self._wrappers.add(made)
        return made

    def setup_optimizer(self, optimizer: Any) -> Any:
        optimizer = super().setup_optimizer(optimizer)  # type: ignore[misc]
        return wrap_optimizer(optimizer, list(self._wrappers)) if self._ddp_kwargs.get("overlap") else optimizer

    def explain(self) -> str:
        """A few lines on what was measured, what was tried and what was kept, for every model."""
        return "\n".join(wrapper.explain() for wrapper in self._wrappers)


@functools.cache
def strategy_class(package: str) -> type[Any]:
    """The strategy for one part of Lightning: `package` is the one that has its strategies."""
    ddp = import_module(package).DDPStrategy
    fabric = hasattr(ddp, "setup_module")
    name, mixin = ("DovetailFabricStrategy", FabricStrategy) if fabric else ("DovetailStrategy", TrainerStrategy)
    return type(name, (mixin, ddp), {"__doc__": mixin.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    whole, part = _PARTS[name]
    if find_spec(whole.partition(".")[0]) is None and find_spec(part.partition(".")[0]) is None:
        raise Error(f"{name}: needs Lightning: pip install 'dovetail-train[examples]'")
    return strategy_class(whole if find_spec(whole.partition(".")[0]) else part)
