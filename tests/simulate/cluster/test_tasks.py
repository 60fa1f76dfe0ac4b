"""The task level: what must hold of every schedule, and the closed forms."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.job import Job, JobPhase, Stage, ladder
from dovetail.planning.sharing.pack import ClusterSize
from dovetail.planning.sharing.policies import POLICIES, policy
from dovetail.planning.sharing.priority import Standing
from dovetail.simulate.cluster import EXACT, ClusterOutcome, Overheads, report, simulate
from dovetail.simulate.cluster.report import lower_bounds, saturated_bound
from dovetail.simulate.cluster.run import Level
from dovetail.simulate.cluster.tasks import NOISE, TaskEngine

from .cluster_jobs import SMALL, jobs

ROOMY = ClusterSize(devices=8, node=8, device_bytes=2**40)


def one(
    name: str, *, workers: int = 1, iterations: int = 1, f: float = 1.0, b: float = 0.0, s: float = 0.0, **kw: object
) -> Job:
    phase = JobPhase(iterations=iterations, workers=workers, depths=kw.pop("depths", ()))  # type: ignore[arg-type]
    return Job(name=name, phases=(phase,), forward=f, backward=b, off_device=s, **kw)  # type: ignore[arg-type]


def check_invariants(outcome: ClusterOutcome, cluster: ClusterSize) -> None:
    schedule = outcome.schedule()
    schedule.check()  # no device runs two tasks
    by_name = {j.name: j for j in outcome.jobs}
    leases = defaultdict(list)
    for lease in schedule.leases:
        leases[lease.job].append(lease)
    for task in schedule.tasks:
        assert task.start >= by_name[task.job].arrival - 1e-9
        assert any(
            task.device in lease.devices and lease.start - 1e-6 <= task.start and task.stop <= lease.stop + 1e-6
            for lease in leases[task.job]
        ), f"{task} runs where its job has no lease"
    # Memory: persistent bytes of everyone with a lease, and the largest ephemeral demand among them.
    for device in range(cluster.devices):
        here = [lease for lease in schedule.leases if device in lease.devices]
        for moment in {lease.start for lease in here}:
            held = {lease.job for lease in here if lease.start <= moment < lease.stop - 1e-9}
            if not outcome.policy.shares:
                assert len(held) <= 1, "a gang shares a device"
            if held:
                persistent = sum(by_name[n].persistent_bytes for n in held)
                assert persistent + max(by_name[n].ephemeral_bytes for n in held) <= cluster.device_bytes
    # Barriers: no iteration before the one before it has ended and its time off the devices has passed.
    rounds: dict[str, dict[tuple[int, int], list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for task in schedule.tasks:
        rounds[task.job][task.iteration, task.stage].append((task.start, task.stop))
    for name, job in by_name.items():
        stages = len(job.stages) or 1
        ran = sorted(rounds[name])
        assert [r for r in ran if r[1] == 0] == [(i, 0) for i in range(len(ran) // stages)]
        for earlier, later in pairwise(ran):
            ended = max(stop for _, stop in rounds[name][earlier])
            pause = job.off_device if later[1] == 0 else 0.0
            assert min(start for start, _ in rounds[name][later]) >= ended + pause - 1e-6
        work = sum(p.iterations * p.workers for p in job.phases)
        if not job.stages:  # elastic or not, every worker's share of every iteration was done, up to one iteration
            tasks = sum(len(rounds[name][r]) for r in ran)
            assert work <= tasks < work + max(p.workers for p in job.phases) * len(job.phases)
        else:
            wanted = [(i, s) for i in range(job.iterations) for s in range(stages)]
            assert ran == wanted
            assert all(len(rounds[name][i, s]) == job.stages[s].workers for i, s in wanted)
    ran_once = {(t.job, t.iteration, t.stage, t.worker) for t in schedule.tasks}
    assert len(ran_once) == len(schedule.tasks), "a worker's task ran twice"


@pytest.mark.parametrize("name", POLICIES)
@given(workload=jobs(), jitter=st.sampled_from([0.0, 0.1]), guard=st.sampled_from(["off", "background", "all"]))
@settings(max_examples=100)
def test_every_policy_keeps_the_invariants(name: str, workload: list[Job], jitter: float, guard: str) -> None:
    chosen = policy(name)
    if chosen.shares:
        chosen = replace(chosen, rules=replace(chosen.rules, guard=guard))  # type: ignore[arg-type]
    chosen = replace(chosen, quantum=chosen.quantum / 60)
    if chosen.partition:  # two parts of three devices, so no job may be wider
        workload = [j for j in workload if max(p.workers for p in j.phases) <= 3]
        if not workload:
            return
    overheads = Overheads(jitter=jitter, switch=0.01, restart=0.1, move=0.05)
    outcome = simulate(workload, SMALL, chosen, level="task", overheads=overheads, record=True)
    check_invariants(outcome, SMALL)
    if not jitter:
        limit = lower_bounds(workload, SMALL.devices)
        assert outcome.makespan >= limit.makespan - 1e-6
        completion = sum(outcome.finish) / len(workload) - sum(j.arrival for j in workload) / len(workload)
        assert completion >= limit.completion - 1e-6


@pytest.mark.parametrize("name", ["jigsaw", "gang-fifo-backfill", "gang-srsf", "tiresias-las"])
@given(workload=jobs())
@settings(max_examples=100)
def test_the_fluid_level_finishes_the_same_jobs_and_respects_the_bounds(name: str, workload: list[Job]) -> None:
    chosen = policy(name)
    outcome = simulate(workload, SMALL, chosen, level="fluid", overheads=EXACT)
    assert all(outcome.finish < float("inf"))
    assert all(f >= j.arrival for f, j in zip(outcome.finish, outcome.jobs, strict=True))
    limit = lower_bounds(workload, SMALL.devices)
    assert outcome.makespan >= limit.critical_path - 1e-6
    # Rates of jobs that share are measured over a few iterations: what they add up to is a little rough.
    assert outcome.makespan >= limit.area * (0.9 if chosen.shares else 1.0) - 1e-6


@given(k=st.integers(1, 8), f=st.integers(1, 64), b=st.integers(1, 64))
def test_two_equal_ladders_pack_perfectly(k: int, f: int, b: int) -> None:
    """Every device carries 2f + b(k+1)/k: where the first job leaves early, the second's deepest task starts."""
    pair = [one(n, workers=k, f=f, b=b, depths=ladder(k)) for n in ("first", "second")]
    outcome = simulate(pair, replace(ROOMY, devices=k), policy("jigsaw"), level="task", overheads=EXACT, record=True)
    carried: dict[int, float] = defaultdict(float)
    for task in outcome.tasks:
        carried[task.device] += task.stop - task.start
    expected = 2 * f + b * (k + 1) / k
    assert carried == pytest.approx(dict.fromkeys(range(k), expected))
    assert outcome.makespan == pytest.approx(expected)


