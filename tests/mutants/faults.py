"""The faults: where, the line as it is, the line with the fault, and the tests of which one must fail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    file: str
    line: str
    instead: str
    tests: tuple[str, ...]


@cache
def sources() -> dict[Path, str]:
    return {each: each.read_text() for each in sorted((ROOT / "src" / "foredraft").rglob("*")) if each.suffix in (".py", ".c", ".h")}


def place(fault: Fault) -> Path | str:
    """The file that has the faulty line once, or what is wrong; code that moved is found in its new file."""
    files = [file for file, text in sources().items() if text.count(fault.line) == 1]
    found = [file for file in files if file.name == fault.file] or files
    return found[0] if len(found) == 1 else f"found in {len(found)} files: {fault.line!r}"


TREE = ("tests/test_tree.py",)
RULES = ("tests/verification/test_rules_enumerated.py",)
CHOICES = ("tests/verification/test_choices.py",)
RULE_KERNELS = ("tests/verification/test_rule_kernels.py",)
TREE_RULES = ("tests/verification/test_tree_rules.py",)
MATCH = ("tests/verification/test_match.py", "tests/verification/test_rules_enumerated.py")
NOISE = ("tests/logits/test_noise.py", "tests/logits/test_keyed.py")
CACHE = ("tests/target/test_cache.py",)
PAGES = ("tests/models/test_pages.py",)
PAGED = ("tests/models/test_paged_cache.py",)
PASS_MEMORY = ("tests/models/test_pass_memory.py",)
WINDOWS = ("tests/models/test_windows.py",)
CHANGED = ("tests/target/test_changed.py",)
SHARING = ("tests/drafters/test_eagle3_sharing.py",)
MTP = ("tests/drafters/test_mtp.py",)
HANDED = ("tests/target/test_handed_pages.py",)
ELSEWHERE = ("tests/target/test_pages_elsewhere.py",)
STATES = ("tests/target/test_kept_states.py",)
STATE_PAGES = ("tests/target/test_state_pages.py",)
ADMISSION = ("tests/test_admission.py",)
MASKS = ("tests/target/test_trees.py",)
LOOP = ("tests/test_session.py", "tests/test_loop_law.py", "tests/test_generate.py")
HISTORIES = ("tests/logits/test_histories.py", "tests/logits/test_processors.py")
NUCLEUS = ("tests/logits/test_nucleus.py",)
KERNELS = ("tests/target/test_native.py",)
HUGE_PAGES = ("tests/target/test_huge_pages.py",)
MIXTURES = ("tests/target/test_native_experts.py",)
COSTS = ("tests/planning/test_planner.py",)
ROUNDS = ("tests/planning/test_rounds.py",)
PACKERS = ("tests/target/test_library_packers.py",)
GROUPS = ("tests/target/test_groups.py",)
MULTIMODAL = ("tests/target/test_multimodal.py",)
EXPERT_COSTS = ("tests/planning/test_expert_costs.py",)
GROUPED_EXPERTS = ("tests/target/test_grouped_experts.py",)
PAGED_ATTENTION = ("tests/target/test_paged_attention.py",)
SOURCED = ("tests/target/test_native_sourced.py",)
ENCODERS = ("tests/target/test_encoder_decoder.py",)
RUNS = ("tests/test_source_memory.py",)
GRAPHS = ("tests/target/test_graphs.py",)
SEGMENTS = ("tests/target/test_native_segments.py",)
DESCRIBED = ("tests/target/test_native_described.py",)
VECTORS = ("tests/target/test_native_vectors.py",)
THREADS = ("tests/test_threads.py",)
LEARNER = ("tests/training/test_online.py",)
ATTACH = ("tests/test_attach.py",)
DRAFT_VERIFY = ("tests/drafters/test_draft_verify.py",)
STOPPING = ("tests/drafters/test_layer_skip.py",)
VOCABULARIES = ("tests/drafters/test_vocabularies.py",)
ENGINE = ("tests/serving/test_engine.py",)
METRICS = ("tests/serving/test_metrics.py",)
FINGERPRINT = ("tests/serving/test_fingerprint.py",)
SERVE = ("tests/serving/test_serve.py",)
SERVER_THREADS = ("tests/serving/test_threads.py",)
ROLL = ("tests/serving/test_roll.py",)
WORKERS = ("tests/serving/test_workers.py",)
LANDING = ("tests/serving/test_landing.py",)
API = ("tests/serving/test_api.py",)
BAD_REQUESTS = ("tests/serving/test_bad_requests.py",)
CLIENTS = ("tests/serving/test_clients.py",)
STOPS = ("tests/serving/test_stops.py",)
PLANS = ("tests/serving/test_plans.py",)
PLANNING = ("tests/planning/test_planner.py", "tests/planning/test_rounds.py")
DECODE = ("tests/target/test_decode.py",)
DRAWN = ("tests/drafters/test_native_growth.py",)

FAILING = ("tests/test_failing_rows.py",)
INVARIANCE = ("tests/target/test_invariance.py",)
GUESSES = ("tests/test_guesses.py",)
ROWS = ("tests/test_row_parameters.py",)
PENALTIES = ("tests/logits/test_penalties.py",)
LOGPROBS = ("tests/logits/test_logprobs.py",)
PROMPT_LOGPROBS = ("tests/test_prompt_logprobs.py",)
ISOLATED = ("tests/drafters/test_isolated.py",)
SERVER = ("tests/auditing/test_server.py",)

FAULTS = [
    # -- rows that fail, and bits
    Fault("cache.py", "store[[row for row in rows if row < len(store)]] = 0", "pass", FAILING),
    Fault(
        "outcome.py",
        "for depth, node in enumerate(path) if (row, node) in failures",
        "for depth, node in [(0, n) for n in range(99)] if (row, node) in failures",
        FAILING,
    ),
    Fault("rows.py", 'reason, error = "error", raised', "raise", FAILING),
    Fault("attention.h", "const int at = c->positions[s] - start;", "const int at = s - start;", INVARIANCE),
    # -- trees
    Fault("tree.py", "for _ in range(max(1, (nodes - 1).bit_length())):", "for _ in range(1):", TREE),
    Fault("tree.py", "            lines[node] = lines[row[node]]\n", "            lines[node] = lines[node - 1]\n", TREE),
    Fault("tree.py", "return tuple(range(-1, nodes - 1))", "return (-1, *[0] * (nodes - 1))", TREE),
    Fault("tree.py", "lines[node, node] = True", "lines[node, node] = False", TREE),
    Fault(
        "shapes.py", "depths.append(0 if parent < 0 else depths[parent] + 1)", "depths.append(0 if parent < 0 else depths[-1] + 1)", TREE
    ),
    Fault("tree.py", "return nodes[::-1]", "return nodes", TREE),
    Fault("tree.py", "max(depths) <= limit for depths", "max(depths) <= limit + 1 for depths", TREE),
    Fault("tree.py", "return self.valid[:, 1:].sum(-1)", "return self.valid.sum(-1)", TREE + RULES),
    Fault("tree.py", "wrong = wrong | (self.valid & ~above).any(1) | ~self.valid[:, 0]", "wrong = wrong | ~self.valid[:, 0]", TREE),
    Fault("tree.py", "if (parent >= node or parent < 0)", "if (parent > node or parent < 0)", (*TREE, "tests/test_shapes.py")),
    # -- rules
    Fault("rejection.py", "kept.cumprod(1).sum(1)", "kept.sum(1)", RULES),
    Fault("ratios.py", "residual(scaled, q_at), p_at)", "p_at, p_at)", RULES),
    Fault("block.py", "P.append((P[-1] * ratio).clamp(max=1))", "P.append(ratio.clamp(max=1))", RULES),
    Fault("ratios.py", "scaled = p_at if scale is None else scale[:, None] * p_at", "scaled = p_at", RULES),
    Fault("growth.h", "const Draws *d = j->rows + row;", "const Draws *d = j->rows;", DRAWN),
    Fault(
        "growth.h",
        "racing(draws, level, logits, g->vocab, draws->q, k, leading)",
        "racing(draws, 0, logits, g->vocab, draws->q, k, leading)",
        DRAWN,
    ),
    Fault("planning/curves.py", "off / variance * along", "off / variance * along * (along > 1e9)", PLANNING),
    Fault("planning/curves.py", "covariance -= np.outer(along, along) / variance", "covariance[0, 0] *= 0.5", PLANNING),
    Fault("planning/curves.py", "if believed or convinced:", "if True:", PLANNING),
    Fault("planning/curves.py", "each.place -= each.place > gone", "each.place -= 0", PLANNING),
    Fault("planning/curves.py", "self.scale if size == 1 else self.checked", "self.checked", PLANNING),
    Fault("drafters/growth.py", "LEADER + (1 - LEADER) * q[..., :1]", "q[..., :1]", DRAWN),
    Fault("growth.h", "draws ? __builtin_logf(chance_of_leader(j, draws->q[at])) : last", "draws ? 0.0f : last", DRAWN),
    Fault(
        "growth.h", "racing(draws, level, logits, g->vocab, draws->q + level", "racing(draws, 0, logits, g->vocab, draws->q + level", DRAWN
    ),
    Fault("growth.h", "ranks[node - 1] < some ? leading[ranks[node - 1]] : -1", "leading[ranks[node - 1]]", DRAWN),
    Fault("growth.h", "first == 0 || out_tokens[first + i - 1] >= 0)", "1)", DRAWN),
    Fault("draft_loops/kernels.py", "real = None if min(tokens) >= 0 else torch.tensor([tokens]) >= 0", "real = None", DRAWN),
    Fault(
        "draft_loops/kernels.py",
        "TokenTree.from_parents(found, parents,",
        "TokenTree(found, torch.tensor([parents]),",
        DRAWN,
    ),
    Fault("growth.h", "if (count < k || all[lane] > best[k - 1]) count", "count", DRAWN),
    Fault("growth.h", "j->logits + row * j->apart, j->vocab, own)", "j->logits + row * j->vocab, j->vocab, own)", DRAWN),
    Fault("native_growth.py", "if logits.stride(1) != 1 or end", "if end", DRAWN),
    Fault("growth.h", "(numbers & 0xffff) == 0xffff ? f32_sum(sum)", "1 ? f32_sum(sum)", DRAWN),
    Fault("growth.h", "int kept = d->top_k < vocab ? d->top_k : vocab;", "int kept = d->top_k; if (kept >= vocab) return least;", DRAWN),
    Fault("growth.h", "__builtin_memcpy(d->q + j->i * d->apart, own", "__builtin_memcpy(d->q + j->i * d->columns, own", DRAWN),
    Fault("growth.py", "all(sampler.sampled)", "True", DRAWN),
    Fault("gguf.py", "blocks[:, :, 0].double() - 128)", "blocks[:, :, 0].double() - 127)", GROUPED_EXPERTS),
    Fault("gguf.py", "torch.stack(list(parts), 2).flatten(1, 2) if alternating else", "", GROUPED_EXPERTS),
    Fault("gguf.py", '"truncate": False', '"truncate": True', GROUPED_EXPERTS),
    Fault(
        "gguf.py", '{"gate": data[:, :inner], "up": data[:, inner:]}', '{"up": data[:, :inner], "gate": data[:, inner:]}', GROUPED_EXPERTS
    ),
    Fault("rules.h", "if (one != one) return -1;", "", CHOICES),
    Fault("rules.h", "if (one > best) best = one,", "if (one >= best) best = one,", CHOICES),
    Fault("rules.h", "return best < __builtin_inff() ? found : -1;", "return found;", CHOICES),
    Fault("rules.h", "i > width - 64 ? width / 16 * 16 : width", "width", CHOICES),
    Fault("layer.c", "outputs(m, I + o, read, up,", "outputs(m, o, read, up,", KERNELS),
    Fault(
        "layer.c",
        "(GAP ? i / tiles : i % parts) * most;\n        const int n = T - from < most ? T - from : most;\n        value gate",
        "0;\n        const int n = T - from < most ? T - from : most;\n        value gate",
        KERNELS,
    ),
    Fault("rules.h", "survival = survival < 1.0f ? survival : 1.0f;", "", RULE_KERNELS),
    Fault("rules.h", "q > 0.0f && p > 0.0f ?", "q > 0.0f ?", RULE_KERNELS),
    Fault("rules.h", "q > 0.0f && p > 0.0f ?", "p > 0.0f ?", RULE_KERNELS),
    Fault("rules.h", "if (token < 0 || token >= j->width) return 0.0f;", "", RULE_KERNELS),
    Fault("rules.h", "p / (q > FLT_MIN ? q : FLT_MIN)", "p / q", RULE_KERNELS),
    Fault(
        "rules.h",
        "f32_max(f32_zero(), f32_sub(f32_mul(p, f32_of(scale)), q))",
        "f32_max(f32_sub(f32_mul(p, f32_of(scale)), q), f32_zero())",
        RULE_KERNELS,
    ),
    Fault("rules.h", "if (node == drafted || !j->blocks)", "if (!j->blocks)", RULE_KERNELS),
    Fault("rules.h", "chance = node <= drafted ? survival : 0.0f;", "chance = survival;", RULE_KERNELS),
    Fault("rules.h", "Z / (Z + (1.0f - survival))", "Z / (Z + 1.0f)", RULE_KERNELS),
    Fault("rules.h", "(j->blocks || accepted == i)", "accepted == i", RULE_KERNELS),
    Fault("rules.h", "(j->blocks || accepted == i)", "1", RULE_KERNELS),
    Fault("rules.h", "j->survival[row * most + accepted - 1] : 1.0f", "1.0f : 1.0f", RULE_KERNELS),
    Fault("rules.h", "if (accepted < j->drafted[row])", "if (accepted < most)", RULE_KERNELS),
    Fault("rules.h", "if (!(sum > 0.0f))", "if (!(sum >= 0.0f))", RULE_KERNELS),
    Fault("rules.h", "ACCEPT, i)", "ACCEPT, 0)", RULE_KERNELS),
    Fault("rules.h", "#define RESIDUAL 4", "#define RESIDUAL 2", RULE_KERNELS),
    Fault("growth.h", "f32_keep(kept & f32_less(f32_of(NOTHING), power),", "f32_keep(kept,", ("tests/drafters/test_eagle3.py",)),
    Fault("rules.h", "j->positions[row], RESIDUAL, 0)", "j->positions[row], RESIDUAL, accepted)", RULE_KERNELS),
    Fault("rules.h", "*q = j->q + row * j->apart + node * width;", "*q = j->q + (row * most + node) * width;", RULE_KERNELS),
    Fault("rules.h", "wrong = node <= drafted &&", "wrong =", RULE_KERNELS),
    Fault("rules.h", "&& !(f32_most(most) > 0.0f)", "", RULE_KERNELS),
    Fault("rules.h", "all >= 1.0f - 1e-3f && ", "", RULE_KERNELS),
    Fault("ratios.py", "torch.where(following < 0, drawn, following)", "following", RULE_KERNELS),
    Fault("ratios.py", "pad(P, (1, 0), value=1.0)", "pad(P, (0, 1), value=1.0)", RULE_KERNELS),
    Fault("ratios.py", "and q.shape[1] >= nodes - 1", "", RULE_KERNELS),
    Fault("__init__.py", "given = [p.contiguous(), q,", "given = [p, q,", RULE_KERNELS),
    Fault("__init__.py", "q.stride(2) == 1 and q.stride(1) == q.shape[2]", "q.stride(2) == 1", RULE_KERNELS),
    Fault("outcome.py", "each.amax(-1).isfinite().all()", "each.amax(-1).isfinite().any()", ("tests/test_host_paths.py",)),
    Fault(
        "outcome.py",
        "if sound and (verdict.wrong_q is None or not bool(verdict.wrong_q.any())):",
        "if sound:",
        ("tests/test_host_paths.py",),
    ),
    Fault("block.py", "return torch.where(index == drafted, P[:, 1:], h)", "return h", RULES),
    Fault("ratios.py", "left = (p - q).clamp(min=0)", "left = (p - q).abs()", RULES),
    Fault("ratios.py", "self.minus_q.scatter_(1, x, torch.where(rejected", "self.minus_q.scatter(1, x, torch.where(rejected", TREE_RULES),
    Fault("ratios.py", "self.q_mass = -self.minus_q.sum(-1)", "self.q_mass = self.q_mass", TREE_RULES),
    Fault("multi_candidate.py", "tried = alive & (node >= 0) & (won < 0)", "tried = alive & (node >= 0)", TREE_RULES),
    Fault("multi_candidate.py", "weights = torch.where(alive[:, None], left.p, weights)", "weights = left.p", TREE_RULES),
    Fault("k_seq.py", "left = torch.where((k > 0)[:, None], rest(left, kept, k), left)", "left = left * 1", TREE_RULES),
    Fault("k_seq.py", "high = k.clamp(min=1).to(p.dtype)", "high = torch.ones_like(low)", TREE_RULES),
    Fault(
        "traversal.py",
        "self.A[depth - 1] = torch.where(deleted, safe_ratio(Z, Z + (1 - A)), A)",
        "self.A[depth - 1] = torch.where(deleted, Z, A)",
        TREE_RULES,
    ),
    Fault("traversal.py", "self.open = self.open & ~survives", "self.open = self.open & survives", TREE_RULES),
    Fault("match.py", "below.sort()", "below.reverse()", (*MATCH, "tests/test_host_paths.py")),
    Fault(
        "match.py",
        "last[row], following[row] = nodes[0], wanted[0]",
        "last[row], following[row] = nodes[0], wanted[-1]",
        (*MATCH, "tests/test_host_paths.py"),
    ),
    Fault("match.py", "choices.roll(1, 1) if tree.chain", "choices if tree.chain", MATCH),
    # -- drafts that stop
    Fault("growth.py", "min(length, depth) for length, goes_on", "min(length, depth - 1) for length, goes_on", STOPPING),
    Fault("growth.py", "possible = on[:, where] if possible is None", "possible = None if possible is None", STOPPING),
    # -- drafts with another tokenizer: q not renormalised, p lost where q is 0, an unfinished piece, the piece a text ends in
    Fault(
        "sampler.py",
        "            p = torch.softmax(scores, -1)\n",
        "            p = torch.softmax(scores.clamp(min=-3.0), -1) * (scores > -1e30)\n",
        VOCABULARIES,
    ),
    Fault("ratios.py", "left = (p - q).clamp(min=0)\n", "left = (p - q).clamp(min=0) * (q > 0)\n", VOCABULARIES),
    Fault("vocabularies.py", "self.target.encode_after if end else self.target.settled", "self.target.encode_after", VOCABULARIES),
    Fault("foreign.py", "scores[-1 - back, longer] - read", "scores[-1 - back, longer]", VOCABULARIES),
    Fault("vocabularies.py", 'for context in ("\\n", "") if self.strips', 'for context in ("", "\\n") if self.strips', VOCABULARIES),
    Fault("spelling.py", 'Branch(b"", logits, begun)', 'Branch(b"", logits)', VOCABULARIES),
    Fault("spelling.py", "logits + here.logits[token])", "logits)", VOCABULARIES),
    Fault("spelling.py", "math.log(left) if left > 0 else -math.inf", "-math.inf", VOCABULARIES),
    Fault("spelling.py", "Branch(spelt[len(word) :], branch.logits)", 'Branch(b"", branch.logits)', VOCABULARIES),
    Fault("spelling.py", "[length - writer.extra for", "[length for", VOCABULARIES),
    Fault("spelling.py", "self.fed.append(seen[0])", "pass", VOCABULARIES),
    Fault("growth.py", "scores.masked_fill(logits == IMPOSSIBLE, IMPOSSIBLE)", "scores", VOCABULARIES),
    Fault("foreign.py", "reading.drafted(text, back)", "reading.drafted(text)", VOCABULARIES),
    Fault("draft_model.py", "self.model.rewind([length - back for length, back in zip(self.model.lengths, backs)])", "pass", VOCABULARIES),
    # -- the learner
    Fault("online.py", "        if self.rehearsed:\n", "        if False:\n", LEARNER),
    Fault("online.py", "list(self.model.parameters()), 1 - stays)", "list(self.model.parameters()), 1.0)", LEARNER),
    # -- rolls of the page
    Fault("landing.py", "else (node + index)[None])", "else (node + index + 1)[None])", ROLL),
    Fault(
        "workers.py",
        "                self._waiting[owner] = turns  # behind all others\n",
        "                self._waiting = {owner: turns, **self._waiting}\n",
        WORKERS,
    ),
    Fault("workers.py", "                turns.remove(turn)\n", "                pass\n", WORKERS),
    Fault("requests.py", "len(text) > self.longest * self._letters", "False", WORKERS),
    Fault(
        "protect.py", 'if scope["method"] in METHODS else "other"', 'if scope["method"] else "other"', ("tests/serving/test_metrics.py",)
    ),
    Fault("loading.py", "int(found[2]) >= count", "False", ("tests/test_bad_input.py",)),
    Fault("checkpoints.py", "if self.bits and bits not in self.bits:", "if False:", ("tests/target/test_groups.py",)),
    Fault("gguf.py", "sorted(widened - UNQUANTIZED)", "sorted(widened & UNQUANTIZED)", ("tests/target/test_groups.py",)),
    Fault("landing.py", "times * q_x[:, None] / p_x[:, None]", "times / p_x[:, None]", LANDING),
    Fault("landing.py", "before = pad(q_x.cumsum(1)[:, :-1], (1, 0))", "before = torch.zeros_like(q_x)", LANDING),
    Fault("landing.py", "    behind = torch.exp(-torch.maximum(*slower))\n", "    behind = torch.ones_like(last)\n", LANDING),
    Fault("landing.py", "return torch.where(q_x.isnan(), p_x, shared)", "return torch.where(q_x.isnan(), 0, shared)", LANDING),
    Fault("landing.py", "1 - fails.flip(1).cumprod(1).flip(1)", "(1 - fails).cumprod(1)", ROLL),
    Fault("landing.py", "        left.reject(mine, x, certain)\n", "", LANDING),
    Fault("landing.py", "p.gather(1, tokens) / rho", "p.gather(1, tokens)", LANDING),
    Fault("landing.py", "super().accept(probability, node) & False", "super().accept(probability, node)", LANDING),
    # -- noise
    Fault(
        "noise.py",
        "return _run(p, self.words(Purpose.MATCH, depths + 1))",
        "return _run(p, self.words(Purpose.MATCH, depths * 0 + 1))",
        NOISE,
    ),
    Fault(
        "noise.py",
        "self._uniforms(node[:, None] + torch.arange(count",
        "self._uniforms(node[:, None] + 0 * torch.arange(count",
        NOISE + TREE_RULES,
    ),
    Fault("noise.py", "bits.mul_(high | 1)", "bits.mul_(1)", NOISE),
    Fault("noise.py", "(positions + offsets).view(np.uint64) * GOLDEN", "(positions + offsets).view(np.uint64)", NOISE),
    Fault("rules.h", "#define CLEAR 4e-6f ", "#define CLEAR 0.0f ", NOISE),
    Fault("rules.h", "most >= SMALLEST && ", "", NOISE),
    Fault("rules.h", "beaten = f32_max(beaten, f32_pick(better, ratio, best));", "beaten = f32_max(beaten, ratio);", NOISE),
    Fault("stats.py", "if row.reused is None:", "if True:", ("tests/test_admission.py",)),
    Fault("outcome.py", "and finite(scores, logits, sampler)", "", ("tests/test_host_paths.py",)),
    Fault("packing.py", "if not kind.encoder or agrees(product, layers[0]):", "if True:", ("tests/target/test_packing.py",)),
    Fault("packing.py", "expected = layer.forward(x)", "expected = layer(x)", ("tests/target/test_packing.py",)),
    Fault("packing.py", " | borrowed(self.model)", "", ("tests/target/test_packing.py",)),
    Fault("encoder_decoder.py", "    BORROWERS.add(whole)\n", "", ("tests/target/test_packing.py",)),
    Fault("kernels.py", 'without_autocast(torch.device("cpu")), ', "", ("tests/target/test_packing.py",)),
    Fault(
        "noise.py",
        "return self._accepts[:, node : node + count] < probability",
        "return self._accepts[:, node : node + count] <= probability * 1.1",
        RULES + NOISE,
    ),
    Fault(
        "noise.py",
        "return _first(weights, self.words(purpose, 0, nodes[None]), k)",
        "return _first(weights, self.words(purpose, 0, 0 * nodes[None]), k)",
        NOISE,
    ),
    Fault("noise.py", "return [(seed, row) for row in range(rows)], seed", "return [(seed, 0) for row in range(rows)], seed", NOISE + LOOP),
    # -- processors, histories, nucleus
    Fault("histories.py", "over[node] = over[node] or over[parent]", "over[node] = over[node]", HISTORIES),
    Fault(
        "histories.py", "ends = [self.lengths[row] for row, _ in places]", "ends = [self.lengths[row] - 1 for row, _ in places]", HISTORIES
    ),
    Fault("histories.py", "return torch.where(ids < 0, ids[:, -1:], ids) if fill is None", "return ids if fill is None", HISTORIES),
    Fault("nucleus.py", "inside[:, :least] = True", "inside[:, :1] = True", NUCLEUS),
    Fault("nucleus.py", "before = mass.cumsum(-1) - mass", "before = mass.cumsum(-1)", NUCLEUS),
    # -- cache and masks
    Fault("cache.py", "            self.lengths[row] += count\n", "            self.lengths[row] += count - (count > 1)\n", CACHE),
    Fault("cache.py", "store[goal[0], :, goal[1]] = store[source[0], :, source[1]]", "pass", CACHE + MASKS),
    Fault("cache.py", "layer.values[goal, :, :length] = layer.values[source, :, :length]", "pass", (*CACHE, "tests/test_session.py")),
    Fault(
        "cache.py",
        "self.lengths = [self.lengths[row] for row in keep]",
        "self.lengths = self.lengths[: len(keep)]",
        (*CACHE, "tests/test_session.py"),
    ),
    Fault("masks.py", "row[:, start + nodes :] = False", "row[:, start + nodes :] = True", MASKS),
    Fault("masks.py", "row[:, start : start + nodes] = within", "row[:, start : start + nodes] = True", MASKS),
    Fault("masks.py", "return allowed & where.visible[:, None]", "return allowed", MASKS),
    Fault("masks.py", "torch.where(slots < starts, slots, self.positions.gather(1, node))", "slots.expand_as(node)", MASKS),
    # -- the loop
    Fault(
        "round.py",
        "self.target.commit(outcome.path, [row.accepted + 1 for row in outcome.rows])",
        "self.target.commit(outcome.path, [max(row.accepted, 1) for row in outcome.rows])",
        LOOP,
    ),
    Fault(
        "round.py", "to_device([len(row.ids) - 1 for row in rows], device)", "to_device([0 * len(row.ids) for row in rows], device)", LOOP
    ),
    Fault("round.py", "lengths=[len(row.ids) for row in rows],", "lengths=[len(row.ids) - 1 for row in rows],", LOOP),
    # -- threads
    Fault("turns.py", "if nested if each.thread is me else each.running or each.thread.is_alive():", "if nested:", THREADS),
    Fault("turns.py", "else each.running or each.thread.is_alive():", "else each.running:", THREADS),
    Fault("turns.py", "else each.running or each.thread.is_alive():", "else True:", THREADS),
    Fault("turns.py", "nested = each.running and not each._own.isdisjoint(self._own)", "nested = False", THREADS),
    Fault("session.py", "self.turn.rest(keep=bool(self.rows) and self.target.owner is self._token)", "self.turn.rest(keep=True)", THREADS),
    Fault("session.py", "self._token = object()", "self._token = self", THREADS),
    # -- attach
    Fault("attachment.py", 'return getattr, (self._model, "generate")', "return getattr, (self, '__call__')", ATTACH),
    Fault("attachment.py", "self._training.pop().training = True", "self._training.pop().training = False", ATTACH),
    Fault("attachment.py", "self._inside += 1", "self._inside = 1", ATTACH),
    Fault("speculator.py", "base.generation_config = speculator.model.generation_config", "pass", ATTACH),
    Fault("changes.py", "isinstance(value, float) and value > 0", "isinstance(value, float) and value > 1", ATTACH),
    Fault("preparation.py", "criterion.done_tracker = [False]", "pass", ATTACH),
    Fault("preparation.py", "type(model).generate(model, *given,", "model.generate(*given,", ATTACH),
    Fault(
        "preparation.py",
        "return replace(self, record=frozenset())",
        "return self",
        (*ATTACH, "tests/test_generate.py", "tests/test_limits.py"),
    ),
    Fault("speculator.py", 'with ending(arguments.get("streamer"))', 'with ending(arguments.get("streamers"))', ATTACH),
    # -- guesses, limits of drafts and traces
    Fault("guesses.py", 'guess.begin() if hasattr(guess, "begin") else guess', "guess", GUESSES),
    Fault("guesses.py", "limit = min(most, self.window)", "limit = self.window", GUESSES),
    Fault("guesses.py", "if not 0 <= token < vocab_size), None)", "if token < 0), None)", GUESSES),
    Fault("guesses.py", "for first, least in ((self._last + 1, 1), (0, ALONE)):", "for first, least in ((0, 1),):", GUESSES),
    Fault("guesses.py", "            self.window = accepted + 1\n", "            pass\n", GUESSES),
    Fault("round.py", "if guessed and self.drafter.info.shares_target:", "if False:", GUESSES),
    Fault("round.py", "limits = [0 if index in guessed else limit for", "limits = [limit for", GUESSES),
    Fault("round.py", "if all(row.parameters.max_draft == 0 or index in", "if all(index in", ROWS + GUESSES),
    Fault("rows.py", "self.remaining - 1 if most is None else min(most, self.remaining - 1)", "self.remaining - 1", ROWS),
    Fault("merging.py", "q[kept, : own.shape[1]] = own[kept]", "q[kept, : own.shape[1]] = own[: len(kept)]", ROWS),
    Fault("traces.py", "above.clamp(max=tree.q.shape[1] - 1), tokens]", "0 * above, tokens]", ROWS),
    Fault("traces.py", "p[above, tokens].tolist()", "p[tree.parents[row] * 0, tokens].tolist()", ROWS),
    Fault("traces.py", "whole = kept == len(path)", "whole = True", ROWS),
    Fault("traces.py", "path[-1] not in {values.parents[node] for node in nodes}", "True", ROWS),
    Fault("isolated.py", "        if isolation is None:\n", "        if True:\n", ISOLATED),
    Fault("isolated.py", "del self.stores[oldest]", "del self.stores[next(reversed(self.stores))]", ISOLATED),
    # -- penalties and log-probabilities
    Fault("penalties.py", "self.presence * (counts > 0)", "self.presence * counts", PENALTIES),
    Fault("penalties.py", "histories.depths[row][node] - penalty.prompt_length)", "histories.depths[row][node])", PENALTIES),
    Fault(
        "penalties.py",
        "counted = columns >= ids.shape[1] - to_device(made, ids.device)[:, None]",
        "counted = (columns >= 0)[None]",
        PENALTIES,
    ),
    Fault("logprobs.py", "tokens.roll(-1, 1).scatter(1, accepted[:, None], next_token[:, None])", "tokens.roll(-1, 1)", LOGPROBS),
    Fault("logprobs.py", "if logits.numel() == logits.shape[-1]:", "if False:", PROMPT_LOGPROBS),
    Fault("logprobs.py", "ids[row, above:] = (flat[row] == values[row, k]).nonzero()[: k - above, 0]", "pass", LOGPROBS),
    Fault("round.py", "unread if scored is None else max(unread, len(texts[0]) - scored)", "unread", PROMPT_LOGPROBS),
    # -- pages that models are handed, and states
    Fault("page_stores.py", "if clean and page < self.made]", "if False]", HANDED),
    Fault("page_stores.py", "return not self.pool.waits and bool(self.layers)", "return bool(self.layers)", HANDED),
    Fault("kernel_pass.py", "if tensor is not before:", "if before is None:", DESCRIBED),
    Fault("admission.py", " and type(pools[0]) is PagePool", "", STATE_PAGES),
    Fault("described_pass.py", "functional.embedding(ids, embedding.weight)", "embedding.weight.index_select(0, ids)", DESCRIBED),
    Fault("native_growth.py", "if not direct.decoder.embedded.tokens:", "if False:", DESCRIBED),
    Fault("kernel_pass.py", 'getattr(self.model, "final_logits_bias", None)', 'self.model._buffers.get("final_logits_bias")', DESCRIBED),
    Fault("torchao_files.py", "groups = [outputs // rows,", "groups = [outputs,", PACKERS),
    Fault("torchao_files.py", "^ 0x88,", "^ 0x80,", PACKERS),
    Fault("torchao_files.py", "mins = (-zero)", "mins = zero", PACKERS),
    Fault("torchao_files.py", "permute(0, 2, 1, 4, 6, 7, 3, 5)", "permute(0, 2, 1, 4, 7, 6, 3, 5)", PACKERS),
    Fault("torchao_files.py", "if weight.act_pre_scale is not None or getattr", "if getattr", PACKERS),
    Fault("crew.h", "            set_float_mode(c->mode);\n", "", KERNELS),
    Fault("groups.h", "zero = m->zero + OFFSET(kind);", "zero = (m->mins ? 0 : m->zero) + OFFSET(kind);", PACKERS),
    Fault("grouped.py", "(codes - self.zero) * self._by_input(scale)", "codes * self._by_input(scale)", PACKERS),
    Fault("described_pass.py", "type(embedding) is nn.Embedding and", "isinstance(embedding, nn.Embedding) and", DESCRIBED),
    Fault("described_pass.py", "self.finishes = (self.divided", "self.finishes = False and (self.divided", DESCRIBED),
    Fault("page_stores.py", "= window.rows == 1 and np.array_equal(", "= window.rows == 1 or np.array_equal(", HANDED),
    Fault("page_stores.py", "    if filler:\n        held[-1].zero_()\n", "", HANDED),
    # -- pages in other ways to make passes
    Fault(
        "page_stores.py",
        "found[row, : pages_of(end)] = self.lines[row, : pages_of(end)]",
        "found[row] = self.lines[row, :blocks]",
        ELSEWHERE,
    ),
    Fault("block_masks.py", "return (block >= 0) & mask.mask_mod(", "return mask.mask_mod(", ELSEWHERE),
    Fault("flex.py", "key, value = (torch.where(own, each, 0) for each in (key, value))", "pass", ELSEWHERE),
    Fault("cache.py", "(of, out), (to, into) = moves[device]", "(to, into), (of, out) = moves[device]", ELSEWHERE),
    Fault("states.py", "            return None\n        self._use(found)\n", "            return None\n", STATES),
    Fault("states.py", "or begins(text, state.tokens, most)):", "or len(state.tokens) <= most):", STATES),
    Fault("states.py", "and (len(self._order) > KEPT if", "and (False if", STATES),
    Fault("states.py", "self.limit - self.held - max(0, more)", "self.limit", STATES),
    Fault("states.py", "return 2 * (fixed + tokens * each)", "return 1 * (fixed + tokens * each)", STATES),
    Fault("rollback.py", "        state.logits = None\n", "", STATES),
    Fault("rollback.py", "(self.live is self.kept or self.live.stored) and not", "(self.live is self.kept and False) and not", STATES),
    Fault("rollback.py", 'than what comes."""\n        self.states.clear()', 'than what comes."""', STATES),
    Fault("rollback.py", "        for row in self.rows:\n            row.key = None\n", "", STATES),
    Fault("rollback.py", "        row.read = max(row.read, len(state.tokens))\n", "", STATE_PAGES),
    Fault("rollback.py", "            self.pages.drop(self.rows[row])\n", "            pass\n", STATE_PAGES),
    Fault("rollback.py", "- self.pages.page_bytes * sum(", "- 0 * sum(", STATE_PAGES),
    Fault("states.py", "self._bytes + self.pages.pool.cached * self.pages.page_bytes", "self._bytes", STATE_PAGES),
    Fault("state_pages.py", "            self.counts[page] += 1\n", "            pass\n", STATE_PAGES),
    Fault("state_pages.py", "            self._release(page)\n", "            pass\n", STATE_PAGES),
    Fault("state_pages.py", "            self.stores[0].copy(last[0], row.pages[full], tokens % PAGE)\n", "", STATE_PAGES),
    Fault(
        "rollback.py",
        "RollbackRow(list(text[: min(known, len(state.tokens))]) if state is not None else [], key=key if share",
        "RollbackRow(list(text[: min(known, len(state.tokens))]) if state is not None else [], key=(0,) if share",
        STATES,
    ),
    Fault(
        "session.py",
        '        with self._alone():\n            return "now"',
        '        with nullcontext():\n            return "now"',
        ADMISSION,
    ),
    # -- pages
    Fault("pages.py", "not node.children and self._pool.counts[node.page] == 1", "not node.children", PAGES),
    Fault("pages.py", "                if self.counts[page]:\n", "                if self.counts[page] > 1:\n", PAGES),
    Fault("pages.py", "node: Node | None = self._roots.get(key)", "node: Node | None = next(iter(self._roots.values()), None)", PAGES),
    Fault("pages.py", "            length += same\n", "            length += size if same else 0\n", PAGES),
    Fault("pages.py", "for node in reversed(path):", "for node in path:", PAGES),
    Fault("pages.py", "max(self.spare, self._most_held)", "self._most_held", PAGES),
    Fault("paged_cache.py", "if self.pool.counts[table[index]] > 1:", "if self.pool.counts[table[index]] > 9:", PAGED),
    Fault("paged_cache.py", "            if length % PAGE and pages[-1] in fresh:", "            if False:", PAGED),
    Fault("paged_cache.py", "self.pool.share([*kept, *partly])", "pass", PAGED),
    Fault("session.py", "short and self.target.limit_to_held()", "False", PAGED),
    Fault("page_stores.py", "if room == self.pool.made:", "if True:", PAGED),
    Fault("page_stores.py", "more = limit if self.at_once and self.layers else min(more, limit)", "more = min(more, limit)", PAGED),
    Fault("device.py", "mmap.MAP_ANONYMOUS | NORESERVE)", "mmap.MAP_ANONYMOUS)", PAGED),
    Fault("loading.py", "if wrong := sorted(info", "if wrong := 0 and sorted(info", ("tests/test_bad_input.py",)),
    Fault("loading.py", "if lacking := sorted(info", "if lacking := 0 and sorted(info", ("tests/test_bad_input.py",)),
    Fault("paged_cache.py", "whole.copy(partly[0], taken[0], length % PAGE)", "pass", PAGED),
    Fault(
        "page_stores.py",
        "[self.begins[row] for row in keep]\n        self.lay_out(0, blocks)\n",
        "[self.begins[row] for row in keep]\n",
        PAGED,
    ),
    Fault("changes.py", "disabled, [*flatten(map(dict.items, self._scales))]", "disabled, []", CHANGED),
    # -- windows
    Fault("target.py", "self.prefill_chunk = self._chunk_within(size)", "pass", WINDOWS),
    Fault("page_stores.py", "length - self.kind.window + 1", "length - self.kind.window + 2", WINDOWS),
    Fault("page_stores.py", "if last - self.sees_from(length) < runs[last]:", "if True:", WINDOWS),
    Fault("paged_cache.py", "        store.copy(former, mine, length % PAGE)\n", "", WINDOWS),
    Fault("paged_cache.py", "            if source != GONE:\n", "            if source != GONE and store is self.stores[0]:\n", WINDOWS),
    Fault("paged_cache.py", "            window.moved(row, index, mine)\n", "            pass\n", WINDOWS),
    Fault("paged_cache.py", "super().rewind([0 if gone else length for", "super().rewind([length for", WINDOWS),
    Fault("pages.py", "        if self._whole._kept(owner):\n            self._keep_for(owner)\n", "", WINDOWS),
    Fault("pages.py", "and pool.lacks_windows(child.page):", "and False:", WINDOWS),
    Fault("pages.py", "        for each in self.windows:\n            each._release_for(page)\n", "", WINDOWS),
    Fault("windows.py", "return size if hidden else None", "return size", WINDOWS),
    Fault("draft_model.py", "        self._keep_to_budget()\n        opened", "        opened", ADMISSION),
    Fault("base.py", "if self.info.shares_target or self.page_bytes else", "if self.info.shares_target else", ADMISSION),
    Fault(
        "target.py",
        "        if not self.reuse_prefix:\n            pages = self._counted.whole",
        "        if False:\n            pages = self._counted.whole",
        ADMISSION,
    ),
    Fault("paged_cache.py", "        if self._memory is None or total > self._memory:", "        if self._memory is None:", WINDOWS),
    Fault("paged_cache.py", "or any(store.short_of_a_copy(length) for store in self.windows)", "", WINDOWS),
    Fault("shapes.py", "return max(self.total, self.k * (self.levels - 1))", "return self.total", ADMISSION),
    Fault(
        "prefixes.py",
        "for _ in self.live], {}\n        cache.share_no_more()\n",
        "for _ in self.live], {}\n",
        PAGED,
    ),
    Fault("prefixes.py", "return (group, *text[: self.ahead])", "return tuple(text[: self.ahead])", PAGED),
    Fault("attention.h", "(size_t)table[row * p->table_stride + start / KEYS]", "(size_t)table[start / KEYS]", PAGED),
    Fault("paged_cache.py", "if start < self._filled[row] else 0", "", PAGED),
    Fault("attention.h", "if (l->cap) each[b] = capped(each[b], l->cap);", "", PAGED_ATTENTION),
    Fault("attention.h", "l->sinks + c->head * group + (c->first + i) % group", "l->sinks + c->head", SEGMENTS),
    Fault("attention.h", "totals(c, i)[0] = sink && *sink > -__builtin_inff() ? 1.0f : 0.0f", "totals(c, i)[0] = 0.0f", SEGMENTS),
    Fault("attention.h", "totals(c, i)[0] = sink && *sink > -__builtin_inff() ? 1.0f", "totals(c, i)[0] = sink ? 1.0f", SEGMENTS),
    Fault("attention.h", "share = exponential(f32_of(largest - now))", "share = f32_of(1.0f)", SEGMENTS),
    Fault("attention.h", "joined(sums, some + s * pieces * needed", "joined(sums, some + (count - s) * pieces * needed", SEGMENTS),
    Fault("attention.h", "l->sinks && c->from[i] / KEY_SEGMENT == segment ?", "l->sinks ?", SEGMENTS),
    Fault(
        "attention.h",
        "begin = segment * KEY_SEGMENT, end",
        "begin = segment * KEY_SEGMENT + c->from[0] / KEYS * KEYS % KEY_SEGMENT, end",
        SEGMENTS,
    ),
    Fault("attention.h", "from, n, begin + number, p->segments", "from, n, number, p->segments", SEGMENTS),
    Fault("attention.h", "    if (d < size) gathered(chances", "    if (0) gathered(chances", PAGED_ATTENTION),
    Fault("attention.h", "(t * KEYS + j) / AT_ONCE]", "j / AT_ONCE]", SEGMENTS),
    Fault("attention.h", "j + 1 < count ? rows[j + 1] + d : 0", "rows[j] + d", SEGMENTS + VECTORS),
    Fault("vectors.h", "f32_to_brain_swapped((uint16_t *)p, x)", "f32_to_brain((uint16_t *)p, x)", SEGMENTS),
    Fault(
        "vectors.h", "i32_xor(i32_left(i32_from_16(first), 16), second ?", "i32_xor(i32_left(i32_from_16(first), 15), second ?", SEGMENTS
    ),
    Fault("layer.c", "row, h, p->slots[t] - slot, size)", "0, h, p->slots[t] - slot, size)", PAGED_ATTENTION),
    Fault("attention.h", "slot / KEYS] == p->spare;", "slot / KEYS] == -1;", PAGED_ATTENTION),
    Fault("paged_attention.py", "None if mask is None else mask.data_ptr(), *stores", "None, *stores", PAGED_ATTENTION),
    Fault("paged_attention.py", "if everything and attention_mask is None", "if attention_mask is None", PAGED_ATTENTION),
    Fault("round.py", "first, unread=2)", "first)", ADMISSION),
    Fault("session.py", "self.loop.read_again(rows, first=first)", "self.loop.read_again(rows)", ADMISSION),
    Fault("admission.py", "-rows[index].slot", "rows[index].slot", ADMISSION),
    Fault(
        "draft_model.py",
        "            model.prefill([text], first=first)\n            model.compact(",
        "            model.compact(",
        ADMISSION,
    ),
    Fault("pass_memory.py", "        self._now -= size\n", "        pass\n", PASS_MEMORY),
    Fault("pass_memory.py", 'scores = config._attn_implementation == "eager"', "scores = False", PASS_MEMORY),
    Fault("budgets.py", "max(free - taken, AT_LEAST * free)", "free - taken", PASS_MEMORY),
    Fault("prefixes.py", "return (group, *text[: self.ahead])", "return group", SHARING),
    Fault("features.py", "Texts(ahead=1)", "Texts()", SHARING),
    Fault("eagle3.py", "        self._texts.share_no_more(self._cache)\n", "", SHARING),
    Fault(
        "features.py",
        "if self._version != self._target.version:\n            self._clear()\n        self._keep",
        "if False:\n            self._clear()\n        self._keep",
        SHARING,
    ),
    Fault("features.py", "        self._drop(range(first))  # those", "        # those", SHARING),
    Fault("features.py", "share=self._target.reuse_prefix)", "share=True)", SHARING),
    Fault("features.py", "[count - 1 for count in self.counts]", "[-1 for count in self.counts]", MTP),
    Fault("features.py", "features[None, begin - start : end - start]", "features[None, begin - start + 1 : end - start + 1]", MTP),
    Fault("mtp.py", "parts[::-1] if self.states_first else parts", "parts[::-1]", MTP),
    Fault("mtp.py", "states = self._root(request.rows) if", "states = self._states if first else self._root(request.rows) if", MTP),
    Fault("mtp.py", "quantize(layer, self.quantization)", "quantize(layers, self.quantization)", MTP),
    Fault("mtp.py", "            module.config = made.config\n", "            pass\n", MTP),
    Fault("mtp.py", "states.to(self._target.model.dtype)", "states", MTP),
    Fault("layers.py", "if begin == 0 and given is not None:", "if False:", MTP),
    Fault("target.py", "compact(self.cache, keep, share=self.reuse_prefix)", "compact(self.cache, keep, share=True)", PAGED),
    Fault("paged_cache.py", "row, text in enumerate(live) if share else ():", "row, text in enumerate(live):", PAGED),
    Fault("target.py", "unread=unread, most=most)", "unread=unread)", SHARING),
    Fault(
        "target.py",
        "                pages[0] = max(pages[0], self._companion.needed(text, group, nodes))\n",
        "                pass\n",
        SHARING,
    ),
    Fault("target.py", "(known if self._companion is None else min(", "(known if True else min(", SHARING),
    # -- kernels
    # -- mixtures of experts
    Fault("experts.h", "|| e->normed ? scores[j] / whole", "? scores[j] / whole", MIXTURES),
    Fault("experts.h", "gated(gate, up, out, TILE, e->activation)", "gated(up, gate, out, TILE, e->activation)", MIXTURES),
    Fault("experts.h", "expert_outputs(&e->down, expert * H + o", "expert_outputs(&e->down, (expert + 1) % e->count * H + o", MIXTURES),
    Fault("experts.h", "*b = first + (high - low) / 2", "*b = first + (high - low) / 3", MIXTURES),
    Fault("experts.h", "for (int j = 1; e->by_number && j < k; j++)", "for (int j = 1; 0; j++)", MIXTURES),
    Fault("experts.h", "    else if (T > 1)\n        gather(", "    else if (T > 8)\n        gather(", MIXTURES),
    Fault("experts.h", "ready_from(r, T == 1 ? 0 : begin + from, all, H)", "ready_from(r, T == 1 ? 0 : begin, all, H)", GROUPED_EXPERTS),
    Fault("experts.h", "tokens ? tokens + from : 0, stride", "tokens, stride", GROUPED_EXPERTS),
    Fault("groups.h", "shifted || i % count == count - 1", "i % count == count - 1", GROUPED_EXPERTS),
    Fault(
        "x86.h",
        "numbers = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13,",
        "numbers = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 14,",
        GROUPED_EXPERTS,
    ),
    Fault("checkpoints.py", '"gate_up_proj": (0, 1)', '"gate_up_proj": (1, 0)', GROUPED_EXPERTS),
    Fault("checkpoints.py", '("w1", "w3", "w2")', '("w3", "w1", "w2")', GROUPED_EXPERTS),
    Fault("checkpoints.py", "scales.double() - 128", "scales.double() - 127", GROUPED_EXPERTS),
    Fault(
        "grouped.py",
        '{"transposed": self.transposed if transposed is None else transposed,',
        '{"transposed": self.transposed,',
        GROUPED_EXPERTS,
    ),
    Fault("gguf.py", '"gate_up_proj": ("gate", "up")', '"gate_up_proj": ("up", "gate")', GROUPED_EXPERTS),
    Fault("experts.py", "return self.mixture.outdated or self.router.outdated", "return False", MIXTURES),
    Fault("latent.h", "i % 2 * (count / 2) + i / 2 : i", "i : i", DESCRIBED),
    Fault("latent.h", " && !(l->rotation & IN_PAIRS)", "", DESCRIBED),
    Fault("latent.h", "factor && j < (last ? rest : plain)", "factor && last && j < rest", DESCRIBED),
    Fault("experts.h", "whole += 1e-20f", "whole += 0", MIXTURES),
    Fault("experts.h", "e->by_best ? best.score : ", "", MIXTURES),
    Fault("experts.py", '(router, "topk_method", "") != "greedy"', '(router, "topk_method", "") != ""', MIXTURES),
    Fault("described_pass.py", "narrow.dequantized(attention.kv_b_proj.weight, weight)", "weight.to(expand.dtype)", DESCRIBED),
    Fault("latent.h", "to_latents + (size_t)s.head * rank", "to_latents + (size_t)(s.head ^ 1) * rank", DESCRIBED),
    Fault("attention.h", "c->asked->turned + at / c->wide * rest", "c->asked->turned + at", DESCRIBED),
    Fault("attention.h", "count, rest, size, c->packed + c->wide * 16, 0);", "count, rest, size, c->packed, 0);", DESCRIBED),
    Fault("experts.h", "e->correction ? numbers[i] + e->correction[i] : numbers[i], i", "numbers[i], i", MIXTURES),
    Fault("experts.h", ": numbers[all[j].expert];", ": all[j].score;", MIXTURES),
    Fault("experts.h", "if (e->open < e->groups) close_groups(e, all);", "", MIXTURES),
    Fault("experts.h", "second = best, best = all[i];", "best = all[i];", MIXTURES),
    Fault("experts.h", "scores[j]) * (float)e->factor);", "scores[j]));", MIXTURES),
    Fault("experts.h", "if (whole < e->least) whole = e->least;", "", MIXTURES),
    Fault("experts.h", "e->routing == OF_EACH ? sigmoid(logits) : logits", "logits", MIXTURES),
    Fault("experts.py", "self.router.matrix.values if known.float32 else None", "None", MIXTURES),
    Fault("products.py", "for held in (layer._parameters, layer._buffers):", "for held in (layer._parameters,):", MIXTURES),
    Fault("costs.py", "cycle([self._chain(size) for _ in range(REPEATS)])", "cycle([self._chain(size)])", COSTS),
    Fault("planner.py", "branching=branching, touched=done.touched, together", "touched=done.touched, together", ROUNDS),
    Fault("planner.py", "COLD, SLOW = 0.03, 1.5", "COLD, SLOW = 0.0, 1.5", ROUNDS),
    Fault("planner.py", "or empty != self._empty\n", "or empty\n", ROUNDS),
    Fault("planner.py", "if empty and count == 1 and not self._looking and not vain else 0", "if count == 1 else 0", ROUNDS),
    Fault("layer.c", "f32_sum(sum) / size + eps", "f32_sum(sum) / size", KERNELS),
    Fault("layer.c", "store(out + i, f32_sub(left,", "store(out + i, f32_add(left,", KERNELS),
    Fault("layer.c", "if (!(parts & MLP)) return;", "", DRAFT_VERIFY),
    Fault("skips.py", "aside=skip.whole", "aside=()", DRAFT_VERIFY),
    Fault("attention.h", "f32_of(l->scaling)", "f32_of(1.0f)", KERNELS),
    Fault("layer.c", "return f32_power_of_two(p, n);", "return p;", KERNELS),
    Fault("attention.h", "c->positions ? c->positions[c->slots[i]] : c->slots[i]", "c->slots[i]", SOURCED),
    Fault("attention.h", "a->slots[a->by_row ? row : begin + node]", "a->slots[begin + node]", SOURCED),
    Fault("layer.c", "load(norm.weight + i), load(norm.bias + i)", "load(norm.weight + i), f32_zero()", SOURCED),
    Fault("layer.c", "if (l->behind) norms(", "if (0) norms(", SOURCED),
    Fault("products.h", "return kind != EIGHTS && m->bias ? load(m->bias + o) : f32_zero();", "return f32_zero();", SOURCED),
    Fault("layer.c", "e->positions && tokens[t] != e->padding", "e->positions", SOURCED),
    Fault("layer.c", "f32_of(-0.284496736f)", "f32_of(-0.2845f)", SOURCED),
    Fault("growth.h", "embed(&g->embedded, tokens, places,", "embed(&g->embedded, tokens, tokens,", SOURCED),
    Fault("kernel_pass.py", "self.decoder.embed(ids, positions)", "self.decoder.embed(ids, places.positions)", SOURCED),
    Fault("kernel_pass.py", "if not ends:", "if False:", KERNELS),
    Fault("target.py", "starts[0] + counts[0] == len(prompts[0])", "starts[0] == len(prompts[0])", KERNELS),
    Fault("kernel_pass.py", "found if bias is None else found + bias", "found", SOURCED),
    Fault("layer.c", "norm.kind & PLUS_ONE ? 1.0f : 0.0f", "0.0f", DESCRIBED),
    Fault("layer.c", "norm.bias || norm.kind & CENTRED", "norm.bias", DESCRIBED),
    Fault("attention.h", "position - l->window + 1 : 0", "position - l->window : 0", DESCRIBED),
    Fault("attention.h", " && c->positions[s] >= c->from[i]", "", DESCRIBED),
    Fault("attention.h", "0, start + b * 16, c->moved) & behind(c->from[i], start + b * 16))", "0, start + b * 16, c->moved))", DESCRIBED),
    Fault("attention.h", "l->grouped ? head % l->heads * 3", "l->grouped ? head % l->heads", DESCRIBED),
    Fault("layer.c", "if (l->head_norms == WHOLE_HEADS) whole_heads(w, l, p);", "", DESCRIBED),
    Fault("attention.h", "k->factor && head < queries", "k->factor && head >= queries", DESCRIBED),
    Fault("layer.c", "p.page_stride = k->page_stride, p.table = k->table;", "", DESCRIBED),
    Fault("layer.c", "store(some + j, f32_mul(load(some + j), f32_of(factor)))", "", DESCRIBED),
    Fault("layer.c", "i < half ? i + half : i - half", "i ^ 1", DESCRIBED),
    Fault("layer.c", "return rounded(f32_mul(x, x));", "return x;", DESCRIBED),
    Fault("layer.c", "!l->after.weight ? p->states : entered(", "0 ? p->states : entered(", DESCRIBED),
    Fault("growth.h", "if (g->logit_cap) logit =", "if (0) logit =", DESCRIBED),
    Fault("described_pass.py", "if not bool(off <= allowed):", "if False:", DESCRIBED),
    Fault("described_pass.py", "return torch.tanh(logits / self.cap) * self.cap if self.cap else logits", "return logits", DESCRIBED),
    Fault("described_pass.py", "rotation |= native.TURNED_ONCE", "pass", DESCRIBED),
    Fault("described_pass.py", "cache.positions = torch.arange(cache.capacity", "_ = torch.arange(cache.capacity", DESCRIBED),
    Fault("growth.h", "d->hashes + x), d->words[i])", "d->hashes + x), d->words[0])", DRAWN),
    Fault("growth.h", "f32_load_some(there, q + x), whole)", "f32_load_some(there, q + x), f32_of(1.0f))", DRAWN),
    Fault("growth.h", "f32_sub(logit, most), temperature)", "f32_sub(logit, most), f32_of(1.0f))", DRAWN),
    Fault("native_growth.py", "(each.top_k, each.temperature,", "(0, each.temperature,", DRAWN),
    Fault("native_growth.py", "self._bias += added[0]", "added[0]", SOURCED),
    Fault("native_growth.py", "if tokens == self._banned:", "if self._banned is not None:", SOURCED),
    # -- serving
    Fault("stops.py", "self._held = held[len(held) - keep :]\n        return held[: len(held) - keep]", "return held", STOPS),
    Fault("stops.py", "_, at, self.hit = min(found)", "_, at, self.hit = max(found)", STOPS),
    Fault("writers.py", "            if self.stops.hit is not None:\n                break\n", "", PLANS),
    Fault("writers.py", 'spoken = len(commit.tokens) - (commit.finish_reason == "eos")', "spoken = len(commit.tokens)", PLANS),
    Fault("requests.py", "seed=(seed, number * request.n + index)", "seed=(seed, index)", PLANS),
    Fault("requests.py", "isolation=isolation,\n", "", PLANS),
    Fault("protect.py", 'self.held[state["owner"]] > SHARE * self.most or ', "", BAD_REQUESTS),
    Fault("hard_schemas.py", "names > NAMES", "names > 10 * NAMES", BAD_REQUESTS),
    Fault("metrics.py", "drafted[commit.drafter, str(depth)] += count", 'drafted["", str(depth)] += count', METRICS),
    Fault("protect.py", "            if hmac.compare_digest(given, key_bytes):\n", "            if given:\n", BAD_REQUESTS),
    Fault(
        "application.py", "            self.engine.leave(job)  # which changes nothing if it is over\n", "            pass\n", BAD_REQUESTS
    ),
    Fault("application.py", "and job.grammar is not None:", "and False:", BAD_REQUESTS),
    Fault("requests.py", "                await self.check_tools(request, form[0])\n", "", ("tests/serving/test_tools.py",)),
    Fault("responses.py", 'and "tool_calls" in deltas[-1]):', "and False):", ("tests/serving/test_clients.py",)),
    Fault("serving/formats.py", 'found.pop("response_format", None)', "pass", ("tests/serving/test_clients.py",)),
    Fault("serving/formats.py", 'elif [*found] == ["response_format"]:', "elif False:", ("tests/serving/test_tools.py",)),
    Fault("sizes.py", 'raise refused(what, "max_tokens", "context_length_exceeded") from error', "raise", API),
    Fault("application.py", "            self.engine.leave(job)\n            raise\n", "            raise\n", BAD_REQUESTS),
    Fault(
        "tools.py", "at = len(self.held) - beginning(self.held, BEGIN) if at < 0 else at", "at = len(self.held) if at < 0 else at", CLIENTS
    ),
    Fault("queue.py", "        self._owners.move_to_end(owner)\n", "", ENGINE),
    Fault("queue.py", "row.job is not job or index not in (None, row.index)", "row.job is not job", ENGINE),
    Fault("queue.py", "        if own + rows > share:\n", "        if own + rows <= share:\n", ENGINE),
    Fault("queue.py", "count < len(job.choices) or (self.head is not None and job is self.head.job)", "count < len(job.choices)", ENGINE),
    Fault("queue.py", "        self._busy += seconds\n", "        self._busy += seconds * (done > 0)\n", ENGINE),
    Fault("queue.py", "own + sum(min(len(rows), own + 1) for", "own + sum(len(rows) for", ENGINE),
    Fault("engine.py", "if rate is not None and ahead / rate > most:", "if False:", ENGINE),
    Fault("engine.py", "            self.session.remove(slot)\n", "            pass\n", ENGINE),
    Fault("engine.py", "        self._tokens -= live.waiting.size\n", "", ENGINE),
    Fault("engine.py", "            self._tokens += row.size\n", "", ENGINE),
    Fault("engine.py", "elif job.unread >= BOUND:", "elif False:", ENGINE),
    Fault("engine.py", "if age > settings.request_timeout:", "if False:", ENGINE),
    Fault("engine.py", "elif age > settings.queue_timeout and not job.begun:", "elif age > settings.queue_timeout:", ENGINE),
    Fault("engine.py", "        if done:\n            self._failures = 0\n", "", ENGINE),
    Fault("engine.py", "        if self._failures >= FATAL:\n", "        if False:\n", ENGINE),
    Fault("engine.py", "                if not self._live:\n", "                if True:\n", ENGINE),
    Fault("engine.py", "job.unfinished.discard(index)", "pass", ENGINE),
    Fault("metrics.py", "        if commit.drafted:\n            self.drafts", "        if True:\n            self.drafts", METRICS),
    Fault("metrics.py", "enumerate(commit.drafted_by_depth, 1)", "enumerate(commit.drafted_by_depth)", METRICS),
    Fault("fingerprint.py", '        "threads": torch.get_num_threads(),\n', "", FINGERPRINT),
    Fault("fingerprint.py", " | dict(speculator.model.named_buffers())", "", FINGERPRINT),
    Fault("fingerprint.py", "packed.get(id(tensor)) or ", "", FINGERPRINT),
    Fault("running.py", "        await self.engine.drain(self.engine.settings.drain)\n", "", SERVE),
    Fault("running.py", "            os._exit(128 + sig)\n", "            pass\n", SERVE),
    Fault("application.py", "lambda: self.engine.leave(job))", "lambda: None)", BAD_REQUESTS),
    Fault("sse.py", "            self.stalled = True\n", "", BAD_REQUESTS),
    Fault("sse.py", "                timer.cancel()\n", "                pass\n", BAD_REQUESTS),
    Fault("jobs.py", "                    timer.cancel()\n", "                    pass\n", ENGINE),
    Fault("running.py", "self.died = self.should_exit = True", "self.should_exit = True", SERVE),
    Fault("requests.py", "if request.presence_penalty or request.frequency_penalty:", "if request.presence_penalty:", PLANS),
    Fault("requests.py", "max_draft=request.max_draft,\n", "", PLANS),
    Fault("protect.py", "                await drop_rest(receive)\n", "                pass\n", BAD_REQUESTS),
    Fault("requests.py", "request.top if isinstance(request, CompletionRequest) and request.echo else None", "None", PLANS),
    Fault("application.py", 'isolation = None if self.settings.share else state["key"]', "isolation = None", API),
    Fault("protect.py", "            if not is_open(path_of(scope)):\n                self.check_ready()\n", "", SERVE),
    Fault("connections.py", "if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:", "if True:", SERVE),
    Fault("protect.py", 'state["key"] or str((scope.get("client") or ("",))[0])', 'state["key"] or ""', SERVER_THREADS),
    # -- the audit of a server
    Fault("groups.h", "in_group = m->group, at += OUTPUTS;", "in_group = m->group, at += nested ? OUTPUTS : 0;", GROUPS),
    Fault("groups.h", "nested = 0, above += OUTPUTS;", "nested = 0;", GROUPS),
    Fault("groups.h", "words += WORDS_OF(kind, steps) * OUTPUTS, x", "words += WORDS_OF(kind, m->group) * OUTPUTS, x", GROUPS),
    Fault("groups.h", "return i32_mul(zero, i32_of(times(-1, inputs)));", "return i32_zero();", GROUPS + VECTORS),  # not where VNNI is used
    Fault("groups.h", "return i32_of(times(-zero, inputs));", "return i32_zero();", GROUPS + VECTORS),  # likewise
    Fault("groups.h", "(exponent < 15 ? 15 : exponent) - 14,", "(exponent < 15 ? 15 : exponent) - 7,", GROUPS),
    Fault("groups.h", "(largest + 0x10000) >> 23", "largest >> 23", VECTORS),
    Fault("groups.h", "if (!finite) part->scale", "if (0) part->scale", GROUPS),
    Fault("groups.h", "== GROUPS_OF_E2M1 ? 12 : 0)", "== GROUPS_OF_E2M1 ? 11 : 0)", VECTORS),
    Fault("groups.h", "i32_add(s.low, i32_left(s.high, 8))", "i32_add(s.low, i32_left(s.high, 7))", VECTORS),
    Fault("x86.h", "i32_and(i32_left(x, 1), i32_of(256))", "i32_of(0)", VECTORS),
    Fault("groups.h", "if (left * 4 <= end - k || place", "if (1 || place", GROUPS),
    Fault("groups.h", "parts = p->parts + t + second * all;", "parts = p->parts + t;", GROUPS),
    Fault("groups.h", "twice = p->twice + (size_t)t * (K / 16);", "twice = p->twice;", GROUPS),
    Fault("groups.h", "if (__builtin_memchr(p->twice + (size_t)t * (K / 16), 1", "if (__builtin_memchr(p->twice, 1", GROUPS),
    Fault("products.h", "if (here != before || from != tokens) prepare(", "if (!before) prepare(", GROUPS),
    Fault("products.h", "T == 2 && b < BLOCKS; b += 2", "T == 2 && b < BLOCKS; b += 4", KERNELS),  # in bfloat16, without AVX-512
    Fault("costs.py", "min(PROMPT, READ // rows, room)", "min(PROMPT, room)", COSTS),
    Fault("products.h", "if (!read || from != tokens) read", "if (!read) read", KERNELS),  # in bfloat16, without AVX-512
    Fault("products.h", "half_of(w + b * block, odd, kind)", "half_of(w + b * block, 0, kind)", KERNELS),  # likewise
    Fault("groups.h", "i32_of(0x0c0c0c0c)", "i32_of(0x04040404)", GROUPS),
    Fault("groups.h", "(number) % 2 * 2 + (i) * 2)", "(number) % 2 * 2)", GROUPS),
    Fault("groups.h", "PLACE_OF(number, i) ((number) * 4)", "PLACE_OF(number, i) ((number) / 2 * 8)", VECTORS),  # with VNNI
    Fault("native/__init__.py", "not in flags and not _tiles_allowed()", "not in flags and False", VECTORS),
    Fault("tiles.h", "tile_product(3, 4, 6);", "tile_product(3, 4, 5);", VECTORS),
    Fault("tiles.h", "if (second) tile_product(3, 5, 7);", "if (second) tile_product(3, 5, 6);", VECTORS),
    Fault("tiles.h", "rest_values(m, o, x, out, T - t, K);", "rest_values(m, o, x - K, out, T - t, K);", VECTORS),
    Fault("tiles.h", "add_values(chances + t * KEYS, KEYS", "add_values(chances, KEYS", PAGED_ATTENTION),  # with AMX
    Fault("attention_tiles.h", "c->slots[t + i] >= at + KEYS - 1", "c->slots[t + i] >= at", VECTORS),
    Fault("tiles.h", "b * 16 == last ? end : from", "b * 16 == last ? room : from", VECTORS),
    Fault("groups.h", "low + in_row + 4 * q, some + 4 * q + 2", "low + in_row + 4 * q, some + 4 * q", GROUPS),  # with AMX
    Fault("group_tiles.h", "{parts + first, parts + 2 * n + first}", "{parts, parts + 2 * n}", GROUPS),  # likewise
    Fault("group_tiles.h", "(first - from) * 64", "(from - from) * 64", GROUPS),
    Fault("group_tiles.h", "found = f32_fnma(i32_to_f32(zero[i]), f32_of(part.sum), found)", "(void)zero", GROUPS),
    Fault("group_tiles.h", "{begin, begin + OUTPUTS}", "{begin, begin}", GROUPS),
    Fault(
        "group_tiles.h", "next + b * 16, steps, kind, table, weights[!now][b]", "at + b * 16, steps, kind, table, weights[!now][b]", GROUPS
    ),
    Fault("group_tiles.h", "i32_sub(zero[i], i32_of(MIDDLE(m->kind)))", "i32_sub(zero[i], i32_of(128))", GROUPS),
    Fault("groups.h", "<= (1 << 24 >> 15)", "<= (1 << 27 >> 15)", GROUPS),
    Fault("attention_tiles.h", "        add_batch(a, c->wide);", "", VECTORS),
    Fault("attention.h", "        if (now != c->most[i]) raise_most(c, i, now);", "        c->most[i] = now;", VECTORS),
    Fault("attention_tiles.h", "if (at + KEYS <= from) a.begin = b + 1;", "", VECTORS),
    Fault("layer.c", "return f32_sub(more, f32_sub(more, p));", "return p;", GROUPED_EXPERTS),
    Fault("costs.py", "max(usual - seconds, LEAST_SPARED * usual)", "max(usual - seconds, 0.0)", COSTS),
    Fault("tiles.h", "x += (size_t)n * K,", "x += K,", VECTORS),
    Fault("tiles.h", "WIDTH, n, k > 0, 0, 0, 0);", "WIDTH, n, 0, 0, 0, 0);", ("tests/target/test_quantization.py",)),  # with AMX
    Fault("tiles.h", "brain_from_8((const int8_t *)w + b * block)", "brain_from_8((const int8_t *)w)", VECTORS),
    Fault("gguf.py", "found - 1 if architecture in GEMMA", "found if architecture in GEMMA", GROUPS),
    Fault("gguf.py", 'config.attn_logit_softcapping = field("attn_logit_softcapping")', "pass", GROUPS),
    Fault("gguf.py", "1.0 if rotated is None else rotated / size", "1.0", GROUPS),
    Fault("gguf.py", '"factor": factor}', '"factor": 1.0}', GROUPS),
    Fault("gguf.py", 'config.sliding_window = field("attention.sliding_window") or None', "config.sliding_window = None", GROUPS),
    Fault("gguf.py", "rest >> 4 | second >> 2 & 48", "rest >> 4 | second >> 4 & 48", GROUPS),
    Fault("gguf.py", '{"mins": -halves(2)}', '{"mins": halves(2)}', GROUPS),
    Fault("checkpoints.py", "if inputs % BLOCK:", "if False:", PACKERS),
    Fault("checkpoints.py", "if least < 0 or most > limit:", "if most > 255:", PACKERS),
    Fault("checkpoints.py", 'fields(parts["qweight"].T, bits)[:, :inputs]', 'fields(parts["qweight"].T, bits)', PACKERS),
    Fault("torchao_files.py", "if missing := [part", "if missing := 0 and [part", PACKERS),
    Fault("torchao_files.py", "    check_shapes(model, source)\n", "", PACKERS),
    Fault(
        "fusion.py",
        'if any(getattr(each, "is_kv_shared_layer", False)',
        'if 0 and any(getattr(each, "", 0)',
        ("tests/target/test_multimodal.py",),
    ),
    Fault("checkpoints.py", "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)", "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)", GROUPS),
    Fault("checkpoints.py", 'first=int(method == "gptq" and form != "gptq_v2")', "first=0", GROUPS),
    Fault("checkpoints.py", "if method and method not in AUTO_QUANTIZER_MAPPING:", "if False:", GROUPS),
    Fault(
        "checkpoints.py",
        "local_files_only=local_files_only, trust_remote_code=False)\n    found.",
        "local_files_only=local_files_only)\n    found.",
        MULTIMODAL,
    ),
    Fault("checkpoints.py", "if inputs % size and", "if False and", PACKERS),
    Fault("checkpoints.py", "found & 15, found >> 4", "found >> 4, found & 15", GROUPS),
    Fault("checkpoints.py", "(given == -1).all()", "(given == -2).all()", PACKERS),
    Fault("gguf.py", "generation.eos_token_id = [*ends, end]", "generation.eos_token_id = [end]", GROUPS),
    Fault("loading.py", "if name.endswith(OF_QUANTIZED) and part_at(", "if False and part_at(", GROUPS),
    Fault("choice.py", "torch.arange(end - count, end,", "torch.arange(count,", DESCRIBED),
    Fault("choice.py", "some_text(facts, SAMPLE, seed=1000)", "list(range(SAMPLE))", DESCRIBED),
    Fault("described_pass.py", "* wanted.abs()).clamp(min=0)", "* wanted.abs().max()).clamp(min=0)", DESCRIBED),
    Fault(
        "masks.py",
        "return self._finish(where.visible[:, None])",
        'return {"full_attention": self._finish(where.visible[:, None])}',
        WINDOWS,
    ),
    Fault("checkpoints.py", "codes = codes[:, order.long()]", "codes = codes[:, order.flip(0).long()]", GROUPS),
    Fault(
        "narrow.py",
        "None if weight.zero_point.any() else 1 << (bits - 1))",
        "None if weight.zero_point.any() else (1 << (bits - 1)) - 1)",
        GROUPS,
    ),
    Fault("huge_pages.py", "found, _free = _free[:size], _free[-(-size // LINE) * LINE :]", "found = _free[:size]", HUGE_PAGES),
    Fault("huge_pages.py", "_free[-(-size // LINE) * LINE :]", "_free[size:]", HUGE_PAGES),
    Fault("huge_pages.py", "memory.madvise(advice)", "pass", HUGE_PAGES),
    Fault("huge_pages.py", "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS", "mmap.MAP_SHARED | mmap.MAP_ANONYMOUS", HUGE_PAGES),
    Fault(
        "narrow.py",
        "return padded_rows(rows).view(-1, 64, rows.shape[1]).transpose(1, 2)",
        "return padded_rows(rows.flip(1)).view(-1, 64, rows.shape[1]).transpose(1, 2)",
        GROUPS,
    ),
    Fault("grouped.py", "torch.stack((packed & 15, packed >> 4), -1)", "torch.stack((packed >> 4, packed & 15), -1)", GROUPS),
    Fault("gguf.py", "torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()", "torch.arange(rows)", GROUPS),
    Fault("repeating.py", "plan.steady = [not differences([one], [other]) for", "plan.steady = [True for", SERVER),
    Fault("repeating.py", "if worst > TOLERANCE:", "if False:", SERVER),
    Fault("repeating.py", 'not any(str(each).endswith("-approx") for each in fingerprints)', "True", SERVER),
    Fault("repeating.py", "if chance < CHANCE:", "if False:", SERVER),
    Fault("repeating.py", "if not plan.abilities.strict:", "if False:", SERVER),
    Fault("contents.py", 'elif answer.finish == "length" and any(each != most for each in said):', "elif False:", SERVER),
    Fault("contents.py", "    if stop in answer.text:\n", "    if False:\n", SERVER),
    Fault("contents.py", "for stream in (False, True):", "for stream in (False,):", SERVER),
    Fault("probabilities.py", "if value == 0 and len(top) <= 1 < most:", "if False:", SERVER),
    Fault("probabilities.py", "if own is not None and not abs(own - value) <= ROUNDING:", "if False:", SERVER),
    Fault("probabilities.py", "if token.logprob < token.top[0].logprob - ROUNDING", "if False", SERVER),
    Fault("samples.py", "if each.logprob > edge and each.key is not None]", "if each.logprob >= edge and each.key is not None]", SERVER),
    Fault("samples.py", "len(top) > (keep := count - 1 - count // 4)", "len(top) > (keep := count)", SERVER),
    Fault(
        "answers.py", "sorted(entries, key=lambda each: -each.logprob)[:count]", "sorted(entries, key=lambda each: -each.logprob)", SERVER
    ),
    Fault("self_test.py", "if of_chain is None and trial.sources:", "if False:", ENCODERS),
    Fault("encoder_decoder.py", "if self._unmasked and input_ids.shape[1] == 1", "if False", ENCODERS),
    Fault("source_runs.py", "and all(a is b for a, b in zip(rows, self.rows))", "", RUNS),
    Fault("source_runs.py", "                run.part()\n", "", RUNS),
    Fault("source_runs.py", "allowed = min(allowed, max(0, self._limit - self.held))", "pass", RUNS),
    Fault(
        "source_runs.py",
        "            self._kept[key] = run\n        return run",
        "            self._kept = {key: run, **self._kept}\n        return run",
        RUNS,
    ),
    Fault("source_runs.py", "            if self._kept.get(run.key) is run:\n", "            if run.key in self._kept:\n", RUNS),
    Fault(
        "source_runs.py",
        "        except BaseException:\n            self.let_go()\n            raise\n\n    def growth",
        "        finally:\n            pass\n\n    def growth",
        RUNS,
    ),
    Fault("source_runs.py", "-sum(run.pages for run in {*self.sources} - kept)]", "0]", RUNS),
    Fault("target.py", "return isolation if source is None else (isolation, source.key)", "return isolation", RUNS),
    Fault("target.py", "return [0 if run is not None and run.rows else pages_of", "return [0 if run is not None else pages_of", RUNS),
    Fault("client.py", '    raise ServerError("the stream ended without [DONE]")\n', "", SERVER),
    Fault("report.py", "if any(not check.reproducibility for check in faults):", "if faults:", SERVER),
    # the planner is not told that something was recorded; drafts of members; memory that is too short is tried for ever
    Fault("observer.py", "            settling=self._settling,", "            settling=False,", GRAPHS),
    Fault("observer.py", "for each in self.drafter.draft_models:", "for each in ():", GRAPHS),
    Fault("graphs.py", "        if self._full[key] >= FULL:\n", "        if False:\n", GRAPHS),
    Fault("graphs.py", "        self.settling += found is None or found.trials < TRIALS\n", "        self.settling += 1\n", GRAPHS),
    Fault("planner.py", "        if 0 < self._settling <= SETTLING:\n", "        if False:\n", COSTS),
    Fault("planner.py", "<= ALIKE * min(rows, each)", "<= min(rows, each)", COSTS),
    Fault("recorded.py", "tokens[:, : depth + 1], proposal", "tokens[:, -depth - 1 :], proposal", GRAPHS),
    Fault("recorded.py", "else q[:, :depth])", "else q[:, -depth:])", GRAPHS),
    Fault("recorded.py", "                recordings.settling += 1\n", "", GRAPHS),
    Fault("recorded.py", "or self._cut[key] >= SELDOM", "", GRAPHS),
    Fault("engine.py", 'if job.begun else "the request was not begun', 'if True else "the request was not begun', ENGINE),
    # experts that a pass touches
    Fault("eager.py", "None if given.part is not None else direct.decoder.touched", "direct.decoder.touched", MIXTURES),
    Fault("experts.h", "        if (touched) *touched += active;\n", "        if (touched) *touched += n;\n", MIXTURES),
    Fault("described_pass.py", "self._touched.value, about.touched = 0, ", "about.touched = ", MIXTURES),
    Fault("planner.py", ", touched=done.touched, together", ", together", MIXTURES),
    Fault("costs.py", "alone += self.experts.spared(", "0 * self.experts.spared(", EXPERT_COSTS),
    Fault("costs.py", "list(accumulate(found, max))", "found", EXPERT_COSTS),
    Fault(
        "expert_costs.py",
        "self.sharing[KINDS[branching]], self.routing.chosen\n        share",
        "self.sharing[KINDS[0]], self.routing.chosen\n        share",
        EXPERT_COSTS,
    ),
    Fault(
        "expert_costs.py",
        "/ (1 + self.random(rows) * self.routing.weight)",
        "/ (1 + self.routing.chosen * self.routing.weight)",
        EXPERT_COSTS,
    ),
    # what rounding explains in a deep mixture; a self-test that the kernels fail
    Fault("described_pass.py", " or bool(off <= explained(model))", "", MIXTURES),
    Fault("kernels.py", "and not found <= explained(self.model)", "and found > explained(self.model)", MIXTURES),
    Fault("rounding.py", "return min(found, MOST)", "return MOST", MIXTURES),
    Fault("rounding.py", "            for hook in hooks:\n                hook.remove()\n", "            pass\n", MIXTURES),
    Fault("self_test.py", "if backend.overrides.unfuse(why):", "if False:", MIXTURES),
    Fault("kernels.py", "self.native, self.unfused, self._failed = 0, why, why", "self.native, self.unfused = 0, why", MIXTURES),
    # several passes of plain decoding in one call
    Fault("growth.h", "draws ? drawn(draws, n, last", "draws ? drawn(draws, 0, last", DECODE),
    Fault("growth.h", "if (ends[i] == token) return n;", ";", DECODE),
    Fault("growth.h", "now.start++, now.logits += now.columns;", "now.logits += now.columns;", DECODE),
    Fault("growth.h", "finish(g, 1), last = g->logits;", "finish(g, 1);", DECODE),
    Fault("passes.py", ", PAGE - self.lengths[0] % PAGE)", ")", DECODE),
    Fault("passes.py", "min(most, int(SECONDS / self._pace))", "most", DECODE),
    Fault("passes.py", "self.single = made is None", "self.single = True", DECODE),
    Fault("session.py", ", several=not self.waiting)", ")", DECODE),
    Fault("observer.py", "target=target / self.passes", "target=target", DECODE),
    Fault("observer.py", "drafted = kept.drafted if self.passes == 1 else ()", "drafted = kept.drafted", DECODE),
    Fault("observer.py", "seconds / self._plain, whole, self._plain)", "seconds, whole)", DECODE),
    Fault("observer.py", "1 if self.passes == 1 else max(1, len(commit.tokens))", "self.passes", DECODE),
    Fault("round.py", "if not (sampler.plain if sampler.greedy else isinstance(self._rule(shape), Match)):", "if False:", DECODE),
    Fault("round.py", "replace(draft, single=most > 1)", "draft", DECODE),
    Fault("round.py", "FOREVER if row.parameters.max_draft == 0 else ", "", DECODE),
    Fault("round.py", "if several and not row.parameters.trace else 1", "if several else 1", DECODE),
    Fault("round.py", "return replace(feedback, drafted=False)", "return feedback", DECODE),
    Fault("stopping.py", " or not feedback.drafted", "", ("tests/drafters/test_layer_skip.py",)),
    Fault("serving.py", "accepted if feedback.drafted else 0", "accepted", ("tests/drafters/test_learning.py",)),
    Fault("costs.py", "if together is not None and rows == 1:", "if False:", COSTS),
    Fault("costs.py", "if together else 0.0", "if together else self.spared", COSTS),
    Fault("planner.py", " and self._compares_plain(greedy):", " and False:", ROUNDS),
    Fault("search.py", "costs.verify[0] if costs.plain is None else costs.plain", "costs.verify[0]", COSTS),
    Fault("planner.py", "            or self._in_vain(empty)\n", "", ROUNDS),
    Fault("planner.py", "round(1 / max(available, 1 / VAIN_PAUSE))", "1", ROUNDS),
    Fault("planner.py", "self._rest = self._waived = min(VAIN_PAUSE, max(self._pause, self._vain_pause)) - 1", "self._waived = 0", ROUNDS),
    Fault("costs.py", "if together and not self._warm:", "if False:", COSTS),
]
