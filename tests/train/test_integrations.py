"""Accelerate and the Hugging Face Trainer follow a plan exactly, or say why they cannot."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.core.errors import Error
from dovetail.core.plan import Bucket, Plan, Prediction
from dovetail.train import integrations
from tests.ranks import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))


def plan_for(model: nn.Module, cuts: list[int], *, dtypes: tuple[str, ...] = ("float32",)) -> Plan:
    """A chain's gradients come in reverse order of its layers; `cuts` stand between layers, never within one."""
    named = list(model.named_parameters())[::-1]
    sizes = [p.numel() * p.element_size() for _, p in named]
    return Plan(
        policy="by hand",
        profile="net",
        network="none",
        workers=2,
        batch=4,
        tensors=tuple(name for name, _ in named),
        dtypes=dtypes,
        buckets=tuple(
            Bucket(start=a, stop=b, bytes=sum(sizes[a:b])) for a, b in zip([0, *cuts[:-1]], cuts, strict=True)
        ),
        prediction=Prediction(iteration=1, forward=0, backward=0, exposed=1, lower_bound=0),
    )


def in_ranks_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    said = DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[said])
    model = net()
    # The ranks bring different plans, as ranks that measured for themselves do.
    plan = plan_for(model, [2, 4, 6] if accelerator.is_main_process else [4, 6])
    plan.apply(accelerator)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(wrapped(torch.randn(4, 8)).square().mean())
        optimizer.step()
    late = None
    try:
        plan.apply(accelerator)
    except Error as e:
        late = str(e)
    return {
        "buckets": integrations.buckets(wrapped),
        "planned": [b.bytes for b in plan.buckets],
        "views": wrapped.gradient_as_bucket_view,
        "hooks": len(wrapped._comm_hooks),
        "weight": next(iter(model.parameters())).sum().item(),
        "late": late,
    }


def test_an_accelerator_keeps_what_it_was_told_and_all_ranks_follow_rank_0s_plan() -> None:
    pytest.importorskip("accelerate", reason="needs dovetail-train[examples]")
    first, second = run_ranks(in_ranks_accelerate)
    assert first["buckets"] == second["buckets"] == first["planned"]
    assert len(first["planned"]) == 3 and len(second["planned"]) == 2
    assert first["views"] and first["hooks"] == 1
    assert first["weight"] == second["weight"]
    assert "too late" in first["late"] and "too late" in second["late"]


def in_ranks_trainer(folder: str) -> dict[str, Any]:
    result = train_with_trainer(folder)
    gc.collect()  # a Trainer is full of cycles: its wrapped model must go before the interpreter and its threads do
    return result


def train_with_trainer(folder: str) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    data = [{"x": torch.randn(8), "labels": torch.tensor(i % 4)} for i in range(64)]
    arguments: dict[str, Any] = {"use_cpu": True, "max_steps": 4, "save_strategy": "no", "report_to": []}

    def trainer(**more: Any) -> Any:
        return Trainer(WithLoss(), TrainingArguments(folder, **arguments, **more), train_dataset=data)

    refused = []
    model = trainer(ddp_find_unused_parameters=False)
    plan = plan_for(model.model, [2, 4, 6])
    for target, given in ((trainer(), plan), (model, plan_for(nn.Linear(3, 3), [2]))):
        try:
            given.apply(target)
        except Error as e:
            refused.append(str(e))
    plan.apply(model)
    model.train()
    return {
        "buckets": integrations.buckets(model.model_wrapped),
        "planned": [b.bytes for b in plan.buckets],
        "refused": refused,
    }


def test_a_trainer_follows_a_plan_and_refuses_one_that_it_cannot_follow(tmp_path: Any) -> None:
    pytest.importorskip("transformers", reason="needs dovetail-train[examples]")
    for result in run_ranks(in_ranks_trainer, folder=str(tmp_path)):
        assert result["buckets"] == result["planned"]
        unused, other = result["refused"]
        assert "ddp_find_unused_parameters=False" in unused
        assert "does not fit this model: expected 2 tensors and 48 bytes" in other


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="needs dovetail-train[examples]")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_plan_with_several_dtypes_is_refused_and_nothing_changes(accelerator: Any) -> None:
    before = accelerator.ddp_handler
    with pytest.raises(Error, match="starts again for every dtype"):
        plan_for(net(), [2, 6], dtypes=("bfloat16", "float32")).apply(accelerator)
    assert accelerator.ddp_handler is before


def test_a_second_plan_replaces_the_first(accelerator: Any) -> None:
    plan_for(net(), [2, 6]).apply(accelerator)
    second = plan_for(net(), [4, 6])
    second.apply(accelerator)
    assert accelerator.ddp_handler.to_kwargs() == second.ddp_kwargs()


def test_find_unused_parameters_is_refused_unless_the_graph_is_static(accelerator: Any) -> None:
    from accelerate.utils import DistributedDataParallelKwargs

    plan = plan_for(net(), [2, 6])
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    with pytest.raises(Error, match="find_unused_parameters"):
        plan.apply(accelerator)
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True, static_graph=True)
    plan.apply(accelerator)
    assert accelerator.ddp_handler.to_kwargs() == {
        "find_unused_parameters": True,
        "static_graph": True,
        **plan.ddp_kwargs(),
    }


def test_an_accelerator_without_ddp_is_refused(accelerator: Any) -> None:
    from accelerate.utils import DistributedType

    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(Error, match="trains with FSDP"):
        plan_for(net(), [2, 6]).apply(accelerator)


def test_a_trainer_that_would_lose_the_plan_is_refused(accelerator: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.accelerator, self.model = accelerator, net()

        def _wrap_model(self) -> None:
            self.accelerator.ddp_handler = None

    with pytest.raises(Error, match="a plan would be lost"):
        plan_for(net(), [2, 6]).apply(Trainer())


@pytest.mark.parametrize("target", [object(), None, nn.Linear(2, 2)])
def test_anything_else_is_refused_by_a_line_that_names_what_is_accepted(target: object) -> None:
    with pytest.raises(Error, match=r"expected an accelerate.Accelerator or a transformers.Trainer, got \S+") as caught:
        plan_for(net(), [2, 6]).apply(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("0", False), ("", False), ("true", False)])
def test_the_variable_that_reverses_caps_is_refused(
    value: str, refused: bool, monkeypatch: pytest.MonkeyPatch, accelerator: Any
) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", value)
    plan = plan_for(net(), [2, 6])
    expected = pytest.raises(Error, match="DDP_SET_LAST_BUCKET_CAP=1") if refused else contextlib.nullcontext()
    with expected:
        plan.apply(accelerator)


def test_one_rank_agrees_with_itself_and_several_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(net(), [2, 6])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert integrations.agree(plan) is plan
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Error, match="init_process_group"):
        integrations.agree(plan)


def test_buckets_of_a_model_that_is_not_wrapped_are_a_clear_error() -> None:
    with pytest.raises(Error, match="no DistributedDataParallel in a Sequential"):
        integrations.buckets(net())
