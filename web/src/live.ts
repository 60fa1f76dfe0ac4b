// A page that its server keeps up to date: asks for newer data, more rarely while nobody answers or nobody looks.

import { useEffect, useState } from "preact/hooks";
import type { Document, DrawnTimeline } from "./document";

const REFRESH = 2000, LONGEST = 30000, PATIENCE = 10000; // milliseconds

/** `heard` is the time of the last answer; `silent` says why there is none now. */
export interface Live { document: Document; heard: string; silent: string }

export function useLive(first: Document): Live {
  const [now, set] = useState<Live>({ document: first, heard: "", silent: "" });
  useEffect(() => {
    if (!first.live) return;
    let last = "", pause = REFRESH, timer = 0, asking = false, over = false;
    const ask = async () => {
      if (asking) return;
      asking = true;
      let silent = "The server does not answer any more.";
      try {
        const answer = await fetch("data.json", { signal: AbortSignal.timeout(PATIENCE) });
        const text = await answer.text();
        silent = answer.ok ? "" : `The server answers, but has nothing to show: ${told(text)}`;
        if (!silent) {
          const newer = text === last ? null : (JSON.parse(text) as Document);
          last = text;
          set((old) => ({ document: newer ? kept(old.document, newer) : old.document, heard: clock(), silent }));
        }
      } catch {
        // nobody there, or somebody else
      }
      asking = false;
      if (silent) set((old) => ({ ...old, silent }));
      pause = silent ? Math.min(LONGEST, 2 * pause) : REFRESH;
      wait();
    };
    const wait = () => {
      clearTimeout(timer);
      if (!document.hidden && !over) timer = window.setTimeout(ask, pause);
    };
    // Who comes back to the page sees at once what is.
    const looked = () => (document.hidden ? clearTimeout(timer) : void ask());
    document.addEventListener("visibilitychange", looked);
    wait();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", looked);
    };
  }, [first]);
  return now;
}

const clock = () => new Date().toLocaleTimeString();

/** The newer document, with the old one's pictures where they are the same: those need not be drawn again. */
function kept(old: Document, newer: Document): Document {
  const pictures = (d: Document) => [...d.timelines, ...d.plans.flatMap((p) => p.drawn), ...d.schedules.map((s) => s.drawn)];
  const before = pictures(old);
  const same = (a: DrawnTimeline) => before.find((b) => b.title === a.title && b.columns.start === a.columns.start &&
    b.columns.duration === a.columns.duration && b.columns.look === a.columns.look && b.names.join() === a.names.join()) ?? a;
  return {
    ...newer, timelines: newer.timelines.map(same), plans: newer.plans.map((p) => ({ ...p, drawn: p.drawn.map(same) })),
    schedules: newer.schedules.map((s) => ({ ...s, drawn: same(s.drawn) })),
  };
}

/** One line of what a server says of its trouble. */
function told(text: string): string {
  try {
    return String(JSON.parse(text).detail ?? text);
  } catch {
    return text.replace(/^dovetail: /, "").trim();
  }
}

/** What stands behind the # of the address. */
export function useHash(): string {
  const [hash, set] = useState(location.hash);
  useEffect(() => {
    const changed = () => set(location.hash);
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return hash;
}
