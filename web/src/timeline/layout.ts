// Where the rows of several timelines stand below each other.

import { GAP, HEAD, ROW } from "./draw";
import { Spans } from "./model";

export interface Track { spans: Spans; block: number; label: string; first: number; stop: number; top: number }
export interface Block { spans: Spans; top: number; bottom: number }
export interface Layout { blocks: Block[]; tracks: Track[]; height: number; duration: number }

export function layout(all: Spans[]): Layout {
  const blocks: Block[] = [], tracks: Track[] = [];
  let top = 0;
  all.forEach((spans, block) => {
    const head = top;
    top += HEAD;
    for (const { label, first, stop } of spans.drawn.rows) {
      tracks.push({ spans, block, label, first, stop, top });
      top += ROW + GAP;
    }
    blocks.push({ spans, top: head, bottom: top });
    top += 10;
  });
  return { blocks, tracks, height: top, duration: Math.max(1e-9, ...all.map((s) => s.drawn.duration)) };
}

/** The track at a height, or −1. */
export function trackAt({ tracks }: Layout, y: number): number {
  let low = 0, high = tracks.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tracks[middle].top + ROW > y) high = middle;
    else low = middle + 1;
  }
  return low < tracks.length && tracks[low].top <= y ? low : -1;
}
