// One prompt and one seed, without speculation and with it: run one after the other, then replayed at the speed they had.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { stream } from "./api.js";
import { Bar, Field, NumberField, Say, SeedField, Trouble, calm, seedOf, useAbort, useFocusKept, useKept } from "./parts.js";
import { notGuessed } from "./round.js";
import { Tokens, piece, reader, totals } from "./tokens.js";

const SIDES = [
  { id: "off", name: "Plain", about: "One pass of the model per token." },
  { id: "auto", name: "Speculative", about: "A pass may confirm several guesses." },
];

/** What came, and when: `{pieces: [{at, text, tokens}], text, first, seconds}`; seconds count from the request. */
async function record(body, signal, progress) {
  const pieces = [], read = reader(), begin = performance.now();
  let finished = begin;
  for await (const chunk of stream("v1/completions", body, signal)) {
    const next = piece(chunk, read);
    if (!next) continue;
    finished = performance.now();
    pieces.push({ ...next, at: (finished - begin) / 1000 });
    progress(pieces.length);
  }
  const text = pieces.map((each) => each.text).join("");
  return { pieces, text, first: pieces[0]?.at ?? 0, seconds: (finished - begin) / 1000, ...totals(pieces) };
}

/** Tokens per second; 0 where all came at once. */
const rate = (run) => (run.tokens > 1 && run.seconds - run.first > 0.005 ? (run.tokens - 1) / (run.seconds - run.first) : 0);

export function Race({ server }) {
  const [settings, set] = useKept("race", { prompt: "def mean(values):\n    ", tokens: 96, temperature: 0.7, seed: "7" });
  const [state, setState] = useState("");
  const [runs, setRuns] = useState(null);
  const [clock, setClock] = useState(0);
  const [problem, setProblem] = useState(null);
  const abort = useAbort();
  const row = useFocusKept(Boolean(state));
  const frame = useRef(0);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);

  const replay = (found) => {
    cancelAnimationFrame(frame.current);
    const longest = Math.max(found.off.seconds, found.auto.seconds);
    if (calm()) return setClock(longest);
    const begin = performance.now();
    const tick = () => {
      const now = (performance.now() - begin) / 1000;
      setClock(Math.min(now, longest));
      if (now < longest) frame.current = requestAnimationFrame(tick);
    };
    tick();
  };

  const run = async (event) => {
    event.preventDefault();
    if (!settings.prompt.trim()) return setProblem(new Error("Write a beginning first; both go on from there."));
    cancelAnimationFrame(frame.current);
    setProblem(null);
    setRuns(null);
    const body = { model: server.model, prompt: settings.prompt, max_tokens: settings.tokens, temperature: settings.temperature, seed: seedOf(settings.seed), rounds: true };
    const signal = abort.begin();
    try {
      setState("Reading the prompt, so that both begin alike…");
      await record({ ...body, max_tokens: 1 }, signal, () => {});
      const found = {};
      for (const { id, name } of SIDES) {
        found[id] = await record({ ...body, speculation: id }, signal, (passes) => setState(`${name}: ${passes} passes…`));
      }
      setRuns(found);
      setState("");
      replay(found);
    } catch (error) {
      setState("");
      if (error.name !== "AbortError") setProblem(error);
    }
  };

  const put = (name) => (value) => set({ ...settings, [name]: value });
  const over = runs && clock >= Math.max(runs.off.seconds, runs.auto.seconds);
  return html`<div class="view">
    <h1>Plain beside speculative</h1>
    <p class="lead">The same prompt and seed, once without guesses and once with. The server runs them one after the other, so that neither slows the
      other down; then you see both at the speed they had.</p>
    <form class="card compose" onSubmit=${run}>
      <${Field} label="Beginning of the text" wide><textarea rows="3" class="code" spellcheck=${false} value=${settings.prompt}
        onInput=${(event) => put("prompt")(event.currentTarget.value)}></textarea><//>
      <div class="fields">
        <${NumberField} label="Tokens" value=${settings.tokens} set=${put("tokens")} least="2" most="1000" />
        <${NumberField} label="Temperature" value=${settings.temperature} set=${put("temperature")} least="0" most="2" step="0.05" />
        <${SeedField} value=${settings.seed} set=${put("seed")} />
        <div class="buttons" ref=${row}>
          ${state
            ? html`<button type="button" key="stop" onClick=${abort.stop}>Stop</button>`
            : html`<button type="submit" key="go" class="primary">Run both</button>`}
          ${over && html`<button type="button" onClick=${() => replay(runs)}>Replay</button>`}
        </div>
      </div>
    </form>
    <${Trouble} problem=${problem} />
    <${Say} text=${!runs ? state.replace(/:.*/, ".") : over ? verdict(runs).said : "Replaying."} />
    ${state && html`<p class="progress">${state}</p>`}
    ${runs && html`
      ${over && html`<${Verdict} runs=${runs} exact=${server.exact} />`}
      <div class="pair">${SIDES.map((side) => html`<${Side} ...${side} run=${runs[side.id]} clock=${clock} best=${Math.max(rate(runs.off), rate(runs.auto))} />`)}</div>`}
  </div>`;
}

