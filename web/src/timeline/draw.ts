// Rows of spans on a canvas. Spans narrower than a pixel are drawn as what fills most of it, so the work of a frame
// depends on the width of the picture and not on the number of spans.

import type { Spans } from "./model";

export interface Theme { ink: string; faint: string; grid: string; paper: string; focus: string; dark: boolean }
export interface View { from: number; to: number }

export const ROW = 24;
export const GAP = 4;
export const HEAD = 34;
const FONT = "11px system-ui, sans-serif";
const LETTER = 6.3; // pixels of a letter in FONT, on average
/** Narrow spans fill their pixel in part; below this share they would vanish. */
const LEAST = 0.35;

export function paint(color: string, theme: Theme): string {
  return color === "#000000" && theme.dark ? "#e8eaed" : color;
}

/** Black or white, whichever reads better on a colour. */
export function inkOn(color: string): string {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(color.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3 ? "#101418" : "#ffffff";
}

export function row(
  context: CanvasRenderingContext2D, spans: Spans, first: number, stop: number, view: View, width: number, top: number,
  theme: Theme,
): void {
  const perPixel = (view.to - view.from) / width;
  const { start, stop: end, look } = spans;
  const looks = spans.drawn.looks;
  const named: number[] = [];
  // A run of pixels that look the same is drawn at once.
  let runLook = -1, runAlpha = 0, runFrom = 0, runTo = 0;
  const flush = () => {
    if (runLook < 0) return;
    box(context, looks[runLook].height, paint(looks[runLook].color, theme), runFrom, runTo, top, runAlpha);
    runLook = -1;
  };
  let i = spans.endingAfter(first, stop, view.from);
  let now = view.from;
  let last = -1;
  while (i < stop && start[i] < view.to) {
    const a = (Math.max(start[i], now) - view.from) / perPixel;
    const b = (Math.min(end[i], view.to) - view.from) / perPixel;
    if (b - a >= 1) {
      flush();
      // A hair's breadth parts wide neighbours.
      box(context, looks[look[i]].height, paint(looks[look[i]].color, theme), a, b - a > 3 ? b - 0.75 : b, top, 1);
      if (b - a > 26 && looks[look[i]].height > 0.5) named.push(i);
      now = end[i];
      last = Math.floor(b) - 1;
      i++;
      continue;
    }
    const pixel = Math.max(Math.floor(a), last + 1);
    const from = view.from + pixel * perPixel;
    const to = from + perPixel;
    const i0 = spans.endingAfter(Math.max(first, i - 1), stop, from); // only the one before i can reach into this pixel
    const j = spans.startingFrom(Math.min(i0, stop), stop, to);
    let best = look[i], most = 0, all = 0;
    for (let k = 0; k < looks.length; k++) {
      const share = spans.covered(k, i0, j, from, to) / perPixel;
      all += share;
      if (share > most) (most = share), (best = k);
    }
    const alpha = Math.max(LEAST, Math.min(1, Math.ceil(all * 4 - 1e-6) / 4));
    if (best === runLook && alpha === runAlpha && pixel <= runTo) runTo = pixel + 1;
    else {
      flush();
      (runLook = best), (runAlpha = alpha), (runFrom = pixel), (runTo = pixel + 1);
    }
    last = pixel;
    now = to;
    i = spans.endingAfter(i, stop, to);
  }
  flush();
  context.globalAlpha = 1;
  names(context, spans, named, view, perPixel, top, theme);
}

function box(
  context: CanvasRenderingContext2D, height: number, color: string, from: number, to: number, top: number,
  alpha: number,
): void {
  const tall = Math.max(3, Math.round(ROW * height));
  context.globalAlpha = alpha;
  context.fillStyle = color;
  // What is lower than the row stands on its floor, what is thinnest runs through its middle.
  context.fillRect(from, height < 0.3 ? top + (ROW - tall) / 2 : top + ROW - tall, to - from, tall);
}

function names(
  context: CanvasRenderingContext2D, spans: Spans, named: number[], view: View, perPixel: number, top: number,
  theme: Theme,
): void {
  context.font = FONT;
  context.textBaseline = "middle";
  for (const i of named) {
    const a = Math.max(0, (spans.start[i] - view.from) / perPixel);
    const b = Math.min((view.to - view.from) / perPixel, (spans.stop[i] - view.from) / perPixel);
    const text = fit(spans.label(i), b - a - 8);
    if (!text) continue;
    const { color, height } = spans.drawn.looks[spans.look[i]];
    context.fillStyle = inkOn(paint(color, theme));
    context.fillText(text, a + 5, top + ROW - (ROW * height) / 2 + 0.5);
  }
}

/** A name, or as much of it as says something: "bucket 3 (12 tensors)", "bucket 3", "3", "layer1.…". */
export function fit(name: string, width: number): string {
  const letters = Math.floor(width / LETTER);
  if (name.length <= letters) return name;
  const plain = name.replace(/ \(.*$/, "");
  if (plain.length <= letters) return plain;
  const number = plain.match(/^(?:bucket|reduce-scatter|all-gather|update) (\d+)$/)?.[1];
  if (number && number.length <= letters) return number;
  return letters >= 8 ? `${plain.slice(0, letters - 1)}…` : "";
}

const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440];

/** Round times for about so many ticks: the first, and the step. */
export function ticks(view: View, count: number): { first: number; step: number } {
  const raw = (view.to - view.from) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const decimal = power * ([1, 2, 5, 10].find((m) => m * power >= raw * (1 - 1e-9)) ?? 10);
  const minutes = MINUTES.find((m) => m * 60 >= raw) ?? Math.ceil(raw / 86400) * 1440;
  const step = raw > 50 ? minutes * 60 : decimal;
  return { first: Math.ceil(view.from / step - 1e-9) * step, step };
}
