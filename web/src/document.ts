// What the page shows. The same shapes as src/dovetail/view/page/document.py; seconds and bytes everywhere.

export type Source = "predicted" | "measured";

export interface Look { label: string; color: string; height: number }
export interface Row { label: string; group: string; first: number; stop: number }
export interface Columns { count: number; start: string; duration: string; look: string; name: string; bytes: string }
export interface Drawn {
  name: string; title: string; source: Source; emulated: boolean; duration: number; origin: number;
  looks: Look[]; names: string[]; rows: Row[]; columns: Columns;
}
export interface Bar {
  label: string; source: Source; emulated: boolean; total: number;
  forward: number; backward: number; optimizer: number; hidden: number | null; exposed: number | null;
}
export interface Lead { sentence: string; more: string[]; bars: Bar[] }
export interface Layers {
  title: string; sentence: string; names: string[]; types: string[]; forward: number[]; backward: number[];
  parameters: number[]; activations: number[]; batches: [number, number, number][];
}
export interface Policy {
  name: string; buckets: number; iteration: number; exposed: number; bound: number; chosen: boolean;
  how: string;
}
export interface Bucket { bytes: number; tensors: number; first: string; last: string }
export interface Planned {
  title: string; sentences: string[]; policies: Policy[]; buckets: Bucket[]; drawn: Drawn[]; missing: string;
}
export interface DepthRow {
  worker: number; depth: number; batch: number; forward: number; backward: number; activations: number; sent: number;
}
export interface Depths { title: string; sentence: string; segments: number; workers: DepthRow[] }
export interface Kinds { sentence: string; rows: [string, number, number][] }
export interface Series { name: string; workers: number[]; speedup: number[]; iteration: number[] }
export interface Scaling { title: string; sentence: string; series: Series[] }
export interface Sized { bytes: number; median: number; low: number; high: number }
export interface Collective {
  name: string; latency: number; seconds_per_byte: number; error: number; samples: Sized[];
}
export interface Wires { title: string; sentence: string; collectives: Collective[] }
export interface Trade {
  name: string; family: "data-parallel" | "burst" | "other"; iteration: number; device_time: number;
  amplification: number; free: number | null; chosen: boolean;
}
export interface Burst {
  title: string; sentences: string[]; devices: number; points: Trade[]; layers: string[]; counts: number[];
}
export interface JobRow {
  name: string; color: string; first: number | null; last: number | null; devices: number; tasks: number;
  device_time: number;
}
export interface LiveJob {
  number: number; name: string; color: string; state: string; done: number; total: number; speed: number;
  promise: string; devices: string; submitted: number; why: string[];
}
export interface LiveDevice {
  name: string; state: string; jobs: string; busy: number; bytes: number; bytes_total: number;
}
export interface Shared {
  title: string; sentence: string; more: string[]; drawn: Drawn; jobs: JobRow[]; live: LiveJob[]; devices: LiveDevice[];
  missing: string;
}
export interface Outcome {
  policy: string; load: number | null; makespan: number; mean: number; queueing: number; busy: number;
}
export interface Study { title: string; sentence: string; outcomes: Outcome[] }
export interface Switch { name: string; x: number; y: number; believes: string[] }
export interface Link { name: string; a: number; b: number; state: string }
export interface Path { source: string; target: string; policy: string; walk: string[]; why: string }
export interface Fabric {
  title: string; sentence: string; switches: Switch[]; links: Link[]; counters: Record<string, number>; paths: Path[];
}
export interface Document {
  title: string; files: string[]; live: boolean; lead: Lead; timelines: Drawn[]; compared: Kinds | null;
  plans: Planned[]; depths: Depths[]; profiles: Layers[]; networks: Wires[]; scaling: Scaling[]; bursts: Burst[];
  schedules: Shared[]; studies: Study[]; fabrics: Fabric[]; empty: Record<string, string>; notes: string[];
  series: string[]; colors: Record<string, string>;
}
