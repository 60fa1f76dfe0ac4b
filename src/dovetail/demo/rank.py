"""One rank of the demonstration's real training: a small GPT on the source code of Python's standard library."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dovetail.emulate.channel import leave
from dovetail.emulate.launch import report
from dovetail.measure.zoo import GPT
from dovetail.train.data_parallel.module import DistributedDataParallel
from dovetail.train.data_parallel.tuning.trials import Tuning

BATCH = 8
QUICK = Tuning(warmup=2, measure=5, steps=2, network_seconds=1.0)


def text() -> torch.Tensor:
    """500 kB of text that every Python installation has, as one token per byte."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("[a-f]*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)[:500_000]), dtype=torch.uint8).long()


def train(kind: type[TorchDDP], iterations: int, data: torch.Tensor, **more: object) -> tuple[TorchDDP, list[float]]:
    """The trained model, and the loss of every iteration, mean over the ranks."""
    torch.manual_seed(0)
    model = kind(GPT(), **more)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    length, losses = model.module.length, []
    for iteration in range(iterations):
        generator = torch.Generator().manual_seed(1000 * iteration + dist.get_rank())
        starts = torch.randint(len(data) - length - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
        optimizer.zero_grad()
        loss = model(rows[:, :-1], labels=rows[:, 1:])["loss"]
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return model, losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, iterations = text(), int(sys.argv[1])
    theirs, torch_losses = train(TorchDDP, iterations, data)
    ours, our_losses = train(DistributedDataParallel, iterations, data, tuning=QUICK)
    pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
    identical = all(torch.equal(a, b) for a, b in pairs)
    assert isinstance(ours, DistributedDataParallel)
    report(
        {
            "losses": {"torch": torch_losses, "dovetail": our_losses},
            "identical": identical,
            "explained": ours.explain(),
        }
    )
    leave()


if __name__ == "__main__":
    main()
