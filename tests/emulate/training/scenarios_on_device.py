"""What the tests of emulated training do in a process that has the accelerator; `python -m` reports all results."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, exactly
from dovetail.emulate import accelerator
from dovetail.emulate.launch import report
from dovetail.emulate.training import cuda_stand_in
from dovetail.emulate.training.layer_times import LayerTimes

HERE = "emu:0"


# The device that scripts mean by "cuda".


def names_of_devices() -> dict[str, Any]:
    x = torch.ones(3)
    layer = nn.Linear(3, 3)
    torch.cuda.set_device(1)
    made = {
        "torch.device": torch.device("cuda", 1),
        "torch.device by keyword": torch.device(type="cuda", index=1),
        "factory": torch.zeros(2, device="cuda:1").device,
        "current": torch.zeros(2, device="cuda").device,
        "to a string": x.to("cuda:1").device,
        "to a device": x.to(torch.device("cuda:1"), torch.float64).device,
        "to a number": x.to(1).device,
        "cuda()": x.cuda().device,
        "cuda(1)": x.cuda(1, non_blocking=True).device,
        "like": torch.empty_like(x, device="cuda:1").device,
        "module.cuda": layer.cuda().weight.device,
        "module.to": nn.Linear(3, 3).to("cuda:1").weight.device,
        "generator": torch.Generator(device="cuda:1").device,
        "rand": torch.rand(2, device="cuda:1", generator=torch.Generator("cuda:1").manual_seed(1)).device,
    }
    torch.set_default_device("cuda")
    made["default"] = torch.ones(1).device
    torch.set_default_device("cpu")
    torch.cuda.set_device(0)
    untouched = [torch.device("cpu"), torch.ones(1).device, torch.ones(1, device="meta").device, x.to("cpu").device]
    return {"made": {name: str(device) for name, device in made.items()}, "untouched": [str(d) for d in untouched]}


def functions_of_cuda() -> dict[str, Any]:
    torch.cuda.manual_seed_all(7)
    first = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(7)
    side, begin, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        begin.record(side)
        accelerator.occupy(0.02)
        end.record(side)
    ran_ahead = not end.query()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.device(1):
        inside = torch.cuda.current_device()
    return {
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "same numbers": torch.equal(first.cpu(), torch.rand(4, device="cuda").cpu()),
        "ran ahead": ran_ahead,
        "milliseconds": begin.elapsed_time(end),
        "inside": inside,
        "outside": torch.cuda.current_device(),
        "allocated": torch.cuda.memory_allocated() > 0,
        "memory": torch.cuda.get_device_properties(0).total_memory,
        "generators": isinstance(torch.default_generator, torch.Generator),
        "ranges": torch.cuda.nvtx.range_push("a") == torch.cuda.nvtx.range_pop(),
    }


def mixed_precision() -> dict[str, Any]:
    """Autocast and a gradient scaler, by their old and new names."""
    layer = nn.Linear(4, 4).cuda()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    before = layer.weight.detach().cpu()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer(torch.ones(2, 4, device="cuda"))
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = not torch.equal(before, layer.weight.detach().cpu())
    return {"dtype": str(out.dtype), "moved": moved, "scaled": scaler.is_enabled()}


def checkpoints() -> list[str]:
    """Where a checkpoint goes that was written on one device and is loaded to another, in all the ways to say it."""
    file = io.BytesIO()
    torch.save({"x": torch.ones(3, device="cuda:0")}, file)
    places: list[Any] = [None, "cpu", "cuda:1", torch.device("cuda:1"), {"cuda:0": "cuda:1"}]
    found = []
    for place in places:
        file.seek(0)
        found.append(str(torch.load(file, map_location=place)["x"].device))
    return found


def pinned_batches() -> list[Any]:
    data = TensorDataset(torch.arange(8.0))
    batches = [x.to("cuda", non_blocking=True) for (x,) in DataLoader(data, batch_size=4, pin_memory=True)]
    pinned = next(iter(DataLoader(data, batch_size=4, pin_memory=True)))[0].is_pinned()
    return [[b.tolist() for b in batches], pinned]


# The times of layers.


def profile(layers: dict[str, tuple[float, float]], ready: dict[str, tuple[int, float]], batch: int = 4) -> Profile:
    """A profile from seconds of forward and backward by layer, and the layer and ready time of every parameter."""
    return Profile(
        name="given",
        device="another",
        batch=batch,
        layers=tuple(
            Layer(
                name=name,
                type="Layer",
                parameter_bytes=0,
                activation_bytes=0,
                times=(LayerTime(batch=batch, forward=exactly(forward), backward=exactly(backward)),),
            )
            for name, (forward, backward) in layers.items()
        ),
        tensors=tuple(
            ParameterTensor(name=name, layer=layer, bytes=4, dtype="float32", ready=at)
            for name, (layer, at) in ready.items()
        ),
    )


def moment() -> torch.Event:
    event = torch.Event(HERE, enable_timing=True)
    event.record(torch.accelerator.current_stream(0))
    return event


class Stopwatch:
    """Runs a model's passes and takes the moments at which its stream came to them."""

    def __init__(self, model: nn.Module, given: Profile) -> None:
        self.model = model.to(HERE)
        self.times = LayerTimes(self.model, given)
        self.ready: dict[str, torch.Event] = {}
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(self._came(name))

    def _came(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.ready.__setitem__(name, moment())

    def run(self, batch: int = 4, width: int = 8) -> dict[str, Any]:
        """Seconds of forward and backward on the device's clock, of each gradient since backward began, and whether the
        host was back from forward before the device."""
        self.ready.clear()
        x = torch.ones(batch, width, device=HERE)
        torch.accelerator.synchronize()
        start = moment()
        out = self.model(x)
        middle = moment()
        ahead = not middle.query()
        out.sum().backward()
        end = moment()
        torch.accelerator.synchronize()
        return {
            "forward": start.elapsed_time(middle) / 1000,
            "backward": middle.elapsed_time(end) / 1000,
            "ready": {name: middle.elapsed_time(event) / 1000 for name, event in self.ready.items()},
            "ahead": ahead,
            "stretch": self.times.stretch(),
        }


def three_layers() -> Profile:
    return profile(
        {"0": (0.10, 0.04), "1": (0.15, 0.16), "2": (0.05, 0.10)},
        {"2.bias": (2, 0.08), "2.weight": (2, 0.10), "1.weight": (1, 0.24), "1.bias": (1, 0.26), "0.weight": (0, 0.30)},
    )


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8))


