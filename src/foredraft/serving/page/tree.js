// The token tree of a round, drawn: a line per node, below and right of its parent. Numbers stand on the left, where a narrow window does not cut them off.

import { html } from "./vendor/htm-preact-standalone.js";
import { percent, visible } from "./parts.js";

const LINE = 34, INDENT = 16, BOX = 24, COLUMN = 48;

/** Nodes in the order in which they are drawn, the kept branch first, each with its depth; the bonus token where it follows. */
export function lines(round) {
  const children = round.tokens.map(() => []);
  round.parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const found = [];
  const kept = new Set(round.path);
  const walk = (node, depth, above) => {
    const line = found.length;
    const kind = node === 0 ? "root" : kept.has(node) ? "accepted" : "rejected";
    found.push({ node, depth, above, kind, text: round.texts[node], p: round.p[node], q: round.q?.[node] });
    const below = children[node].filter((each) => kept.has(each));
    below.forEach((each) => walk(each, depth + 1, line));
    if (node === round.path.at(-1) && round.bonus) {
      found.push({ node: "bonus", depth: depth + 1, above: line, kind: "own", text: round.bonus.text, p: round.bonus.p });
    }
    children[node].filter((each) => !kept.has(each)).forEach((each) => walk(each, depth + 1, line));
  };
  walk(0, 0, -1);
  return found;
}

const SAID = { root: "start", accepted: "kept", own: "the model's own", rejected: "refused" };
export const SIGN = { root: "", accepted: "✓", own: "+", rejected: "✗" };

export function Tree({ round }) {
  const rows = lines(round);
  const left = 12 + (round.q ? 2 : 1) * COLUMN;
  const width = (text) => Math.max(30, 16 + 8.2 * [...short(text)].length);
  const total = 22 + Math.max(...rows.map((row) => left + row.depth * INDENT + width(row.text))), height = rows.length * LINE + 4;
  const y = (line) => line * LINE + LINE / 2 + 2;
  const said = rows.map((row) => `${short(row.text)} ${SAID[row.kind]}${row.p == null ? "" : `, ${percent(row.p)}`}`).join("; ");
  return html`<div class="tree" role="region" aria-label="Tree of guesses" tabindex="0">
    <svg role="img" aria-label=${said} width=${total} height=${height} viewBox=${`0 0 ${total} ${height}`}>
      ${rows.map((row, line) => row.above < 0 ? null : html`<path class=${`edge ${row.kind}`}
        d=${`M${left + rows[row.above].depth * INDENT + 9} ${y(row.above) + BOX / 2}V${y(line) - 6}q0 6 6 6H${left + row.depth * INDENT}`} />`)}
      ${rows.map((row, line) => {
        const x = left + row.depth * INDENT;
        return html`<g class=${`node ${row.kind}`}>
          <rect x=${x} y=${y(line) - BOX / 2} width=${width(row.text)} height=${BOX} rx="6" />
          <text class="word" x=${x + 8} y=${y(line) + 4.5}><tspan>${short(row.text)}</tspan></text>
          <text class="sign" x=${x + width(row.text) + 6} y=${y(line) + 4.5}>${SIGN[row.kind]}</text>
          <text class="number" x=${COLUMN} y=${y(line) + 4.5}>${line ? row.p != null && percent(row.p) : "p"}</text>
          ${round.q && html`<text class="number" x=${2 * COLUMN} y=${y(line) + 4.5}>${line ? row.q != null && percent(row.q) : "q"}</text>`}
        </g>`;
      })}
    </svg>
  </div>`;
}

const short = (text) => { const shown = visible(text); return [...shown].length > 14 ? `${[...shown].slice(0, 13).join("")}…` : shown; };
