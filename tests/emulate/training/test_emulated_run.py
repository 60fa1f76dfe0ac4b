"""`dovetail train --emulate`: a script for GPUs runs unchanged, with the CPU's losses, and says what was emulated."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.core import files
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.emulate.shaped_network import available
from tests.cli.command import run, shell
from tests.paths import ROOT

Write = Callable[[str], Path]

SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device, ids = torch.device("cuda", local_rank), [local_rank]
    else:
        device, ids = torch.device("cpu"), None
    dist.init_process_group("nccl" if device.type != "cpu" else "gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 12), torch.randint(4, (96,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), pin_memory=torch.cuda.is_available())
    layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DDP(layers.to(device), device_ids=ids, output_device=ids and ids[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if dist.get_rank() == 0:
        print(sys.argv[1:], dist.get_backend(), *(loss.item() for loss in losses), flush=True)
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
    model(x).sum().backward()
    dist.destroy_process_group()
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


def test_a_script_for_gpus_runs_unchanged_with_the_losses_of_the_cpu(write: Write, tmp_path: Path) -> None:
    script, job = write(SCRIPT), slow(tmp_path / "job.json")
    plain = shell("train", script, "--", "--epochs", "3", timeout=300)
    assert plain.returncode == 0, plain.stderr
    options = ("--emulate", "--profile", job, "--rate", "1gbit")
    done = shell("train", script, *options, "--", "--epochs", "3", timeout=300)
    assert done.returncode == 0, done.stderr
    arguments, backend, *losses = re.split(r"(?<=\]) | (?=\w)", done.stdout.strip())
    assert (arguments, backend) == ("['--epochs', '3']", "eccl") and len(losses) == 6
    assert plain.stdout == done.stdout.replace("eccl", "gloo"), "to the last digit"
    links = "links of 1gbit" if available() is None else "loopback without a limit"
    *_, closing, emulated = done.stderr.splitlines()
    assert closing == "dovetail: torch's own buckets stay: the training ended before planning was over"
    assert re.fullmatch(
        r"dovetail: emulated: 2 accelerators, on which kernels queue as on a GPU; 3 of 3 layers take the times of "
        r"profile slow \(backward took \d\.\d\d times as long\); real: the arithmetic, on this machine's processor, "
        rf"and every byte of the collectives, over {links}",
        emulated,
    ), emulated


def test_a_race_of_the_script_is_named_with_its_line(write: Write) -> None:
    done = shell("train", write(RACY), "--emulate", "--races", "--workers", "1", timeout=300)
    assert done.returncode == 1
    assert "dovetail: rank 0: 1 race between streams, " in done.stderr
    assert "script.py:11 in <module>" in done.stderr and "script.py:8 in <module>" in done.stderr
    assert "synchronize" in done.stderr, "host syncs have their lines too"


def test_a_script_that_stays_on_the_cpu_is_told_so(write: Write) -> None:
    script = write(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        raise SystemExit(5)
        """
    )
    done = shell("train", script, "--emulate", "--workers", "1", "--json", timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert "dovetail: the script trained on cpu, so no device was emulated; real: the arithmetic" in done.stderr
    assert done.stderr.endswith("training failed with exit code 5; its own messages stand above\n")


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
