// The page: what to read first at the top, then a section for every kind of file, empty ones with a word on how to fill them.

import type { ComponentChildren } from "preact";
import type { Document } from "./document";
import { useHash, useLive } from "./live";
import { Section } from "./parts";
import { Compared, Depth, Network, Plan, Profile, Scale } from "./sections/job";
import { Lead } from "./sections/lead";
import { Burst, Fabric, Schedule, Study } from "./sections/cluster";
import { type Choice, useTheme } from "./theme";
import { Timeline } from "./timeline/view";

const INTROS: Record<string, string> = {
  timelines: "One iteration: a row for each device and each link, time runs to the right. Low orange " +
    "bars are gradients that travel meanwhile; tall red ones are what devices wait for.",
  plan: "What dovetail would change: where the stream of gradients is cut into messages, called buckets. Many small ones " +
    "pay for starting many times; one large one cannot start before the last gradient is there. In between is a best cut.",
  profile: "What one device computes in an iteration, layer by layer.",
  network: "What it costs to exchange gradients, by their size.",
  scaling: "The speed-up on more workers, each with the same local batch. The dashed line would be perfect; optimal " +
    "is the best cut, ddp torch's default, single everything in one message, per-tensor a message for every tensor.",
  burst: "How many devices each layer gets. Layers that do not get faster on many may run on few: the others are free.",
  cluster: "Which job uses which device when. A bar is one task: one worker's part of one iteration of a job. Jobs take turns. " +
    "Where tasks were not recorded, a bar is a lease: the job has the device.",
  fabric: "Switches and links, those that have failed, and the paths that packets take.",
};

export function App({ first }: { first: Document }) {
  const { document: d, heard, silent } = useLive(first);
  const parts = sections(d);
  const asked = useHash().match(/^#job-(\d+)$/)?.[1];
  const known = d.schedules.some((s) => s.live.some((j) => String(j.number) === asked));
  return (
    <>
      <a class="skip" href="#lead">Skip to the content</a>
      <header>
        <p class="brand">dovetail<span>{d.title}</span>{d.live && (
          <span class={silent ? "stopped" : "now"}>{silent ? "not live" : "live"}{heard && `, ${heard}`}</span>
        )}</p>
        <nav aria-label="Sections">
          <ul>{parts.map((p) => <li><a href={`#${p.id}`} class={p.full ? "" : "none"}>{p.name}</a></li>)}</ul>
        </nav>
        <ThemeSwitch />
      </header>
      <main>
        {silent && <p class="empty gone" role="alert">{silent} This page shows what it said
          {heard ? ` at ${heard}` : " when it was opened"}, and goes on asking.</p>}
        {asked && !known && <p class="empty" role="alert">There is no job {asked} among those shown: it may be an older
          one, or of another cluster. <code>dovetail cluster why {asked}</code> knows more.</p>}
        <Lead lead={d.lead} />
        {d.notes.length > 0 && <ul class="notes">{d.notes.map((n) => <li>{n}</li>)}</ul>}
        {parts.filter((p) => p.full).map((p) => p.view)}
        {parts.some((p) => !p.full) && <p class="rest">Not shown, because nothing given holds it:</p>}
        {parts.filter((p) => !p.full).map((p) => p.view)}
      </main>
      <footer>
        <p>{d.files.length ? `Made by dovetail from ${d.files.join(", ")}.` : "Made by dovetail."}{" "}
          “Predicted” did not run; “emulated” ran on devices or links that are slowed down on purpose. This page asks
          nobody for anything{d.live ? " but the dovetail that serves it" : ""}.</p>
      </footer>
    </>
  );
}

function sections(d: Document) {
  const part = (id: string, name: string, full: boolean, body: () => ComponentChildren, empty: string) =>
    ({ id, name, full, empty: d.empty[empty], view: <Section key={id} id={id} title={name} intro={INTROS[id]} empty={full ? undefined : d.empty[empty]}>{full && body()}</Section> });
  return [
    part("timelines", "Timeline", d.timelines.length > 0, () => (
      <>
        <Timeline drawn={d.timelines} what={d.timelines.map((t) => t.source).join(" and ") + " timeline"} />
        {d.compared && <Compared kinds={d.compared} />}
      </>
    ), "timelines"),
    part("plan", "Plan", d.plans.length + d.depths.length > 0, () => (
      <>{d.plans.map((p) => <Plan plan={p} />)}{d.depths.map((p) => <Depth depths={p} />)}</>
    ), "plans"),
    part("profile", "Profile", d.profiles.length > 0, () => d.profiles.map((p) => <Profile layers={p} />), "profiles"),
    part("network", "Network", d.networks.length > 0, () => d.networks.map((n) => <Network network={n} />), "networks"),
    part("scaling", "Scaling", d.scaling.length > 0, () =>
      d.scaling.map((s) => <Scale scaling={s} colors={d.series} />), "scaling"),
    part("burst", "Burst", d.bursts.length > 0, () => d.bursts.map((b) => <Burst burst={b} />), "bursts"),
    part("cluster", "Cluster", d.schedules.length + d.studies.length > 0, () => (
      <>{d.schedules.map((s) => <Schedule shared={s} told={d.lead.sentence === s.sentence} />)}{d.studies.map((s) => <Study study={s} colors={d.series} />)}</>
    ), "cluster"),
    part("fabric", "Fabric", d.fabrics.length > 0, () => d.fabrics.map((f) => <Fabric fabric={f} />), "fabrics"),
  ].filter((p) => p.full || p.empty);
}

function ThemeSwitch() {
  const [choice, set] = useTheme();
  return (
    <label class="theme">
      <span>Colours</span>
      <select value={choice} onChange={(e) => set(e.currentTarget.value as Choice)}>
        <option value="auto">as the system</option>
        <option value="light">light</option>
        <option value="dark">dark</option>
      </select>
    </label>
  );
}
