"""Each training library trains with dovetail's line to the losses that it has without, and has dovetail's wrapper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.core.errors import Error
from tests.docs.blocks import blocks
from tests.paths import ROOT
from tests.ranks import run_ranks

from . import library_scenarios as scenarios

PLAIN = ["ddp", "dovetail"]
BOTH = [*PLAIN, "dovetail_overlap"]


@pytest.mark.parametrize(
    ("scenario", "package"),
    [
        (scenarios.with_lightning, "lightning"),
        (scenarios.with_fabric, "lightning"),
        (scenarios.with_accelerate, "accelerate"),
        (scenarios.with_trainer, "transformers"),
    ],
    ids=["lightning", "fabric", "accelerate", "trainer"],
)
def test_losses_are_those_without_dovetail(scenario: Callable[..., scenarios.Results], package: str) -> None:
    pytest.importorskip("sklearn", reason="needs dovetail-train[examples]")
    pytest.importorskip(package, reason="needs dovetail-train[examples]")
    for results in run_ranks(scenario, modes=BOTH):
        for case, losses in results.items():
            assert losses["dovetail"] == losses["ddp"], case
            assert losses["dovetail_overlap"] == pytest.approx(losses["ddp"], rel=1e-4), case
            assert len(losses["ddp"]) >= 2 and losses["ddp"][0] > 0


def test_lightning_and_fabric_hand_a_stored_plan_to_torch() -> None:
    pytest.importorskip("lightning", reason="needs dovetail-train[examples]")
    for result in run_ranks(scenarios.stored_plan_in_lightning):
        assert result["trainer"] == result["fabric"] == result["planned"] and len(result["planned"]) == 3


RAY = """
import json, sys, tempfile
import ray, torch
from dovetail.train.integrations import buckets
from tests.test_examples import digits_plan
from tests.train.library_scenarios import example

def follow(config):
    given = config["plan"].ddp_kwargs()
    model = ray.train.torch.prepare_model(digits.net(), parallel_strategy_kwargs=given)
    for _ in range(3):
        model(torch.randn(4, 64)).mean().backward()
    names = {"model": digits.net()}
    exec(config["page"], names)
    return buckets(model), type(names["model"]).__module__, names["model"].memory

digits = sys.modules["ray_train_example"] = example("ray_train")
ray.cloudpickle.register_pickle_by_value(digits)
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
found = {}
with tempfile.TemporaryDirectory() as folder:
    for mode in sys.argv[2:]:
        how = {"ddp": mode == "ddp", "overlap": mode == "dovetail_overlap"}
        if mode != "dovetail_overlap":  # which goes on from the checkpoint of one line
            first, checkpoint = digits.train(folder, epochs=1, bf16=True, **how)
        second, _ = digits.train(folder, epochs=2, bf16=True, resume=checkpoint, **how)
        found[mode] = [*first["losses"], *second["losses"]], second["explained"]
    plan = digits_plan()
    digits.work = follow
    found["page"], _ = digits.train(folder, plan=plan, page=sys.argv[1])
    found["planned"] = [b.bytes for b in plan.buckets]
