// The page: its views, the key that the server may ask for, and what is known of the server.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.js";
import { getJSON, onKeyNeeded } from "./api.js";
import { Trouble } from "./parts.js";
import { Live, watch } from "./live.js";
import { Race } from "./race.js";
import { Roll } from "./roll.js";
import { Write } from "./write.js";

const VIEWS = [
  { id: "write", name: "Write", view: Write },
  { id: "roll", name: "Roll a round", view: Roll },
  { id: "race", name: "Side by side", view: Race },
  { id: "live", name: "Live", view: Live },
];

const named = () => VIEWS.find(({ id }) => id === location.hash.slice(1)) ?? VIEWS[0];

/** What the views need to know of the server. */
async function ask() {
  const models = await getJSON("v1/models");
  const [{ id, chat, exact = true }] = models.data;
  return { model: id, chat, exact };
}

function App() {
  const [view, setView] = useState(named);
  const [server, setServer] = useState(null);
  const [problem, setProblem] = useState(null);
  const [asked, setAsked] = useState(null);
  const main = useRef(null);
  const connect = () => {
    setProblem(null);
    const again = (found) => setServer((old) => ({ ...found, turns: old?.turns })); // it may be another model
    ask().then((found) => { setServer(found); watch(() => ask().then(again, () => {})); }, setProblem);
  };
  useEffect(() => {
    onKeyNeeded((refused) => new Promise((answer) => setAsked({ refused, answer })));
    connect();
    const follow = () => { setView(named()); main.current?.focus({ preventScroll: true }); scrollTo(0, 0); };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => { document.title = `${view.name} – Foredraft`; }, [view]);
  const answer = (key) => { asked.answer(key); setAsked(null); };
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current?.focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#write"><img src="page/icon.svg" alt="" width="26" height="26" />Foredraft</a>
      <nav aria-label="Views">${VIEWS.map(({ id, name }) => html`<a href=${`#${id}`} aria-current=${id === view.id ? "page" : null}>${name}</a>`)}</nav>
      ${server && html`<p class="model" title="The model that this server runs">${server.model}</p>`}
    </header>
    <main id="main" ref=${main} tabindex="-1">
      <${Trouble} problem=${problem} retry=${connect} />
      ${server && html`<${view.view} server=${server} key=${view.id} />`}
      ${!server && !problem && html`<p class="loading">Asking the server…</p>`}
    </main>
    ${asked && html`<${KeyDialog} refused=${asked.refused} answer=${answer} />`}`;
}

function KeyDialog({ refused, answer }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const done = (event) => {
    event.preventDefault();
    answer(new FormData(event.currentTarget).get("key").trim() || null);
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" aria-describedby="key-about" onCancel=${() => answer(null)}>
    <form onSubmit=${done}>
      <h2 id="key-title">API key</h2>
      <p id="key-about">${refused ? "The server did not take this key. Enter another one." : "This server asks for a key. It is kept in this tab alone, until you close it."}</p>
      <label class="field wide"><span>Key</span><input name="key" type="password" autocomplete="off" required autofocus /></label>
      <div class="buttons"><button type="submit" class="primary">Continue</button><button type="button" onClick=${() => answer(null)}>Cancel</button></div>
    </form>
  </dialog>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
