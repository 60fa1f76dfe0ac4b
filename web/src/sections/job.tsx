// What the job is made of, what its network costs, what to do about it, and how it scales.

import { Plot, Strip } from "../charts";
import type { ComparisonSection, DepthsSection, LayersSection, NetworkSection, PlanSection, ScalingSection } from "../document";
import { COLORS } from "../palette";
import { AsTable, Legend, Sentences, Table, Words } from "../parts";
import { Timeline } from "../timeline/view";
import { integer, percent, rate, seconds, size } from "../units";

export function Profile({ layers: p }: { layers: LayersSection }) {
  const total = p.forward.reduce((a, b) => a + b, 0) + p.backward.reduce((a, b) => a + b, 0) || 1;
  const index = p.names.map((_, i) => i);
  const title = (i: number) => `${p.names[i]} (${p.types[i]}): forward ${seconds(p.forward[i])}, backward ` +
    `${seconds(p.backward[i])}, ${size(p.parameters[i])} of parameters`;
  return (
    <article>
      <h3>{p.title}</h3>
      <p><Words text={p.sentence} /></p>
      <Legend items={[{ label: "forward", color: COLORS.forward }, { label: "backward", color: COLORS.backward },
        { label: "parameters", color: COLORS.optimizer }]} />
      <Strip what="Time of every layer" label="time of each layer, in execution order" text={seconds}
        stacks={index.map((i) => ({ title: title(i), parts: [p.forward[i], p.backward[i]] }))}
        colors={[COLORS.forward, COLORS.backward]} />
      <Strip what="Parameters of every layer" label="parameters of each layer" text={size} base={1024} height={110}
        stacks={index.map((i) => ({ title: title(i), parts: [p.parameters[i]] }))} colors={[COLORS.optimizer]} />
      <AsTable what="Layers">
        {() => <Table caption="Layers in execution order" rows={index} columns={[
          { name: "layer", text: (i) => p.names[i] },
          { name: "type", text: (i) => p.types[i] },
          { name: "forward", text: (i) => seconds(p.forward[i]), right: true },
          { name: "backward", text: (i) => seconds(p.backward[i]), right: true },
          { name: "share", text: (i) => percent((p.forward[i] + p.backward[i]) / total), right: true },
          { name: "parameters", text: (i) => size(p.parameters[i]), right: true },
          { name: "output per sample", text: (i) => size(p.activations[i]), right: true },
        ]} />}
      </AsTable>
      {p.batches.length > 1 && (
        <Table caption="Local batches that were measured" rows={p.batches} columns={[
          { name: "local batch", text: (b) => integer(b[0]), right: true },
          { name: "forward", text: (b) => seconds(b[1]), right: true },
          { name: "backward", text: (b) => seconds(b[2]), right: true },
          { name: "per sample", text: (b) => seconds((b[1] + b[2]) / b[0]), right: true },
        ]} />
      )}
    </article>
  );
}

export function Plan({ plan }: { plan: PlanSection }) {
  // Where both modes stand in one table, torch's own is the one that sends whole all-reduces.
  const named = (name: string) => plan.policies.find((p) => p.name === name);
  const default_ = named("ddp (all-reduce)") ?? named("ddp");
  return (
    <article>
      <h3>{plan.title}</h3>
      <Sentences lines={plan.sentences} />
      {plan.drawn.length
        ? <Timeline drawn={plan.drawn} what="Buckets against forward and backward, predicted" />
        : <p class="empty"><Words text={plan.missing} /></p>}
      <AsTable what="This plan beside other ways of cutting">
        {() => <Table caption="Ways of cutting the stream of gradients, predicted" rows={plan.policies} marked={(p) => p.chosen} columns={[
        { name: "policy", text: (p) => (p.chosen ? `→ ${p.name}` : p.name) },
        { name: "buckets", text: (p) => integer(p.buckets), right: true },
        { name: "iteration", text: (p) => seconds(p.iteration), right: true },
        { name: "exposed", text: (p) => seconds(p.exposed), right: true },
        { name: "above bound", text: (p) => (p.bound ? percent(p.iteration / p.bound - 1, true) : ""), right: true },
        ...(default_ ? [{ name: "against ddp", right: true,
          text: (p: PlanSection["policies"][number]) => percent(p.iteration / default_.iteration - 1, true) }] : []),
        { name: "how it cuts", text: (p) => <div class="wrapped">{p.how}</div> },
        ]} />}
      </AsTable>
      <AsTable what="The plan's buckets">
        {() => <Table caption="Buckets in the order in which they are sent" rows={plan.buckets} columns={[
          { name: "bucket", text: (_, i) => i, right: true },
          ...(plan.buckets.some((b) => b.kind) ? [{ name: "kind", text: (b: PlanSection["buckets"][number]) => b.kind }] : []),
          { name: "size", text: (b) => size(b.bytes), right: true },
          { name: "tensors", text: (b) => integer(b.tensors), right: true },
          { name: "first ready", text: (b) => b.first },
          { name: "last ready", text: (b) => b.last },
        ]} />}
      </AsTable>
    </article>
  );
}

