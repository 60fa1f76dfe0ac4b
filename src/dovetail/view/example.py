"""A small made-up job, for `python -m dovetail.view.timeline` and for tests."""

from __future__ import annotations

from dovetail.core.network import Collective, CostSample, Fit, Network
from dovetail.core.profile import Layer, LayerTime, ParameterTensor, Profile, Quantiles
from dovetail.core.timeline import Span, SpanKind, Timeline

KIB = 1024


def profile(*, layers: int = 8, name: str = "example") -> Profile:
    """Equal layers: 2 ms forward, 4 ms backward, 1 MiB of weights, 4 KiB of biases each, at a local batch of 32."""
    numbers = range(layers)
    return Profile(
        name=name,
        device="a made-up device",
        emulated=True,
        batch=32,
        layers=tuple(
            Layer(
                name=f"block{i}",
                type="Linear",
                parameter_bytes=1028 * KIB,
                activation_bytes=4 * KIB,
                times=tuple(
                    LayerTime(batch=b, forward=_spread(0.002 * b / 32), backward=_spread(0.004 * b / 32))
                    for b in (16, 32)
                ),
            )
            for i in numbers
        ),
        tensors=tuple(
            ParameterTensor(
                name=f"block{i}.{part}", layer=i, bytes=size * KIB, dtype="float32", ready=0.004 * (layers - i)
            )
            for i in reversed(numbers)
            for part, size in (("bias", 4), ("weight", 1024))
        ),
    )


def network(*, name: str = "made-up") -> Network:
    """Four ranks: 0.5 ms and 1 GB/s, with a table that agrees to a few per cent."""
    samples = tuple(
        CostSample(bytes=size, seconds=_spread(0.0005 + size * 1e-9 * (1.04 if i % 2 else 0.97)))
        for i, size in enumerate(KIB * 4**k for k in range(8))
    )
    fit = Fit(latency=0.0005, seconds_per_byte=1e-9, error=0.02)
    return Network(
        name=name,
        ranks=4,
        source="made up",
        measured=True,
        emulated=True,
        collectives={"all_reduce": Collective(fit=fit, samples=samples)},
    )


def _spread(seconds: float) -> Quantiles:
    return Quantiles(median=seconds, low=0.9 * seconds, high=1.2 * seconds, samples=20)


def timelines() -> tuple[Timeline, Timeline]:
    """The same plan predicted and measured: two ranks, four layers, two buckets."""
    return _iteration("predicted", 1.0), _iteration("measured", 1.08)


def _iteration(source: str, stretch: float) -> Timeline:
    spans: list[Span] = []
    for rank in (0, 1):
        lag = 0.001 * rank
        work: list[tuple[str, str, SpanKind, float, float, int]] = [
            ("compute", "forward", "forward", 0.0, 0.030, 0),
            ("compute", "layer 4", "backward", 0.030, 0.048, 0),
            ("compute", "layer 3", "backward", 0.048, 0.062, 0),
            ("compute", "layer 2", "backward", 0.062, 0.075, 0),
            ("compute", "layer 1", "backward", 0.075, 0.090, 0),
            ("network", "bucket 0", "communication", 0.062, 0.084, 12 << 20),
            ("network", "bucket 1", "communication", 0.092, 0.112, 9 << 20),
            ("compute", "wait", "wait", 0.092, 0.112, 0),
            ("compute", "step", "optimizer", 0.113, 0.118, 0),
        ]
        spans += [
            Span(
                track=f"rank {rank}/{track}",
                name=name,
                kind=kind,
                start=stretch * start + lag,
                stop=stretch * stop + lag,
                bytes=nbytes,
            )
            for track, name, kind, start, stop, nbytes in work
        ]
    if source == "predicted":
        return Timeline(name="example", source="predicted", spans=tuple(spans))
    return Timeline(name="example", source="measured", emulated=True, spans=tuple(spans))
