// Roll a round: draft, verify, accept, correct, with the numbers of a real round; and hundreds of rounds beside what was to be expected.

import { html, useEffect, useState } from "./vendor/htm-preact-standalone.js";
import { getJSON, postJSON } from "./api.js";
import { Bar, Choice, Field, NumberField, Say, Trouble, calm, many, percent, useAbort, useFocusKept, useKept, visible } from "./parts.js";
import { Many, joined } from "./many.js";
import { SIGN, lines, Tree } from "./tree.js";

const STEPS = [
  { id: "Draft", about: (found) => (found.round.ended === "no draft" ? `The drafter (${found.drafter}) has nothing to offer here.`
    : `The drafter (${found.drafter}) guesses ${many(found.round.tokens.length - 1, "token")}. It is small and quick, and often wrong.`) },
  { id: "Verify", about: () => "One pass of the model over all guesses gives p, how likely the model itself finds each of them at its place." },
  { id: "Accept", about: (found) => ACCEPT[found.rule.split("(")[0]] },
  { id: "Correct", about: (found) => correct(found) },
];

const ACCEPT = {
  match: "The model chooses a token of its own at every place, with random numbers that follow from the seed. A guess stays if it is that very token.",
  rejection: "Each guess gets a coin. It stays if the coin lies below p / q: what the model likes as much as the drafter always stays.",
  lenient: "As rejection, but the coin has to lie below p / (ε q), which is larger, since ε is less than 1. More guesses stay than should: the text is no longer the model's.",
  block: "The whole draft is judged together: each guess gets a coin, and the longest beginning whose coin lies below its chance stays.",
  "multi-candidate": "Guesses for the same place are tried one after the other, each with a coin. Each one refused leaves less of p to the next.",
  "k-seq": "Guesses for the same place are judged all at once, each with a coin. The first whose coin passes stays.",
  traversal: "The last guesses are tried first, each with a coin. The first whose coin passes stays, with all guesses before it.",
  typical: "No coin: a guess stays if p lies above a threshold. The text is no longer the model's.",
};

const TERMS = [
  { step: 0, name: "q", about: "how likely the drafter finds its guess.", shown: ({ round }) => round.q },
  { step: 1, name: "p", about: "how likely the model finds it, after the guesses above it." },
  { step: 2, name: "Coin", about: "a fresh random number between 0 and 1. It passes below the mark, which the rule sets by p and q.", shown: ({ round }) => round.coins.length },
  { step: 3, name: "Residual", about: "p without what the drafter had already offered, scaled to 100 % again.", shown: ({ round }) => round.residual },
];

function correct({ rule, lossless, round }) {
  const from = rule.startsWith("typical") ? ", its likeliest" : " from p";
  if (round.ended === "no draft") return `Nothing was guessed, so the pass gives one token${from}.`;
  if (round.ended === "end of draft") return `Every guess on the branch stayed, so the model adds one more token${from}: it comes free with the pass.`;
  if (rule.startsWith("match")) return "Where the guess differs, the model's own choice stands in its place. What was guessed after it is thrown away.";
  if (rule.startsWith("typical")) return "The model's likeliest token follows.";
  return `A guess was refused, so the next token is drawn from the residual.${lossless ? " That keeps the text exactly the model's." : ""}`;
}

/** What can be rolled; asked for when the view is first opened, and kept in `server`. */
export function Roll({ server }) {
  const [known, setKnown] = useState(server.rounds);
  const [problem, setProblem] = useState(null);
  const ask = () => {
    setProblem(null);
    getJSON("rounds").then((found) => { server.rounds = found; setKnown(found); }, setProblem);
  };
  useEffect(() => { if (!known) ask(); }, []);
  if (known) return html`<${Rolling} known=${known} />`;
  return html`<div class="view">
    <h1>Roll a round</h1>
    ${problem?.status === 404 ? html`<p class="lead">This server does not offer rounds to roll.</p>` : html`<${Trouble} problem=${problem} retry=${ask} />`}
    ${!problem && html`<p class="loading">Asking the server…</p>`}
  </div>`;
}

const chain = (shape) => /^\s*chain/.test(shape);
const twice = (known, drafter) => known.drafters.some(({ id, name }) => name === drafter.name && id !== drafter.id);
const fits = (drafter, shape) => Boolean(drafter.rules.tree) || chain(shape);
const rulesOf = (drafter, shape) => (chain(shape) ? drafter.rules.chain : drafter.rules.tree) ?? drafter.rules.chain ?? [];