def in_a_row() -> dict[str, Any]:
    watch = Stopwatch(sequence(), three_layers())
    watch.run()
    return {"once": watch.run(), "half": watch.run(batch=2), "mismatch": watch.times.coverage.mismatch()}


def waits_for_others() -> dict[str, Any]:
    """A layer whose stream waits inside it for another one, as it waits for parameters that are on their way."""
    model = sequence()
    side = torch.Stream(HERE)

    def wait(*_: Any) -> None:
        with side:
            accelerator.occupy(0.3)
        torch.accelerator.current_stream(0).wait_stream(side)

    watch = Stopwatch(model, three_layers())
    model[1].register_forward_pre_hook(wait)  # behind the hook that takes the layer's begin
    watch.run()
    return watch.run()


def shallow() -> dict[str, Any]:
    """Backward ends in the middle, as with partial backpropagation."""
    watch = Stopwatch(sequence(), three_layers())
    watch.model[0].requires_grad_(False)  # type: ignore[index]
    return watch.run()


class Nested(nn.Module):
    """A layer with a parameter of its own around two others, one of which it calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.once, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twice(self.twice(self.once(x)) * self.scale)
        return out


def nested() -> list[float]:
    given = profile({"Nested": (0.06, 0.01), "once": (0.10, 0.01), "twice": (0.20, 0.01)}, {"scale": (0, 0.01)})
    watch = Stopwatch(Nested(), given)
    return [watch.run()["forward"] for _ in range(3)]


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.inner, x.requires_grad_(), use_reentrant=False))
        return out


def recomputed() -> dict[str, Any]:
    """A checkpoint's second forward pass is a part of backward, whose time the profile has."""
    given = profile({"inner": (0.2, 0.1), "head": (0.05, 0.05)}, {"head.weight": (1, 0.05), "inner.weight": (0, 0.15)})
    watch = Stopwatch(Recomputing(), given)
    watch.run()
    return watch.run()


def stranger() -> str:
    given = profile({"0": (0.3, 0.1), "9": (0.1, 0.1)}, {"0.weight": (0, 0.1)})
    return LayerTimes(sequence().to(HERE), given).coverage.mismatch()


def main() -> None:
    accelerator.load(devices=2, detector="raise")
    cuda_stand_in.install()
    cuda_stand_in.install()  # once more does no harm
    scenarios: list[Callable[[], Any]] = [names_of_devices, functions_of_cuda, mixed_precision, checkpoints]
    scenarios += [pinned_batches, in_a_row, waits_for_others, shallow, nested, recomputed, stranger]
    report({scenario.__name__: scenario() for scenario in scenarios})


if __name__ == "__main__":
    main()
