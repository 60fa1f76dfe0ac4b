// Lines, points and bars in SVG: axes at round numbers, names beside lines instead of boxes of keys.

import { scaleLinear, scaleLog } from "d3-scale";
import { useWidth } from "./parts";

export interface Mark { x: number; y: number; title: string; strong?: boolean }
export interface Line { name: string; color: string; marks: Mark[]; dashed?: boolean; bare?: boolean; shape?: number }
export interface Axis { label: string; log?: boolean; text: (value: number) => string; zero?: boolean; ticks?: number[] }

const LEFT = 66, TOP = 30, BOTTOM = 42;
const SHAPES = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-5l5 5l-5 5l-5-5z", "M0-5l4.6 8h-9.2z",
  "M0 5l4.6-8h-9.2z", "M-5-1.5h3.5V-5h3v3.5H5v3H1.5V5h-3V1.5H-5z"];
const STAR = "M0-9l2.4 5.6 6 .5-4.6 4 1.4 5.9L0 2.9-5.2 6l1.4-5.9-4.6-4 6-.5z";

function scale(axis: Axis, values: number[], range: [number, number]) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (axis.zero && !axis.log) low = 0;
  if (low === high) (low = axis.log ? low / 2 : low - 1), (high = axis.log ? high * 2 : high + 1);
  return axis.log ? scaleLog().domain([low, high]).range(range) : scaleLinear().domain([low, high]).nice().range(range);
}

/** Ticks of a log axis: powers of ten; more where there are too few of them. */
function stops(axis: Axis, s: ReturnType<typeof scale>, room: number): number[] {
  if (axis.ticks) return axis.ticks;
  const ticks = s.ticks(Math.max(2, Math.floor(room)));
  if (!axis.log) return ticks;
  const tens = ticks.filter((t) => Number.isInteger(Math.round(Math.log10(t) * 1e6) / 1e6));
  return tens.length >= 3 ? tens : ticks.filter((t) => [1, 2, 5].includes(+(t / 10 ** Math.floor(Math.log10(t) + 1e-9)).toPrecision(3)));
}

export function Plot(props: { what: string; lines: Line[]; x: Axis; y: Axis; height?: number; named?: boolean }) {
  const { what, lines, x, y, height = 300, named = true } = props;
  const [ref, width] = useWidth();
  const longest = Math.max(0, ...lines.map((l) => l.name.length));
  const right = named ? Math.min(200, 34 + longest * 6.6) : 18;
  const [inner, bottom] = [width - right, height - BOTTOM];
  const marks = lines.flatMap((l) => l.marks);
  if (!marks.length) return <p class="empty">Nothing to draw.</p>;
  const sx = scale(x, [...marks.map((m) => m.x), ...(x.ticks ?? [])], [LEFT, inner]);
  const sy = scale(y, marks.map((m) => m.y), [bottom, TOP]);
  const names = named ? apart(lines.map((l) => sy(l.marks.at(-1)!.y)), 14) : [];
  const thinned = every(stops(x, sx, (inner - LEFT) / 70), (inner - LEFT) / 46);
  return (
    <div class="chart" ref={ref}>
      {width > 0 && (
        <svg width={width} height={height} role="img" aria-label={`${what}. The same is below as a table.`}>
          <g class="grid">
            {stops(y, sy, height / 50).map((v) => (
              <g transform={`translate(0 ${sy(v)})`}>
                <line x1={LEFT} x2={inner} />
                <text x={LEFT - 8} dy="0.32em" text-anchor="end">{y.text(v)}</text>
              </g>
            ))}
            {thinned.map((v) => (
              <text x={sx(v)} y={bottom + 18} text-anchor="middle">{x.text(v)}</text>
            ))}
          </g>
          <text class="axis-name" x={LEFT} y={height - 4}>{x.label}</text>
          <text class="axis-name" x={0} y={12}>{y.label}</text>
          {lines.map((l, k) => <Drawn line={l} sx={sx} sy={sy} k={k} />)}
          {lines.flatMap((l) => l.marks.filter((m) => m.strong).map((m) => (
            <path d={STAR} class="star" transform={`translate(${sx(m.x).toFixed(1)} ${sy(m.y).toFixed(1)})`}>
              <title>{m.title}</title>
            </path>
          )))}
          {named && lines.map((l, k) => (
            <g transform={`translate(${inner + 14} ${names[k].toFixed(1)})`}>
              {!l.bare && <path d={SHAPES[(l.shape ?? k) % SHAPES.length]} fill={l.color} class={ink(l.color)} />}
              <text class="name" x={l.bare ? -4 : 9} dy="0.32em">{l.name}</text>
            </g>
          ))}
        </svg>
      )}
    </div>
  );
}

