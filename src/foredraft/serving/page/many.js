// What many rolls came to: how many guesses landed, and how often each first token came, beside what was to be expected.

import { html } from "./vendor/htm-preact-standalone.js";
import { Say, percent, visible } from "./parts.js";

const SHOWN = 8;
const SPREADS = 2; // of the distance that chance alone leaves, up to which nothing is said against a rule

/** Where the expected number comes from, by rule. */
const FROM = {
  chances: "for each draft, the probabilities that its guesses are kept, multiplied along each branch.",
  block: "from the chances of each draft's coins.",
  traversal: "from the chances of each draft's coins.",
  typical: "this rule throws no coin, so each draft leads to what came.",
};

/** Two tallies of the same rolls in one; `sum` is null at first. */
export function joined(sum, next) {
  if (!sum) return next;
  const add = (one, two) => one.map((count, index) => count + two[index]);
  const first = new Map(sum.first.map((each) => [each.token, { ...each }]));
  for (const each of next.first) {
    const known = first.get(each.token);
    if (known) known.count += each.count;
    else first.set(each.token, { ...each });
  }
  const rolls = sum.rolls + next.rolls, tokens = [...first.values()];
  return {
    ...sum, rolls, first: tokens, landed: add(sum.landed, next.landed),
    expected: sum.expected && next.expected && add(sum.expected, next.expected),
    distance: Math.max(0, 1 - tokens.reduce((kept, { count, p }) => kept + Math.min(count / rolls, p), 0)),
    chance: next.chance, spread: next.spread,
  };
}

export function Many({ tally, running }) {
  const { rolls, landed, expected, first, distance, chance, spread, rule, lossless, drafter, shape } = tally;
  const mean = (counts) => counts.reduce((sum, count, index) => sum + index * count, 0) / rolls;
  const most = Math.max(...landed, ...(expected ?? []));
  const likely = [...first].sort((one, two) => two.p - one.p || two.count - one.count);
  const shown = [...new Set([...likely.slice(0, SHOWN), ...[...first].sort((one, two) => two.count - one.count).slice(0, 3)])];
  const rest = { p: 1 - shown.reduce((sum, { p }) => sum + p, 0), count: rolls - shown.reduce((sum, { count }) => sum + count, 0) };
  const highest = Math.max(...[...shown, rest].map(({ p, count }) => Math.max(p, count / rolls)));
  const limit = chance + SPREADS * spread, far = distance > limit;
  return html`<section class="card many" aria-label="Many rolls">
    <header><h2>${rolls} rolls</h2><p class="note">${drafter}, ${shape}, rule <code>${rule}</code> ${!lossless && html`<span class="badge">lossy</span>`}</p></header>
    ${running && html`<progress max="500" value=${rolls} aria-label="Rolls made"></progress>`}
    <${Say} text=${running ? "" : `${rolls} rolls. ${mean(landed).toFixed(2)} guesses landed on average.`} />
    <div class="pair">
      <div>
        <h3>How many guesses landed</h3>
        <table class="bars"><thead><tr><th scope="col">Kept</th><th scope="col">Rolls</th><th scope="col">came</th>
          ${expected && html`<th scope="col">expected</th>`}</tr></thead>
          <tbody>${landed.map((count, index) => html`<tr><th scope="row">${index}</th>
            <td class="draw"><${Versus} came=${count / most} wanted=${expected && expected[index] / most} /></td>
            <td class="figure">${count}</td>${expected && html`<td class="figure">${expected[index].toFixed(0)}</td>`}</tr>`)}</tbody></table>
        <p class="note">On average <b>${mean(landed).toFixed(2)}</b>${expected ? html`, expected <b>${mean(expected).toFixed(2)}</b>: ${FROM[rule.split("(")[0]] ?? FROM.chances}`
          : html`. Two guesses after the same text may be the same token. For such guesses no expected number is computed.`}</p>
      </div>
      <div>
        <h3>The first token of each round</h3>
        <table class="bars"><thead><tr><th scope="col">Token</th><th scope="col">Share</th><th scope="col">came</th><th scope="col">p</th></tr></thead>
          <tbody>${[...shown, { text: null, ...rest }].map(({ text, count, p }) => html`<tr>
            <th scope="row">${text === null ? "all others" : html`<code>${visible(text)}</code>`}</th>
            <td class="draw"><${Versus} came=${count / rolls / highest} wanted=${p / highest} /></td>
            <td class="figure">${percent(count / rolls)}</td><td class="figure">${percent(Math.max(0, p))}</td></tr>`)}</tbody></table>
        <p class=${far ? "closing far" : "closing near"}><span class="mark" aria-hidden="true">${far ? "≠" : "≈"}</span>
          <span><b>${percent(distance)}</b> away from the model's own probabilities. Even a perfect rule would be about <b>${percent(chance)}</b> off after ${rolls} rolls, and seldom more
            than <b>${percent(limit)}</b>; with more rolls both shrink. ${far && (lossless ? "This is more: rare by chance alone, so roll again." : "This is more: this rule changes what the model says.")}</span></p>
      </div>
    </div>
    <p class="legend-line"><span class="swatch came"></span> came <span class="swatch wanted"></span> expected</p>
  </section>`;
}

const Versus = ({ came, wanted }) => html`<span class="versus" aria-hidden="true"><i style=${{ width: `${Math.max(0, came) * 100}%` }}></i>
  ${wanted != null && html`<b style=${{ left: `${Math.max(0, wanted) * 100}%` }}></b>`}</span>`;
