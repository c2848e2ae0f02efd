// One round in words, drawn, and as a table.

import { html } from "./vendor/htm-preact-standalone.js";
import { many, percent, visible } from "./parts.js";
import { lines, Tree } from "./tree.js";

const REASONS = {
  mismatch: "The model did not go along with the next guess, so it wrote a token of its own there, and the rest of the draft was thrown away.",
  "end of draft": "Every guess on this branch was right. The same pass also gave the token after the last one, for free.",
  eos: "The text ended here: the model wrote its end token.",
  length: "The text ended here: it had as many tokens as were asked for.",
  stop: "The text ended here, at a stop sign.",
};

/** Why nothing was guessed, where the drafter was asked (`tried`) and where it was not. */
export const notGuessed = (tried) => `Nothing was guessed: ${tried
  ? "the drafter had nothing to offer."
  : "the server has no drafter, or found that guessing does not make this text faster on this machine now. Start it with a drafter and --shape \"chain(4)\" to see guesses."}`;

export function inWords(round, number) {
  const drafted = round.tokens.length - 1;
  if (!drafted && number !== 1 && round.ended === "length" && round.shape === "chain(0)") return "Nothing was guessed: one token was left to write.";
  if (!drafted && number === 1) return "Nothing was guessed: the first pass reads the text before. Guesses come after it.";
  if (!drafted) return notGuessed(round.shape !== "chain(0)");
  return `${many(drafted, "token")} guessed, ${round.accepted} kept, in one pass of the model.`;
}

const OUTCOME = { root: "last token of the text before", accepted: "✓ kept", own: "+ the model's own", rejected: "✗ refused" };

export function Round({ round, number, close }) {
  return html`<section class="card round" aria-label=${`Round ${number}`}>
    <header>
      <h2>Round ${number}</h2>
      <button type="button" class="quiet" onClick=${close} aria-label="Close the round">✕</button>
    </header>
    <p>${round.tokens.length > 1 ? html`<strong>${inWords(round)}</strong>` : inWords(round, number)} ${REASONS[round.ended] ?? ""}</p>
    <${Tree} round=${round} />
    <p class="note"><b>p</b>: how likely the model finds the token after those above it. ${round.q && html`<b>q</b>: how likely the drafter did.`}
      ${round.shape && html` Shape: <code>${round.shape}</code>.`}</p>
    <details>
      <summary>The same as a table</summary>
      <${Table} round=${round} />
    </details>
  </section>`;
}

function Table({ round }) {
  return html`<div class="scroll" role="region" aria-label="Tokens of the round" tabindex="0"><table>
    <thead><tr><th scope="col">Token</th><th scope="col">Outcome</th><th scope="col">Guessed by</th><th scope="col">p</th><th scope="col">q</th></tr></thead>
    <tbody>${lines(round).map((row) => html`<tr>
      <th scope="row"><code>${visible(row.text)}</code></th>
      <td>${OUTCOME[row.kind]}</td>
      <td>${row.kind === "root" || row.kind === "own" ? "–" : round.drafters?.[row.node] ?? "–"}</td>
      <td class="figure">${percent(row.p)}</td>
      <td class="figure">${percent(row.q)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}
