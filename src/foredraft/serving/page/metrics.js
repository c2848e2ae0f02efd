// Prometheus' text format, and the few figures of it that the page shows.

/** Counters and gauges at one moment, of the exposition `text`. */
export function read(text) {
  const values = (name) => [...text.matchAll(new RegExp(`^${name}(\\{.*\\})? (\\S+)`, "gm"))].map(([, labels, value]) => [labels, Number(value)]);
  const sum = (name) => values(name).reduce((total, [, value]) => total + value, 0);
  const byDrafter = (name) => values(name).reduce((totals, [labels, value]) => {
    const [, drafter] = /[{,]drafter="((?:[^"\\]|\\.)*)"/.exec(labels);
    return { ...totals, [drafter]: (totals[drafter] ?? 0) + value };
  }, {});
  return {
    tokens: sum("vllm:generation_tokens_total"),
    running: sum("vllm:num_requests_running"),
    waiting: sum("vllm:num_requests_waiting"),
    drafts: byDrafter("foredraft:drafts_total"),
    accepted: byDrafter("foredraft:accepted_tokens_total"),
    passes: sum("foredraft:row_passes_total"), // passes, each counted once per row
  };
}

/** What happened between two moments; null without the first, or where counters began anew. */
export function sample(before, now) {
  if (!before || now.tokens < before.tokens) return null;
  const seconds = now.at - before.at, passes = now.passes - before.passes, length = {};
  let all = 0;
  for (const drafter in now.drafts) {
    const more = (counts, earlier) => (counts[drafter] ?? 0) - (earlier[drafter] ?? 0), drafts = more(now.drafts, before.drafts);
    length[drafter] = drafts > 0 ? 1 + more(now.accepted, before.accepted) / drafts : null;
    all += drafts;
  }
  return {
    at: now.at,
    length,
    rate: { "all requests": (now.tokens - before.tokens) / seconds },
    rows: { running: now.running, waiting: now.waiting },
    share: { drafted: passes > 0 ? Math.min(100, (100 * all) / passes) : null },
  };
}
