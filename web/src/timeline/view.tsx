// A timeline to look into: mouse, touch and keyboard, with words for those who do not see it.

import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { DrawnTimeline, LegendEntry } from "../document";
import { AsTable, Legend } from "../parts";
import { colours, useColours } from "../theme";
import { plural } from "../units";
import { Controller } from "./controller";
import { HEAD, ROW } from "./draw";
import { layout } from "./layout";
import { Spans } from "./model";
import { Totals, Visible } from "./tables";

const MOST_HEIGHT = 620;
const KEYS = "Tab moves between tracks, ← and → between spans, + and − zoom, Shift with ← and → moves the picture, " +
  "Home and End go to the first and the last span, Enter zooms to the span, 0 shows everything.";

export function Timeline({ drawn, what }: { drawn: DrawnTimeline[]; what: string }) {
  const bare = drawn.filter((d) => !d.columns.count);
  return (
    <>
      {bare.map((d) => <p class="empty">{d.title}. It has no spans: nothing ran, or nothing was recorded.</p>)}
      {bare.length < drawn.length && <Picture drawn={drawn} what={what} />}
    </>
  );
}

function Picture({ drawn, what }: { drawn: DrawnTimeline[]; what: string }) {
  const all = useMemo(() => drawn.filter((d) => d.columns.count).map((d) => new Spans(d)), drawn);
  const plan = useMemo(() => layout(all), [all]);
  const canvas = useRef<HTMLCanvasElement>(null), axis = useRef<HTMLCanvasElement>(null);
  const scroller = useRef<HTMLDivElement>(null), labels = useRef<HTMLDivElement>(null);
  const live = useRef<HTMLParagraphElement>(null);
  const controller = useRef<Controller | null>(null);
  const [version, bump] = useState(0);
  const height = Math.min(plan.height, MOST_HEIGHT);
  const count = all.reduce((sum, s) => sum + s.start.length, 0);

  useEffect(() => {
    let later = 0;
    const made = new Controller(plan, canvas.current!, axis.current!, scroller.current!, colours, () => {
      const mark = made.hovered ?? made.selected;
      const text = mark ? made.describe(mark) : HINT;
      // Only where it is another one: what is touched has to be laid out again, in every frame of a zoom.
      if (live.current && live.current.textContent !== text) live.current.textContent = text;
      // Tables follow when the picture has come to rest.
      clearTimeout(later);
      later = window.setTimeout(() => bump((v) => v + 1), 150);
    });
    if (controller.current) made.adopt(controller.current);
    controller.current = made;
    const watch = new ResizeObserver(() => made.resize());
    watch.observe(canvas.current!);
    const unlisten = pointers(canvas.current!, made);
    bump((v) => v + 1);
    return () => {
      watch.disconnect();
      unlisten();
      clearTimeout(later);
      made.stop();
    };
  }, [plan]);
  useColours(useCallback(() => controller.current?.refresh(), []));

  const key = (event: KeyboardEvent) => {
    const track = Number((event.target as HTMLElement).dataset.track);
    if (Number.isNaN(track) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (controller.current && act(controller.current, event, track, labels.current!)) event.preventDefault();
  };
  const me = () => controller.current!;

  return (
    <figure class="timeline" aria-label={`${what}: ${plural(count, "span")} on ${plural(plan.tracks.length, "track")}`}>
      <div class="tools">
        <Legend items={looks(all)} />
        <div class="buttons" role="group" aria-label="Zoom">
          <button type="button" onClick={() => me().zoom(2)} aria-label="Zoom out">−</button>
          <button type="button" onClick={() => me().zoom(0.5)} aria-label="Zoom in">+</button>
          <button type="button" onClick={() => me().fit()}>Fit</button>
        </div>
      </div>
      <div class="axis"><canvas ref={axis} aria-hidden="true" /></div>
      <div class="scroller" ref={scroller} style={{ height: `${height}px` }} onScroll={() => me().refresh()}>
        <div class="body" style={{ height: `${plan.height}px` }}>
          <div class="labels" ref={labels} onKeyDown={key} role="application" aria-label={`${what}. ${KEYS}`}>
            {plan.blocks.map((b) => (
              <p class="head" style={{ top: `${b.top}px`, height: `${HEAD}px` }}>{b.spans.drawn.title}</p>
            ))}
            {plan.tracks.map((t, i) => (
              <button type="button" class="label" data-track={i} style={{ top: `${t.top}px`, height: `${ROW}px` }}
                title={t.label} aria-label={`${t.label}, ${t.spans.drawn.source}${plan.blocks.length > 1 ? `, ${t.spans.drawn.name}` : ""}: ${plural(t.stop - t.first, "span")}`}>
                {t.label}
              </button>
            ))}
          </div>
          <canvas ref={canvas} style={{ height: `${height}px` }} role="img"
            aria-label={`${what}. The same is below as a table.`} />
        </div>
      </div>
      <p class="detail" aria-live="polite" ref={live}>{HINT}</p>
      <AsTable what="This timeline">
        {() => (
          <>
            <Totals plan={plan} />
            {controller.current && <Visible plan={plan} view={controller.current.view} key={version} />}
          </>
        )}
      </AsTable>
    </figure>
  );
}

const HINT = "Point at a span, or press Tab and the arrow keys; Enter zooms to it, 0 shows all. Drag to move, Ctrl and wheel zoom.";

/** Every look that occurs, once. */
function looks(all: Spans[]): LegendEntry[] {
  const found = new Map<string, LegendEntry>();
  for (const s of all) for (const look of s.drawn.looks) found.set(look.label, look);
  return [...found.values()];
}

/** Does what a key asks; true where there was something to do. */
function act(me: Controller, event: KeyboardEvent, track: number, labels: HTMLElement): boolean {
  const focus = (i: number) => labels.querySelector<HTMLElement>(`[data-track="${i}"]`)?.focus();
  switch (event.key) {
    case "ArrowLeft": event.shiftKey ? me.pan(-0.2) : me.step(track, -1); return true;
    case "ArrowRight": event.shiftKey ? me.pan(0.2) : me.step(track, 1); return true;
    case "ArrowUp": focus(track - 1); return true;
    case "ArrowDown": focus(track + 1); return true;
    case "Home": me.end(track, false); return true;
    case "End": me.end(track, true); return true;
    case "+": case "=": me.zoom(0.5); return true;
    case "-": case "_": case "−": me.zoom(2); return true;
    case "0": me.fit(); return true;
    case "Enter": if (me.selected?.track === track) me.zoomToSelected(); else me.step(track, 0); return true;
    case "Escape": me.select(null); return true;
    default: return false;
  }
}

/** Mouse, pen and touch on the canvas; returns what takes the listeners away. */
function pointers(canvas: HTMLCanvasElement, me: Controller): () => void {
  const gone = new AbortController();
  const on = <K extends keyof HTMLElementEventMap>(name: K, handle: (e: HTMLElementEventMap[K]) => void) =>
    canvas.addEventListener(name, handle, { signal: gone.signal, passive: false });
  let grabbed: { x: number; from: number; to: number; moved: boolean } | null = null;
  on("wheel", (e) => {
    const x = e.offsetX / canvas.clientWidth;
    if (e.ctrlKey || e.metaKey) me.zoom(Math.exp(Math.sign(e.deltaY) * Math.min(0.5, Math.abs(e.deltaY) / 200)), x);
    else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) me.pan((e.deltaX || e.deltaY) / canvas.clientWidth);
    else return;
    e.preventDefault();
  });
  on("pointerdown", (e) => {
    if (e.button) return;
    canvas.setPointerCapture(e.pointerId);
    grabbed = { x: e.offsetX, ...me.view, moved: false };
  });
  on("pointermove", (e) => {
    if (grabbed) {
      const by = e.offsetX - grabbed.x;
      grabbed.moved ||= Math.abs(by) > 3;
      const time = (by / canvas.clientWidth) * (grabbed.to - grabbed.from);
      if (grabbed.moved) me.set({ from: grabbed.from - time, to: grabbed.to - time });
    } else hover(me, me.hit(e.offsetX, e.offsetY));
  });
  on("pointerup", (e) => {
    if (grabbed && !grabbed.moved) me.select(me.hit(e.offsetX, e.offsetY));
    grabbed = null;
  });
  on("pointercancel", () => (grabbed = null));
  on("pointerleave", () => hover(me, null));
  on("dblclick", (e) => me.zoom(0.4, e.offsetX / canvas.clientWidth));
  return () => gone.abort();
}

function hover(me: Controller, found: { track: number; span: number } | null): void {
  if (found?.track === me.hovered?.track && found?.span === me.hovered?.span) return;
  me.hovered = found;
  me.pointed();
}
