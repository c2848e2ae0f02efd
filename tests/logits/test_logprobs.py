"""`output_logprobs`: the target's own log-probabilities of the committed tokens, whatever drafted them."""

from __future__ import annotations

import pytest
import torch
from helpers import PAD, make_drafter, padded, prompts, tiny
from helpers import Oracle as ChainOracle

import foredraft
from foredraft import ConfigurationError, LogProbs, RowParameters, Speculator
from foredraft.drafters.base import DrafterInfo, DraftRequest
from foredraft.logits.logprobs import best_by_place, of_tokens
from foredraft.tree import TokenTree

NEW = 12
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2}


class TreeOracle(ChainOracle):
    """Its chain hangs second below the root; the nodes beside it are wrong, and every fifth on it."""

    info = DrafterInfo(branches=True)

    def draft(self, request: DraftRequest) -> TokenTree:
        drafts = [self._next(row.ids, min(limit, 3), request.vocab_size) for row, limit in zip(request.rows, request.limits)]
        tokens, valid = [], []
        for row, draft in zip(request.rows, drafts):
            chain = [*draft, *[0] * (3 - len(draft))]
            other = (chain[0] + 7) % request.vocab_size
            tokens.append([row.ids[-1], other, chain[0], other, chain[1], other, chain[2]])
            valid.append([True, bool(draft), len(draft) > 0, len(draft) > 1, len(draft) > 1, len(draft) > 2, len(draft) > 2])
        parents = torch.tensor([[-1, 0, 0, 2, 2, 4, 4]]).expand(len(drafts), -1)
        return TokenTree(torch.tensor(tokens), parents, torch.tensor(valid))


def references(rows, **options):
    """Per row the new tokens and the log-softmax of the raw logits ``[L, V]``, from transformers' own generate alone."""
    model, result = tiny(), []
    for row in rows:
        ids = torch.tensor([row])
        options = {"do_sample": False, "pad_token_id": PAD, "max_new_tokens": NEW, **options}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options)
        result.append((output.sequences[0, len(row) :].tolist(), torch.stack(output.logits, 1)[0].float().log_softmax(-1)))
    return result


def check(logprobs: LogProbs, tokens: list[int], logs: torch.Tensor, k: int) -> None:
    assert logprobs.chosen.shape == (len(tokens),) and logprobs.ids.shape == logprobs.values.shape == (len(tokens), k)
    assert logprobs.chosen.dtype == logprobs.values.dtype == torch.float32 and logprobs.ids.dtype == torch.long
    logs = logs[: len(tokens)]
    torch.testing.assert_close(logprobs.chosen, logs.gather(1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs.values, logs.topk(k).values, atol=1e-5, rtol=0)
    torch.testing.assert_close(logs.gather(1, logprobs.ids), logprobs.values, atol=1e-5, rtol=0)


def speculator(kind: str, rows, texts) -> Speculator:
    if kind == "chain":
        return Speculator(tiny(), ChainOracle([row + text for row, text in zip(rows, texts)]), draft_length=4)
    if kind == "tree":
        return Speculator(tiny(), TreeOracle([row + text for row, text in zip(rows, texts)]), shape="product(2,2,2)")
    return Speculator(tiny(), kind, shape="chain(5)")


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}], ids=["plain", "processors"])
@pytest.mark.parametrize("kind", ["none", "chain", "tree"])
def test_as_transformers_alone(kind, options):
    """Of the raw logits even where processors decide; ragged rows that accept and reject for sure."""
    rows = prompts()
    wanted = references(rows, **options)
    decoder = speculator(kind, rows, [tokens for tokens, _ in wanted])
    output = decoder.generate(**padded(rows), pad_token_id=PAD, max_new_tokens=NEW, output_logprobs=4, **options)
    if kind != "none":
        assert 0 < output.stats.accepted < output.stats.drafted
    for row, (tokens, logs) in enumerate(wanted):
        assert output.sequences[row, -NEW:].tolist() == tokens
        check(output.logprobs[row], tokens, logs, 4)


@pytest.mark.parametrize("shape", ["chain(4)", "product(2,2,1)"])
def test_sampling_by_match_as_plain_decoding(shape):
    """The same seed, the same tokens, the same log-probabilities, before temperature and penalties."""
    rows = prompts()
    options = {**padded(rows), "pad_token_id": PAD, "max_new_tokens": NEW, "seed": 3, "output_logprobs": 2, **SAMPLED}
    plain = Speculator(tiny(), "none").generate(**options)
    drafted = Speculator(tiny(), make_drafter("draft-model"), shape=shape, rule="match").generate(**options)
    assert drafted.stats.accepted > 0 and torch.equal(drafted.sequences, plain.sequences)
    for mine, other in zip(drafted.logprobs, plain.logprobs):
        for name in ("chosen", "values"):
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), atol=1e-5, rtol=0)
    assert not torch.allclose(plain.logprobs[0].values[:, 0], plain.logprobs[0].chosen)  # sampled: not always the likeliest


