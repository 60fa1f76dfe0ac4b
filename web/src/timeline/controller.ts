// What happens to a timeline's picture: zooming, panning, choosing spans; and drawing it, at most once a frame.

import { seconds, size, tick } from "../units";
import { type Theme, type View, HEAD, ROW, row, ticks } from "./draw";
import { type Layout, trackAt } from "./layout";
import type { Spans } from "./model";

export interface Selection { track: number; span: number }

const AXIS = 22;
const MANY = 5_000; // spans from which on a first zoom would be felt
const QUICK = 4, PATIENCE = 80; // milliseconds: of a picture that is quick enough, and for all of a rehearsal
let rehearsed = false;

export class Controller {
  view: View;
  selected: Selection | null = null;
  hovered: Selection | null = null;
  private pending = 0;
  private width = 0;

  constructor(
    readonly layout: Layout, private readonly canvas: HTMLCanvasElement, private readonly axis: HTMLCanvasElement,
    private readonly scroller: HTMLElement, private readonly theme: () => Theme, private readonly changed: () => void,
  ) {
    this.view = this.whole();
  }

  private whole(): View {
    return { from: 0, to: this.layout.duration * 1.005 };
  }

  get zoomed(): boolean {
    return this.view.to - this.view.from < 0.999 * this.whole().to;
  }

  /** Newer data of a live source: who had zoomed in or chosen a span stays there, though time 0 has moved. */
  adopt(before: Controller): void {
    const moved = (a: Spans, b: Spans) => a.drawn.origin - b.drawn.origin;
    if (before.zoomed && before.layout.blocks.length && this.layout.blocks.length) {
      const by = moved(before.layout.blocks[0].spans, this.layout.blocks[0].spans);
      this.set({ from: before.view.from + by, to: before.view.to + by });
    }
    if (!before.selected) return;
    const old = before.layout.tracks[before.selected.track];
    const track = this.layout.tracks.findIndex((t) => t.block === old.block && t.label === old.label);
    if (track < 0) return;
    const { spans, first, stop } = this.layout.tracks[track];
    const { span } = before.selected;
    const middle = (old.spans.start[span] + old.spans.stop[span]) / 2 + moved(old.spans, spans);
    const found = spans.at(first, stop, middle);
    if (found >= 0) this.selected = { track, span: found };
    this.changed();
  }

  resize(): void {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(50, this.canvas.clientWidth);
    for (const [canvas, height] of [[this.canvas, this.canvas.clientHeight], [this.axis, AXIS]] as const) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.getContext("2d")!.setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.width = width;
    this.draw();
    if (!rehearsed && this.layout.blocks.some((b) => b.spans.drawn.columns.count >= MANY)) {
      rehearsed = true;
      window.setTimeout(() => this.rehearse());
    }
  }

  /** Browsers compile what runs often: a few closer views that nobody sees make the first zoom as quick as later ones. */
  private rehearse(): void {
    const unseen = document.createElement("canvas").getContext("2d")!;
    const tracks = this.layout.tracks.filter((t) => t.top < this.canvas.clientHeight), theme = this.theme();
    const began = performance.now();
    for (let wide = this.whole().to, took = Infinity; took > QUICK || wide > this.whole().to / 50; wide *= 0.7) {
      const start = performance.now();
      if (start - began > PATIENCE) return;
      const view = { from: 0, to: wide };
      for (const t of tracks) row(unseen, t.spans, t.first, t.stop, view, this.width, 0, theme);
      took = performance.now() - start;
    }
  }

  /** Asks for a frame. */
  refresh(): void {
    if (!this.pending) this.pending = requestAnimationFrame(() => this.draw());
  }

  stop(): void {
    cancelAnimationFrame(this.pending);
  }

  set(view: View): void {
    const least = Math.max(1e-9, this.layout.duration * 1e-8);
    const whole = this.whole();
    const wide = Math.min(whole.to, Math.max(least, view.to - view.from));
    const from = Math.min(Math.max(0, view.from), whole.to - wide);
    this.view = { from, to: from + wide };
    this.changed();
    this.refresh();
  }

  /** Times `factor` as much time in the picture; the time at the share `at` of its width stays where it is. */
  zoom(factor: number, at?: number): void {
    const { from, to } = this.view;
    const share = at ?? this.centre();
    const wide = (to - from) * factor;
    const fixed = from + (to - from) * share;
    this.set({ from: fixed - wide * share, to: fixed + wide * (1 - share) });
  }

  pan(share: number): void {
    const by = (this.view.to - this.view.from) * share;
    this.set({ from: this.view.from + by, to: this.view.to + by });
  }

  fit(): void {
    this.set(this.whole());
  }

  /** Around the selected span, or the middle. */
  private centre(): number {
    if (!this.selected) return 0.5;
    const { spans } = this.layout.tracks[this.selected.track];
    const middle = (spans.start[this.selected.span] + spans.stop[this.selected.span]) / 2;
    const share = (middle - this.view.from) / (this.view.to - this.view.from);
    return share >= 0 && share <= 1 ? share : 0.5;
  }

  select(selection: Selection | null): void {
    this.selected = selection;
    if (selection) this.reveal(selection);
    this.changed();
    this.refresh();
  }

  /** The pointer is somewhere else. */
  pointed(): void {
    this.changed();
    this.refresh();
  }

  /** The next span of a track in a direction, or the first in the picture. */
  step(track: number, by: number): void {
    const { spans, first, stop } = this.layout.tracks[track];
    if (first === stop) return;
    const here = this.selected?.track === track ? this.selected.span + by
      : Math.min(spans.endingAfter(first, stop, this.view.from), stop - 1);
    this.select({ track, span: Math.min(stop - 1, Math.max(first, here)) });
  }

