"""Log-probabilities of a prompt's own tokens: those of one pass of the model over it, and no change to the text."""

from __future__ import annotations

import pytest
import torch
from helpers import make_drafter, prompts, repetitive, tiny
from kernel_cases import build

from foredraft import ConfigurationError, RowParameters, Speculator
from foredraft.logits.logprobs import LogProbs, of_tokens
from foredraft.target import target as target_module

PROMPTS = [*repetitive((30, 17)), *prompts((90, 1), seed=4)]


def expected(model, ids, top):
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    every = torch.log_softmax(logits, -1)
    return every.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], every.topk(top)


def run(speculator, rows):
    session = speculator.session()
    for ids, parameters in rows:
        session.add(ids, parameters)
    texts, first = {}, {}
    while session.live:
        for commit in session.step():
            assert (commit.prompt_logprobs is None) or commit.slot not in texts, "only in the first commit"
            first.setdefault(commit.slot, commit.prompt_logprobs)
            texts.setdefault(commit.slot, []).extend(commit.tokens)
    return texts, first


@pytest.mark.parametrize(("family", "drafter"), [("llama", "prompt-lookup"), ("llama", "medusa"), ("rwkv", "none")])
def test_they_are_those_of_one_pass(family, drafter, monkeypatch):
    monkeypatch.setattr(target_module, "SCORED", 128 * 8)  # eight tokens at a time
    model, top = tiny(family, "eager" if family == "rwkv" else "sdpa"), [None, 3, 0, 2]
    speculator = Speculator(model, drafter=make_drafter(drafter), shape="chain(3)" if drafter == "medusa" else "auto")
    parameters = [RowParameters(6, do_sample=index == 1, seed=(index, 3)) for index in range(4)]
    plain, none = run(speculator, zip(PROMPTS, parameters))
    assert set(none.values()) == {None}
    asked = [RowParameters(6, do_sample=index == 1, seed=(index, 3), prompt_logprobs=k) for index, k in enumerate(top)]
    texts, found = run(speculator, zip(PROMPTS, asked))  # whose beginnings are all cached
    assert texts == plain
    assert found[0] is None
    for slot in (1, 2, 3):
        chosen, best = expected(model, PROMPTS[slot], top[slot])
        assert len(found[slot]) == len(PROMPTS[slot]) - 1
        torch.testing.assert_close(found[slot].chosen, chosen, atol=1e-4, rtol=0)
        torch.testing.assert_close(found[slot].values, best.values, atol=1e-4, rtol=0)
        assert torch.equal(found[slot].ids, best.indices)
    speculator.close()


def test_a_long_prompt_is_scored_in_pieces_while_others_are_written(monkeypatch):
    model, ids = build("qwen3", torch.float32), [token % 97 for token in range(3, 303)]  # its cache is in pages
    speculator = Speculator(model, drafter="none", execution="native")
    session = speculator.session()
    session.add(list(range(30)), RowParameters(30))
    session.step()
    monkeypatch.setattr("foredraft.session.PAUSE", 0.0)
    monkeypatch.setattr("foredraft.session.SHARE", 0.0)
    slot = session.add(ids, RowParameters(2, prompt_logprobs=1))
    steps, found = 0, None
    while found is None:
        steps += 1
        found = next((commit.prompt_logprobs for commit in session.step() if commit.slot == slot), None)
    assert steps > 3, "it was read at once"
    session.close()
    speculator.close()
    torch.testing.assert_close(found.chosen, expected(model, ids, 1)[0], atol=1e-4, rtol=0)


def test_they_are_the_same_in_pieces_of_any_length():
    """Where pieces end depends on the load, and may leave a single token in one. Here several threads would share its sum."""
    threads, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(60, 50257, generator=generator), torch.arange(60)
    torch.set_num_threads(4)
    try:
        whole = of_tokens(logits, tokens, 2)
        for size in (1, 2, 7):
            parts = [of_tokens(a, b, 2) for a, b in zip(logits.split(size), tokens.split(size))]
            joined = LogProbs.joined(parts)
            assert torch.equal(joined.chosen, whole.chosen) and torch.equal(joined.values, whole.values), size
    finally:
        torch.set_num_threads(threads)


def test_too_many_are_refused():
    speculator = Speculator(tiny(), drafter="none")
    with pytest.raises(ConfigurationError, match="prompt_logprobs must be a whole number from 0"):
        speculator.session().add([1, 2], RowParameters(1, prompt_logprobs=1000))
    speculator.close()
