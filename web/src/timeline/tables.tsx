// A timeline as tables: what every track did in all, and the spans in the picture.

import { Table } from "../parts";
import { seconds, size } from "../units";
import type { View } from "./draw";
import type { Layout } from "./layout";

const MOST = 200;

export function Totals({ plan }: { plan: Layout }) {
  const rows = plan.tracks.flatMap(({ spans, label, first, stop }) =>
    spans.drawn.looks.map((look, k) => ({
      label, look: look.label, source: spans.drawn.source, name: spans.drawn.name, total: spans.total(k, first, stop),
      share: spans.drawn.duration ? spans.total(k, first, stop) / spans.drawn.duration : 0,
    })).filter((r) => r.total > 0));
  const several = plan.blocks.length > 1;
  return (
    <Table caption="Seconds of each kind of work" rows={rows} columns={[
      { name: "track", text: (r) => r.label },
      ...(several ? [{ name: "timeline", text: (r: (typeof rows)[number]) => `${r.source}: ${r.name}` }] : []),
      { name: "kind", text: (r) => r.look },
      { name: "time", text: (r) => seconds(r.total), right: true },
      { name: "share", text: (r) => `${(r.share * 100).toFixed(1)} %`, right: true },
    ]} />
  );
}

export function Visible({ plan, view }: { plan: Layout; view: View }) {
  const seen = plan.tracks.map((track) => {
    const i = track.spans.endingAfter(track.first, track.stop, view.from);
    return { ...track, i, j: Math.max(i, track.spans.startingFrom(Math.min(i, track.stop), track.stop, view.to)) };
  });
  const all = seen.reduce((sum, { i, j }) => sum + j - i, 0);
  // Where not all have room, the tracks of few spans come first: a few buckets tell more than many layers.
  if (all > MOST) seen.sort((a, b) => a.j - a.i - (b.j - b.i));
  const rows: {
    label: string; timeline: string; name: string; look: string; start: number; stop: number; bytes: number;
  }[] = [];
  for (const { spans, label, i, j } of seen)
    for (let k = i; k < j && rows.length < MOST; k++)
      rows.push({
        label, timeline: `${spans.drawn.source}: ${spans.drawn.name}`, name: spans.label(k),
        look: spans.drawn.looks[spans.look[k]].label, start: spans.start[k], stop: spans.stop[k],
        bytes: spans.bytes?.[k] ?? 0,
      });
  const several = plan.blocks.length > 1;
  const shown = all > rows.length ? `${MOST} of ${all.toLocaleString("en-US")}; zoom in for others` : "all";
  return (
    <Table caption={`Spans from ${seconds(view.from)} to ${seconds(view.to)}: ${shown}`} rows={rows} columns={[
      { name: "track", text: (r) => r.label },
      ...(several ? [{ name: "timeline", text: (r: (typeof rows)[number]) => r.timeline }] : []),
      { name: "span", text: (r) => r.name },
      { name: "kind", text: (r) => r.look },
      { name: "starts", text: (r) => seconds(r.start), right: true },
      { name: "ends", text: (r) => seconds(r.stop), right: true },
      { name: "takes", text: (r) => seconds(r.stop - r.start), right: true },
      { name: "size", text: (r) => (r.bytes ? size(r.bytes) : ""), right: true },
    ]} />
  );
}