@given(p=st.tuples(st.integers(1, 20), st.integers(1, 20)), s=st.integers(0, 30))
def test_two_residents_hide_their_time_off_iff_it_fits_the_others_task(p: tuple[int, int], s: int) -> None:
    pair = [one(str(i), iterations=40, f=float(p[i]), s=float(s)) for i in (0, 1)]
    outcome = simulate(
        pair, replace(ROOMY, devices=1), policy("jigsaw", duty_cap=9), level="task", overheads=EXACT, record=True
    )
    # While both are there: the device idles between two tasks, or it never does.
    both = sorted((t.start, t.stop) for t in outcome.tasks if t.stop <= min(outcome.finish) - s)
    idle = any(later[0] > earlier[1] + 1e-9 for earlier, later in pairwise(both[4:]))
    assert idle == (s > min(p))


@given(workload=jobs(most=1))
def test_a_job_alone_takes_the_sum_of_its_periods(workload: list[Job]) -> None:
    for name in ("gang-fifo", "jigsaw"):
        outcome = simulate(workload, SMALL, policy(name), level="task", overheads=EXACT)
        if all(len(j.phases) == 1 for j in workload):
            assert outcome.finish[0] == pytest.approx(workload[0].arrival + workload[0].alone())


@given(data=st.data(), devices=st.integers(1, 4))
def test_list_scheduling_stays_below_area_plus_path(data: st.DataObject, devices: int) -> None:
    """Work-conserving, no time off the device: makespan ≤ area + (1 − 1/G)·path, so within 2 − 1/G of the optimum."""
    times = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
    batch = [
        one(str(i), workers=devices, iterations=3, f=f, b=b, depths=ladder(devices)) for i, (f, b) in enumerate(times)
    ]
    chosen = policy("jigsaw", duty_cap=99, max_residents=99)
    outcome = simulate(batch, replace(ROOMY, devices=devices), chosen, level="task", overheads=EXACT)
    limit = lower_bounds(batch, devices)
    assert outcome.makespan <= limit.area + (1 - 1 / devices) * limit.critical_path + 1e-6


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("off", [0.0, 0.15, 0.3])
def test_saturated_homogeneous_jobs_come_within_three_percent_of_the_bound(k: int, off: float) -> None:
    """With the policy's defaults, while there is a queue; in fair turns to the very end, as no job is left alone."""
    f, b = 1.0, 2.0
    cluster = replace(ROOMY, devices=16)
    s = off * (f + b)
    batch = [one(str(i), workers=k, iterations=60, f=f, b=b, s=s, depths=ladder(k)) for i in range(6 * 16 // k)]
    assert saturated_bound(batch[0]) == pytest.approx((f + b + s) / (f + b * (k + 1) / (2 * k)))
    noisy = Overheads(jitter=0.03, switch=0.0)
    reached = report(simulate(batch, cluster, policy("jigsaw"), level="task", overheads=noisy)).throughput
    assert reached >= 0.97 * saturated_bound(batch[0])
    few = batch[: 3 * 16 // k]
    fair = simulate(few, cluster, policy("jigsaw-las", duty_cap=9), level="task", overheads=noisy)
    assert sum(j.gang_work for j in few) / (16 * fair.makespan) >= 0.97 * saturated_bound(batch[0])


def test_background_jobs_fill_the_gaps_of_a_burst_job_and_do_not_slow_it() -> None:
    stages = (Stage(seconds=1.0, workers=4), Stage(seconds=2.0, workers=1))
    burst = Job(name="burst", phases=(JobPhase(iterations=20, workers=4),), stages=stages)
    background = [one(f"background {i}", iterations=100, f=0.9, background=True) for i in range(4)]
    cluster = replace(ROOMY, devices=4)
    chosen = policy("jigsaw", duty_cap=3)
    outcome = simulate([burst, *background], cluster, chosen, level="task", overheads=EXACT, record=True)
    finish = dict(zip([j.name for j in outcome.jobs], outcome.finish, strict=True))
    assert finish["burst"] == pytest.approx(burst.alone())
    before = [t for t in outcome.tasks if t.job != "burst" and t.stop <= finish["burst"]]
    assert len(before) >= 2 * 3 * 19, "two background tasks of 0.9 s fit each gap of 2 s on three devices"
    unguarded = replace(chosen, rules=replace(chosen.rules, guard="off"))
    slowed = simulate([burst, *background], cluster, unguarded, level="task", overheads=EXACT)
    assert slowed.finish[0] > burst.alone() + 1


@pytest.mark.parametrize("level", ["task", "fluid"])
def test_with_a_reservation_a_wide_job_is_not_kept_waiting_by_smaller_ones(level: Level) -> None:
    """Three devices are held until 10. The wide job waits for them; one short job and no long one may pass."""
    held = one("held", workers=3, iterations=10)
    wide = one("wide", workers=4, iterations=5, arrival=1.0)
    long = [one(f"long {i}", iterations=20, arrival=2.0) for i in range(3)]
    short = one("short", iterations=6, arrival=3.0)
    cluster = replace(ROOMY, devices=4)
    outcome = simulate(
        [held, wide, *long, short], cluster, policy("gang-easy-backfill"), level=level, overheads=EXACT, record=True
    )
    start = dict(zip([j.name for j in outcome.jobs], outcome.start, strict=True))
    assert start["wide"] == pytest.approx(10.0) and start["short"] == pytest.approx(3.0)
    assert min(start[j.name] for j in long) == pytest.approx(15.0)
    passed = simulate([held, wide, *long, short], cluster, policy("gang-fifo-backfill"), level=level, overheads=EXACT)
    assert passed.start[1] > 20, "without one, the long ones pass"


def test_the_guard_s_predictions_follow_the_measured_durations() -> None:
    """All tasks take 1.5 times what their profiles say: gaps of 3 s and background tasks of 1.35 s, two to a gap."""
    engine = TaskEngine(2, policy("jigsaw"), Overheads(jitter=0.1, switch=0.0))
    engine.noise = (1.5,) * NOISE
    stages = (Stage(seconds=1.0, workers=2), Stage(seconds=2.0, workers=1))
    burst = Job(name="burst", phases=(JobPhase(iterations=40, workers=2),), stages=stages)
    background = one("background", iterations=1000, f=0.9, background=True)
    for i, (job, devices) in enumerate(((burst, (0, 1)), (background, (1,)))):
        standing = Standing(serial=i, arrival=0.0, total=1000, shape=job.shape(), background=job.background)
        engine.start(standing, job.shape(), devices, until=float("inf"))
    engine.run(40 * 4.5 + 0.1)
    assert engine.active[0].standing.rounds == 40, "the burst job is never in anybody's way"
    assert engine.active[1].standing.rounds >= 2 * 35, "by the profile alone only one fits: 1.35 + 0.9 is above 2"


def test_a_job_does_not_wait_for_background_jobs() -> None:
    background = [one(f"background {i}", iterations=200, background=True) for i in range(2)]
    late = one("late", iterations=20, arrival=50.5)
    outcome = simulate([*background, late], replace(ROOMY, devices=1), policy("jigsaw"), level="task", overheads=EXACT)
    assert outcome.start[2] == 50.5
    assert outcome.finish[2] == pytest.approx(71.0), "after the task that was running"


def test_an_elastic_job_gives_workers_to_a_waiting_job_and_takes_them_back() -> None:
    elastic = Job(name="elastic", phases=(JobPhase(iterations=40, workers=4, min_workers=2),), forward=1.0)
    rigid = one("rigid", workers=2, iterations=5, arrival=3.5)
    chosen = policy("jigsaw", duty_cap=1.0)
    outcome = simulate([elastic, rigid], replace(ROOMY, devices=4), chosen, level="task", overheads=EXACT, record=True)
    widths = [len(lease.devices) for lease in outcome.schedule().leases if lease.job == "elastic"]
    assert max(widths) == 4 and min(widths) == 2 and widths[-1] == 4
    assert outcome.start[1] <= 5.0 < elastic.alone()
    # Two workers were away for five iterations: ten worker-iterations later than alone, in steps of four.
    assert 40 < outcome.finish[0] <= 44


def test_a_phase_with_fewer_workers_frees_its_devices() -> None:
    late = Job(name="late", phases=(JobPhase(iterations=5, workers=4), JobPhase(iterations=5, workers=2)), forward=1.0)
    waiting = one("waiting", workers=2, iterations=1)
    outcome = simulate([late, waiting], replace(ROOMY, devices=4), policy("gang-fifo"), level="task", overheads=EXACT)
    assert outcome.start[1] == pytest.approx(5.0)
    assert outcome.finish[0] == pytest.approx(10.0)


@pytest.mark.parametrize("level", ["task", "fluid"])
def test_time_slices_alternate(level: Level) -> None:
    pair = [one(n, iterations=300) for n in ("first", "second")]
    outcome = simulate(pair, replace(ROOMY, devices=1), policy("gandiva-timeslice"), level=level, overheads=EXACT)
    leases = outcome.schedule().leases
    assert [lease.job for lease in leases[:8]] == ["first", "second"] * 4
    assert all(50 <= lease.stop - lease.start <= 62 for lease in leases[:8])
    assert abs(outcome.finish[0] - outcome.finish[1]) <= 62 and outcome.makespan == pytest.approx(600.0)


@pytest.mark.parametrize("level", ["task", "fluid"])
def test_least_attained_service_lets_a_short_job_pass_a_long_one(level: Level) -> None:
    """Also where the long one hardly uses the devices that it holds."""
    for device in (1.0, 0.05):
        long = one("long", iterations=400, f=device, s=1.0 - device)
        short = one("short", iterations=20, arrival=100.0)
        for chosen in (policy("tiresias-las"), replace(policy("tiresias-las"), thresholds=(50.0,))):
            outcome = simulate([long, short], replace(ROOMY, devices=1), chosen, level=level, overheads=EXACT)
            assert outcome.finish[1] <= 122.0


def test_a_gang_that_cannot_be_widened_again_starts_at_full_width() -> None:
    rigid = one("rigid", workers=3, iterations=5)
    elastic = Job(name="elastic", phases=(JobPhase(iterations=9, workers=4, min_workers=1),), forward=1.0)
    cluster = replace(ROOMY, devices=4)
    outcome = simulate([rigid, elastic], cluster, policy("gang-fifo-backfill"), level="task", overheads=EXACT)
    assert outcome.start[1] == pytest.approx(5.0) and outcome.finish[1] == pytest.approx(14.0)


@pytest.mark.parametrize("level", ["task", "fluid"])
def test_workers_on_one_device_take_turns(level: Level) -> None:
    """A phase of sixteen workers begins while every other device is held."""
    grows = Job(
        name="grows", phases=(JobPhase(iterations=1, workers=1), JobPhase(iterations=5, workers=16)), forward=1.0
    )
    others = [one(str(i), iterations=1000) for i in range(15)]
    cluster = replace(ROOMY, devices=16)
    outcome = simulate([grows, *others], cluster, policy("gang-fifo"), level=level, overheads=EXACT)
    assert outcome.finish[0] == pytest.approx(1 + 5 * 16)