/** Black lines are drawn in the colour of text, which is not black on dark paper. */
const ink = (color: string, what = "fill") => (color === "#000000" ? `ink-${what}` : "");

type Scale = (value: number) => number;

function Drawn({ line, sx, sy, k }: { line: Line; sx: Scale; sy: Scale; k: number }) {
  const path = line.marks.map((m, i) => `${i ? "L" : "M"}${sx(m.x).toFixed(1)} ${sy(m.y).toFixed(1)}`).join("");
  return (
    <g>
      {line.marks.length > 1 && (
        <path d={path} fill="none" stroke={line.color} stroke-width={line.dashed ? 1.2 : 2}
          class={ink(line.color, "stroke")} stroke-dasharray={line.dashed ? "4 4" : undefined} />
      )}
      {!line.bare && line.marks.map((m) => (
        <path d={SHAPES[(line.shape ?? k) % SHAPES.length]} fill={line.color}
          class={`mark ${ink(line.color)}`} transform={`translate(${sx(m.x).toFixed(1)} ${sy(m.y).toFixed(1)})`}>
          <title>{m.title}</title>
        </path>
      ))}
    </g>
  );
}

/** Moves numbers apart by at least `least`, each as little as possible in order. */
function apart(wanted: number[], least: number): number[] {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const out = [...wanted];
  order.forEach((i, k) => {
    if (k) out[i] = Math.max(out[i], out[order[k - 1]] + least);
  });
  // What has been pushed down goes half of the way back, all together.
  const over = Math.max(0, ...out.map((v, i) => (v - wanted[i]) / 2));
  return out.map((v) => v - Math.min(over, Math.max(0, Math.min(...out) - 8)));
}

/** At most so many of the values, evenly. */
function every<T>(values: T[], most: number): T[] {
  const step = Math.ceil(values.length / Math.max(1, most));
  return values.filter((_, i) => i % step === 0);
}

export interface Stack { title: string; parts: number[] }

/** Columns side by side, each a stack; a strip of them for every layer of a model. */
export function Strip(props: {
  what: string; stacks: Stack[]; colors: string[]; text: (value: number) => string; height?: number; label: string;
  base?: number;
}) {
  const { what, stacks, colors, text, height = 150, label, base = 10 } = props;
  const [ref, width] = useWidth();
  const sums = stacks.map((s) => s.parts.reduce((a, b) => a + b, 0));
  // Round numbers of the largest unit: of bytes, powers of 1024.
  const most = Math.max(...sums) || 1;
  const unit = base === 10 ? 1 : base ** Math.max(0, Math.floor(Math.log(most) / Math.log(base) + 0.001));
  const sy = scaleLinear().domain([0, most / unit]).nice(3).range([height - 4, 24]);
  const inner = width - 8;
  const each = (inner - LEFT) / stacks.length;
  return (
    <div class="chart" ref={ref}>
      {width > 0 && (
        <svg width={width} height={height} role="img" aria-label={`${what}. The same is below as a table.`}>
          <g class="grid">
            {sy.ticks(3).map((v) => (
              <g transform={`translate(0 ${sy(v)})`}>
                <line x1={LEFT} x2={inner} />
                <text x={LEFT - 8} dy="0.32em" text-anchor="end">{text(v * unit)}</text>
              </g>
            ))}
          </g>
          <text class="axis-name" x={0} y={11}>{label}</text>
          {stacks.map((s, i) => {
            let below = 0;
            return (
              <g>
                <title>{s.title}</title>
                <rect class="catch" x={LEFT + i * each} y={20} width={each} height={height - 24} />
                {s.parts.map((part, k) => {
                  const y = sy((below += part) / unit);
                  return (
                    <rect x={LEFT + i * each} y={y} width={Math.max(0.7, each - (each > 4 ? 1 : 0))}
                      height={Math.max(0, sy((below - part) / unit) - y)} fill={colors[k]} />
                  );
                })}
              </g>
            );
          })}
        </svg>
      )}
    </div>
  );
}
