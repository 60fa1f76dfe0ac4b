"""`dovetail train` ends with one line that says what was kept or why nothing was, however the training ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dovetail.train.run.launcher import train
from dovetail.train.run.rendezvous import Rendezvous
from tests.paths import ROOT

WAIT = 300.0  # seconds after which something that is bound to happen counts as hanging
UNFINISHED = "torch's own buckets stay: the training ended before planning was over"
NOTHING = "no DistributedDataParallel was constructed: the script ended before that, or trains in another way"

WRAPS = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def steps(model, count):
    for _ in range(count):
        model(torch.randn(4, 8)).mean().backward()

def told(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: ranks write to one pipe
    sys.stdout.flush()

"""

JOINED = """
dist.init_process_group("gloo")
"""

SPAWNS = """
import torch.multiprocessing as mp

def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(8, 8))
    steps(model, 3)
    told(rank, type(model).__module__, __name__)
    if len(sys.argv) > 2:
        pathlib.Path(sys.argv[2], f"{os.getpid()}.pid").touch()
        time.sleep(600)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1],), nprocs=2, start_method=os.environ["METHOD"])
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.delenv("DOVETAIL_PLAN", raising=False)


def trained(folder: Path, text: str, **options: object) -> tuple[int, list[str]]:
    """Exit code and the lines that were told."""
    script = folder / "script.py"
    script.write_text(WRAPS + textwrap.dedent(text))
    lines: list[str] = []
    return train(script, tell=lines.append, **options), lines  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", 0, NOTHING),
        ("raise KeyError('mine')", 1, NOTHING),
        (JOINED + "model = DistributedDataParallel(nn.Linear(8, 8)); steps(model, 3)", 0, UNFINISHED),
        (JOINED + "model = DistributedDataParallel(nn.Linear(8, 8)); dist.barrier(); os._exit(3)", 1, UNFINISHED),
        (
            JOINED + "class Own(DistributedDataParallel): pass\nmodel = Own(nn.Linear(8, 8)); steps(model, 3)",
            0,
            "torch's own buckets stay: Own is derived from DistributedDataParallel and left alone",
        ),
        (
            JOINED + "pair = [DistributedDataParallel(m) for m in (nn.Linear(8, 8), nn.Sequential(nn.Linear(2, 2)))]",
            0,
            f"Linear: {UNFINISHED}; Sequential: {UNFINISHED}",
        ),
    ],
    ids=["none", "fails", "too short", "dies", "derived", "two"],
)
def test_the_line_says_why_nothing_was_kept(text: str, code: int, line: str, tmp_path: Path) -> None:
    assert trained(tmp_path, text, workers=2) == (code, [line])


def test_the_line_says_what_the_contest_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The model is gone when the script ends, as most are that live in a function."""
    text = """
    def main():
        dist.init_process_group("gloo")
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))))
        for _ in range(100):
            steps(model, 20)
            over = torch.tensor([float(model.report.state == "done")])
            dist.broadcast(over, 0)
            if over:
                break
        assert model.report.state == "done"
        if dist.get_rank() == 0:
            told(model.explain())
        dist.destroy_process_group()
    main()
    """
    code, (line,) = trained(tmp_path, text, workers=2)
    said = capfd.readouterr()
    result = next(r for r in said.out.splitlines() if r.startswith("  result ")).removeprefix("  result ").strip()
    assert code == 0 and line.endswith(result)
    assert line.startswith(("kept plan ", "torch's own buckets stay: "))
    assert "  result " not in said.err  # what the tuner logs goes where it went before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_the_command_says_it_after_an_interruption_too(signum: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = "model = DistributedDataParallel(nn.Linear(8, 8)); pathlib.Path(sys.argv[1], str(dist.get_rank())).touch()"
    script.write_text(f"{WRAPS}{JOINED}{text}; time.sleep(600)")
    command = [sys.executable, "-m", "dovetail", "train", str(script), "--workers", "2", "--", str(tmp_path)]
    trainer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in (0, 1)) or trainer.poll() is not None)
        trainer.send_signal(signum)
        _, said = trainer.communicate(timeout=WAIT)
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 128 + signum
    assert [line for line in said.splitlines() if line.startswith("dovetail:")] == [f"dovetail: {UNFINISHED}"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_a_script_starts_itself_are_adopted(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METHOD", method)
    code, lines = trained(tmp_path, SPAWNS, spawns=True, args=[str(tmp_path / "meet")])
    assert (code, lines) == (0, [UNFINISHED])
    main = "__main__" if method == "fork" else "__mp_main__"
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == [f"{rank} dovetail.train.data_parallel.module {main}" for rank in (0, 1)]


def test_a_script_with_its_own_ranks_ends_with_all_of_them_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METHOD", "spawn")
    script = tmp_path / "script.py"
    script.write_text(WRAPS + SPAWNS)
    command = [sys.executable, "-m", "dovetail", "train", "--spawns", str(script), "--", str(tmp_path / "meet")]
    trainer = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 2 or trainer.poll() is not None)
        trainer.send_signal(signal.SIGINT)
        _, said = trainer.communicate(timeout=WAIT)
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 130 and f"dovetail: {UNFINISHED}\n" in said
    pids = [path.stem for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))