ray.shutdown()
print(json.dumps(found))
"""


@pytest.fixture
def ray_folder() -> Iterator[str]:
    # Ray puts sockets there, whose paths may have about a hundred characters: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="dt-ray-") as folder:
        yield folder


def test_ray_train_has_the_same_losses_accumulated_clipped_in_bf16_and_resumed(ray_folder: str) -> None:
    pytest.importorskip("ray", reason="needs dovetail-train[examples]")
    own = {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": ray_folder,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "OMP_NUM_THREADS": "1",
    }
    (page,) = [b.text for b in blocks(ROOT / "docs" / "integrations.md") if "ray_train import prepare_model" in b.text]
    command = [sys.executable, "-c", RAY, page, *BOTH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **own}, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dovetail"][0] == found["ddp"][0] and len(found["ddp"][0]) == 2
    assert found["dovetail_overlap"][0] == pytest.approx(found["ddp"][0], rel=1e-4)
    assert found["dovetail"][1].startswith("dovetail: ") and found["ddp"][1] == ""
    assert found["page"] == [found["planned"], "dovetail.train.data_parallel.module", "shard"]


@pytest.mark.parametrize(
    "order", ["import dovetail, {0}", "import {0}, dovetail"], ids=["dovetail first", "Lightning first"]
)
@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"])
def test_lightning_knows_the_strategy_whichever_is_imported_first(order: str, package: str) -> None:
    pytest.importorskip(package, reason="needs dovetail-train[examples]")
    program = f"""
{order.format(package)}
import sys
assert "dovetail.train.data_parallel.module" not in sys.modules
make = sys.modules["{package}"].Fabric if "fabric" in "{package}" else sys.modules["{package}"].Trainer
for name in ("dovetail", "dovetail_overlap"):
    given = make(strategy=name, accelerator="cpu", devices=1).strategy
    assert type(given).__name__.startswith("Dovetail"), type(given)
    assert type(given).__mro__[2].__module__.startswith("{package}"), type(given).__mro__
    assert given._ddp_kwargs == ({{"overlap": "forward"}} if "overlap" in name else {{}})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="needs dovetail-train[examples]")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_what_cannot_be_prepared_is_refused_in_one_line(accelerator: Any) -> None:
    import torch
    from accelerate.utils import DistributedType

    with pytest.raises(Error, match=r"prepare: expected an accelerate.Accelerator or a transformers.Trainer, got \S+"):
        dovetail.prepare(object())
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(Error, match="trains with FSDP, which constructs no DistributedDataParallel"):
        dovetail.prepare(accelerator)
    accelerator.state.distributed_type = DistributedType.NO
    accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(Error, match="prepare: too late, a model is already prepared"):
        dovetail.prepare(accelerator)


def test_one_process_needs_no_wrapper_and_keeps_its_optimiser(accelerator: Any) -> None:
    import torch

    assert dovetail.prepare(accelerator, overlap="forward", memory="shard") is accelerator
    linear = torch.nn.Linear(2, 2)
    optimizer, model = accelerator.prepare(torch.optim.SGD(linear.parameters(), 0.1), linear)
    assert model is linear and type(optimizer.optimizer) is torch.optim.SGD


def test_options_reach_the_wrapper_beside_the_arguments_that_accelerate_was_given(accelerator: Any) -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from dovetail.train.integrations import with_arguments

    said = DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType.FP16)
    handler = with_arguments(with_arguments(said, plan=None), memory="shard")
    assert handler.to_kwargs() == {"gradient_as_bucket_view": True, "plan": None, "memory": "shard"}
    assert handler.comm_hook == DDPCommunicationHookType.FP16


def test_a_wrapper_is_made_only_inside_the_block_and_only_of_torchs_own_class() -> None:
    program = """
import pickle, threading
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
import dovetail
from dovetail.train.integrations.substitute import substituted

class Own(TorchDDP):
    pass

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with substituted():
    assert type(TorchDDP(nn.Linear(2, 2), gradient_as_bucket_view=True)) is dovetail.DistributedDataParallel
    assert type(Own(nn.Linear(2, 2))) is Own
    assert type(dovetail.DistributedDataParallel(nn.Linear(2, 2), plan=None)) is dovetail.DistributedDataParallel
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(TorchDDP(nn.Linear(2, 2))))
    thread.start(), thread.join()
    assert type(elsewhere[0]) is TorchDDP
assert type(TorchDDP(nn.Linear(2, 2))) is TorchDDP and type(Own(nn.Linear(2, 2))) is Own
assert type(pickle.loads(pickle.dumps(TorchDDP(nn.Linear(2, 2))))) is TorchDDP
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_imports_are_seen_before_and_after_they_happen(tmp_path: Path) -> None:
    (tmp_path / "awaited.py").write_text("value = 1\n")
    program = """
import sys
from dovetail.core.import_hooks import when_imported
seen = []
when_imported("awaited", lambda module: seen.append(module.value))
when_imported("absent", lambda module: seen.append("never"))
assert seen == []
import awaited
when_imported("awaited", lambda module: seen.append(module.value + 1))
assert seen == [1, 2] and awaited.__spec__.name == "awaited"
try:
    import absent
except ModuleNotFoundError:
    pass
assert seen == [1, 2]
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"}
    subprocess.run([sys.executable, "-c", program], timeout=60, env=environment, check=True)
