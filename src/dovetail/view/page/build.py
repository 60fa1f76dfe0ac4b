"""Builds the page's document from contents; with a profile and a network, also what dovetail would change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dovetail.core.errors import Error
from dovetail.core.network import Network
from dovetail.core.plan import Plan
from dovetail.core.profile import Profile
from dovetail.core.timeline import Timeline, compare
from dovetail.planning import compare as rivals
from dovetail.planning import plan as choose
from dovetail.simulate import scale, simulate
from dovetail.view import explain, palette

from . import columns, lead, sections
from .contents import Contents
from .document import Bar, Document, DrawnTimeline, FabricSection, Lead, PlanSection, ScalingSection
from .fabric import fabric
from .reports import ScaleEntry, ScaleReport

EMPTY = {
    "timelines": "No timeline among the files. `dovetail simulate plan.json -o predicted.json` predicts one; "
    "training with dovetail records one. Given both, they are drawn on one axis and compared.",
    "plans": "No plan, and no profile with a network to make one from. `dovetail plan job.json net.json` writes "
    "plan.json; or give job.json and a network.",
    "profiles": "No profile. `dovetail profile SCRIPT -o job.json` measures a model layer by layer.",
    "networks": "No network. `dovetail network -o net.json` measures one; `dovetail network --preset 10gbe-16 -o "
    "net.json` takes known figures.",
    "scaling": "No scaling study. `dovetail scale job.json --network 10gbe-16 --json > scale.json` predicts one.",
    "bursts": "No burst plan. `dovetail plan job.json net.json --burst --json > burst.json` compares how many devices "
    "each layer could get.",
    "cluster": "No schedule. `dovetail schedule --json > study.json` simulates a cluster under a trace of jobs; a "
    "schedule file shows who ran where.",
    "fabrics": "No fabric. `dovetail fabric status --json > fabric.json` tells the state of one that is up; "
    "`dovetail fabric trace A B --json > path.json` adds a path.",
}
THEIRS = "torch's default"
SCALED = ("optimal", "ddp", "single", "per-tensor")
WORKERS = tuple(2**i for i in range(1, 10))
"""Numbers of workers in the scaling curves that the page makes itself."""
MOST_TENSORS = 600
"""Above so many, curves are left to `dovetail scale`: a page should open at once."""


@dataclass(frozen=True)
class PredictedPlan:
    """A plan beside torch's default, both predicted: what dovetail would change."""

    profile: Profile
    network: Network
    chosen: Plan
    compared: list[Plan]

    @property
    def default(self) -> Plan | None:
        return next((p for p in self.compared if p.policy == "ddp" and p.overlap == "backward"), None)

    def predicted(self, plan: Plan) -> Timeline:
        return simulate(plan, self.profile, self.network)

    def bars(self, label: str) -> tuple[Bar | None, Bar | None]:
        """torch's default, where the plan is another, and the plan."""
        if self.default and (self.chosen.policy, self.chosen.overlap) == ("ddp", "backward"):
            return None, lead.bar(self.predicted(self.chosen), THEIRS)
        default = lead.bar(self.predicted(self.default), THEIRS) if self.default else None
        return default, lead.bar(self.predicted(self.chosen), label)


def document(contents: Contents, *, live: bool = False) -> Document:
    notes: list[str] = []
    settings = list(_settings(contents, notes))
    planned = [_planned(s) for s in settings]
    made_from = {id(s.chosen) for s in settings}
    planned += [
        sections.planned(p, [p], (), (), _WITHOUT.format(p.profile, p.network))
        for p in contents.plans
        if id(p) not in made_from
    ]
    both = _pair(contents.timelines)
    scaling = [sections.scaling(r) for r in contents.scale_reports] or _scaled(settings, notes)
    schedules = [*contents.clusters, *map(columns.shared, contents.schedules)]
    studies, fabrics = [*map(sections.study, contents.studies)], [*_fabrics(contents)]
    bursts = [*map(sections.burst_report, contents.burst_reports), *map(sections.burst_plan, contents.bursts)]
    others = [x.sentence for x in schedules] + [x.sentence for x in scaling] + [x.sentence for x in fabrics]
    others += [x for b in bursts for x in b.sentences[:1]]
    others += [f"{x.title}. {x.sentence}" for x in studies]
    return Document(
        title=_title(contents),
        files=contents.files,
        live=live,
        lead=_lead(contents, settings, others),
        timelines=tuple(map(columns.drawn, contents.timelines)),
        compared=sections.kinds(compare(*both)) if both else None,
        plans=tuple(planned),
        depths=tuple(map(sections.depths, contents.depths)),
        profiles=tuple(map(sections.layers, contents.profiles)),
        networks=tuple(map(sections.wires, contents.networks)),
        scaling=tuple(scaling),
        bursts=tuple(bursts),
        schedules=tuple(schedules),
        studies=tuple(studies),
        fabrics=tuple(fabrics),
        empty={kind: how for kind, how in EMPTY.items() if not contents.only or kind in contents.only},
        notes=tuple(dict.fromkeys(notes)),
        series=palette.SERIES,
        colors={kind: look.color for kind, look in palette.LOOKS.items()},
    )


_WITHOUT = "Nothing to draw it against: the profile {!r} and the network {!r} it was made from are not here."


