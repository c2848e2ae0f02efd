// Live: what the server's own metrics say, second by second.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { getText } from "./api.js";
import { Trouble } from "./parts.js";
import { read, sample } from "./metrics.js";

const EVERY = 1000, PATIENCE = 5000, KEPT = 300, SHORTEST = 30; // milliseconds twice, seconds, seconds on the time axis

const CHARTS = [
  { id: "length", name: "Acceptance length", unit: "tokens per drafted round", about: "Guesses kept in a round that drafted, and the token the model adds.", digits: 2, none: "no drafts" },
  { id: "rate", name: "Speed", unit: "tokens/s", about: "New tokens of all requests together.", digits: 0, none: "–" },
  { id: "rows", name: "Requests", unit: "", about: "Being written, and waiting in the queue.", digits: 0, none: "–" },
  { id: "share", name: "Rounds that drafted", unit: "%", none: "no rounds", about: "The drafter may have nothing to offer, and the planner leaves drafts out where they do not pay, for instance under load.", digits: 0 },
];

const seen = { samples: [], problem: null, changed() {} };

/** Looks every second from now on, whichever view is shown, so that Live has curves when somebody comes to it; calls `back` when a server
 * that did not answer does so again. */
export async function watch(back, before = null) {
  let now = null;
  try {
    now = { at: Date.now() / 1000, ...read(await getText("metrics", AbortSignal.timeout(PATIENCE))) };
    const next = sample(before, now);
    if (next) seen.samples = [...seen.samples.filter(({ at }) => at > next.at - KEPT && at < next.at), next]; // a hidden tab looks less often
    if (seen.problem) back();
    seen.problem = null;
  } catch (error) {
    seen.problem = error;
    if (seen.samples.length) seen.samples = [...seen.samples, { at: Date.now() / 1000, length: {}, rate: {}, rows: {}, share: {} }].slice(-KEPT); // a gap
  }
  seen.changed();
  setTimeout(watch, EVERY, back, now);
}

export function Live() {
  const [, show] = useState(0);
  useEffect(() => {
    seen.changed = () => show((count) => count + 1);
    return () => { seen.changed = () => {}; };
  }, []);
  const { samples, problem } = seen;
  const last = samples.at(-1);
  return html`<div class="view">
    <h1>Live</h1>
    <p class="lead">What the server is doing, from <a href="metrics">/metrics</a>, every second. It is recorded from when this page was opened, whichever view it shows:
      write something under <a href="#write">Write</a>, or in another browser tab, and come back.</p>
    <${Trouble} problem=${problem} />
    ${!last && !problem && html`<p class="loading">Waiting for the second look…</p>`}
    ${last && html`<div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.id} ...${chart} samples=${samples} />`)}</div>`}
  </div>`;
}

const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4"];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

function Chart({ id, name, unit, about, digits, none, samples }) {
  const box = useRef(null), plot = useRef(null);
  const series = [...new Set(samples.flatMap((each) => Object.keys(each[id])))];
  const names = series.join("\n");
  const data = [samples.map(({ at }) => at), ...series.map((each) => samples.map((sample) => sample[id][each] ?? null))];
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    let gone = false, made = null, watch = null;
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const make = async () => {
      const { default: uPlot } = await import("./vendor/uPlot.esm.js");
      if (gone) return;
      made?.destroy();
      plot.current = made = new uPlot(options(box.current, series, digits, unit), latest.current, box.current);
    };
    make();
    watch = new ResizeObserver(() => made?.setSize({ width: box.current.clientWidth, height: 160 }));
    watch.observe(box.current);
    scheme.addEventListener("change", make);
    return () => { gone = true; watch.disconnect(); scheme.removeEventListener("change", make); made?.destroy(); plot.current = null; };
  }, [names]);
  useEffect(() => plot.current?.setData(data), [samples]);
  const last = samples.at(-1)[id];
  const value = (each) => (last[each] == null ? html`<small>${none}</small>` : html`${last[each].toFixed(digits)} <small>${unit}</small>`);
  return html`<section class="card chart" aria-label=${name}>
    <h2>${name}</h2>
    <p class="note">${about}</p>
    <dl class="now">${series.map((each, index) => html`<div><dt><svg width="22" height="6" aria-hidden="true"><line x1="0" x2="22" y1="3" y2="3"
      class=${`line line-${index % 4}`} /></svg>${each}</dt><dd>${value(each)}</dd></div>`)}${series.length === 0 && html`<div><dd><small>${none}</small></dd></div>`}</dl>
    <div class="plot" ref=${box} aria-hidden="true"></div>
  </section>`;
}

function options(box, series, digits, unit) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: ink("--muted"), grid: { stroke: ink("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  function ink(name) { return resolved(colour(name)); }
  return {
    width: box.clientWidth, height: 160, legend: { show: false }, cursor: { show: false }, padding: [8, 28, 0, 0],
    scales: {
      x: { range: (_, least, most) => [Math.min(least, most - SHORTEST), most] },
      y: { range: (_, least, most) => [0, unit === "%" ? 100 : Math.max(1, (most ?? 1) * 1.1)] },
    },
    axes: [
      { ...axis, space: 90, size: 22, incrs: [5, 10, 15, 30, 60, 120], values: (_, marks) => marks.map((mark) => new Date(mark * 1000).toTimeString().slice(0, 8)) },
      { ...axis, size: 50, space: 34, values: (_, marks) => marks.map((mark) => `${digits && mark % 1 ? mark.toFixed(1) : mark}${unit === "%" ? " %" : ""}`) },
    ],
    series: [{}, ...series.map((label, index) => ({ label, stroke: ink(COLOURS[index % 4]), dash: DASHES[index % 4], width: 2, points: { show: false }, spanGaps: false }))],
  };
}

/** A colour as a canvas takes it: `light-dark()` is resolved by the browser. */
function resolved(colour) {
  const probe = document.createElement("span");
  probe.style.color = colour;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
