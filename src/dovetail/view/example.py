"""A small made-up iteration, for `python -m dovetail.view.timeline` and for tests."""

from __future__ import annotations

from dovetail.core.timeline import Span, SpanKind, Timeline


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
