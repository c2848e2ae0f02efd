// Live: what the server's own metrics say, second by second.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { getText } from "./api.js";
import { Trouble } from "./parts.js";
import { read, sample } from "./metrics.js";

const EVERY = 1000, KEPT = 300; // milliseconds, samples

const CHARTS = [
  { id: "length", name: "Acceptance length", unit: "tokens per drafted round", about: "Guesses kept in a round that drafted, and the token the model adds.", digits: 2 },
  { id: "rate", name: "Speed", unit: "tokens/s", about: "New tokens of all requests together.", digits: 0 },
  { id: "rows", name: "Requests", unit: "", about: "Being written, and waiting in the queue.", digits: 0 },
  { id: "share", name: "Rounds that drafted", unit: "%", about: "The planner leaves drafts out where they do not pay, for instance under load.", digits: 0 },
];

export function Live() {
  const [samples, setSamples] = useState([]);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let before = null, timer = 0, over = false;
    const look = async () => {
      try {
        const now = { at: Date.now() / 1000, ...read(await getText("metrics")) };
        if (over) return;
        const next = sample(before, now);
        if (next) setSamples((known) => [...known.slice(1 - KEPT), next]);
        before = now;
        setProblem(null);
      } catch (error) {
        if (over) return;
        before = null;
        setProblem(error);
      }
      if (!over) timer = setTimeout(look, EVERY);
    };
    look();
    return () => { over = true; clearTimeout(timer); };
  }, []);
  const last = samples.at(-1);
  return html`<div class="view">
    <h1>Live</h1>
    <p class="lead">What the server is doing, from <a href="metrics">/metrics</a>, every second. Nothing to see? Write something in another tab.</p>
    <${Trouble} problem=${problem} />
    ${!last && !problem && html`<p class="loading">Waiting for the second look…</p>`}
    ${last && html`<div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.id} ...${chart} samples=${samples} />`)}</div>`}
  </div>`;
}

const COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4"];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

function Chart({ id, name, unit, about, digits, samples }) {
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
      plot.current = made = new uPlot(options(box.current, series, digits), latest.current, box.current);
    };
    make();
    watch = new ResizeObserver(() => made?.setSize({ width: box.current.clientWidth, height: 160 }));
    watch.observe(box.current);
    scheme.addEventListener("change", make);
    return () => { gone = true; watch.disconnect(); scheme.removeEventListener("change", make); made?.destroy(); plot.current = null; };
  }, [names]);
  useEffect(() => plot.current?.setData(data), [samples]);
  const last = samples.at(-1)[id];
  const value = (each) => (last[each] == null ? "–" : last[each].toFixed(digits));
  return html`<section class="card chart" aria-label=${name}>
    <h2>${name}</h2>
    <p class="note">${about}</p>
    <dl class="now">${series.map((each, index) => html`<div><dt><svg width="22" height="6" aria-hidden="true"><line x1="0" x2="22" y1="3" y2="3"
      class=${`line line-${index % 4}`} /></svg>${each}</dt><dd>${value(each)} <small>${unit}</small></dd></div>`)}
      ${!series.length && html`<div><dt>No drafted rounds yet</dt><dd>–</dd></div>`}</dl>
    <div class="plot" ref=${box} aria-hidden="true"></div>
  </section>`;
}

function options(box, series, digits) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: ink("--muted"), grid: { stroke: ink("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  function ink(name) { return resolved(colour(name)); }
  return {
    width: box.clientWidth, height: 160, legend: { show: false }, cursor: { show: false }, padding: [8, 8, 0, 0],
    scales: { y: { range: (_, least, most) => [0, Math.max(1, (most ?? 1) * 1.1)] } },
    axes: [{ ...axis, space: 90, size: 22, values: (_, marks) => marks.map((mark) => new Date(mark * 1000).toTimeString().slice(0, 8)) }, { ...axis, size: 44, space: 34, values: (_, marks) => marks.map((mark) => (digits && mark % 1 ? mark.toFixed(1) : `${mark}`)) }],
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
