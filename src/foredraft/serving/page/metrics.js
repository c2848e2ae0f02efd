// Prometheus' text format, and the few figures of it that the page shows.

/** Counters and gauges at one moment, of the exposition `text`. */
export function read(text) {
  const sum = (name) => [...text.matchAll(new RegExp(`^${name}(?:\\{.*\\})? (\\S+)`, "gm"))].reduce((total, [, value]) => total + Number(value), 0);
  return {
    tokens: sum("vllm:generation_tokens_total"),
    running: sum("vllm:num_requests_running"),
    waiting: sum("vllm:num_requests_waiting"),
    drafts: sum("vllm:spec_decode_num_drafts_total"),
    accepted: sum("vllm:spec_decode_num_accepted_tokens_total"),
    drafter: /^foredraft:row_passes_total\{(?:.*,)?drafter="((?:[^"\\]|\\.)*)"/m.exec(text)?.[1] ?? "drafter", // a server has one
    passes: sum("foredraft:row_passes_total"), // rounds, each counted once per row
  };
}

/** What happened between two moments; null without the first, or where counters began anew. */
export function sample(before, now) {
  if (!before || now.tokens < before.tokens) return null;
  const seconds = now.at - before.at, passes = now.passes - before.passes, drafts = now.drafts - before.drafts;
  return {
    at: now.at,
    length: { [now.drafter]: drafts > 0 ? 1 + (now.accepted - before.accepted) / drafts : null },
    rate: { "all requests": (now.tokens - before.tokens) / seconds },
    rows: { running: now.running, waiting: now.waiting },
    share: { drafted: passes > 0 ? Math.min(100, (100 * drafts) / passes) : null },
  };
}
