// Who gets which devices, and which way packets go.

import { useState } from "preact/hooks";
import { Plot, Strip } from "../charts";
import type { BurstSection, FabricSection, LiveJob, ScheduleSection, StudySection, TradeOff } from "../document";
import { AsTable, Legend, Sentences, Table, Words, useWidth } from "../parts";
import { Timeline } from "../timeline/view";
import { integer, percent, seconds, size } from "../units";

const FAMILIES = [["burst", "#0072b2"], ["data-parallel", "#d55e00"], ["other", "#009e73"]] as const;

export function Burst({ burst }: { burst: BurstSection }) {
  const title = (p: TradeOff) => `${p.name}: iteration ${seconds(p.iteration)}, ${p.amplification.toFixed(2)} times the ` +
    `device-time of one device`;
  const lines = FAMILIES.map(([family, color], shape) => ({
    name: family === "other" ? (burst.points.find((p) => p.family === family)?.name ?? family) : family, color, shape,
    marks: burst.points.filter((p) => p.family === family).sort((a, b) => a.iteration - b.iteration)
      .map((p) => ({ x: p.iteration, y: p.amplification, title: title(p), strong: p.chosen })),
  })).filter((l) => l.marks.length);
  return (
    <article>
      <h3>{burst.title}</h3>
      <Sentences lines={burst.sentences} />
      {burst.points.length > 1 && (
        <>
          <Legend items={lines.map((l) => ({ label: l.name, color: l.color }))} />
          <p class="note">Left is faster, down is cheaper; the star is the chosen plan.</p>
          <Plot what="Iteration time against device-time" lines={lines} named={false}
            x={{ label: "iteration", text: seconds, zero: true }}
            y={{ label: "device-time, times one device", text: (v) => `${v}×`, zero: true }} />
        </>
      )}
      <Strip what="Devices of every layer" label={`devices of each layer, of ${burst.devices}`} text={integer} height={120}
        stacks={burst.counts.map((c, i) => ({ title: `${burst.layers[i]}: ${c} devices`, parts: [c] }))} colors={["#0072b2"]} />
      <AsTable what="Plans">
        {() => <Table caption="Plans, predicted" rows={burst.points} marked={(p) => p.chosen} columns={[
          { name: "plan", text: (p) => (p.chosen ? `→ ${p.name}` : p.name) },
          { name: "iteration", text: (p) => seconds(p.iteration), right: true },
          { name: "device-time", text: (p) => `${p.amplification.toFixed(2)}×`, right: true },
          { name: "free devices", text: (p) => (p.free === null ? "" : p.free.toFixed(1)), right: true },
        ]} />}
      </AsTable>
      <AsTable what="Devices of every layer">
        {() => <Table caption="Devices of every layer" rows={burst.layers} columns={[
          { name: "layer", text: (name) => name },
          { name: "devices", text: (_, i) => burst.counts[i], right: true },
        ]} />}
      </AsTable>
    </article>
  );
}

export function Schedule({ shared, told }: { shared: ScheduleSection; told: boolean }) {
  return (
    <article>
      <h3>{shared.title}</h3>
      {!told && <><p><Words text={shared.sentence} /></p><Sentences lines={shared.more} /></>}
      {shared.missing ? <p class="empty"><Words text={shared.missing} /></p>
        : <Timeline drawn={[shared.drawn]} what="Who ran where" />}
      {shared.devices.length > 0 && <AsTable what="Devices">{() => <Devices shared={shared} />}</AsTable>}
      {shared.live.length > 0 && <Jobs jobs={shared.live} />}
      {shared.jobs.length > 0 && <Table caption="Jobs by device-time" rows={shared.jobs} most={50} columns={[
        { name: "job", text: (j) => <Named {...j} /> },
        { name: "first device at", text: (j) => (j.first === null ? "not yet" : seconds(j.first)), right: true },
        { name: "last ran at", text: (j) => (j.last === null ? "" : seconds(j.last)), right: true },
        { name: "devices", text: (j) => integer(j.devices), right: true },
        { name: "tasks", text: (j) => (j.tasks ? integer(j.tasks) : ""), right: true },
        { name: "device-time", text: (j) => seconds(j.device_time), right: true },
      ]} />}
    </article>
  );
}

