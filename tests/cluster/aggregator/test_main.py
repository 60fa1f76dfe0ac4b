"""Real aggregators with plain executors: losses do not depend on failures, and no memory is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dovetail.cluster.aggregator import checkpoint
from dovetail.cluster.transport.messages import Described, Failed, Finished, Join, Leave, Progress, Refusal, StopJob
from dovetail.cluster.transport.wire import Connection, Lost
from dovetail.emulate.launch import held_port
from tests.cluster.workshop import KEY, LIMIT, Desk, Workshop, workshop

DIGITS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dovetail import Guard, TrainingJob


def model():
    layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def data():
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = TrainingJob(
    name="digits",
    model=model,
    data=data,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80),
    steps=80,
    batch=120,
    workers=3,
    spb="guard",
    guard=Guard(epsilon=0.5, every=5, patience=1),
    checkpoint_every=7,
)
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with workshop(tmp_path_factory.mktemp("home")) as ours:
        yield ours


@pytest.fixture
def desk() -> Iterator[Desk]:
    ours = Desk()
    yield ours
    ours.close()


def finish(shop: Workshop, desk: Desk, aggregator: int, job: str, attempt: int = 1) -> Finished:
    finished = desk.hear(Finished)
    desk.hang_up()
    assert shop.wait(aggregator) == 0
    assert not shop.memory(job, attempt).exists()
    return finished


@pytest.fixture(scope="module")
def undisturbed(shop: Workshop) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The digits job with one executor: its losses and its parameters at the end."""
    folder, desk = shop.job("1", DIGITS), Desk()
    aggregator = shop.aggregator("1", 1, desk)
    hello = desk.hello()
    described = desk.hear(Described)
    assert (described.workers, described.iterations, described.depths) == (3, 80, (1.0, 1.0, 1.0))
    executor = shop.executor(hello, 0)
    finished = finish(shop, desk, aggregator, "1")
    assert shop.wait(executor) == 0
    desk.close()
    losses = checkpoint.losses(folder)
    assert (finished.iteration, finished.loss, len(losses)) == (80, losses[-1], 80)
    assert losses[-1] < 1 < 2 < losses[0], "it learns"
    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert "guard: step" in log and "finished: 80 iterations" in log
    return (folder / "losses.jsonl").read_bytes(), end_of(folder)