def _settings(contents: Contents, notes: list[str]) -> Iterable[PredictedPlan]:
    """Every plan that can be predicted again; without plans, the one dovetail would choose."""
    profiles: dict[str, Profile] = {}
    networks: dict[str, Network] = {}
    for thing in (*contents.profiles, *contents.networks, *contents.beside):
        if isinstance(thing, Profile):
            profiles.setdefault(thing.name, thing)
        else:
            networks.setdefault(thing.name, thing)
    for plan in contents.plans:
        job, net = profiles.get(plan.profile), networks.get(plan.network)
        if job is None or net is None:
            continue
        try:
            yield _setting(job, net, plan)
        except Error as e:
            notes.append(str(e))
    if not contents.plans and contents.profiles and contents.networks:
        job, net = contents.profiles[0], contents.networks[0]
        try:
            yield _setting(job, net, choose(job, net))
        except Error as e:
            notes.append(str(e))


def _setting(job: Profile, net: Network, plan: Plan) -> PredictedPlan:
    simulate(plan, job, net)  # refuses a plan that is not for this profile
    known = "all_reduce" in net.collectives
    compared = rivals(
        job, net, workers=plan.workers, batch=plan.batch, overlap=plan.overlap, optimizer=plan.prediction.optimizer
    )
    if plan.overlap == "forward" and known:
        compared.append(choose(job, net, workers=plan.workers, batch=plan.batch, policy="ddp"))
    return PredictedPlan(job, net, plan, compared)


def _planned(s: PredictedPlan) -> PlanSection:
    pictures: list[DrawnTimeline] = [columns.drawn(s.predicted(s.chosen))]
    default = s.default
    if default is not None and (default.policy, default.overlap) != (s.chosen.policy, s.chosen.overlap):
        pictures.insert(0, columns.drawn(s.predicted(default)))
    return sections.planned(s.chosen, s.compared, explain.explain(s.chosen, s.compared, s.network), pictures, "")


def _scaled(settings: Sequence[PredictedPlan], notes: list[str]) -> list[ScalingSection]:
    if not settings or "all_reduce" not in settings[0].network.collectives:
        return []
    job, net = settings[0].profile, settings[0].network
    if len(job.tensors) > MOST_TENSORS:
        notes.append(f"{job.name} has {len(job.tensors):,} tensors: `dovetail scale` makes its scaling curves.")
        return []
    points = tuple(
        ScaleEntry(workers=p.workers, policy=p.policy, iteration=p.iteration, speedup=p.speedup)
        for p in scale(job, net, workers=WORKERS, policies=SCALED)
    )
    return [sections.scaling(ScaleReport(profile=job.name, network=net.name, batch=job.batch, points=points))]


def _pair(timelines: Sequence[Timeline]) -> tuple[Timeline, Timeline] | None:
    """A prediction and what happened: of the same name where there are such, or else the first of each."""
    predicted, measured = ([t for t in timelines if t.source == s] for s in ("predicted", "measured"))
    pairs = [(p, m) for p in predicted for m in measured]
    return next((pair for pair in pairs if pair[0].name == pair[1].name), pairs[0] if pairs else None)


def _lead(contents: Contents, settings: Sequence[PredictedPlan], others: Sequence[str]) -> Lead:
    """What was measured comes first; then torch's default beside the plan; or else what else is known of the time.

    Where two ways of training were measured they speak for themselves, and only what did not run is predicted.
    `others` are sentences about what is not the time of an iteration, for contents that say nothing of that.
    """
    measured = [b for t in contents.timelines if t.source == "measured" and (b := lead.bar(t, t.name))]
    default = plan = None
    for s in settings[:1]:
        default, plan = s.bars(f"dovetail's plan ({s.chosen.policy})")
    bars = [*measured, *(b for b in (default, plan) if b)]
    if len(measured) > 1:
        default, plan, bars = measured[0], measured[1], measured
    notes = [*(loss for t in contents.timelines for loss in lead.losses(t)), *contents.notes]
    for s in settings[1:]:
        if s.chosen.overlap == "forward":
            theirs, ours = s.bars('dovetail with overlap="forward"')
            if measured:  # like beside like: a prediction among measured bars would look better than it is
                theirs = settings[0].bars(f"dovetail's plan ({settings[0].chosen.policy})")[1]
            elif ours:
                bars.append(ours)
            notes += [lead.against(theirs, ours)] if theirs and ours else []
    if not settings:
        predicted = [t for t in contents.timelines if t.source == "predicted"]
        bars += [b for t in predicted if (b := lead.bar(t, t.name))]
    bars = bars or [lead.plan_bar(p, f"plan {p.policy}") for p in contents.plans]
    bars = bars or [lead.profile_bar(p) for p in contents.profiles]
    if not bars and others:
        return Lead(sentence=others[0], more=contents.clusters[0].more if contents.clusters else ())
    return lead.lead(_subject(contents, settings), bars, default=default, plan=plan, more=notes)


def _subject(contents: Contents, settings: Sequence[PredictedPlan]) -> str:
    """The job in as few words as there are: a timeline's name says more than is needed."""
    names = (
        [s.profile.name for s in settings] + [p.name for p in contents.profiles] + [p.profile for p in contents.plans]
    )
    return names[0] if names else _title(contents)


def _fabrics(contents: Contents) -> Iterable[FabricSection]:
    for report in contents.fabrics:
        yield fabric(report.name, report.links, report.counters, report.believed, contents.paths)


def _title(contents: Contents) -> str:
    names = [p.name for p in contents.profiles] + [t.name for t in contents.timelines]
    names += [p.profile for p in contents.plans] + [b.profile for b in contents.bursts]
    names += [d.profile for d in contents.depths]
    names += [r.profile for r in contents.scale_reports] + [s.policy for s in contents.schedules]
    names += ["cluster" for _ in contents.clusters]
    names += [r.name for r in contents.fabrics] + [r.trace.name for r in contents.studies]
    return names[0] if names else "dovetail"
