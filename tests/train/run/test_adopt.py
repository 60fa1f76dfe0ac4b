"""`dovetail train --spb`: unchanged DDP scripts under partial backpropagation; and the data that workers get."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from dovetail.core import files
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.train.partial.rotation import RotatingBatches
from dovetail.train.partial.segments import cut
from dovetail.train.run.adopt import shares
from dovetail.train.run.launcher import train
from tests.paths import ROOT
from tests.train.partial.depth_models import build, cuts, inputs

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


def depth_plan(batches: tuple[int, ...] = (5, 3)) -> DepthPlan:
    """For the script's model."""
    from torch import nn, randn

    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 2))
    return cut(model, randn(4, 6), at=["2"], depths=[1, 2], batches=batches)


def test_an_unchanged_script_runs_under_the_guard_which_says_what_it_does(
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
    files.write(path, depth_plan())
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


def test_every_part_of_the_data_meets_every_worker_and_nothing_is_lost() -> None:
    workers = [RotatingBatches(range(64), (4, 4, 4, 4), rank=r, shuffle=False) for r in range(4)]
    epochs = [[list(w) for w in workers] for _ in range(2)]
    assert all(sorted(i for w in epoch for b in w for i in b) == list(range(64)) for epoch in epochs)
    first = [[batch[0] % 16 // 4 for batch in w] for w in epochs[0]]
    assert first == [[(r + t) % 4 for t in range(4)] for r in range(4)]


def test_unequal_batches_rotate_and_the_last_step_is_filled_up() -> None:
    workers = [RotatingBatches(range(30), (6, 3, 1), rank=r, seed=3) for r in range(3)]
    assert [len(w) for w in workers] == [3, 3, 3]
    batches = [list(w) for w in workers]
    assert [[len(b) for b in w] for w in batches] == [[6] * 3, [3] * 3, [1] * 3]
    assert sorted(i for w in batches for b in w for i in b) == list(range(30))
    for worker in workers:
        worker.set_epoch(1)
    assert [list(w) for w in workers] != batches
    uneven = [RotatingBatches(range(32), (6, 3, 1), rank=r) for r in range(3)]
    counts = Counter(i for w in uneven for batch in w for i in batch)
    assert set(counts) == set(range(32)) and sum(counts.values()) == 40


def test_phases_change_the_batches_at_their_step() -> None:
    plan = depth_plan((4, 4))
    late = msgspec.structs.replace(plan.phases[0], begins=0.5, batches=(5, 3))
    plan = msgspec.structs.replace(plan, phases=(plan.phases[0], late))
    batches = RotatingBatches(range(16), plan, rank=0, steps=6)
    sizes = [len(b) for _ in range(3) for b in batches]
    assert sizes == [4, 4, 4, 5, 5, 5]
    with pytest.raises(Error, match="the plan has phases: expected the training's length"):
        RotatingBatches(range(16), plan, rank=0)


@pytest.mark.parametrize("batches", [(0, 0), (4, 0), (4, -1)])
def test_batches_that_would_never_use_up_the_data_are_refused(batches: tuple[int, ...]) -> None:
    with pytest.raises(Error, match=r"RotatingBatches: expected local batches of at least 1, got \["):
        RotatingBatches(range(4), batches, rank=0)


def test_shares_keep_the_global_batch() -> None:
    plan = depth_plan((5, 3))
    for total in (2, 7, 8, 64, 100):
        assert sum(shares(plan, 0, total)) == total
    assert shares(plan, 0, 16) == (10, 6)


def test_cut_points_that_do_not_fit_are_one_line() -> None:
    model, batch = build("skips"), inputs("skips", 3, 0)
    with pytest.raises(Error, match="expected the name of a module that runs in forward"):
        cut(model, batch, at=["nowhere"], depths=[1, 2])
    with pytest.raises(Error, match="expected cut points in execution order"):
        cut(model, batch, at=["blocks.4", "blocks.2"], depths=[1, 2, 3])
    with pytest.raises(Error, match="nobody would train it"):
        cut(model, batch, at=cuts("skips", 3, 8), depths=[1, 2])
