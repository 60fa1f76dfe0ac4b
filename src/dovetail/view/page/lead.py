"""The page's first sentence and its three numbers: where the time goes, and what dovetail would change."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import LOST, Timeline
from dovetail.view import tracks, units

from .document import Bar, Lead

LITTLE = 0.02
"""A share of exposed communication below which there is nothing for a plan to win."""
TIE = 0.01


def bar(timeline: Timeline, label: str) -> Bar | None:
    """Where a timeline's time goes, on the rank whose communication is exposed longest; None where nobody computes."""
    traffic = tracks.traffic(timeline)
    if not traffic:
        return None
    kinds: dict[str, dict[str, float]] = {group: dict.fromkeys(tracks.COMPUTE, 0.0) for group in traffic}
    for s in timeline.spans:
        group = tracks.group(s.track)
        if s.kind in tracks.COMPUTE and group in kinds:
            kinds[group][s.kind] += s.duration
    slowest = max(traffic, key=lambda group: (traffic[group].exposed, sum(kinds[group].values())))
    return Bar(
        label=label,
        source=timeline.source,
        emulated=timeline.emulated,
        total=timeline.duration,
        hidden=traffic[slowest].hidden,
        exposed=traffic[slowest].exposed,
        **kinds[slowest],
    )


def losses(timeline: Timeline) -> list[str]:
    """A sentence for each loss by which a rank delays the others, the largest first."""
    lost = sorted((s for s in timeline.spans if s.name.startswith(LOST)), key=lambda s: -s.duration)
    whole = timeline.duration or 1.0
    return [
        f"{tracks.group(s.track).capitalize()} is slow: {units.seconds(s.duration)} of every {units.seconds(whole)}, "
        f"{units.percent(s.duration / whole)}, are {s.name}, and the others wait."
        for s in lost
    ]


def plan_bar(plan: Plan, label: str) -> Bar:
    """The same from a plan alone, which does not say how long its communication takes in all."""
    p = plan.prediction
    return Bar(
        label=label,
        source="predicted",
        total=p.iteration,
        forward=p.forward,
        backward=p.backward,
        optimizer=p.optimizer,
        hidden=None,
        exposed=p.exposed,
    )


def profile_bar(profile: Profile) -> Bar:
    forward, backward = profile.forward_time(), profile.backward_time()
    return Bar(
        label=f"{profile.name}, computing",
        source="measured",
        emulated=profile.emulated,
        total=forward + backward,
        forward=forward,
        backward=backward,
        optimizer=0.0,
        hidden=None,
        exposed=None,
    )


def lead(
    subject: str,
    bars: Sequence[Bar],
    *,
    default: Bar | None = None,
    plan: Bar | None = None,
    more: Sequence[str] = (),
) -> Lead:
    """`bars[0]` is how things are; `default` and `plan` are both predicted, or both measured: like beside like."""
    if not bars:
        return Lead(
            sentence=f"{subject}: nothing here tells where training time goes.",
            more=("Give a profile and a network, a plan, or a timeline: the sections below name the commands.",),
        )
    advice = []
    if bars[0].exposed is None:
        advice = ["Measure the network with `dovetail network`, or name a preset: then the page can say."]
    if default and plan:
        advice = [against(default, plan)]
    return Lead(sentence=_sentence(subject, bars[0]), more=(*advice, *more), bars=tuple(bars))


def _sentence(subject: str, now: Bar) -> str:
    how = f"{now.source}{', emulated' if now.emulated else ''}"
    text = f"Of every {units.seconds(now.total)} that {subject} trains ({how}), {units.seconds(now.compute)} "
    if now.exposed is None:
        return text + "go into computing; what communication adds is not known yet."
    share = now.exposed / now.total if now.total else 0.0
    if share < LITTLE:
        return text + f"go into computing and only {units.percent(share)} into waiting for the network."
    return (
        text
        + f"go into computing and {units.seconds(now.exposed)}, {units.percent(share)}, into waiting for the network."
    )


def against(default: Bar, plan: Bar) -> str:
    gain = default.total / plan.total if plan.total else 1.0
    sentence = (
        f"{plan.label} is {plan.source} at {units.seconds(plan.total)}, {default.label} at "
        f"{units.seconds(default.total)}"
    )
    if gain > 1 + TIE:
        shown = (plan.exposed or 0.0) < (default.exposed or 0.0)
        return f"{sentence}: {gain:.2f} times as fast" + (
            ", because less of the communication is exposed." if shown else "."
        )
    if gain < 1 - TIE:
        return f"{sentence}: slower, so keep {default.label}."
    return f"{sentence}: a tie, expect no gain."