  end(track: number, last: boolean): void {
    const { first, stop } = this.layout.tracks[track];
    if (first < stop) this.select({ track, span: last ? stop - 1 : first });
  }

  zoomToSelected(): void {
    if (!this.selected) return;
    const { spans } = this.layout.tracks[this.selected.track];
    const [a, b] = [spans.start[this.selected.span], spans.stop[this.selected.span]];
    const margin = Math.max((b - a) * 0.5, 1e-9);
    this.set({ from: a - margin, to: b + margin });
  }

  private reveal({ track, span }: Selection): void {
    const { spans, top } = this.layout.tracks[track];
    const wide = this.view.to - this.view.from;
    const [a, b] = [spans.start[span], spans.stop[span]];
    if (a < this.view.from || b > this.view.to) {
      const from = b - a > wide ? a - wide * 0.05 : (a + b) / 2 - wide / 2;
      this.set({ from, to: from + wide });
    }
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = Math.max(0, top - HEAD);
    else if (top + ROW > scrollTop + clientHeight) this.scroller.scrollTop = top + ROW - clientHeight + 8;
  }

  /** What is drawn at a point of the canvas. A span of less than three pixels can be hit beside it. */
  hit(x: number, y: number): Selection | null {
    const track = trackAt(this.layout, y + this.scroller.scrollTop);
    if (track < 0) return null;
    const { spans, first, stop } = this.layout.tracks[track];
    const perPixel = (this.view.to - this.view.from) / this.width;
    const t = this.view.from + x * perPixel;
    const exact = spans.at(first, stop, t);
    if (exact >= 0) return { track, span: exact };
    const near = spans.endingAfter(first, stop, t - 3 * perPixel);
    return near < stop && spans.start[near] <= t + 3 * perPixel ? { track, span: near } : null;
  }

  /** A span in words. */
  describe({ track, span }: Selection): string {
    const { spans, label } = this.layout.tracks[track];
    const bytes = spans.bytes?.[span];
    const parts = [
      spans.label(span), spans.drawn.looks[spans.look[span]].label, seconds(spans.stop[span] - spans.start[span]),
      `from ${seconds(spans.start[span])} to ${seconds(spans.stop[span])}`, ...(bytes ? [size(bytes)] : []),
      `${label}, ${spans.drawn.source}${this.layout.blocks.length > 1 ? `: ${spans.drawn.name}` : ""}`,
    ];
    return parts.filter((p, i) => parts.indexOf(p) === i).join(" · ");
  }

  private draw(): void {
    this.pending = 0;
    const began = performance.now();
    const context = this.canvas.getContext("2d")!;
    const theme = this.theme();
    const [width, height] = [this.width, this.canvas.clientHeight];
    const offset = this.scroller.scrollTop;
    context.clearRect(0, 0, width, height);
    this.grid(context, theme, height);
    for (const { spans, top, bottom } of this.layout.blocks) {
      if (bottom < offset || top > offset + height) continue;
      const end = this.x(spans.drawn.duration);
      context.strokeStyle = theme.faint;
      context.setLineDash([3, 3]);
      line(context, end, top + HEAD - 6 - offset, bottom - offset);
      context.setLineDash([]);
    }
    this.layout.tracks.forEach((track, i) => {
      const top = track.top - offset;
      if (top + ROW < 0 || top > height) return;
      row(context, track.spans, track.first, track.stop, this.view, width, top, theme);
      for (const [mark, color, wide] of [[this.hovered, theme.ink, 1], [this.selected, theme.focus, 2.5]] as const)
        if (mark?.track === i) this.outline(context, mark.span, i, top, color, wide);
    });
    // What the picture shows, and the milliseconds it took to draw, for whoever measures.
    const took = (performance.now() - began).toFixed(2);
    Object.assign(this.canvas.dataset, { from: String(this.view.from), to: String(this.view.to), drawn: took });
  }

  private x(t: number): number {
    return ((t - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  private outline(
    context: CanvasRenderingContext2D, span: number, track: number, top: number, color: string, wide: number,
  ): void {
    const { spans } = this.layout.tracks[track];
    const a = Math.max(-4, this.x(spans.start[span]));
    const b = Math.min(this.width + 4, this.x(spans.stop[span]));
    context.strokeStyle = color;
    context.lineWidth = wide;
    context.strokeRect(a - 0.5, top - 0.5, Math.max(2, b - a), ROW + 1);
    context.lineWidth = 1;
  }

  private grid(context: CanvasRenderingContext2D, theme: Theme, height: number): void {
    const axis = this.axis.getContext("2d")!;
    axis.clearRect(0, 0, this.width, AXIS);
    axis.font = "11px system-ui, sans-serif";
    axis.fillStyle = theme.faint;
    axis.textBaseline = "middle";
    const { first, step } = ticks(this.view, this.width / 110);
    context.strokeStyle = theme.grid;
    for (let t = first; t <= this.view.to; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      line(context, x, 0, height);
      const text = tick(t, step);
      const wide = axis.measureText(text).width;
      axis.fillText(text, Math.min(Math.max(0, x - wide / 2), this.width - wide), AXIS / 2);
    }
  }
}

function line(context: CanvasRenderingContext2D, x: number, from: number, to: number): void {
  context.beginPath();
  context.moveTo(x, from);
  context.lineTo(x, to);
  context.stroke();
}
