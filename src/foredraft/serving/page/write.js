// Chat and complete: an answer as it comes, each token marked by who wrote it.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { stream } from "./api.js";
import { Legend, NumberField, Say, SeedField, Trouble, many, seedOf, useAbort, useFocusKept, useKept } from "./parts.js";
import { Round, inWords, notGuessed } from "./round.js";
import { Tokens, piece, reader, totals } from "./tokens.js";

const START = "def mean(values):\n    \"\"\"The arithmetic mean.\"\"\"\n";

export function Write({ server }) {
  const [mode, setMode] = useKept("mode", server.chat ? "chat" : "complete");
  const chat = server.chat && mode === "chat";
  const [settings, set] = useKept("write", { tokens: 96, temperature: 0.7, seed: "" });
  const [prompt, setPrompt] = useKept("prompt", START);
  const [question, setQuestion] = useKept("question", "");
  const [turns, setTurns] = useState(server.turns ?? []);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState(null);
  const [hide, setHide] = useKept("hide", true);
  const [opened, setOpened] = useState(null); // {turn, index}
  const [said, say] = useState("");
  const abort = useAbort();
  const row = useFocusKept(busy);
  const box = useRef(null);

  useEffect(() => { server.turns = turns.map((turn) => (turn.done === false ? { ...turn, done: true } : turn)); }, [turns]); // for whoever comes back

  const begin = () => {
    setTurns([]);
    setOpened(null);
    setProblem(null);
  };
  const change = (next) => {
    if ((next === "chat") === chat) return;
    setMode(next);
    begin();
  };

  const run = async (event) => {
    event.preventDefault();
    if (busy) return; // Enter; the button is another one meanwhile
    const text = chat ? question : prompt;
    if (!text.trim()) {
      setProblem(new Error(chat ? "Write a message first." : "Write a beginning first; the model goes on from there."));
      box.current?.focus();
      return;
    }
    const before = chat ? [...turns, { role: "user", text }] : [];
    const answer = { role: "assistant", text: "", prompt: chat ? null : text, pieces: [], done: false };
    const show = () => setTurns([...before, { ...answer }]);
    const read = reader();
    const body = {
      model: server.model, max_tokens: settings.tokens, temperature: settings.temperature, seed: seedOf(settings.seed), rounds: true,
      ...(chat ? { messages: before.map(({ role, text: content }) => ({ role, content })) } : { prompt: text }),
    };
    setProblem(null);
    setOpened(null);
    setBusy(true);
    setQuestion("");
    say("Writing.");
    show();
    let ended = "Finished.";
    try {
      for await (const chunk of stream(chat ? "v1/chat/completions" : "v1/completions", body, abort.begin())) {
        const next = piece(chunk, read);
        if (!next) continue;
        answer.pieces = [...answer.pieces, next];
        answer.text += next.text;
        show();
      }
    } catch (error) {
      ended = error.name === "AbortError" ? "Stopped." : "Broken off.";
      if (error.name !== "AbortError") setProblem(error);
      if (chat && !answer.pieces.length) setQuestion((typed) => typed || text);
    }
    answer.done = true;
    answer.pieces.length || ended === "Finished." ? show() : setTurns(before.slice(0, -1));
    setBusy(false);
    say(answer.pieces.length ? `${ended} ${summary(answer.pieces)}` : "");
  };

  /** Closes the round. Who was in it is at its token again. */
  const close = () => {
    const token = document.querySelector(".of-round [tabindex='0']") ?? document.querySelector(".of-round .tok");
    if (document.activeElement?.closest("aside")) token?.focus();
    setOpened(null);
  };
  useEffect(() => {
    const escape = (event) => { if (event.key === "Escape") close(); };
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, []);
  const look = (turn) => (index) => {
    setOpened({ turn, index });
    say(`Round ${index + 1}: ${inWords(turns[turn].pieces[index].round, index + 1)}`);
  };

  const round = opened && turns[opened.turn]?.pieces[opened.index]?.round;
  const keys = (event) => {
    if (event.key !== "Enter" || event.isComposing || !(chat ? !event.shiftKey : event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    event.currentTarget.form.requestSubmit(); // which checks the fields first
  };
  const put = (name) => (value) => set({ ...settings, [name]: value });

  return html`<div class="view">
    <h1>${chat ? "Chat" : "Complete"}</h1>
    <p class="lead">A small, quick drafter guesses the next few tokens. The model checks all guesses in one pass and keeps those it would have
      written itself: each guess kept saves a pass. <strong>Choose any token to see how its round went.</strong></p>
    <form class="card compose" onSubmit=${run}>
      ${server.chat && html`<div class="switch" role="group" aria-label="Kind of text">
        ${[["chat", "Chat"], ["complete", "Complete"]].map(([id, name]) => html`<button type="button" aria-pressed=${(id === "chat") === chat} disabled=${busy}
          onClick=${() => change(id)}>${name}</button>`)}
      </div>`}
      <label class="field wide">
        <span>${chat ? "Message" : "Beginning of the text"}</span>
        <textarea ref=${box} rows=${chat ? 2 : 5} spellcheck=${chat} class=${chat ? "" : "code"} value=${chat ? question : prompt} onKeyDown=${keys}
          onInput=${(event) => (chat ? setQuestion : setPrompt)(event.currentTarget.value)}></textarea>
      </label>
      <div class="fields">
        <${NumberField} label="Max. tokens" value=${settings.tokens} set=${put("tokens")} least="1" most="2000" />
        <${NumberField} label="Temperature" value=${settings.temperature} set=${put("temperature")} least="0" most="2" step="0.05" />
        <${SeedField} value=${settings.seed} set=${put("seed")} />
        <div class="buttons" ref=${row}>
          ${busy
            ? html`<button type="button" key="stop" onClick=${abort.stop}>Stop</button>`
            : html`<button type="submit" key="go" class="primary">${chat ? "Send" : "Continue the text"}</button>`}
          ${chat && !busy && turns.length > 0 && html`<button type="button" key="new" onClick=${begin}>New conversation</button>`}
        </div>
      </div>
    </form>
    <${Trouble} problem=${problem} />
    <${Say} text=${said} />
    ${turns.length > 0 && html`<div class=${round ? "split" : "split alone"}>
      <section class="card answer" aria-label="Answer">
        <div class="above"><${Legend} /><label class="check"><input type="checkbox" checked=${hide}
          onChange=${(event) => setHide(event.currentTarget.checked)} /> Hide refused guesses</label></div>
        ${turns.map((turn, at) => html`<${Turn} turn=${turn} hide=${hide} selected=${opened?.turn === at ? opened.index : null}
          open=${look(at)} chat=${chat} />`)}
      </section>
      ${round && html`<aside><${Round} round=${round} number=${opened.index + 1} close=${close} /></aside>`}
    </div>`}
  </div>`;
}

/** A finished turn is not drawn again for every token of the next one. */
function Turn(props) {
  const { turn, hide, selected, chat } = props;
  return useMemo(() => drawn(props), [turn, hide, selected, chat]);
}

function drawn({ turn, hide, selected, open, chat }) {
  if (turn.role === "user") return html`<div class="said"><h2>You</h2><p>${turn.text}</p></div>`;
  return html`<div class=${chat ? "said model-said" : ""}>
    ${chat && html`<h2>Model</h2>`}
    <div class=${chat ? "flow" : "flow code"}>
      ${turn.prompt && html`<span class="prompt">${turn.prompt}</span>`}
      <${Tokens} pieces=${turn.pieces} open=${open} selected=${selected} hideRefused=${hide} label="The text, token by token" />
      ${!turn.done && html`<span class="caret" aria-hidden="true"></span>`}
    </div>
    ${turn.done && html`<p class="note">${summary(turn.pieces)}</p>`}
  </div>`;
}

function summary(pieces) {
  const { tokens, accepted, drafted, tried, passes, by } = totals(pieces);
  if (!tokens) return "The model wrote nothing.";
  const names = Object.entries(by).map(([name, count]) => `${count} by ${name}`).join(", ");
  const cost = `${many(tokens, "token")} in ${many(passes, "pass", "passes")} of the model`;
  if (!drafted) return `${cost}. ${notGuessed(tried)}`;
  const plain = tokens + (pieces.at(-1).round?.ended === "eos" ? 1 : 0); // the end token took a pass, too
  return `${cost} (plain decoding takes ${plain}). ${many(accepted, "guess", "guesses")} kept${names ? `: ${names}` : ""}.`;
}