function Side({ name, about, run, clock, best }) {
  const shown = run.pieces.filter((each) => each.at <= clock);
  const over = clock >= run.seconds;
  return html`<section class="card side" aria-label=${name}>
    <header><h2>${name}</h2><p class="note">${about}</p></header>
    <dl class="figures">
      <div><dt>First token</dt><dd>${(run.first * 1000).toFixed(0)} ms</dd></div>
      <div><dt>Tokens/s</dt><dd>${rate(run).toFixed(0)}</dd></div>
      <div><dt>Passes</dt><dd>${run.passes}</dd></div>
      <div><dt>Whole answer</dt><dd>${run.seconds.toFixed(2)} s</dd></div>
    </dl>
    <${Bar} share=${best ? rate(run) / best : 0} kind="accepted" />
    <p class="clock note"><span>${Math.min(clock, run.seconds).toFixed(2)} s</span> ${over ? "done" : "writing…"}</p>
    <div class="flow code">
      <${Tokens} pieces=${shown} hideRefused label=${`${name}: the text`} />
    </div>
  </section>`;
}

/** What the guesses brought. The speeds are compared only where there is something to compare. */
function gain({ off, auto }) {
  if (!auto.drafted) return `${notGuessed(auto.tried)} No guesses were used, so both did the same work, and the difference in speed is noise.`;
  if (!auto.accepted || auto.passes >= off.passes) return "Guesses saved no pass here. The difference in speed is noise, and the time that guessing took.";
  return rate(off) ? `Speculative wrote ${(rate(auto) / rate(off)).toFixed(2)} times as many tokens per second, in ${auto.passes} passes instead of ${off.passes}.` : "";
}

/** Where two texts part, and what to say of it. */
export function verdict({ off, auto }) {
  const speed = gain({ off, auto });
  if (off.text === auto.text) return { same: true, said: `The texts are the same, character for character. ${speed}`, speed };
  let at = 0;
  while (off.text[at] === auto.text[at]) at += 1;
  return { same: false, at, said: `The texts part at character ${at + 1}. ${speed}`, speed };
}

function Verdict({ runs, exact }) {
  const { same, at, speed } = verdict(runs);
  const around = (text) => `…${text.slice(Math.max(0, at - 20), at + 20)}…`;
  return html`<div class=${`verdict ${!same && exact ? "bad" : runs.auto.passes < runs.off.passes ? "good" : ""}`}>
    <span class="mark" aria-hidden="true">${same ? "=" : "≠"}</span>
    <div>
      <p><strong>${same ? "The texts are the same, character for character." : `The texts part at character ${at + 1}.`}</strong> ${speed}</p>
      ${!same && html`<p class="note">Plain: <code>${around(runs.off.text)}</code> Speculative: <code>${around(runs.auto.text)}</code>. ${exact
        ? "Rounding can tip a near tie on machines whose passes over one token and over several differ in the last bit; the server's fingerprint then ends in “-approx”."
        : "This server's rule draws by what was guessed: both texts follow the model's probabilities, and need not be the same."}</p>`}
    </div>
  </div>`;
}