def end_of(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the last checkpoint, which plain torch reads."""
    newest = checkpoint.found(folder)
    assert len(newest) == checkpoint.KEPT and newest[0][0] == 80
    state = torch.load(newest[0][1], weights_only=True)
    assert {"model", "optimizer", "scheduler", "guard", "iteration"} <= set(state)
    model: dict[str, torch.Tensor] = state["model"]
    return model


def same_end(folder: Path, undisturbed: tuple[bytes, dict[str, torch.Tensor]]) -> None:
    assert (folder / "losses.jsonl").read_bytes() == undisturbed[0]
    assert all(torch.equal(value, undisturbed[1][name]) for name, value in end_of(folder).items())


def test_losses_do_not_depend_on_which_executors_run_the_tasks_or_die(
    shop: Workshop, desk: Desk, undisturbed: tuple[bytes, dict[str, torch.Tensor]]
) -> None:
    folder = shop.job("2", DIGITS)
    aggregator = shop.aggregator("2", 1, desk)
    hello = desk.hello()
    dying = [shop.executor(hello, 0, die_after=4), shop.executor(hello, 1, die_after=19, jitter=0.003)]
    assert [shop.wait(pid) for pid in dying] == [-9, -9]
    for device, jitter in ((0, 0.002), (2, 0.006)):
        shop.executor(hello, device, jitter=jitter, twice=0.3, asks=device == 2)
    finish(shop, desk, aggregator, "2")
    same_end(folder, undisturbed)


def test_a_run_whose_aggregator_is_killed_several_times_ends_as_the_undisturbed_one(
    shop: Workshop, desk: Desk, undisturbed: tuple[bytes, dict[str, torch.Tensor]]
) -> None:
    folder, chance = shop.job("3", DIGITS), random.Random(3)
    resumed = []
    for attempt in range(1, 6):
        aggregator = shop.aggregator("3", attempt, desk)
        hello = desk.hello()
        resumed.append(desk.hear(Progress).iteration)
        until = resumed[-1] + chance.randint(6, 14)
        last = until + 4 if attempt < 5 else None  # so that it cannot end before it is killed
        executors = [shop.executor(hello, device, jitter=0.01, last=last) for device in (0, 1)]
        if attempt < 5:
            while desk.hear(Progress).iteration < until:
                pass
            time.sleep(chance.uniform(0.0, 0.05))
            shop.kill(aggregator)
            shop.memory("3", attempt).unlink()  # as the coordinator does before the next attempt
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / ".00000099.pt.1").write_bytes(b"half-written")
        else:
            finish(shop, desk, aggregator, "3", attempt)
        for executor in executors:
            assert shop.wait(executor) == 0
    assert any(resumed) and resumed == sorted(resumed), "it resumes from checkpoints"
    assert not list((folder / "checkpoints").glob(".*"))
    same_end(folder, undisturbed)


def test_a_torn_checkpoint_is_skipped_and_a_stopped_job_leaves_a_complete_one(
    shop: Workshop, desk: Desk, undisturbed: tuple[bytes, dict[str, torch.Tensor]]
) -> None:
    folder = shop.job("4", DIGITS)
    aggregator = shop.aggregator("4", 1, desk)
    executor = shop.executor(desk.hello(), 0, last=40)
    while desk.hear(Progress).iteration < 10:
        pass
    desk.say(StopJob())
    assert shop.wait(aggregator) == 0 and shop.wait(executor) == 0
    assert not shop.memory("4", 1).exists()
    stopped = checkpoint.found(folder)[0][0]
    assert 10 <= stopped == len(checkpoint.losses(folder)) < 80
    whole = checkpoint.found(folder)[0][1].read_bytes()
    for torn in (whole[: len(whole) // 2], whole[:-100] + bytes(100)):
        (folder / "checkpoints" / "00000079.pt").write_bytes(torn)
        aggregator = shop.aggregator("4", 2, desk)
        desk.hello()
        assert desk.hear(Progress).iteration == stopped
        desk.say(StopJob(discard=True))
        assert shop.wait(aggregator) == 0
    assert "cannot be read" in (folder / "log.txt").read_text(encoding="utf-8")
    aggregator = shop.aggregator("4", 3, desk)
    shop.executor(desk.hello(), 0)
    finish(shop, desk, aggregator, "4", 3)
    same_end(folder, undisturbed)


def test_training_goes_on_while_the_coordinator_is_lost_and_the_next_one_gets_all_reports(shop: Workshop) -> None:
    folder = shop.job("5", DIGITS)
    with held_port() as port:
        desk = Desk(port)
        aggregator = shop.aggregator("5", 1, desk)
        hello = desk.hello()
        described = desk.hear(Described)
        desk.close()
        executor = shop.executor(hello, 0)
        assert shop.wait(executor) == 0, "the job is finished and tells its executors"
        assert len(checkpoint.losses(folder)) == 80
        again = Desk(port)
        assert again.hello() == hello
        assert again.hear(Described) == described
        assert again.hear(Finished).iteration == 80
        again.close()
    assert shop.wait(aggregator) == 0
    assert not shop.memory("5", 1).exists()


def test_executors_on_another_machine_give_the_same_losses(
    shop: Workshop, desk: Desk, undisturbed: tuple[bytes, dict[str, torch.Tensor]]
) -> None:
    folder = shop.job("7", DIGITS)
    aggregator = shop.aggregator("7", 1, desk, node="here")
    hello = desk.hello()
    dying = shop.executor(hello, 2, node="there", die_after=5)
    assert shop.wait(dying) == -9
    shop.executor(hello, 0, node="there", jitter=0.002)
    shop.executor(hello, 1, node="here", jitter=0.004)
    finish(shop, desk, aggregator, "7")
    same_end(folder, undisturbed)


def test_an_aggregator_of_an_earlier_attempt_ends_when_refused(shop: Workshop, desk: Desk) -> None:
    shop.job("6", DIGITS)
    aggregator = shop.aggregator("6", 1, desk)
    desk.hello()
    desk.hear(Described)
    desk.say(Refusal(reason="attempt 2 runs"))
    assert shop.wait(aggregator) == 0
    assert not shop.memory("6", 1).exists()


def with_loss(*lines: str) -> str:
    return DIGITS.replace("def loss(model, batch):", "\n    ".join(["def loss(model, batch):", *lines]))


FAILING = {
    "not a number": (
        with_loss(
            "if model.training and model[1].num_batches_tracked == 9:", "    return model(batch[0]).sum() * 1e39"
        ),
        r"iteration 9: the loss of worker 0 is -?inf",
        True,
    ),
    "raises": (
        with_loss("if model[1].num_batches_tracked == 5:", "    raise ValueError('a bad sample\\nof many')"),
        r"iteration 5, worker [012]: ValueError: a bad sample",
        False,
    ),
    "optimizer": (DIGITS.replace("lr=3e-3", "lr=-1"), r"optimizer: ValueError: Invalid learning rate: -1", True),
    "file": (
        DIGITS.replace("steps=80", "steps=-1"),
        r".*job.py: job: steps: expected a whole number of at least 1",
        True,
    ),
    "model": (
        DIGITS.replace("nn.Linear(32, 10))", "Absent())"),
        r"model: NameError: name 'Absent' is not defined",
        True,
    ),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_job_that_cannot_go_on_gives_a_one_line_reason_and_leaves_no_memory(
    what: str, shop: Workshop, desk: Desk
) -> None:
    text, reason, fatal = FAILING[what]
    name = str(10 + list(FAILING).index(what))
    folder = shop.job(name, text)
    aggregator = shop.aggregator(name, 1, desk)
    hello = desk.hello()
    executor = shop.executor(hello, 0)
    failed = desk.hear(Failed)
    assert re.match(reason, failed.reason) and "\n" not in failed.reason
    assert (failed.fatal, failed.job, failed.attempt) == (fatal, name, 1)
    desk.hang_up()
    assert shop.wait(aggregator) == 1 and shop.wait(executor) == 0
    assert not shop.memory(name, 1).exists()
    log = (folder / "log.txt").read_text(encoding="utf-8")
    assert failed.reason in log
    assert ("of many" in log) == (what == "raises"), "the trace is in the log"


def test_sigterm_stops_the_job_and_foreign_connections_are_refused(shop: Workshop, desk: Desk) -> None:
    folder = shop.job("20", DIGITS)
    aggregator = shop.aggregator("20", 1, desk)
    hello = desk.hello()
    desk.hear(Described)
    for key, attempt in (("wrong", 1), (KEY, 2)):
        connection = Connection.to(hello.address)
        connection.send(Join(key=key, job="20", attempt=attempt, device=0, node=""))
        assert isinstance(connection.receive(timeout=LIMIT), Leave)
        connection.close()
    garbage = Connection.to(hello.address)
    garbage.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(Lost):
        garbage.receive(timeout=LIMIT)
    garbage.close()
    executor = shop.executor(hello, 0)
    while desk.hear(Progress).iteration < 3:
        pass
    os.kill(aggregator, signal.SIGTERM)
    assert shop.wait(aggregator) == 0 and shop.wait(executor) == 0
    assert checkpoint.found(folder)[0][0] == len(checkpoint.losses(folder)) >= 3
    assert not shop.memory("20", 1).exists()