export function Depth({ depths: d }: { depths: DepthsSection }) {
  return (
    <article>
      <h3>Partial backpropagation, {d.title}</h3>
      <p><Words text={d.sentence} /></p>
      <Table caption="Workers, predicted" rows={d.workers} columns={[
        { name: "worker", text: (w) => w.worker, right: true },
        { name: `depth of ${d.segments}`, text: (w) => w.depth, right: true },
        { name: "local batch", text: (w) => integer(w.batch), right: true },
        { name: "forward", text: (w) => seconds(w.forward), right: true },
        { name: "backward", text: (w) => seconds(w.backward), right: true },
        { name: "activations", text: (w) => size(w.activations), right: true },
        { name: "sent", text: (w) => size(w.sent), right: true },
      ]} />
    </article>
  );
}

export function Compared({ kinds }: { kinds: ComparisonSection }) {
  return (
    <>
      <p>{kinds.sentence}</p>
      <Table caption="Predicted beside measured, the busiest track" rows={kinds.rows} columns={[
        { name: "", text: (r) => r[0] },
        { name: "predicted", text: (r) => seconds(r[1]), right: true },
        { name: "measured", text: (r) => seconds(r[2]), right: true },
        { name: "error", text: (r) => (r[2] ? percent(r[1] / r[2] - 1, true) : ""), right: true },
      ]} />
    </>
  );
}

export function Network({ network }: { network: NetworkSection }) {
  const colors = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
  const lines = network.collectives.map((c, k) => ({
    name: c.name, color: colors[k % colors.length],
    marks: (c.samples.length ? c.samples.map((s) => [s.bytes, s.median]) : [10, 14, 18, 22, 26].map((e) =>
      [2 ** e, c.latency + c.seconds_per_byte * 2 ** e])).map(([x, y]) => ({ x, y, title: `${c.name} of ${size(x)}: ${seconds(y)}` })),
  }));
  const rows = network.collectives.flatMap((c) => c.samples.map((s) => ({ c, s })));
  return (
    <article>
      <h3>{network.title}</h3>
      <p><Words text={network.sentence} /></p>
      <Plot what="Seconds of a collective by its size" lines={lines} x={{ label: "bytes", log: true, text: size,
        ticks: [10, 14, 18, 22, 26].map((e) => 2 ** e).filter((b) => b <= Math.max(...lines.flatMap((l) => l.marks.map((m) => m.x)))) }}
        y={{ label: "time", log: true, text: seconds }} />
      <Table caption="Collectives" rows={network.collectives} columns={[
        { name: "collective", text: (c) => c.name },
        { name: "to start", text: (c) => seconds(c.latency), right: true },
        { name: "then", text: (c) => rate(c.seconds_per_byte), right: true },
        { name: "error of that law", text: (c) => percent(c.error), right: true },
      ]} />
      {rows.length > 0 && (
        <AsTable what="Measured sizes">
          {() => <Table caption="Measured sizes" rows={rows} columns={[
            { name: "collective", text: (r) => r.c.name },
            { name: "bytes", text: (r) => size(r.s.bytes), right: true },
            { name: "median", text: (r) => seconds(r.s.median), right: true },
            { name: "10 %", text: (r) => seconds(r.s.low), right: true },
            { name: "90 %", text: (r) => seconds(r.s.high), right: true },
          ]} />}
        </AsTable>
      )}
    </article>
  );
}

export function Scale({ scaling, colors }: { scaling: ScalingSection; colors: string[] }) {
  const workers = [...new Set(scaling.series.flatMap((s) => s.workers))].sort((a, b) => a - b);
  const ideal = { name: "ideal", color: "#7f7f7f", dashed: true, bare: true,
    marks: workers.map((w) => ({ x: w, y: w, title: "" })) };
  const lines = scaling.series.map((s, k) => ({
    name: s.name, color: colors[k % colors.length], shape: k,
    marks: s.workers.map((w, i) => ({ x: w, y: s.speedup[i],
      title: `${s.name}, ${integer(w)} workers: ${s.speedup[i].toFixed(1)} times one worker, iteration ${seconds(s.iteration[i])}` })),
  }));
  return (
    <article>
      <h3>{scaling.title}</h3>
      <p><Words text={scaling.sentence} /></p>
      {scaling.series.length > 0 && (
        <>
          <Plot what="Speed-up over one worker" lines={[ideal, ...lines]} height={340}
            x={{ label: "workers", log: true, text: integer, ticks: workers }} y={{ label: "speed-up", log: true, text: integer }} />
          <AsTable what="Speed-ups">
            {() => <Table caption="Predicted speed-up over one worker" rows={workers} columns={[
              { name: "workers", text: (w) => integer(w), right: true },
              ...scaling.series.map((s) => ({ name: s.name, right: true, text: (w: number) => {
                const i = s.workers.indexOf(w);
                return i < 0 ? "" : s.speedup[i].toFixed(1);
              } })),
            ]} />}
          </AsTable>
        </>
      )}
    </article>
  );
}
