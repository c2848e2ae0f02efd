// Small pieces that several views use.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { storage } from "./api.js";

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** A token's text with blanks made visible. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length));
}

/** The same for a screen reader. */
export const spoken = (text) => (text.trim() ? text.trim() : text.includes("\n") ? "line break" : text === "" ? "nothing" : "space");

export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.001) return "< 0.1 %";
  return `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;

export function Trouble({ problem, retry }) {
  if (!problem) return null;
  return html`<div class="trouble" role="alert">
    <span class="mark" aria-hidden="true">!</span>
    <p>${problem.message}</p>
    ${retry && html`<button type="button" class="quiet" onClick=${retry}>Try again</button>`}
  </div>`;
}

export function Field({ label, hint, wide, children }) {
  return html`<label class=${wide ? "field wide" : "field"}><span>${label}</span>${children}${hint && html`<small>${hint}</small>`}</label>`;
}

export function NumberField({ label, value, set, least, most, step = 1, hint }) {
  const [typed, setTyped] = useState(""); // "1.0" stays as it is, though the number is 1: more may follow
  const on = (event) => {
    setTyped(event.currentTarget.value);
    set(event.currentTarget.value === "" ? "" : Number(event.currentTarget.value));
  };
  return html`<${Field} label=${label} hint=${hint}>
    <input type="number" inputmode="decimal" required min=${least} max=${most} step=${step} value=${typed !== "" && Number(typed) === value ? typed : String(value)} onInput=${on} />
  <//>`;
}

export function SeedField({ value, set }) {
  return html`<${Field} label="Seed">
    <input inputmode="numeric" pattern="[0-9]{0,15}" title="A whole number, or nothing for a random one" placeholder="random"
      value=${value} onInput=${(event) => set(event.currentTarget.value)} />
  <//>`;
}

export const seedOf = (value) => (value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(value));

export function Choice({ label, value, set, options }) {
  return html`<${Field} label=${label}>
    <select value=${value} onChange=${(event) => set(event.currentTarget.value)}>
      ${options.map((each) => html`<option value=${each.id} selected=${each.id === value}>${each.name}</option>`)}
    </select>
  <//>`;
}

/** A bar of a share of 1, with its value in words beside it elsewhere. */
export const Bar = ({ share, kind }) => html`<span class=${`bar ${kind}`} aria-hidden="true"><i style=${{ width: `${Math.min(100, share * 100)}%` }}></i></span>`;

export function Legend({ children }) {
  return html`<ul class="legend">
    <li><span class="tok accepted">kept</span> guessed by the drafter, confirmed by the model</li>
    <li><span class="tok own">own</span> written by the model itself</li>
    <li><span class="tok rejected">refused</span> guessed, and thrown away</li>
    ${children}
  </ul>`;
}

/** Says `text` to screen readers once it changes. */
export const Say = ({ text }) => html`<p class="unseen" role="status">${text}</p>`;

/** A value that survives a change of view, and the reload of the page. */
export function useKept(name, initial) {
  const [value, set] = useState(() => {
    try {
      return JSON.parse(storage.getItem(name)) ?? initial;
    } catch {
      return initial;
    }
  });
  useEffect(() => {
    try {
      storage.setItem(name, JSON.stringify(value));
    } catch { /* it is full: the value lasts as long as the view */ }
  }, [value]);
  return [value, set];
}

/** For a row of buttons that `busy` disables or replaces: whoever pressed one keeps the focus at its place. */
export function useFocusKept(busy) {
  const row = useRef(null), place = useRef(-1), before = useRef(busy);
  const buttons = () => [...(row.current?.querySelectorAll("button") ?? [])];
  if (before.current !== busy) { // the buttons are still those of before
    const focused = buttons().indexOf(document.activeElement);
    if (busy || buttons().some((each) => !each.disabled)) place.current = focused; // else nobody could stay there
    before.current = busy;
  }
  useLayoutEffect(() => {
    const lost = document.activeElement === document.body || buttons().includes(document.activeElement);
    if (lost) buttons()[place.current]?.focus({ preventScroll: true });
  }, [busy]);
  return row;
}

/** Aborts what the view has under way when it is left. */
export function useAbort() {
  const current = useRef(null);
  useEffect(() => () => current.current?.abort(), []);
  return {
    begin() {
      current.current?.abort();
      current.current = new AbortController();
      return current.current.signal;
    },
    stop: () => current.current?.abort(),
  };
}
