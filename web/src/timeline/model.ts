// A timeline in typed arrays: every question is a binary search, whatever the number of spans.

import type { DrawnTimeline } from "../document";

function bytesOf(base64: string): ArrayBuffer {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

export class Spans {
  readonly start: Float64Array;
  readonly stop: Float64Array;
  readonly look: Uint8Array;
  readonly name: Uint32Array;
  readonly bytes: Float64Array | null;
  /** Per look, the seconds that spans [0, i) spend in it: coverage of any interval is two look-ups. */
  private readonly spent: Float64Array[];

  constructor(readonly drawn: DrawnTimeline) {
    const { columns } = drawn;
    this.start = new Float64Array(bytesOf(columns.start));
    const duration = new Float32Array(bytesOf(columns.duration));
    this.look = new Uint8Array(bytesOf(columns.look));
    this.name = new Uint32Array(bytesOf(columns.name));
    this.bytes = columns.bytes ? new Float64Array(bytesOf(columns.bytes)) : null;
    const n = columns.count;
    this.stop = new Float64Array(n);
    this.spent = drawn.looks.map(() => new Float64Array(n + 1));
    const sums = new Float64Array(drawn.looks.length);
    for (let i = 0; i < n; i++) {
      this.stop[i] = this.start[i] + duration[i];
      sums[this.look[i]] += duration[i];
      for (let k = 0; k < sums.length; k++) this.spent[k][i + 1] = sums[k];
    }
  }

  label(i: number): string {
    return this.drawn.names[this.name[i]];
  }

  /** The first of spans [first, stop) that ends after t. */
  endingAfter(first: number, stop: number, t: number): number {
    return search(this.stop, first, stop, t, false);
  }

  /** The first of spans [first, stop) that starts at t or later. */
  startingFrom(first: number, stop: number, t: number): number {
    return search(this.start, first, stop, t, true);
  }

  /** The span of a row at time t, or −1. */
  at(first: number, stop: number, t: number): number {
    const i = this.endingAfter(first, stop, t);
    return i < stop && this.start[i] <= t ? i : -1;
  }

  /** Seconds of [a, b) that spans [i, j) spend in a look; j is where spans start at b or later. */
  covered(look: number, i: number, j: number, a: number, b: number): number {
    let total = this.spent[look][j] - this.spent[look][i];
    if (j > i && this.look[i] === look) total -= Math.max(0, a - this.start[i]);
    if (j > i && this.look[j - 1] === look) total -= Math.max(0, this.stop[j - 1] - b);
    return total;
  }

  /** Seconds of a whole row in a look. */
  total(look: number, first: number, stop: number): number {
    return this.spent[look][stop] - this.spent[look][first];
  }
}

/** The first index whose value is above t (at t or above, with `equal`): doubling steps, then halving. */
function search(values: Float64Array, first: number, stop: number, t: number, equal: boolean): number {
  let low = first, step = 1;
  while (low + step < stop && (equal ? values[low + step] < t : values[low + step] <= t)) {
    low += step;
    step *= 2;
  }
  let high = Math.min(low + step, stop);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (equal ? values[middle] >= t : values[middle] > t) high = middle;
    else low = middle + 1;
  }
  return low;
}
