"""`dovetail train --emulate`: a script for GPUs runs unchanged, with the CPU's losses, and says what was emulated."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dovetail.core import files
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.emulate.shaped_network import available
from dovetail.emulate.training.emulated_rank import RankEmulation
from dovetail.emulate.training.emulated_run import summary
from tests.cli.command import run, shell
from tests.paths import ROOT

Write = Callable[[str], Path]

SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 12), torch.randint(4, (96,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), pin_memory=True)
    layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DDP(layers.to(device), device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if dist.get_rank() == 0:
        print(sys.argv[1:], dist.get_backend(), [loss.item() for loss in losses], flush=True)
    dist.destroy_process_group()
"""

RACY = """
    import os, torch, torch.distributed as dist
    from torch import nn
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[0])
    x = torch.ones(2, 4).cuda()
    y = x * 2
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        z = y + 1  # nothing orders this behind the line that made y
    torch.cuda.synchronize()
    for _ in range(40):
        model(x).sum().item()
    raise SystemExit(5)
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    return to_file


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.delenv("DOVETAIL_PLAN", raising=False)


def slow(path: Path) -> Path:
    """A profile of the script's model on a device that takes 10 ms for each of its layers, forward and backward."""
    sizes = {"2.bias": (2, 16), "2.weight": (2, 512), "0.bias": (0, 128), "0.weight": (0, 1536)}
    profile = Profile(
        name="slow",
        device="a slow one",
        batch=8,
        layers=tuple(
            Layer(
                name=str(i),
                type="Layer",
                parameter_bytes=0,
                activation_bytes=0,
                times=(LayerTime(batch=8, forward=exactly(0.01), backward=exactly(0.01)),),
            )
            for i in range(3)
        ),
        tensors=tuple(
            ParameterTensor(name=name, layer=layer, bytes=nbytes, dtype="float32", ready=0.01 * (3 - layer))
            for name, (layer, nbytes) in sizes.items()
        ),
    )
    files.write(path, profile)
    return path


def losses_of_the_cpu() -> list[float]:
    """The first rank's losses, by both ranks' gradients in one process: halved and then added, as DDP does it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(96, 12), torch.randint(4, (96,)))
        model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    samplers: list[DistributedSampler[Any]] = [DistributedSampler(data, num_replicas=2, rank=rank) for rank in (0, 1)]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batches in zip(*(DataLoader(data, batch_size=8, sampler=sampler) for sampler in samplers), strict=True):
        both = [nn.functional.cross_entropy(model(x), y) for x, y in batches]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in both]
        for parameter, mine, others in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = mine / 2 + others / 2
        optimizer.step()
        losses.append(both[0].item())
    torch.set_num_threads(threads)
    return losses


@pytest.mark.usefixtures("accelerator")
def test_a_script_for_gpus_runs_unchanged_with_the_losses_of_the_cpu(write: Write, tmp_path: Path) -> None:
    options = ("--emulate", "--profile", slow(tmp_path / "job.json"), "--rate", "1gbit")
    done = shell("train", write(SCRIPT), *options, "--", "--epochs", "3", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['--epochs', '3'] eccl {losses_of_the_cpu()}\n", "to the last digit"
    links = "links of 1gbit" if available() is None else "loopback without a limit"
    *_, closing, emulated = done.stderr.splitlines()
    assert closing == "dovetail: torch's own buckets stay: the training ended before planning was over"
    assert re.fullmatch(
        r"dovetail: emulated: 2 accelerators, on which kernels queue as on a GPU; 3 of 3 layers take the times of "
        r"profile slow \(backward took \d\.\d\d times as long\); real: the arithmetic, on this machine's processor, "
        rf"and every byte of the collectives, over {links}",
        emulated,
    ), emulated


@pytest.mark.usefixtures("accelerator")
def test_races_and_host_syncs_of_a_script_have_their_lines_and_its_exit_code_stays(write: Write) -> None:
    done = shell("train", write(RACY), "--emulate", "--races", "--workers", "1", "--json", timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert "dovetail: rank 0: 1 race between streams, " in done.stderr
    assert "script.py:11 in <module>" in done.stderr and "script.py:8 in <module>" in done.stderr
    assert re.search(r"40 × item\(\) at \S*script\.py:14 in <module>", done.stderr), done.stderr
    assert "take the processor's own time; real: " in done.stderr
    assert done.stderr.endswith("training failed with exit code 5; its own messages stand above\n")


def test_what_was_not_emulated_is_said() -> None:
    on_cpu, nothing = RankEmulation(device="cpu"), RankEmulation()
    assert summary([on_cpu], None, None).startswith("the script trained on cpu, so no device was emulated; real: ")
    assert summary([nothing], None, "1gbit") == "nothing was emulated: the script wrapped no model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--races"], "profile, rate, races: expected together with emulate"),
        (["--emulate", "--spawns"], "emulate: the ranks are started here"),
        (["--emulate", "--rate", "fast"], "rate: expected a number with kbit, mbit or gbit"),
        (["--emulate", "--profile", "absent.json"], "absent.json: cannot be read"),
        (["--emulate", "--profile", "script.py"], "script.py: line 2 column 1: expected valid JSON"),
        (["--emulate", "--epsilon", "0.1"], "epsilon, steps: expected together with spb"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_options_that_do_not_fit_are_one_line(
    options: list[str], words: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(SCRIPT).parent)
    result = run("train", "script.py", *options)
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.count("\n") == 1
    assert words in result.stderr