function Rolling({ known }) {
  const [settings, set] = useKept("roll", {
    prompt: "def mean(values):\n    return sum(", drafter: known.drafters[0].id, rule: "rejection", shape: "chain(5)", temperature: 0.7,
  });
  const [found, setFound] = useState(null);
  const [step, setStep] = useState(STEPS.length - 1);
  const [others, setOthers] = useState([]);
  const [tally, setTally] = useState(null);
  const [busy, setBusy] = useState("");
  const [problem, setProblem] = useState(null);
  const abort = useAbort();
  const row = useFocusKept(Boolean(busy));

  const drafter = known.drafters.find(({ id }) => id === settings.drafter) ?? known.drafters[0];
  const { shape } = settings;
  const rules = rulesOf(drafter, shape);
  const rule = rules.includes(settings.rule) ? settings.rule : rules.includes("rejection") ? "rejection" : rules[0];
  const body = { ...settings, drafter: drafter.id, rule, shape };

  useEffect(() => {
    if (!found || step >= STEPS.length - 1 || step < 0 || found.paused) return undefined;
    const timer = setTimeout(() => setStep(step + 1), 1100);
    return () => clearTimeout(timer);
  }, [found, step]);

  const attempt = async (name, work) => {
    if (!settings.prompt.trim()) return setProblem(new Error("Write a beginning first; the round goes on from there."));
    setProblem(null);
    setBusy(name);
    try {
      await work(abort.begin());
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error);
    }
    setBusy("");
  };

  const rollOne = (event) => {
    event.preventDefault();
    return attempt("one", async (signal) => {
      const next = await postJSON("rounds", body, signal);
      setOthers([]);
      setFound({ ...next, paused: calm(), body });
      setStep(calm() ? STEPS.length - 1 : 0);
    });
  };

  const rollMany = () => attempt("many", async (signal) => {
    let sum = null;
    setTally(null);
    while (!sum || sum.rolls < 500) {
      const next = await postJSON("rounds", { ...body, seed: sum?.seed, first: sum?.rolls ?? 0, rolls: Math.min(50, 500 - (sum?.rolls ?? 0)) }, signal);
      sum = joined(sum, next);
      setTally(sum);
    }
  });

  const sameNoise = () => attempt("others", async (signal) => {
    const rest = rulesOf(known.drafters.find(({ id }) => id === found.body.drafter), found.body.shape).filter((each) => each !== found.rule);
    const results = [];
    for (const other of rest) {
      results.push(await postJSON("rounds", { ...found.body, rule: other, seed: found.seed }, signal));
      setOthers([...results]);
    }
  });

  const put = (name) => (value) => set({ ...settings, [name]: value });
  const draftBy = (id) => {
    const next = known.drafters.find((each) => each.id === id);
    set({ ...settings, drafter: id, shape: fits(next, shape) ? shape : known.shapes.find((each) => fits(next, each)) });
  };
  const lossy = (name) => (known.rules[name]?.lossless ? name : `${name} (lossy)`);
  return html`<div class="view">
    <h1>Roll a round</h1>
    <p class="lead">Speculative decoding goes in rounds: a drafter guesses a few tokens, the model checks them in one pass, and keeps the guesses that hold.
      Each roll is a real round on this server, with fresh random numbers. <strong>Roll again, and see how many guesses land.</strong></p>
    <form class="card compose" onSubmit=${rollOne}>
      <${Field} label="Text so far" wide><textarea rows="3" class="code" spellcheck=${false} maxlength=${known.most.characters} value=${settings.prompt}
        onInput=${(event) => put("prompt")(event.currentTarget.value)}></textarea><//>
      <div class="fields">
        <${Choice} label="Drafter" value=${drafter.id} set=${draftBy}
          options=${known.drafters.map((each) => ({ ...each, name: each.served && twice(known, each) ? `${each.name} (the server's)` : each.name }))} />
        <${Field} label="Shape of the draft"><input list="shapes" required maxlength="500" spellcheck=${false} autocomplete="off" value=${shape}
          onInput=${(event) => put("shape")(event.currentTarget.value)} /><//>
        <datalist id="shapes">${known.shapes.filter((each) => fits(drafter, each)).map((each) => html`<option value=${each}></option>`)}</datalist>
        <${Choice} label="Rule" value=${rule} set=${put("rule")} options=${rules.map((name) => ({ id: name, name: lossy(name) }))} />
        <${NumberField} label="Temperature" value=${settings.temperature} set=${put("temperature")} least="0.1" most="2" step="0.05" />
        <div class="buttons" ref=${row}>
          <button type="submit" class="primary" disabled=${Boolean(busy)}>${found ? "Roll again" : "Roll"}</button>
          ${busy === "many"
            ? html`<button type="button" key="stop" onClick=${abort.stop}>Stop</button>`
            : html`<button type="button" key="many" disabled=${Boolean(busy)} onClick=${rollMany}>Roll 500</button>`}
        </div>
      </div>
      <p class="note"><code>${rule}</code>: ${ACCEPT[rule] ?? known.rules[rule]?.summary} ${known.rules[rule]?.lossless && "The text stays exactly the model's."}</p>
    </form>
    <${Trouble} problem=${problem} />
    ${found && html`<${One} found=${found} step=${step} stale=${!same(found.body, body)} go=${(next) => { setFound({ ...found, paused: true }); setStep(next); }} />`}
    ${found && step === STEPS.length - 1 && html`<section class="card">
      <h2>The same random numbers under another rule</h2>
      ${others.length === 0
        ? html`<p>Another rule may keep more or fewer of the guesses. Rules differ in how the drafter draws them, so the guesses may differ as well.</p>
          <div class="buttons"><button type="button" disabled=${Boolean(busy)} onClick=${sameNoise}>Try the other rules</button></div>`
        : html`<ul class="outcomes">${[found, ...others].map((each) => html`<li>
          <span class="name">${each.rule} ${!each.lossless && html`<span class="badge">lossy</span>`}</span>
          <${Strip} round=${each.round} />
          <span class="note">${each.round.accepted} of ${each.round.tokens.length - 1} kept</span></li>`)}</ul>`}
    </section>`}
    ${tally && html`<${Many} tally=${tally} running=${busy === "many"} />`}
  </div>`;
}

/** The guesses of the first branch, the kept ones, and the model's own token, in a line. */
function Strip({ round }) {
  const rows = lines(round).filter((row) => row.kind !== "root");
  const kept = rows.filter((row) => row.kind !== "rejected"), rest = rows.filter((row) => row.kind === "rejected");
  return html`<span class="strip">${[...kept, ...rest.slice(0, 8)].map((row) => html`<span class=${`tok ${row.kind}`}>
    <span class="unseen">${row.kind === "accepted" ? "kept" : row.kind === "own" ? "own" : "refused"}</span>${visible(row.text)}</span> `)}${rest.length > 8 && html`<span class="note">+ ${rest.length - 8}</span>`}</span>`;
}

const same = (one, two) => JSON.stringify(one) === JSON.stringify(two);

function One({ found, step, stale, go }) {
  const { round } = found;
  const rows = lines(round).filter((row) => row.kind !== "root");
  const coin = (node) => round.coins.find((each) => each.node === node);
  const landed = `${round.accepted} of ${many(round.tokens.length - 1, "guess", "guesses")} landed; this pass wrote ${many(round.accepted + 1, "token")}.`;
  return html`<section class="card one" aria-label="The round">
    <${Say} text=${step === STEPS.length - 1 ? landed : ""} />
    <header><h2>One round, step by step</h2><p class="note">${found.drafter}, ${found.shape}, rule <code>${found.rule}</code>
      ${!found.lossless && html` <span class="badge">lossy</span>`}${stale && html`<br />The settings above have changed since.`}</p></header>
    <ol class="steps" aria-label="Steps of the round">${STEPS.map(({ id }, index) => html`<li>
      <button type="button" class=${index <= step ? "reached" : ""} aria-current=${index === step ? "step" : null} onClick=${() => go(index)}>
        <span class="count" aria-hidden="true">${index + 1}</span>${id}</button></li>`)}</ol>
    <p class="about">${STEPS[step].about(found)}</p>
    <div class="split even">
      <div class="scroll" role="region" aria-label="Guesses and their numbers" tabindex="0"><table class="guesses">
        <thead><tr><th scope="col">Guess</th><th scope="col">q, drafter</th><th scope="col">${step > 0 && "p, model"}</th>
          <th scope="col">${step > 1 && judged(found)}</th><th scope="col"><span class="outcome">${step > 1 && "Outcome"}</span></th></tr></thead>
        <tbody>${rows.map((row) => row.kind === "own" ? (step > 2 && html`<tr class="own">
            <th scope="row" class=${deep(row)}><span class="tok own">${visible(row.text)}</span></th><td></td><td><${Probability} value=${row.p} kind="own" /></td>
            <td class="note">${drawnFrom(found)}</td><td><${Outcome} kind="own" /></td></tr>`)
          : html`<tr class=${row.kind}>
            <th scope="row" class=${deep(row)}><span class=${`tok ${step > 1 ? row.kind : "open"}`}>${visible(row.text)}</span></th>
            <td>${row.q == null ? html`<span class="note">${found.drafter === "prompt-lookup" ? "copied" : "not drawn"}</span>` : html`<${Probability} value=${row.q} kind="draft" />`}</td>
            <td>${step > 0 && html`<${Probability} value=${row.p} kind="own" />`}</td>
            <td>${step > 1 && html`<${Judgement} coin=${coin(row.node)} threshold=${round.thresholds?.[row.node]} row=${row} found=${found} />`}</td>
            <td>${step > 1 && html`<${Outcome} kind=${row.kind} />`}</td></tr>`)}</tbody>
      </table>
      <dl class="terms note">${TERMS.filter((term) => step >= term.step && (!term.shown || term.shown(found))).map(({ name, about }) =>
        html`<div><dt>${name}:</dt> <dd>${about}</dd></div>`)}</dl></div>
      <div class="beside">
        ${step > 2 && round.residual && html`<${Residual} of=${round.residual} bonus=${round.bonus} />`}
        ${step > 2 ? html`<${Tree} round=${round} />` : html`<p class="note wait">${["Next, the model looks at them.", "Next, each guess is judged.", "Next, the model writes a token of its own."][step]}</p>`}
      </div>
    </div>
    ${step > 2 && html`<p class="landed"><strong>${landed}</strong></p>`}
  </section>`;
}

const deep = ({ depth }) => `deep-${Math.min(depth, 8)}`;
const judged = ({ rule }) => (rule.startsWith("match") ? "Model's own choice" : rule.startsWith("typical") ? "Threshold" : "Coin");
const drawnFrom = ({ rule, round }) => (round.residual ? "drawn from the residual" : rule.startsWith("match") ? "the model's choice" : rule.startsWith("typical") ? "the likeliest" : "drawn from p");

const Outcome = ({ kind }) => html`<span aria-hidden="true">${SIGN[kind]} </span><span class="outcome">${{ accepted: "kept", own: "own", rejected: "refused" }[kind]}</span>`;

function Probability({ value, kind }) {
  return html`<span class="probability"><${Bar} share=${value ?? 0} kind=${kind} /><span class="figure">${percent(value)}</span></span>`;
}

/** A coin on its line from 0 to 1, with the part below which it passes; or what stands in its place under other rules. */
function Judgement({ coin, threshold, row, found }) {
  if (threshold != null) return html`<span class="figure">p ${row.p > threshold ? ">" : "≤"} ${percent(threshold)}</span>`;
  if (found.rule.startsWith("match")) return html`<${Own} row=${row} round=${found.round} />`;
  const kept = row.kind === "accepted", passes = coin && coin.coin < coin.probability;
  const why = kept && !passes ? "kept with a later token" : !kept && passes ? "another came first" : "";
  if (!coin) return html`<span class="note">${why || (found.rule === "block" ? "no chance" : "not looked at")}</span>`;
  return html`<span class="coin"><span class="track" aria-hidden="true"><i style=${{ width: `${coin.probability * 100}%` }}></i>
    <b style=${{ left: `${coin.coin * 100}%` }}></b></span><span class="figure">${coin.coin.toFixed(2)} ${passes ? "<" : "≥"} ${coin.probability.toFixed(2)}</span>${why && html`<small>${why}</small>`}</span>`;
}

function Own({ row, round }) {
  const above = round.parents[row.node], place = round.path.indexOf(above);
  if (place < 0) return html`<span class="note">not looked at</span>`;
  const choice = place + 1 < round.path.length ? round.texts[round.path[place + 1]] : round.bonus.text;
  return html`<code>${visible(choice)}</code>`;
}

function Residual({ of, bonus }) {
  const most = Math.max(...of.map((each) => Math.max(each.weight, each.p)));
  return html`<div class="residual"><h3>Residual</h3>
    <table><thead><tr><th scope="col">Token</th><th scope="col">p</th><th scope="col">after the refusal</th></tr></thead>
    <tbody>${of.map((each) => html`<tr><th scope="row"><span class=${each.token === bonus.token ? "tok own" : "tok open"}>${visible(each.text)}</span></th>
      <td class="figure">${percent(each.p)}</td>
      <td><span class="probability"><${Bar} share=${each.weight / most} kind="own" /><span class="figure">${percent(each.weight)}</span></span></td></tr>`)}</tbody></table>
  </div>`;
}
