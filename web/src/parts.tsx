// Small parts that every section uses: tables, explanations, legends, the width of what is around a picture.

import type { ComponentChildren, RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export function useWidth(): [RefObject<HTMLDivElement | null>, number] {
  const ref = useRef<HTMLDivElement | null>(null);
  const [width, set] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => set(Math.floor(entry.contentRect.width)));
    watch.observe(ref.current!);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

/** `text` with what stands in backticks as code. */
export function Words({ text }: { text: string }) {
  const shown = text.replace(/(\d) us\b/g, "$1 µs"); // the terminal keeps to letters that every terminal has
  return <>{shown.split("`").map((part, i) => (i % 2 ? <code>{part}</code> : part))}</>;
}

export function Sentences({ lines }: { lines: string[] }) {
  return lines.length ? <ul class="sentences">{lines.map((line) => <li><Words text={line} /></li>)}</ul> : null;
}

export interface Column<T> { name: string; text: (row: T, index: number) => ComponentChildren; right?: boolean }

export function Table<T>(props: {
  caption: string; columns: Column<T>[]; rows: T[]; marked?: (row: T) => boolean; most?: number; id?: (row: T) => string;
}) {
  const { caption, columns, rows, marked, most = 500, id } = props;
  return (
    <div class="table" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <caption>{caption}</caption>
        <thead>
          <tr>{columns.map((c) => <th scope="col" class={c.right ? "right" : ""}>{c.name}</th>)}</tr>
        </thead>
        <tbody>
          {rows.slice(0, most).map((row, index) => (
            <tr class={marked?.(row) ? "marked" : ""} id={id?.(row)} key={id?.(row)}>
              {columns.map((c, i) => i
                ? <td class={c.right ? "right" : ""}>{c.text(row, index)}</td>
                : <th scope="row" class={c.right ? "right" : ""}>{c.text(row, index)}</th>)}
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > most && <p class="note">… and {(rows.length - most).toLocaleString("en-US")} more</p>}
    </div>
  );
}

/** A table that is there for those who want or need it instead of the picture. */
export function AsTable({ what, children }: { what: string; children: () => ComponentChildren }) {
  const [open, set] = useState(false);
  return (
    <details class="as-table" onToggle={(e) => set((e.currentTarget as HTMLDetailsElement).open)}>
      <summary>{what} as a table</summary>
      {open && children()}
    </details>
  );
}

export function Legend({ items }: { items: { label: string; color: string; height?: number }[] }) {
  return (
    <ul class="legend" aria-label="Legend">
      {items.map(({ label, color, height = 1 }) => (
        <li>
          <svg width="18" height="12" aria-hidden="true">
            <rect width="18" height={Math.max(3, 12 * height)} fill={color}
              y={height < 0.3 ? 4.5 : 12 - 12 * height} class={color === "#000000" ? "ink-fill" : ""} />
          </svg>
          {label}
        </li>
      ))}
    </ul>
  );
}

export function Section(props: { id: string; title: string; intro: string; empty?: string; children?: ComponentChildren }) {
  const { id, title, intro, empty, children } = props;
  return (
    <section id={id} aria-labelledby={`${id}-title`} class={empty ? "nothing" : ""}>
      <h2 id={`${id}-title`}>{title}</h2>
      {empty ? <p class="empty"><Words text={empty} /></p> : <><p class="intro">{intro}</p>{children}</>}
    </section>
  );
}
