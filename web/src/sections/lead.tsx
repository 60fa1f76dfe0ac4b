// The first screen: one sentence, three numbers, and the bars that they are parts of.

import type { Bar, Lead as LeadData } from "../document";
import { COLORS } from "../palette";
import { AsTable, Table, Words } from "../parts";
import { percent, seconds } from "../units";

const compute = (b: Bar) => b.forward + b.backward + b.optimizer;

export function Lead({ lead }: { lead: LeadData }) {
  const now = lead.bars[0];
  return (
    <section id="lead" aria-labelledby="lead-title">
      <h1 id="lead-title"><Words text={lead.sentence} /></h1>
      {lead.more.map((line) => <p class="more"><Words text={line} /></p>)}
      {now && (
        <>
          <dl class="figures">
            <Figure name="Computing" color={COLORS.backward} value={compute(now)} total={now.total}
              note="forward, backward and optimizer: the work itself" />
            <Figure name="Communication, hidden" color={COLORS.communication} value={now.hidden} total={now.total} behind
              note="goes on behind computing and costs no time" />
            <Figure name="Communication, exposed" color={COLORS.exposed} value={now.exposed} total={now.total}
              note="devices wait for it: a plan can win some of this" />
          </dl>
          <Bars bars={lead.bars} />
          <p class="intro reading">How to read this: in every iteration each device computes forward and backward on its
            own part of the data; then all need the sum of their gradients, which the network adds up. Backward finishes
            gradients one after the other, so most can travel while it goes on: that part is hidden. What is still
            on its way when backward ends, everybody waits for: that part is exposed.
            {lead.bars.some((b) => b.emulated) && " Emulated devices wait for the time of every layer instead of computing" +
              " it; their gradients and their links are real."}</p>
          <p class="intro reading next">What dovetail changes: the same gradients are cut into other messages, chosen for this
            model on this network, so that more of them are hidden. That takes one line of a script:{" "}
            <code>from dovetail import DistributedDataParallel as DDP</code>. With <code>overlap="forward"</code> they travel
            behind the next forward pass too. What is learned stays the same.</p>
        </>
      )}
    </section>
  );
}

function Figure(props: {
  name: string; color: string; value: number | null; total: number; note: string; behind?: boolean;
}) {
  const { name, color, value, total, note, behind } = props;
  return (
    <div class="figure">
      <dt><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" rx="2" fill={color} /></svg>{name}</dt>
      <dd>
        <b>{value === null ? "not known" : seconds(value)}</b>
        {value !== null && total > 0 && <span>{percent(value / total)} of the time</span>}
        <small>{value === null ? "nothing given tells" : behind && value === 0 ? "nothing goes on behind computing" : note}</small>
      </dd>
    </div>
  );
}

function Bars({ bars }: { bars: Bar[] }) {
  const longest = Math.max(...bars.map((b) => b.total)) || 1;
  const wide = (t: number) => ({ width: `${(100 * t) / longest}%` });
  return (
    <figure class="bars" aria-label="Where the time goes">
      {bars.map((b) => (
        <div class="bar" role="img" aria-label={`${b.label}: ${seconds(b.total)}`}>
          <p><span>{b.label}</span><span class="tag">{b.source}{b.emulated ? ", emulated" : ""}</span>
            <b>{seconds(b.total)}</b></p>
          <div class="track">
            {(["forward", "backward", "optimizer"] as const).map((k) => b[k] > 0 && (
              <i style={{ ...wide(b[k]), background: COLORS[k] }} title={`${k}: ${seconds(b[k])}`} />
            ))}
            {b.exposed ? <i class="exposed" style={{ ...wide(b.exposed), background: COLORS.exposed }}
              title={`exposed communication: ${seconds(b.exposed)}`} /> : null}
          </div>
          {b.hidden ? (
            <div class="track behind">
              <i style={{ ...wide(Math.max(0, compute(b) - b.hidden)), background: "transparent" }} />
              <i style={{ ...wide(b.hidden), background: COLORS.communication }}
                title={`hidden communication: ${seconds(b.hidden)}`} />
            </div>
          ) : null}
        </div>
      ))}
      <figcaption class="legend-line">
        {([["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["hidden", "communication, hidden"],
          ["exposed", "communication, exposed"]] as const).filter(([k]) => bars.some((b) => b[k])).map(([k, label]) => (
          <span><svg width="12" height="12" aria-hidden="true"><rect width="12" y={k === "hidden" ? 6 : 0}
            height={k === "hidden" ? 6 : 12} fill={COLORS[k === "hidden" ? "communication" : k]} /></svg>{label}</span>
        ))}
      </figcaption>
      <AsTable what="These bars">
        {() => <Table caption="Where the time goes" rows={bars} columns={[
          { name: "", text: (b) => b.label },
          { name: "from", text: (b) => b.source + (b.emulated ? ", emulated" : "") },
          { name: "forward", text: (b) => seconds(b.forward), right: true },
          { name: "backward", text: (b) => seconds(b.backward), right: true },
          { name: "optimizer", text: (b) => seconds(b.optimizer), right: true },
          { name: "hidden", text: (b) => (b.hidden === null ? "not known" : seconds(b.hidden)), right: true },
          { name: "exposed", text: (b) => (b.exposed === null ? "not known" : seconds(b.exposed)), right: true },
          { name: "in all", text: (b) => seconds(b.total), right: true },
        ]} />}
      </AsTable>
    </figure>
  );
}
