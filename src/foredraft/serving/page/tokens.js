// A streamed answer as tokens: which were kept of a draft, which the model wrote itself, which were refused.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { spoken } from "./parts.js";

const BYTES = /^bytes:(?:\\x[0-9a-f]{2})+$/; // how the server writes a token that is no text alone

/** Reads the texts of one answer's tokens, in order. A character of several tokens is the text of its last one; those before it have none. */
export function reader() {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true }), encoder = new TextEncoder();
  const bytes = (text) => (BYTES.test(text) ? Uint8Array.from(text.matchAll(/\\x(..)/g), ([, each]) => parseInt(each, 16)) : encoder.encode(text));
  return (text, last = false) => decoder.decode(bytes(text), { stream: !last });
}

/** What one chunk of a stream added: `{text, round, tokens}`, or null where it holds no text. `read` is the answer's `reader`. */
export function piece(chunk, read) {
  const choice = chunk.choices?.[0];
  if (!choice) return null;
  const text = choice.text ?? choice.delta?.content ?? "";
  const round = choice.round ?? null;
  if (!text && !round) return null;
  return { text, round, tokens: round ? tokensOf(round, read, Boolean(choice.finish_reason)) : [{ kind: "own", text }] };
}

/** The round's tokens in the order of the text, refused ones last. The token that ends a text is none of its. */
function tokensOf(round, read, last) {
  const kept = round.path.slice(1).map((node) => ({ kind: "accepted", text: round.texts[node], node, drafter: round.drafters?.[node] }));
  if (round.bonus) kept.push({ kind: "own", text: round.bonus.text, node: "bonus" });
  const shown = last && round.ended === "eos" ? kept.slice(0, -1) : kept;
  const written = shown.map((each, index) => ({ ...each, name: each.text, text: read(each.text, last && index === shown.length - 1) }));
  return [...written, ...refused(round)];
}

/** The branch that was tried first after the last token kept. */
function refused(round) {
  const found = [];
  let above = round.path.at(-1);
  for (;;) {
    const node = round.parents.findIndex((parent, index) => parent === above && !round.path.includes(index));
    if (node < 0) return found;
    found.push({ kind: "rejected", text: round.texts[node], node, drafter: round.drafters?.[node] });
    above = node;
  }
}

/** Counts of a whole answer. */
export function totals(pieces) {
  const sum = { tokens: 0, accepted: 0, drafted: 0, tried: false, passes: pieces.length, by: {} };
  for (const { round, tokens } of pieces) {
    sum.drafted += round ? round.tokens.length - 1 : 0;
    sum.tried ||= Boolean(round) && round.shape !== "chain(0)";
    for (const { kind, drafter } of tokens) {
      if (kind === "rejected") continue;
      sum.tokens += 1;
      if (kind === "accepted") {
        sum.accepted += 1;
        sum.by[drafter ?? "the drafter"] = (sum.by[drafter ?? "the drafter"] ?? 0) + 1;
      }
    }
  }
  return sum;
}

const NAMES = { accepted: "kept", own: "the model's own", rejected: "refused" };

/** The tokens of `pieces`. Where they can be opened, arrow keys move between them; Enter, or a click, opens the round. */
export function Tokens({ pieces, open, selected, hideRefused, label }) {
  const [at, setAt] = useState(0);
  const box = useRef(null);
  const focus = useRef(false);
  const flat = [];
  pieces.forEach((each, index) => each.tokens.forEach((token) => {
    if (!(hideRefused && token.kind === "rejected")) flat.push({ ...token, index, round: each.round });
  }));
  const current = Math.min(at, flat.length - 1);
  useLayoutEffect(() => {
    if (focus.current) box.current?.querySelector('[tabindex="0"]')?.focus();
    focus.current = false;
  });
  const last = flat.length - 1;
  const go = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return; // Alt and an arrow go back in the browser
    const move = { ArrowRight: (from) => from + 1, ArrowLeft: (from) => from - 1, Home: () => 0, End: () => last }[event.key];
    if (move) {
      event.preventDefault();
      focus.current = true;
      setAt((from) => Math.max(0, Math.min(last, move(Math.min(from, last)))));
    } else if ((event.key === "Enter" || event.key === " ") && flat[current]?.round) {
      event.preventDefault();
      open(flat[current].index);
    }
  };
  const token = (each, index) => {
    const title = each.kind === "accepted" && each.drafter ? `kept, guessed by ${each.drafter}` : each.kind === "rejected" && each.drafter ? `refused, guessed by ${each.drafter}` : NAMES[each.kind];
    const click = () => { setAt(index); if (each.round) open(each.index); };
    const said = each.text === "" && each.name ? "part of a character" : spoken(each.text);
    const button = open ? { role: "button", tabindex: index === current ? 0 : -1, "aria-label": `${said}: ${title}`, onClick: click } : {};
    return html`<span class=${`tok ${each.kind}${/^[ \t]*\n/.test(each.text) ? " breaks" : ""}`} title=${title}
      ...${button}>${each.kind === "rejected" ? each.text.replace(/\s+/g, " ") : each.text}</span>`;
  };
  const groups = pieces.map(() => []);
  flat.forEach((each, index) => groups[each.index].push(token(each, index)));
  return html`<div class="tokens" role="group" aria-label=${label} ref=${box} onKeyDown=${open && go}>${groups.map((group, index) =>
    html`<span class=${index === selected ? "of-round" : ""}>${group}</span>`)}</div>`;
}
