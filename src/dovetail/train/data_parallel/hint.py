"""What a second line in the script would gain: overlap="forward" as predicted from steps without it."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from dovetail import planning
from dovetail.core.network import Collective, Fit, Network, Sample
from dovetail.core.profile import Layer, LayerTime, Profile

from .trials import exactly


def forward_gain(profile: Profile, network: Network) -> str:
    """One sentence. Two things are not measured without that line, so they are taken as usual: forward passes through
    the layers in the reverse order of backward, in proportion; and each half of an all-reduce takes half its time."""
    now = planning.plan(profile, network, policy="optimal").prediction.iteration
    then = planning.plan(mirrored(profile), halved(network), policy="optimal", overlap="forward").prediction.iteration
    gain = 1 - then / now
    what = "communication would hide behind the next forward pass too"
    if gain < 0.01:
        return f"overlap='forward' with dovetail.optimizer: {what}, which is predicted to gain nothing here"
    return (
        f"overlap='forward' with dovetail.optimizer: {what}; predicted {then * 1e3:.1f} ms a step, {gain:.0%} less "
        f"than the {now * 1e3:.1f} ms predicted for the best buckets without"
    )


def mirrored(profile: Profile) -> Profile:
    """The same tensors, each in a layer of its own whose share of forward is its share of backward."""
    forward, ready = profile.forward_time(), [0.0, *profile.ready_times()]
    gaps = [max(0.0, b - a) for a, b in pairwise(ready)]
    whole, count = sum(gaps), len(gaps)
    shares = [gap / whole if whole else 1 / count for gap in gaps]
    layers = tuple(
        Layer(
            name=tensor.name,
            type="parameter",
            parameter_bytes=tensor.bytes,
            activation_bytes=0,
            times=(LayerTime(batch=profile.batch, forward=exactly(forward * share), backward=exactly(gap)),),
        )
        for tensor, share, gap in reversed(list(zip(profile.tensors, shares, gaps, strict=True)))
    )
    tensors = tuple(msgspec.structs.replace(t, layer=count - 1 - k) for k, t in enumerate(profile.tensors))
    return msgspec.structs.replace(profile, layers=layers, tensors=tensors, edges=())


def halved(network: Network) -> Network:
    """Reduce-scatter and all-gather as the two halves of the measured all-reduce."""
    whole = network.collectives["all_reduce"]
    fit = Fit(latency=whole.fit.latency / 2, seconds_per_byte=whole.fit.seconds_per_byte / 2, error=whole.fit.error)
    samples = tuple(Sample(bytes=s.bytes, seconds=s.seconds.scaled(0.5)) for s in whole.samples)
    half = Collective(fit=fit, samples=samples)
    return msgspec.structs.replace(
        network, collectives={**network.collectives, "reduce_scatter": half, "all_gather": half}
    )
