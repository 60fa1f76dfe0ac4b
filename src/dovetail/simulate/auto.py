"""Scores plans of every kind by their simulated timelines, and chooses among them.

    choose(profile, network, devices=64)     the best combination of techniques and devices, explained
    timeline(plan, profile, network)         one predicted iteration of any plan, as `dovetail simulate` draws it

A device of the job is busy while it computes or communicates. The rest of its time, and all of the time of devices that
the job does not use, is for background tasks, which take `task` seconds each and cannot be interrupted. Iterations
follow each other without a pause, so the last gap of one continues as the first gap of the next.
"""

from __future__ import annotations

from functools import partial

from dovetail.core.burst_plan import BurstPlan
from dovetail.core.depth_plan import DepthPlan
from dovetail.core.errors import Error
from dovetail.core.files import MOST_COUNT, MOST_SECONDS
from dovetail.core.network import Network
from dovetail.core.profile import Profile
from dovetail.core.timeline import ALL_RANKS, Timeline
from dovetail.planning.auto.options import OBJECTIVES, AnyPlan, Objective, Question, shared_out
from dovetail.planning.auto.search import AutoPlan, Score, Search
from dovetail.planning.burst.background import check_task, worth
from dovetail.planning.burst.cost import NetworkLinks

from .burst import occupancy, simulate_burst
from .depth import simulate_depth
from .iteration import simulate

Busy = tuple[int, list[tuple[float, float]]]
"""(number of devices that do the same, spans in which they are busy)."""


def choose(
    profile: Profile,
    network: Network,
    *,
    devices: int | None = None,
    batch: int | None = None,
    objective: Objective = "time",
    within: float | None = None,
    task: float = 0.0,
    statistics: bool = False,
    memory: int | None = None,
    optimizer: float = 0.0,
) -> AutoPlan:
    """The best combination for a job on a cluster.

    `devices` defaults to the network's ranks and the global `batch` to the profile's own on each of them. For
    device-time and throughput an iteration may take `within` seconds, by default what torch's DDP takes on all devices.
    """
    if objective not in OBJECTIVES:
        raise Error(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}")
    count = network.ranks if devices is None else devices
    samples = profile.batch * count if batch is None else batch
    for what, number in (("devices", count), ("batch", samples)):
        if not 1 <= number <= MOST_COUNT:
            raise Error(f"{what}: expected 1 to {MOST_COUNT:,}, got {number}")
    for what, seconds in (("within", within), ("task", task), ("optimizer", optimizer)):
        if seconds is not None and not 0 <= seconds <= MOST_SECONDS:
            raise Error(f"{what}: expected seconds, at least 0, got {seconds}")
    question = Question(
        profile=profile,
        network=network,
        devices=count,
        batch=samples,
        objective=objective,
        within=within,
        task=task,
        statistics=statistics,
        memory=memory,
        optimizer=optimizer,
    )
    return Search(question, partial(score, profile=profile, network=network, devices=count, task=task)).run()


def timeline(plan: AnyPlan, profile: Profile, network: Network) -> Timeline:
    """One predicted iteration; of a depth plan, one of its last phase."""
    if isinstance(plan, BurstPlan):
        return simulate_burst(plan, shared_out(profile), NetworkLinks(network))
    if isinstance(plan, DepthPlan):
        return simulate_depth(plan, profile, network)
    return simulate(plan, profile, network)


def score(plan: AnyPlan, *, profile: Profile, network: Network, devices: int, task: float = 0.0) -> Score:
    """Iteration, device time and time for background tasks of a plan on a cluster, by its timeline."""
    check_task(task)
    if isinstance(plan, BurstPlan):
        iteration, busy = occupancy(plan, shared_out(profile), NetworkLinks(network))
    else:
        seen = timeline(plan, profile, network)
        iteration, busy = seen.duration, _busy(plan, seen)
    used = sum(ranks for ranks, _ in busy)
    useful = (devices - used) * iteration
    for ranks, spans in busy:
        useful += ranks * sum(worth(gap, task) for gap in gap_lengths(spans, iteration))
    taken = sum(ranks * (iteration - sum(gap_lengths(spans, iteration))) for ranks, spans in busy)
    return Score(iteration=iteration, device_time=taken, useful=useful)


def _busy(plan: AnyPlan, seen: Timeline) -> list[Busy]:
    """When devices are busy. Rank 0 stands for all in data parallelism; a depth plan has a track for every worker."""
    common = [(s.start, s.stop) for s in seen.spans if s.track.startswith(f"{ALL_RANKS}/")]
    by_rank: dict[str, list[tuple[float, float]]] = {}
    for s in seen.spans:
        if s.kind not in ("wait", "idle") and s.track.startswith("rank "):
            by_rank.setdefault(s.track.partition("/")[0], []).append((s.start, s.stop))
    each = 1 if isinstance(plan, DepthPlan) else plan.workers if not isinstance(plan, BurstPlan) else 0
    return [(each, sorted([*own, *common])) for own in by_rank.values()]


def gap_lengths(busy: list[tuple[float, float]], until: float) -> list[float]:
    """Lengths of the idle gaps; the one at the end continues as the one at the beginning."""
    found: list[float] = []
    at = 0.0
    for start, stop in busy:
        if start > at:
            found.append(start - at)
        at = max(at, stop)
    last = max(0.0, until - at)
    if last and busy and busy[0][0] > 0:
        found[0] += last
    elif last:
        found.append(last)
    return found
