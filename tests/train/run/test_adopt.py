"""`dovetail train --spb`: unchanged DDP scripts under partial backpropagation."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.train.run.adopt import shares
from dovetail.train.run.launcher import train
from tests.paths import ROOT
from tests.train.partial.depth_models import linear_plan

SCRIPT = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # unlike on purpose: the first rank's weights count
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    sizes = set()
    for epoch in range(int(sys.argv[1])):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            sizes.add(len(x))
            assert len(x) == loader.batch_size
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    state = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(everyone, state)
    same = torch.equal(*everyone) and bool(state.isfinite().all())
    said = [type(model).__name__, dist.get_rank(), sorted(sizes), len(loader), model.step, same, model.depths]
    sys.stdout.write(" ".join(map(str, said)) + "\\n")  # in one piece: two ranks write to one pipe
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    root = ROOT
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}{os.pathsep}{root}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_an_unchanged_script_runs_under_the_guard_which_logs_its_decision(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(script, workers=2, spb="guard", epsilon=0.9, args=["7"]) == 0
    said = capfd.readouterr()
    lines = sorted(said.out.splitlines())
    assert [line.partition(", (")[0].rpartition(" (")[0] for line in lines] == [
        f"PartialBackprop {rank} [4] 6 42 True" for rank in (0, 1)
    ]
    (decision,) = [line for line in said.err.splitlines() if line.startswith("dovetail: guard: step 39:")]
    assert "optimiser's metric" in decision and "contributors were 2 2, now 1 2 of 2" in decision


def test_balanced_gives_each_worker_its_share_of_the_scripts_batch(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "depth.json"
    files.write(path, linear_plan())
    assert train(script, workers=2, spb="balanced", plan=path, args=["1"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"PartialBackprop {rank} [{size}] 6 6 True (1, 2)" for rank, size in ((0, 5), (1, 3))]


def test_wrong_use_starts_nothing(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started a process"))
    with pytest.raises(Error, match=r"spb: expected guard, ladder or balanced, got 'deep'"):
        train(script, workers=2, spb="deep")
    with pytest.raises(Error, match="spb balanced: expected --plan with local batches"):
        train(script, workers=2, spb="balanced")
    with pytest.raises(Error, match="epsilon: expected with spb guard, at least 0 and below 1"):
        train(script, workers=2, spb="ladder", epsilon=0.1)
    with pytest.raises(Error, match="expected together with spb"):
        train(script, workers=2, steps=5)
    (tmp_path / "plan.json").write_text('{"kind": "plan", "version": 1}')
    with pytest.raises(Error, match=r"plan\.json: kind: expected 'depth-plan', got 'plan'"):
        train(script, workers=2, spb="guard", plan=tmp_path / "plan.json")


def test_shares_keep_the_global_batch() -> None:
    plan = linear_plan((5, 3))
    for total in (2, 7, 8, 64, 100):
        assert sum(shares(plan, 0, total)) == total
    assert shares(plan, 0, 16) == (10, 6)