const Named = ({ name, color }: { name: string; color: string }) => (
  <><span class="dot" style={{ background: color === "#000000" ? "var(--ink)" : color }} />{name}</>
);

/** Jobs as they are now; whatever is not known yet is said to be so. */
function Jobs({ jobs }: { jobs: LiveJob[] }) {
  return (
    <Table caption="Jobs: who runs first, then the queue in its order, then who has ended" rows={jobs} most={120}
      id={(j) => `job-${j.number}`} columns={[
        { name: "job", text: (j) => <Named {...j} /> },
        { name: "state", text: (j) => <span class={`state ${j.state}`}>{j.state}</span> },
        { name: "iterations", text: (j) => <Progress job={j} /> },
        { name: "an iteration takes", text: (j) => (j.speed ? seconds(j.speed) : ""), right: true },
        { name: "devices", text: (j) => j.devices },
        { name: "why it waits, or what sharing costs it", text: (j) => <Why job={j} /> },
      ]} />
  );
}

function Why({ job }: { job: LiveJob }) {
  const [first, ...rest] = [...(job.promise ? [job.promise] : []), ...job.why];
  const more = [...rest, `submitted ${new Date(job.submitted * 1000).toLocaleString()}`];
  return (
    <div class="wrapped">
      {first && <div><Words text={first} /></div>}
      <details>
        <summary>{rest.length ? "more" : "when"}</summary>
        {more.map((line) => <div><Words text={line} /></div>)}
      </details>
    </div>
  );
}

function Progress({ job }: { job: LiveJob }) {
  if (!job.total) return <>{job.done ? integer(job.done) : ""}</>;
  return (
    <>
      <progress value={job.done} max={job.total} aria-label={`iterations of ${job.name}`} />
      {` ${integer(job.done)} of ${integer(job.total)}`}
    </>
  );
}

const Devices = ({ shared }: { shared: ScheduleSection }) => (
  <Table caption="Devices now" rows={shared.devices} columns={[
    { name: "device", text: (d) => d.name },
    { name: "now", text: (d) => d.state },
    { name: "jobs that take turns on it", text: (d) => d.jobs },
    { name: "busy lately", text: (d) => percent(d.busy), right: true },
    { name: "memory", text: (d) => `${size(d.bytes)} of ${size(d.bytes_total)}`, right: true },
  ]} />
);

export function Study({ study, colors }: { study: StudySection; colors: string[] }) {
  const policies = [...new Set(study.outcomes.map((o) => o.policy))];
  const curves = policies.map((name, k) => ({
    name, color: colors[k % colors.length], shape: k,
    marks: study.outcomes.filter((o) => o.policy === name && o.load !== null)
      .map((o) => ({ x: o.load!, y: o.mean, title: `${name} at load ${o.load}: mean completion ${seconds(o.mean)}` })),
  })).filter((l) => l.marks.length > 1);
  return (
    <article>
      <h3>{study.title}</h3>
      <p>{study.sentence}</p>
      {curves.length > 0 && <Plot what="Mean completion by offered load" lines={curves}
        x={{ label: "offered load (1: devices full of gangs)", text: (v) => `${v}` }}
        y={{ label: "mean completion", log: true, text: seconds }} />}
      <Table caption="What each policy gives, predicted" rows={study.outcomes} columns={[
        { name: "policy", text: (o) => o.policy },
        { name: "load", text: (o) => (o.load === null ? "as it is" : o.load), right: true },
        { name: "mean completion", text: (o) => seconds(o.mean), right: true },
        { name: "queueing", text: (o) => seconds(o.queueing), right: true },
        { name: "makespan", text: (o) => seconds(o.makespan), right: true },
        { name: "devices busy", text: (o) => percent(o.busy), right: true },
      ]} />
    </article>
  );
}