def test_a_hidden_sitecustomize_is_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own_sitecustomize = True\n")
    text = """
    import subprocess
    os.environ["PYTHONPATH"] += os.pathsep + str(pathlib.Path(__file__).parent)
    child = "import sys; print(sys.own_sitecustomize, 'torch' in sys.modules, sys.modules['sitecustomize'].__file__)"
    subprocess.run([sys.executable, "-c", child], check=True)
    """
    assert trained(tmp_path, text, spawns=True) == (0, [NOTHING])
    own, heavy, file = capfd.readouterr().out.split()
    assert (own, heavy) == ("True", "False") and file.endswith("dovetail/train/run/site/sitecustomize.py")


def two_machines(tmp_path: Path, text: str, *, ranked: bool) -> list[tuple[int, list[str]]]:
    """Exit code and told lines of each of two machines with a worker each; their ranks are given, or agreed on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def machine(number: int) -> tuple[int, list[str]]:
        folder = tmp_path / str(number)
        folder.mkdir()
        endpoint, rank = f"127.0.0.1:{port}", number if ranked else None
        meeting = Rendezvous("2", node_rank=rank, rdzv_endpoint=endpoint, rdzv_id="both", local_addr="127.0.0.1")
        return trained(folder, text, workers=1, rendezvous=meeting)

    with ThreadPoolExecutor(2) as pool:
        return sorted(pool.map(machine, (0, 1)))


@pytest.mark.parametrize("ranked", [True, False], ids=["static", "c10d"])
def test_two_machines_train_together_and_the_one_with_rank_0_says_the_line(
    ranked: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = JOINED + (
        "model = DistributedDataParallel(nn.Linear(8, 8)); steps(model, 3)\n"
        "told(type(model).__module__, dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_RANK'])\n"
        "dist.destroy_process_group()\n"
    )
    assert two_machines(tmp_path, text, ranked=ranked) == [(0, []), (0, [UNFINISHED])]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"dovetail.train.data_parallel.module {rank} 2 0" for rank in (0, 1)
    ]


TWO_LINES = """
import copy, dovetail
dist.init_process_group("gloo")
torch.manual_seed(0)
alone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
model = DistributedDataParallel(copy.deepcopy(alone))
optimizer = dovetail.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(6):
    x = torch.randn(4, 8).double()
    for trained, opt in ((model, optimizer), (alone, by_hand)):
        opt.zero_grad()
        trained(x).square().mean().backward()
        for p in alone.parameters() if trained is alone else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        opt.step()
pairs = zip(model.parameters(), alone.parameters(), strict=True)
told(model.exchange.active, max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12)
dist.destroy_process_group()
"""


def test_a_script_with_the_second_line_trains_on_two_machines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert two_machines(tmp_path, TWO_LINES, ranked=True) == [(0, []), (0, [UNFINISHED])]
    assert capfd.readouterr().out.splitlines() == ["True True"] * 2


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
