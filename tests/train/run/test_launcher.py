"""`python -m dovetail.train.run` and `train`: a script runs as if by itself, planned, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.core import files
from dovetail.core.errors import Error
from dovetail.train.run.launcher import train
from dovetail.train.run.rendezvous import Rendezvous
from tests.paths import ROOT
from tests.train.test_integrations import net, plan_for

WAIT = 300.0  # seconds after which something that is bound to happen counts as hanging

Write = Callable[[str], Path]

DDP_SCRIPT = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from dovetail.train.integrations import buckets
    from tests.train.test_integrations import net
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    for _ in range(4):
        model(torch.randn(4, 8)).mean().backward()
    if dist.get_rank() == 0:
        print(type(model).__module__, buckets(model), sys.argv[1:], flush=True)
    dist.destroy_process_group()
"""

SLOW_SCRIPT = """
    import os, pathlib, sys, time
    folder = pathlib.Path(sys.argv[1])
    (folder / f"{os.getpid()}.pid").touch()
    time.sleep(600)
"""


FAIL_IF_FIRST = """while len(list(folder.glob("*.pid"))) < 2:
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        raise SystemExit(3)
    time.sleep(600)
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
    monkeypatch.delenv("DDP_SET_LAST_BUCKET_CAP", raising=False)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dovetail.train.run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


def test_a_script_sees_what_it_would_see_by_itself(write: Write) -> None:
    script = write(
        """
        import os, sys
        print(__name__, sys.argv, sys.path[0], __file__, os.environ.get("DOVETAIL_PLAN"))
        import helper_beside_it
        sys.exit(helper_beside_it.code)
        """
    )
    script.with_name("helper_beside_it.py").write_text("code = 7\n")
    script.with_name("plan.json").write_text(files.encode(plan_for(net(), [2, 6])))
    done = run("--plan", script.with_name("plan.json"), script, "--plan", "its own", "-x")
    plan = script.with_name("plan.json")
    expected = f"__main__ {[str(script), '--plan', 'its own', '-x']} {script.parent} {script} {plan}\n"
    assert (done.returncode, done.stdout, done.stderr) == (7, expected, "")


def test_a_module_sees_what_it_would_see_under_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "trainers"
    package.mkdir()
    (package / "__init__.py").write_text("code = 7\n")
    told = "import os, sys; print(__name__, __package__, __spec__.name, sys.argv, sys.path[0], __file__)\n"
    (package / "digits.py").write_text(f"{told}from . import code\nsys.exit(code)\n")
    (package / "__main__.py").write_text(f"{told}raise KeyError('mine')\n")
    for name in ("trainers.digits", "trainers"):
        alone = subprocess.run(
            [sys.executable, "-m", name, "-m", "its own"], capture_output=True, text=True, timeout=WAIT, check=False
        )
        ours = run("-m", name, "-m", "its own")
        assert ours.stdout == alone.stdout and ours.returncode == alone.returncode
        assert ours.stderr.splitlines()[-3:] == alone.stderr.splitlines()[-3:]
        assert "dovetail" not in ours.stderr and "runpy" not in ours.stderr
    absent = run("-m", "trainers.absent")
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr == "dovetail: trainers.absent: expected a module that can be run, found none\n"
    absent = run("-m", "no_such_package.absent")
    assert absent.returncode == 2 and "expected a module, found none in the current folder" in absent.stderr


def test_a_script_that_crashes_ends_with_its_own_traceback(write: Write) -> None:
    script = write("def fail():\n    raise KeyError('mine')\nfail()\n")
    done = run(script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 3, in <module>',
    ]
    assert done.stderr.endswith("KeyError: 'mine'\n")
    assert "dovetail" not in done.stderr and "runpy" not in done.stderr


def test_wrong_inputs_are_one_line_and_exit_code_2(write: Write, tmp_path: Path) -> None:
    script = write("print('must not run')")
    (tmp_path / "plan.json").write_text("{}")
    for arguments, said in (
        (
            [tmp_path / "absent.py"],
            f"dovetail: {tmp_path / 'absent.py'}: expected a Python script, found no such file\n",
        ),
        (
            ["--plan", tmp_path / "plan.json", script],
            f"dovetail: {tmp_path / 'plan.json'}: kind: missing, expected 'plan'\n",
        ),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_ddp_becomes_dovetails_and_everything_that_knew_torchs_class_still_holds(write: Write) -> None:
    done = run(
        write(
            """
            import copy, pickle
            import torch, torch.distributed as dist
            from torch import nn
            from torch.nn.parallel import DistributedDataParallel, distributed
            import dovetail
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            Torchs = distributed.DistributedDataParallel
            assert Torchs is DistributedDataParallel is torch.nn.parallel.DistributedDataParallel
            assert Torchs.__module__ == "torch.nn.parallel.distributed"

            planned = DistributedDataParallel(nn.Linear(2, 2))
            assert type(planned) is dovetail.DistributedDataParallel and isinstance(planned, Torchs)
            assert type(nn.parallel.DistributedDataParallel(module=nn.Linear(2, 2))) is dovetail.DistributedDataParallel

            class Own(DistributedDataParallel):
                def __init__(self, module):
                    super().__init__(module, find_unused_parameters=True)
            assert type(Own(nn.Linear(2, 2))) is Own

            for model in (planned, Own(nn.Linear(2, 2))):
                seen = []
                model.module.register_forward_hook(lambda *_: seen.append(Torchs._get_active_ddp_module()))
                with model.join():  # torch checks the class here
                    model(torch.randn(3, 2)).sum().backward()
                assert seen == [model]  # what torch.compile asks for
            other = copy.deepcopy(DistributedDataParallel(nn.Linear(2, 2)))
            assert type(other) is dovetail.DistributedDataParallel
            other(torch.randn(3, 2)).sum().backward()
            assert type(Torchs.__new__(Torchs)) is Torchs  # how a pickle of torch's begins
            print("held")
            """
        )
    )
    assert done.stdout.endswith("held\n"), done.stderr


def test_training_an_unchanged_script_follows_the_plan(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_for(net(), [2, 4, 6])
    script = write(DDP_SCRIPT)
    path = script.with_name("plan.json")
    files.write(path, plan)
    assert train(script, workers=2, plan=path, args=["--rate", "3"]) == 0
    sizes = [b.bytes for b in plan.buckets]
    assert capfd.readouterr().out == f"dovetail.train.data_parallel.module {sizes} ['--rate', '3']\n"


def test_a_failing_rank_ends_the_others_and_the_exit_code_says_so(write: Write, tmp_path: Path) -> None:
    script = write(SLOW_SCRIPT.replace("time.sleep(600)", FAIL_IF_FIRST))
    assert train(script, workers=2, args=[str(tmp_path)]) == 1
    assert_ended(tmp_path)


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGTERM] * 2, 143), ([signal.SIGKILL], -9)],
    ids=["ctrl-c", "terminated", "twice", "killed"],
)
def test_a_signal_ends_every_process(signals: list[signal.Signals], code: int, write: Write, tmp_path: Path) -> None:
    script = write(SLOW_SCRIPT)
    program = "import sys; from dovetail.train.run.launcher import train; "
    program += "sys.exit(train(sys.argv[1], workers=2, args=sys.argv[2:]))"
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(script), str(tmp_path)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 2 or trainer.poll() is not None)
        for signum in signals:
            trainer.send_signal(signum)
            time.sleep(0.2)  # the kernel may merge signals that follow at once; the outcome is the same
        assert trainer.wait(WAIT) == code
    finally:
        trainer.kill()
        trainer.wait()
    assert_ended(tmp_path)


def assert_ended(folder: Path) -> None:
    pids = [int(p.stem) for p in folder.glob("*.pid")]
    assert len(pids) == 2
    until(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # a zombie: its parent has not waited for it yet


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_wrong_use_starts_nothing(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
    script = write("")
    with pytest.raises(Error, match="workers: expected at least 1, got 0"):
        train(script, workers=0)
    with pytest.raises(Error, match=r"absent\.py: expected a Python script"):
        train(tmp_path / "absent.py", workers=2)
    with pytest.raises(Error, match=r"plan\.json: cannot be read: no such file"):
        train(script, workers=2, plan=tmp_path / "plan.json")
    with pytest.raises(Error, match="spawns: the script starts its ranks itself; expected no workers"):
        train(script, workers=2, spawns=True)
    with pytest.raises(Error, match="nnodes 2: expected rdzv-endpoint"):
        train(script, rendezvous=Rendezvous("2"))
    with pytest.raises(Error, match="nnodes: expected a number of machines or LEAST:MOST, got '3:2'"):
        train(script, rendezvous=Rendezvous("3:2", rdzv_endpoint="localhost:1"))
    with pytest.raises(Error, match="rdzv-backend static: expected node-rank"):
        train(script, rendezvous=Rendezvous("2", rdzv_endpoint="localhost:1", rdzv_backend="static"))
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    with pytest.raises(Error, match="DDP_SET_LAST_BUCKET_CAP"):
        train(script, workers=2)


def test_the_launcher_does_not_wait_for_torch_to_be_imported() -> None:
    program = "import sys, dovetail.train.run.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT, check=False).returncode == 0
    assert os.environ.get("DOVETAIL_RUN") is None