const STATES: Record<string, { color: string; dash: string }> = {
  down: { color: "#d55e00", dash: "2 5" }, silent: { color: "#cc79a7", dash: "7 4" }, drained: { color: "#e69f00", dash: "9 3" },
};
const MARGIN = 60;

export function Fabric({ fabric }: { fabric: FabricSection }) {
  const [ref, width] = useWidth();
  const [chosen, choose] = useState(fabric.paths.length ? 0 : -1);
  const height = Math.min(520, Math.max(260, 120 + 14 * fabric.switches.length));
  const at = (i: number) => [MARGIN + fabric.switches[i].x * (width - 2 * MARGIN),
    26 + fabric.switches[i].y * (height - 52)] as const;
  const walk = fabric.paths[chosen]?.walk ?? [];
  const onWalk = new Set(walk.slice(1).map((b, i) => [walk[i], b].sort().join("\n")));
  const used = (a: number, b: number) => onWalk.has([fabric.switches[a].name, fabric.switches[b].name].sort().join("\n"));
  const counters = Object.entries(fabric.counters).filter(([, v]) => v);
  return (
    <article>
      <h3>{fabric.title}</h3>
      <p>{fabric.sentence}</p>
      <Legend items={[{ label: "up", color: "#8a8f98", height: 0.2 }, ...Object.entries(STATES)
        .filter(([s]) => fabric.links.some((l) => l.state === s)).map(([label, { color }]) => ({ label, color, height: 0.2 })),
        ...(fabric.paths.length ? [{ label: "the path", color: "#0072b2", height: 0.4 }] : [])]} />
      <div class="chart" ref={ref}>
        {width > 0 && (
          <svg width={width} height={height} role="img" aria-label="The fabric. The same is below as a table.">
            {fabric.links.map((l) => {
              const [[x1, y1], [x2, y2]] = [at(l.a), at(l.b)];
              const look = STATES[l.state];
              return (
                <line x1={x1} y1={y1} x2={x2} y2={y2} class={look || used(l.a, l.b) ? "" : "link"} stroke={used(l.a, l.b) ? "#0072b2" : look?.color}
                  stroke-dasharray={look?.dash} stroke-width={used(l.a, l.b) ? 5 : look ? 3 : 1.5}>
                  <title>{l.name}: {l.state}</title>
                </line>
              );
            })}
            {fabric.switches.map((s, i) => (
              <g transform={`translate(${at(i).join(" ")})`} class={walk.includes(s.name) ? "switch used" : "switch"}>
                <circle r="7" />
                <text y="-12" text-anchor="middle">{s.name}</text>
                <title>{s.believes.length ? `${s.name} heard that ${s.believes.join(", ")} failed` : s.name}</title>
              </g>
            ))}
          </svg>
        )}
      </div>
      {fabric.paths.length > 0 ? (
        <div class="paths">
          <label>Path{" "}
            <select value={chosen} onChange={(e) => choose(Number(e.currentTarget.value))}>
              {fabric.paths.map((p, i) => <option value={i}>{p.source} → {p.target}</option>)}
            </select>
          </label>
          <p aria-live="polite">{walk.length ? walk.join(" → ") : "did not arrive"} · policy {fabric.paths[chosen].policy}:{" "}
            {fabric.paths[chosen].why}</p>
        </div>
      ) : <p class="note"><Words text="No path given: `dovetail fabric trace A B --json > path.json` tells one." /></p>}
      <AsTable what="Links">
        {() => <Table caption="Links" rows={fabric.links} columns={[
          { name: "link", text: (l) => l.name },
          { name: "state", text: (l) => l.state },
        ]} />}
      </AsTable>
      {counters.length > 0 && <AsTable what="What the switches counted">
        {() => <Table caption="What the switches counted" rows={counters} columns={[
          { name: "counter", text: (c) => c[0] },
          { name: "packets", text: (c) => integer(c[1]), right: true },
        ]} />}
      </AsTable>}
    </article>
  );
}
