// Light and dark: as the system says, or as the reader chose.

import { useEffect, useState } from "preact/hooks";
import type { Theme } from "./timeline/draw";

export type Choice = "auto" | "light" | "dark";
const KEY = "dovetail-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

function stored(): Choice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "auto";
  } catch {
    return "auto"; // a file opened from disk may have no storage
  }
}

let choice = stored(), known: Theme | null = null;
apply();
system.addEventListener("change", apply);

function apply(): void {
  document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
  known = null;
  for (const listener of listeners) listener();
}

export function useTheme(): [Choice, (next: Choice) => void] {
  const [value, set] = useState(choice);
  return [value, (next) => {
    choice = next;
    set(next);
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // then it lasts as long as the page
    }
    apply();
  }];
}

/** Calls back whenever colours change. */
export function useColours(changed: () => void): void {
  useEffect(() => {
    listeners.add(changed);
    return () => void listeners.delete(changed);
  }, [changed]);
}

/** As they are now; looked up once for each theme, since pictures ask in every frame. */
export function colours(): Theme {
  return (known ??= looked());
}

function looked(): Theme {
  const style = getComputedStyle(document.documentElement);
  const get = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: get("ink"), faint: get("faint"), grid: get("grid"), paper: get("paper"), focus: get("focus"),
    dark: document.documentElement.dataset.theme === "dark",
  };
}
