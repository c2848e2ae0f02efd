// Requests to the server this page came from. Paths are relative, so that a proxy may serve it below a prefix.

const STORED = "foredraft-key";

/** The tab's storage; where the browser forbids it, values last as long as the page. */
export const storage = allowed();

function allowed() {
  try {
    return sessionStorage;
  } catch {
    const values = new Map();
    return { getItem: (name) => values.get(name) ?? null, setItem: (name, value) => { values.set(name, value); } };
  }
}

/** A key as a header takes it: what is no ASCII as bytes of UTF-8, as the server compares them. */
const bytes = (key) => String.fromCharCode(...new TextEncoder().encode(key));

let askForKey = async () => null;
let asking = null;

/** What went wrong, in words for a person; `status` is 0 where no answer came. */
export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** `ask(refused)` gets a key from the person, or null; `refused` says that there was one and the server did not take it. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

async function newKey(refused) {
  asking ??= askForKey(refused).finally(() => { asking = null; });
  const key = await asking;
  if (key === null) throw new Problem("This server asks for an API key. Reload the page to enter one.", 401);
  storage.setItem(STORED, key);
}

async function send(path, options = {}) {
  for (;;) {
    const key = storage.getItem(STORED);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${bytes(key)}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server does not answer. Start it again, or check the connection, and try once more.", 0);
    }
    if (response.ok) return response;
    if (response.status !== 401) throw new Problem(await reason(response), response.status);
    await newKey(Boolean(key));
  }
}

async function reason(response) {
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? (typeof body?.detail === "string" ? body.detail : "");
  const after = response.headers.get("retry-after");
  return `${sentence(said) || `The server answered ${response.status}.`}${after && !/try again/i.test(said) ? ` Try again in ${after} s.` : ""}`;
}

/** A message of the API as a sentence; a field's name at its beginning stays as it is. */
const sentence = (text) => text.replace(/^[a-z]+(?= )/, (word) => word[0].toUpperCase() + word.slice(1)).replace(/[^.!?]$/, "$&.");

export const getJSON = async (path) => (await send(path)).json();
export const getText = async (path, signal) => (await send(path, { signal })).text();

const post = (path, body, signal) =>
  send(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

export const postJSON = async (path, body, signal) => (await post(path, body, signal)).json();

/** The chunks of a streamed answer, parsed, until `[DONE]`. */
export async function* stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Problem("The connection broke off before the answer was complete.", 0);
      });
      if (done) throw new Problem("The connection broke off before the answer was complete.", 0);
      const events = (rest + value.replaceAll("\r", "")).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue; // a ping
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem(sentence(chunk.error.message), chunk.error.code ?? 500);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