def test_rows_that_end_early_hold_what_they_returned():
    rows = prompts()
    (first, _), *_ = wanted = references(rows)
    eos = first[3]
    ends = [tokens.index(eos) + 1 if eos in tokens else NEW for tokens, _ in wanted]
    assert min(ends) <= 4
    for kind in ("chain", "tree"):
        decoder = speculator(kind, rows, [tokens for tokens, _ in wanted])
        output = decoder.generate(**padded(rows), pad_token_id=PAD, max_new_tokens=NEW, eos_token_id=eos, output_logprobs=1)
        for row, (tokens, logs) in enumerate(wanted):
            check(output.logprobs[row], tokens[: ends[row]], logs, 1)


def test_zero_gives_only_the_tokens_own():
    rows = prompts()[:1]
    output = Speculator(tiny(), "none").generate(torch.tensor(rows), max_new_tokens=3, pad_token_id=PAD, output_logprobs=0)
    ((tokens, logs),) = references(rows)
    check(output.logprobs[0], tokens[:3], logs, 0)
    assert Speculator(tiny(), "none").generate(torch.tensor(rows), max_new_tokens=3, pad_token_id=PAD).logprobs is None


def test_stream_carries_each_commits_own():
    rows = prompts()
    wanted = references(rows)
    decoder = speculator("tree", rows, [tokens for tokens, _ in wanted])
    parts = {row: [] for row in range(len(rows))}
    for tokens in decoder.stream(**padded(rows), pad_token_id=PAD, max_new_tokens=NEW, output_logprobs=3):
        assert len(tokens.logprobs) == len(tokens)
        parts[tokens.row].append(tokens.logprobs)
    for row, (tokens, logs) in enumerate(wanted):
        check(LogProbs.joined(parts[row]), tokens, logs, 3)
    assert all(tokens.logprobs is None for tokens in decoder.stream(**padded(rows), pad_token_id=PAD, max_new_tokens=2))


def test_every_row_of_a_session_has_its_own():
    rows = prompts()
    session = Speculator(tiny(), "none").session()
    for row, k in zip(rows, (None, 0, 5)):
        session.add(row, RowParameters(max_new_tokens=3, logprobs=k))
    wanted, seen = references(rows), {0: [], 1: [], 2: []}
    while session.live:
        for commit in session.step():
            seen[commit.slot].append(commit.logprobs)
    assert seen[0] == [None] * 3
    for slot, k in ((1, 0), (2, 5)):
        check(LogProbs.joined(seen[slot]), wanted[slot][0][:3], wanted[slot][1], k)


def test_through_transformers_generate():
    row = torch.tensor(prompts()[:1])
    decode, options = foredraft.custom_generate("prompt-lookup"), {"max_new_tokens": 5, "pad_token_id": PAD, "do_sample": False}
    output = tiny().generate(row, custom_generate=decode, output_logprobs=2, return_dict_in_generate=True, **options)
    ((tokens, logs),) = references(row.tolist())
    check(output.logprobs[0], tokens[:5], logs, 2)
    with pytest.raises(ConfigurationError, match="return_dict_in_generate"):
        tiny().generate(row, custom_generate=decode, output_logprobs=2, **options)


@pytest.mark.parametrize("bad", [-1, True, 2.0, "3", 10**6])
def test_bad_counts_are_refused_before_the_first_pass(bad):
    decoder = Speculator(tiny(), "none")
    passes = decoder.target.passes
    with pytest.raises(ConfigurationError, match=r"output_logprobs must be a whole number from 0"):
        decoder.generate(torch.tensor(prompts()[:1]), max_new_tokens=2, output_logprobs=bad)
    with pytest.raises(ConfigurationError, match=r"output_logprobs"):
        decoder.stream(torch.tensor(prompts()[:1]), max_new_tokens=2, output_logprobs=bad)
    assert decoder.target.passes == passes


def test_ties_do_not_depend_on_how_many_others_ask_for():
    """Rows that are decoded together share one search, of the most tokens that any of them wants."""
    scores = torch.randint(-3, 4, (50, 300), generator=torch.Generator().manual_seed(1)).float()
    scores[0, ::7], scores[1] = -torch.inf, 0.0
    scores[1, ::2] = -0.0
    tokens = torch.zeros(50, dtype=torch.long)
    wanted = of_tokens(scores, tokens, 300)
    expected = scores.sort(dim=-1, descending=True, stable=True).indices
    for k in (0, 1, 5, 20, 300):
        found = of_tokens(scores, tokens, k)
        assert torch.equal(found.ids, expected[:, :k]) and torch.equal(found.ids, wanted.cut(50, k).ids)
        assert torch.equal(found.values, wanted.values[:, :k]) and torch.equal(best_by_place(scores, k), found.ids)
