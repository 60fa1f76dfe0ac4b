// What the page shows. The same shapes as src/dovetail/view/page/document.py; times in seconds, sizes in bytes.

export type Source = "predicted" | "measured";

export interface LegendEntry { label: string; color: string; height: number }
export interface TimelineRow { label: string; group: string; first: number; stop: number }
export interface Columns { count: number; start: string; duration: string; look: string; name: string; bytes: string }
export interface DrawnTimeline {
  name: string; title: string; source: Source; emulated: boolean; duration: number; origin: number;
  looks: LegendEntry[]; names: string[]; rows: TimelineRow[]; columns: Columns;
}
export interface Bar {
  label: string; source: Source; emulated: boolean; total: number;
  forward: number; backward: number; optimizer: number; hidden: number | null; exposed: number | null;
}
export interface Lead { sentence: string; more: string[]; bars: Bar[] }
export interface LayersSection {
  title: string; sentence: string; names: string[]; types: string[]; forward: number[]; backward: number[];
  parameters: number[]; activations: number[]; batches: [number, number, number][];
}
export interface PolicyRow {
  name: string; buckets: number; iteration: number; exposed: number; bound: number; chosen: boolean;
  how: string;
}
export interface BucketRow { bytes: number; tensors: number; first: string; last: string; kind: string }
export interface PlanSection {
  title: string; sentences: string[]; policies: PolicyRow[]; buckets: BucketRow[]; drawn: DrawnTimeline[]; missing: string;
}
export interface DepthRow {
  worker: number; depth: number; batch: number; forward: number; backward: number; activations: number; sent: number;
}
export interface DepthsSection { title: string; sentence: string; segments: number; workers: DepthRow[] }
export interface ComparisonSection { sentence: string; rows: [string, number, number][] }
export interface Series { name: string; workers: number[]; speedup: number[]; iteration: number[] }
export interface ScalingSection { title: string; sentence: string; series: Series[] }
export interface SizeRow { bytes: number; median: number; low: number; high: number }
export interface CollectiveRow {
  name: string; latency: number; seconds_per_byte: number; error: number; samples: SizeRow[];
}
export interface NetworkSection { title: string; sentence: string; collectives: CollectiveRow[] }
export interface TradeOff {
  name: string; family: "data-parallel" | "burst" | "other"; iteration: number; device_time: number;
  amplification: number; free: number | null; chosen: boolean;
}
export interface BurstSection {
  title: string; sentences: string[]; devices: number; points: TradeOff[]; layers: string[]; counts: number[];
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
export interface ScheduleSection {
  title: string; sentence: string; more: string[]; drawn: DrawnTimeline; jobs: JobRow[]; live: LiveJob[]; devices: LiveDevice[];
  missing: string;
}
export interface StudyRow {
  policy: string; load: number | null; makespan: number; mean: number; queueing: number; busy: number;
}
export interface StudySection { title: string; sentence: string; outcomes: StudyRow[] }
export interface DrawnSwitch { name: string; x: number; y: number; believes: string[] }
export interface DrawnLink { name: string; a: number; b: number; state: string }
export interface TracedPath { source: string; target: string; policy: string; walk: string[]; why: string }
export interface FabricSection {
  title: string; sentence: string; switches: DrawnSwitch[]; links: DrawnLink[]; counters: Record<string, number>; paths: TracedPath[];
}
export interface Document {
  title: string; files: string[]; live: boolean; lead: Lead; timelines: DrawnTimeline[]; compared: ComparisonSection | null;
  plans: PlanSection[]; depths: DepthsSection[]; profiles: LayersSection[]; networks: NetworkSection[]; scaling: ScalingSection[]; bursts: BurstSection[];
  schedules: ScheduleSection[]; studies: StudySection[]; fabrics: FabricSection[]; empty: Record<string, string>; notes: string[];
  series: string[]; colors: Record<string, string>;
}
