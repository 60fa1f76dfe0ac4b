// Numbers for people: three significant digits and a unit, as in the terminal.

function digits(value: number): string {
  if (value === 0 || !Number.isFinite(value)) return value.toFixed(0);
  return value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)) + 1e-4)));
}

/** "412 µs", "1.23 ms", "4.50 s", "12.3 min". */
export function seconds(value: number): string {
  if (value === 0) return "0 s";
  for (const [factor, unit] of [[86400, "d"], [3600, "h"], [60, "min"]] as const)
    if (Math.abs(value) >= 2 * factor) return `${digits(value / factor)} ${unit}`;
  // What will be printed decides, so that 999.7 µs becomes "1.00 ms" and not "1000 µs".
  for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]] as const)
    if (Math.abs(value) * factor >= 0.9995) return `${digits(value * factor)} ${unit}`;
  return `${digits(value * 1e9)} ns`;
}

/** In powers of 1024: "512 B", "1.50 MiB". */
export function size(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(bytes) >= 999.5 && at < units.length - 1) (bytes /= 1024), at++;
  return at ? `${digits(bytes)} ${units[at]}` : `${bytes.toFixed(0)} B`;
}

export function rate(secondsPerByte: number): string {
  if (secondsPerByte <= 0) return "unlimited";
  const value = 1 / secondsPerByte;
  for (const [factor, unit] of [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]] as const)
    if (value >= 0.9995 * factor) return `${digits(value / factor)} ${unit}`;
  return `${digits(value)} B/s`;
}

export function percent(fraction: number, signed = false): string {
  const value = fraction * 100;
  const text = value.toFixed(Math.abs(value) >= 99.95 ? 0 : 1);
  if (Number(text) === 0) return "0 %";
  return `${signed && value > 0 ? "+" : ""}${text.replace("-", "−")} %`;
}

export const integer = (value: number): string => Math.round(value).toLocaleString("en-US");

export const plural = (count: number, what: string): string => `${integer(count)} ${what}${count === 1 ? "" : "s"}`;

/** Tick labels of a time axis that share one unit. */
export function tick(value: number, step: number): string {
  if (value === 0) return "0";
  const [factor, unit] = step >= 3600 ? [1 / 3600, "h"] : step >= 60 ? [1 / 60, "min"]
    : step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : step >= 1e-7 ? [1e6, "µs"] : [1e9, "ns"];
  return `${+(value * (factor as number)).toPrecision(12)} ${unit}`;
}
