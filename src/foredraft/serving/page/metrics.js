// Prometheus' text format, and the few figures of it that the page shows.

/** `{name: [{labels, value}]}` of the exposition `text`. */
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    (found[match[1]] ??= []).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const sum = (lines) => (lines ?? []).reduce((total, { value }) => total + value, 0);

/** Counters and gauges at one moment. */
export function read(text) {
  const metrics = parse(text);
  return {
    tokens: sum(metrics["vllm:generation_tokens_total"]),
    running: sum(metrics["vllm:num_requests_running"]),
    waiting: sum(metrics["vllm:num_requests_waiting"]),
    drafts: sum(metrics["vllm:spec_decode_num_drafts_total"]),
    accepted: sum(metrics["vllm:spec_decode_num_accepted_tokens_total"]),
    drafter: metrics["foredraft:row_passes_total"]?.[0]?.labels.drafter ?? "drafter", // a server has one
    passes: sum(metrics["foredraft:row_passes_total"]), // rounds, each counted once per row
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
