"""Models that can only verify chains: a row's logits are those of a plain pass, wherever its state was taken up again."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import build
from helpers import Oracle, alone, generate, make_drafter, prompts, repetitive, tiny

from foredraft import RowParameters, Speculator, TokenTree
from foredraft.backends.rollback import READ_AGAIN, RollbackRow
from foredraft.backends.states import State
from foredraft.drafters.draft_model import DraftModel
from foredraft.target import Target

FAMILIES = ["gpt_neo", "falcon_alibi", "qwen3_next", "zamba2", "mamba2", "rwkv"]  # caches that are cut, mixed, recurrent, no cache
RECURRENT = ["qwen3_next", "mamba2", "rwkv"]
TOLERANCE = 1e-4


def model_of(family):
    return tiny(family, "sdpa" if family in ("falcon_alibi", "qwen3_next", "zamba2") else "eager")


def opened(family, texts, **options):
    target = Target(model_of(family), test=False, **options)
    target.open(texts)
    return target, target.prefill(texts, first=0)


@torch.inference_mode()
def plain(target, text):
    """``[L, V]`` of one pass with no cache."""
    ids = torch.tensor([list(text)])
    return target.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]


def assert_close(got, wanted):
    assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def assert_scores(target, texts, chain, *, first=0):
    """Score ``chain`` ``[R, N]`` behind ``texts`` and compare with plain passes."""
    logits = target.score(TokenTree.from_chain(chain), first=first)
    for row, text in enumerate(texts):
        assert_close(logits[row], plain(target, text + chain[row].tolist())[len(text) + first :])


def chain_of(rows, nodes, seed):
    return torch.randint(3, 128, (rows, nodes), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_round_scores_what_a_plain_pass_would(family):
    texts = [list(text) for text in prompts((9, 21, 14))]
    target, logits = opened(family, texts)
    for row, text in enumerate(texts):
        assert_close(logits[row], plain(target, text)[-1])
    for step, kept in enumerate([(1, 4, 2), (4, 4, 4), (2, 1, 1), (3, 4, 1)]):
        chain = chain_of(3, 4, step)
        assert_scores(target, texts, chain)
        target.commit(None, kept)
        texts = [text + line[:count] for text, line, count in zip(texts, chain.tolist(), kept)]
        assert target.lengths == [len(text) for text in texts]


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_come_and_go_and_tokens_are_taken_back(family):
    texts = [list(text) for text in prompts((9, 21))]
    target, _ = opened(family, texts, prefill_chunk=8)
    for token in (7, 8, 9):  # as a draft model does
        texts = [[*text, token] for text in texts]
        logits = target.advance(torch.tensor([token, token]))
        for row, text in enumerate(texts):
            assert_close(logits[row], plain(target, text)[-1])
    lengths = [10, 5]  # of the second row, behind what its prompt had
    target.rewind(lengths)
    texts = [text[:length] for text, length in zip(texts, lengths)]
    assert_scores(target, texts, chain_of(2, 3, 1))
    target.commit(None, (2, 3))
    texts = [text + line[:count] for text, line, count in zip(texts, chain_of(2, 3, 1).tolist(), (2, 3))]
    texts = [text + [5] * 11 for text in texts]
    target.open([new := prompts((6,), seed=4)[0]])
    assert_close(target.prefill([*texts, new], first=0)[2], plain(target, new)[-1])
    target.compact([1, 2])
    assert_scores(target, [texts[1], new], chain_of(2, 3, 2))
    assert all(row.live.memory is not None for row in target.cache.rows)
    target.release()
    assert target.cache.rows == [] and target.lengths == []


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_of_uneven_length_in_several_passes(family):
    texts = [list(text) for text in prompts((9, 21))]
    target, _ = opened(family, texts)
    tokens, valid = chain_of(2, 5, 3), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for first, end in ((0, 2), (2, 4), (4, 5)):
        logits = target.score(TokenTree.from_chain(tokens[:, :end], valid=valid[:, :end]), first=first)
        assert logits.shape[:2] == (2, end - first)
        for row, count in enumerate((5, 3)):
            wanted = plain(target, texts[row] + tokens[row, : min(end, count)].tolist())[len(texts[row]) + first :]
            if len(wanted):
                assert_close(logits[row, : len(wanted)], wanted)
            assert not logits[row, len(wanted) :].any(), "filler is not read"
    target.commit(None, (1, 3))
    texts = [text + line[:count] for text, line, count in zip(texts, tokens.tolist(), (1, 3))]
    assert_scores(target, texts, chain_of(2, 3, 4))


@torch.inference_mode()
@pytest.mark.parametrize("family", RECURRENT)
def test_kept_tokens_are_read_again_but_not_for_ever(family):
    text = list(prompts((9,))[0])
    target, _ = opened(family, [text])
    read = []
    handle = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for step in range(READ_AGAIN + 4):
        chain = chain_of(1, 4, step)
        target.score(TokenTree.from_chain(chain))
        target.commit(None, [1])
        text += chain[0, :1].tolist()
    handle.remove()
    assert max(read) <= READ_AGAIN + 4 and target.passes == len(read) + 1
    assert len(read) == READ_AGAIN + 4 + 1, "one pass of its own, once there was too much to read again"
    assert_scores(target, [text], chain_of(1, 3, 99))


@pytest.mark.parametrize("family", ["gpt_neo", "qwen3_next", "mamba2"])
def test_a_draft_model_that_keeps_a_state(family):
    model, rows = tiny(), repetitive((33, 20, 41))
    drafter = make_drafter("draft-model", family, model_implementation(family))
    speculator = Speculator(model, drafter=drafter, shape="chain(5)")
    session = speculator.session()
    for row in rows:
        session.add(row, RowParameters(max_new_tokens=12))
    live = list(session.waiting)
    while session.live:
        session.step()
    assert [row.ids[row.prompt_length :] for row in live] == [alone(model, row, max_new_tokens=12) for row in rows]
    assert session.stats.drafted > 0


def test_a_state_is_taken_up_only_behind_what_it_has_read():
    row = RollbackRow(text=[1, 2], live=State([1, 2, 3], [torch.zeros(1)]), kept=State([1, 2], [torch.ones(1)]))
    state = row.take([1, 2, 4, 5], 3)
    assert state.tokens == [1, 2] and state is row.live is not row.kept
    assert row.take([1, 2, 4, 5], 3) is state
    assert row.take([7, 2, 4, 5], 3).tokens == []


def model_implementation(family):
    return "sdpa" if family == "qwen3_next" else "eager"


def test_rows_leave_while_others_go_on():
    model, rows = build("zamba2"), prompts((33, 20, 41))
    expected = [alone(model, row, max_new_tokens=16) for row in rows]
    session = Speculator(model, drafter=Oracle([row + text for row, text in zip(rows, expected)])).session()
    for row, limit in zip(rows, (4, 16, 9)):
        session.add(row, RowParameters(max_new_tokens=limit))
    live = list(session.waiting)
    while session.live:
        session.step()
    assert [row.ids[row.prompt_length :] for row in live] == [text[:limit] for text, limit in zip(expected, (4, 16, 9))]
    assert session.stats.drafted > session.stats.accepted > 0


@pytest.mark.parametrize("lengths", [(70, 20), (62, 20)])
def test_a_draft_whose_context_is_shorter_than_the_text(lengths):
    config = copy.deepcopy(model_of("gpt_neo").config)
    config.max_position_embeddings = 64
    draft = type(model_of("gpt_neo"))(config).eval()
    rows = prompts(lengths)
    speculator = Speculator(tiny(), drafter=DraftModel(draft), shape="chain(5)")
    assert generate(speculator, rows, max_new_tokens=10) == [alone(tiny(), row, max_new_tokens=10) for row in rows]


def test_a_context_by_another_name_is_kept():
    """mpt calls it max_seq_len; a draft may not cross it, although the text ends before."""
    config = copy.deepcopy(model_of("mpt").config)
    config.max_seq_len = 48
    torch.manual_seed(0)
    model = type(model_of("mpt"))(config).eval()
    (row,) = prompts((40,))
    text = alone(model, row, max_new_tokens=7)
    ends = next(place for place in range(3, 7) if text[place] not in text[:place])
    speculator = Speculator(model, drafter=Oracle([row + text[: ends + 1] + [1] * 20]), draft_length=10)
    assert generate(speculator, [row], max_new_tokens=30, eos_token_id=text[ends]) == [text[: ends + 1]]
    assert speculator.target.context == 48
