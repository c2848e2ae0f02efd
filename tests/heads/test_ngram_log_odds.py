"""NgramLogOdds beside Medusa's heads: what is counted, what is added to logits, and drafts that leave the output distribution as it is."""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from functools import cache

import pytest
import torch
from cover import by_turns, covered
from head_cases import SHAPES, off_by, on_table, shaken_medusa, table_head
from helpers import alone, clone, generate, padded, plainly, repetitive, taught_head, tiny
from safetensors.torch import save_file

from foredraft import ConfigurationError, Speculator, zoo
from foredraft.backends import native
from foredraft.drafters import medusa as drafting
from foredraft.drafters.medusa import Medusa
from foredraft.heads import checkpoints
from foredraft.heads import ngram_log_odds as counting
from foredraft.heads.calibration import WEIGHTS, calibrate, weigh_log_odds
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.testing import ProbabilityTable, TableTarget

VOCABULARY = 11


def texts(vocabulary: int = VOCABULARY, count: int = 40):
    generator = torch.Generator().manual_seed(5)
    favour = 3 * torch.randn(vocabulary, vocabulary, generator=generator)
    found = []
    for length in torch.randint(1, 60, (count,), generator=generator).tolist():
        text = [int(torch.randint(vocabulary, (1,), generator=generator))]
        while len(text) < length:
            text.append(int(torch.multinomial(torch.softmax(favour[text[-1]], -1), 1, generator=generator)))
        found.append(text)
    return found


def interpolated(found, context, vocabulary=VOCABULARY):
    """Witten and Bell's p(y | context), straight from its definition."""
    everything = Counter(token for text in found for token in text)
    total = sum(everything.values())
    p = [(everything[token] + 1) / (total + vocabulary) for token in range(vocabulary)]
    for reach in range(1, len(context) + 1):
        suffix = context[-reach:]
        after = Counter(text[at] for text in found for at in range(reach, len(text)) if text[at - reach : at] == suffix)
        if not after:
            return p
        count, types = sum(after.values()), len(after)
        p = [(after[token] + types * p[token]) / (count + types) for token in range(vocabulary)]
    return p


@pytest.fixture
def everything(monkeypatch):
    """Lists that leave nothing out."""
    monkeypatch.setattr(counting, "SEEN", (1, 1))


@pytest.mark.usefixtures("everything")
def test_what_is_added_makes_of_single_tokens_the_interpolated_probabilities():
    found = texts()
    made = NgramLogOdds.count(found, VOCABULARY, heads=1, listed=(VOCABULARY, VOCABULARY))
    contexts = [[-1, 4], [3, 7], [0, 0], [10, 2], [9, 9]]
    alone_ = torch.tensor(interpolated(found, [])).log().expand(len(contexts), -1)
    p = torch.softmax(made.added(alone_, torch.tensor(contexts), 0), -1)
    for line, context in zip(p, contexts):
        expected = interpolated(found, [token for token in context if token >= 0])
        for ours, theirs in zip(line.tolist(), expected):
            assert math.log(ours) == pytest.approx(math.log(theirs), abs=2.5 / counting.UNITS)  # two lists, each rounded


def test_tokens_that_are_not_listed_share_what_is_left():
    """Two listed per context: the listed have their interpolated probabilities, and the others keep their proportions."""
    found = texts()
    made = NgramLogOdds.count(found, VOCABULARY, heads=1, listed=(2,))
    plain = torch.tensor(interpolated(found, [])).log()
    p = torch.softmax(made.added(plain[None], torch.tensor([[5, 4]]), 0), -1)[0]
    expected = interpolated(found, [4])
    listed = made.lists[0]
    place = listed.contexts.tolist().index(4)
    kept = listed.tokens[listed.first[place] : listed.first[place + 1]].tolist()
    assert len(kept) == 2
    for token in kept:
        assert p[token].log() == pytest.approx(math.log(expected[token]), abs=1.5 / counting.UNITS)
    others = [token for token in range(VOCABULARY) if token not in kept]
    ratio = p[others] / plain.exp()[others]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_contexts_end_where_texts_do_and_weights_scale_what_is_added():
    made = NgramLogOdds.count([[1, 2, 3]] * 9 + [[4], [5, 1]] * 9, 6, heads=2)
    zeros = torch.zeros(1, 6)
    assert made.added(zeros, torch.tensor([[-1, 4]]), 0).abs().sum() == 0  # nothing follows 4: the next text is another one
    whole = made.added(zeros, torch.tensor([[1, 2]]), 1)
    assert whole[0, 3] > 1 and whole[0, [0, 1, 2, 4, 5]].abs().sum() == 0
    half = made.weighed([0.0, 0.5])
    torch.testing.assert_close(half.added(zeros, torch.tensor([[1, 2]]), 1), whole / 2)
    assert half.added(zeros, torch.tensor([[1, 2]]), 0) is zeros
    assert made.added(torch.zeros(2, 3, 2), torch.tensor([[[1, 2]] * 3] * 2), 1).abs().sum() == 0  # 3 is beyond a smaller vocabulary


def test_no_more_is_listed_than_is_meant_to_be(monkeypatch):
    monkeypatch.setattr(counting, "SEEN", (1, 1))
    monkeypatch.setattr(counting, "MOST", 30)
    made = NgramLogOdds.count(texts(), VOCABULARY, heads=1, listed=(3, 2))
    assert made.lists[0].longest == 3 and 0 < len(made.lists[1].tokens) <= 30


def test_texts_that_can_not_be_counted_are_refused():
    with pytest.raises(ConfigurationError, match="no text"):
        NgramLogOdds.count([[]], 5, heads=1)
    with pytest.raises(ConfigurationError, match="outside the vocabulary of 5"):
        NgramLogOdds.count([[1, 5]], 5, heads=1)
    assert not sum(len(each.tokens) for each in NgramLogOdds.count([[1], [2]], 5, heads=1).lists)


def mixed(q, path, text):
    """The mixture straight from its definition."""
    for length, share in zip((2, 3, 4), counting.SHARES):
        if len(path) < length:
            return q
        places = [at for at in range(length, len(text)) if text[at - length : at] == path[-length:]]
        exact = {reach: [at for at in places if longest(path, text, at) == reach] for reach in (2, 3, 4)}
        places = [at for reach in exact for at in exact[reach][-counting.MATCHES :]]
        if not places:
            return q
        after = Counter(text[at] for at in places)
        q = [(1 - share) * each + share * after[token] / len(places) for token, each in enumerate(q)]
    return q


def longest(path, text, at):
    reach = 0
    while reach < min(counting.PATH, len(path), at) and text[at - 1 - reach] == path[-1 - reach]:
        reach += 1
    return reach


@pytest.mark.parametrize("matches", [2, 32])
def test_what_followed_in_the_text_is_mixed_in(matches, monkeypatch):
    monkeypatch.setattr(counting, "MATCHES", matches)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, (length,), generator=generator).tolist() for length in (60, 3, 25)]
    rows[2][4:14] = rows[2][14:24]
    logits = torch.randn(3, 2, 5, generator=generator, dtype=torch.float32)
    drafted = [[], [1, 2]]  # of the places of every row
    paths = torch.full((3, 2, counting.PATH), -1)
    for row, text in enumerate(rows):
        for place, more in enumerate(drafted):
            path = (text + more)[-counting.PATH :]
            paths[row, place, counting.PATH - len(path) :] = torch.tensor(path)
    texts_ = torch.tensor([[-2] * (60 - len(text)) + text for text in rows])
    q = torch.softmax(counting.mix_in_text(logits, paths, texts_), -1)
    changed = 0
    for row, text in enumerate(rows):
        for place, more in enumerate(drafted):
            plain = torch.softmax(logits[row, place], -1).tolist()
            expected = mixed(plain, (text + more)[-counting.PATH :], text)
            assert q[row, place].tolist() == pytest.approx(expected, abs=1e-5)
            changed += expected != plain
    assert changed >= 2


def test_the_latest_tokens_of_a_text_are_remembered(monkeypatch):
    monkeypatch.setattr(drafting, "REMEMBERED", 7)
    latest, text = drafting.Latest(), []
    for length in (3, 1, 20, 0, 5, 1, 1, 9, 60, 2):
        text += range(len(text), len(text) + length)
        assert latest.of(text).tolist() == text[-7:]


# -- files ------------------------------------------------------------------------------------------------------------------


def with_log_odds(head, rows=None, weights=(1.0, 0.7, 0.5)):
    model = tiny()
    rows = rows or [row + alone(model, row, max_new_tokens=30) for row in repetitive()]
    head.log_odds = NgramLogOdds.count(rows * 8, head.config.target.vocab_size, heads=head.config.predictions).weighed(weights)
    return head


def test_they_are_stored_beside_the_head_and_left_out_of_exports(tmp_path):
    head = with_log_odds(shaken_medusa().float())
    checkpoints.save(head, tmp_path / "a")
    back = checkpoints.load(tmp_path / "a", tiny()).log_odds
    logits, tokens = torch.zeros(5, head.config.target.vocab_size), torch.tensor(repetitive()[0][:6]).unfold(0, 2, 1)
    for k in range(4):
        expected = head.log_odds.added(logits, tokens, k)
        assert expected.abs().sum() > 0 and torch.equal(back.added(logits, tokens, k), expected)
    checkpoints.save(head, tmp_path / "b", format="vllm")
    assert not (tmp_path / "b" / "successors").exists()
    assert any("log-odds" in line for line in checkpoints.formats.find("vllm").losses(head))
    head.log_odds = None
    checkpoints.save(head, tmp_path / "a")
    assert checkpoints.load(tmp_path / "a", tiny()).log_odds is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, said: tensors.pop("odds_1"), "odds_1 missing"),
        (lambda tensors, said: tensors.update(lengths_1=tensors["lengths_1"] + 1), "do not fit"),
        (lambda tensors, said: tensors.update(contexts_1=tensors["contexts_1"].long().flip(0)), "do not fit"),
        (lambda tensors, said: tensors.update(contexts_3=tensors["contexts_1"].clone()), "contexts of 3 tokens"),
        (lambda tensors, said: said.update(version="0"), "no n-gram log-odds of version 1"),
        (lambda tensors, said: said.update(vocab_size="9999"), "another vocabulary"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, message):
    head = with_log_odds(shaken_medusa().float())
    checkpoints.save(head, tmp_path)
    tensors, said = head.log_odds.tensors()
    change(tensors, said)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / checkpoints.LOG_ODDS, said)
    with pytest.raises(ConfigurationError, match=message):
        checkpoints.load(tmp_path, tiny())
    (tmp_path / checkpoints.LOG_ODDS).write_bytes(b"no such file")
    with pytest.raises(ConfigurationError, match=r"not a (readable )?safetensors file"):
        checkpoints.load(tmp_path, tiny())


def mute(model=None):
    """A head that says nothing of its own."""
    head = MedusaHead.for_target(model or tiny())
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head


# -- what they are worth ------------------------------------------------------------------------------------------------------


def test_the_weights_are_those_that_make_texts_likeliest():
    """A head that says nothing of its own needs all that is counted; one whose guesses know the token before already needs none."""
    model, rows = tiny(), repetitive()
    answered = [row + alone(model, row, max_new_tokens=30) for row in rows]
    head = with_log_odds(mute())
    found = weigh_log_odds(head, model, answered, answers=[len(row) for row in rows])
    assert all(weight in WEIGHTS for weight in found.weights) and min(found.weights) >= 0.5
    vocabulary = head.config.target.vocab_size
    never = next(token for token in range(vocabulary) if not any(token in row for row in answered))
    head.log_odds = NgramLogOdds.count([[token, never] for token in range(vocabulary)] * 8, vocabulary, heads=4)  # a lie
    assert set(weigh_log_odds(head, model, answered).weights) == {0.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.cuda
def test_on_a_gpu_weights_and_guesses_are_those_of_the_cpu():
    model, rows = tiny(), repetitive()
    answered = [row + alone(model, row, max_new_tokens=30) for row in rows]
    found = []
    for device in ("cpu", "cuda"):
        there = clone(model).to(device)
        head = with_log_odds(mute(there))
        head.log_odds = weigh_log_odds(head, there, answered)
        accuracies = calibrate(head, there, answered, cost=lambda count: 1.0).accuracies
        found.append((head.log_odds.weights, accuracies))
    assert found[0] == found[1]


def test_calibration_asks_for_what_is_drafted():
    model, rows = tiny(), repetitive()
    answered, firsts = [row + alone(model, row, max_new_tokens=30) for row in rows], [len(row) for row in rows]
    head = mute()
    without = calibrate(head, model, answered, cost=lambda count: 1.0, answers=firsts)
    with_ = calibrate(with_log_odds(head), model, answered, cost=lambda count: 1.0, answers=firsts)
    assert with_.accuracies[0][0] > 0.8 > without.accuracies[0][0]


# -- drafts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", by_turns(SHAPES, 0))
def test_texts_stay_what_they_are_and_drafts_get_better(shape):
    model = clone(tiny())
    head, rows = with_log_odds(copy(taught_head("medusa", steps=6))), repetitive()
    expected = [alone(tiny(), row, max_new_tokens=16) for row in rows]
    lengths = []
    for successors in ("off", "stored", "auto"):
        drafter = Medusa(head, successors=successors)
        out = Speculator(model, drafter, shape=shape).generate(**padded(rows), max_new_tokens=16, pad_token_id=0)
        assert [row[-16:] for row in out.sequences.tolist()] == expected
        lengths.append(out.stats.acceptance_length)
    assert lengths[0] < min(lengths[1:])
    options = {"do_sample": True, "temperature": 0.8, "seed": 4, "max_new_tokens": 16}
    for more in ({"top_k": 20}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}):
        plain = plainly(tiny(), rows, **options, **more)
        assert generate(Speculator(model, Medusa(head), shape=shape, rule="match"), rows, **options, **more) == plain


@pytest.mark.parametrize(
    ("siblings", "rule", "shape"),
    [
        ("iid", "rejection", "chain(2)"),
        ("iid", "block", "chain(2)"),
        ("iid", "traversal", "product(2,1)"),
        ("without-replacement", "multi-candidate", "product(2,1)"),
        ("keyed", "match", "product(2,1)"),
        ("keyed", "match", "dynamic(depth=2,k=2,total=3)"),
    ],
)
def test_the_law_is_the_targets(siblings, rule, shape):
    """Every outcome of every draw, over several rounds, with lists that matter."""
    target = TableTarget(ProbabilityTable.random(3, seed=1))
    head = table_head()
    drafter = on_table(Medusa, head, target, siblings)
    drafter._successors = NgramLogOdds.count([[0, 1, 2, 0, 2, 1, 1, 0]] * 20, 3, heads=2).weighed([1.0, 0.5])
    assert drafter.successors == "auto"  # what follows in the text counts too
    assert off_by(drafter, target, rule, shape) < 1e-9


@cache
def embedded():
    """A model, its heads, a prompt, and the text that it becomes. Not to be changed."""
    model = zoo.load("python-8m", dtype=torch.float32)
    ids = zoo.load_tokenizer("python-8m")(["def area(radius):\n    return radius\n\ndef area(radius):\n"], return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=48, do_sample=False, pad_token_id=0)[0].tolist()
    return model, checkpoints.load("zoo:python-8m-medusa", model), ids, written


@pytest.mark.skipif(native.refusal(torch.float32) is not None, reason="no native kernels here")
@pytest.mark.parametrize(
    ("shape", "options"),
    covered(
        [*SHAPES, "opt(total=12,depth=4,delta=0.05)", "paths(0,1,2,3,0.0,0.1,0.2,0.0.0,0.0.1,0.0.0.0)"],
        [(1, True, "auto"), (2, True, "auto"), (2, True, "stored"), (2, False, "auto"), (1, True, "off")],
        ways=1,
    ),
)
def test_the_kernel_drafts_what_is_drafted_level_by_level(shape, options):
    layers, counted, successors = options
    model, given, ids, written = embedded()
    head = copy(given)
    if layers == 1:
        generator = torch.Generator().manual_seed(2)
        head = type(head).for_target(model, heads=4, layers=1)
        with torch.no_grad():
            for weight in head.parameters():  # heads that are alike are a tie wherever one looks
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
    head.log_odds = NgramLogOdds.count([written] * 9, 4096, heads=4).weighed([0.5, 0.6, 0.7, 0.8]) if counted else None
    seen = []
    for kernel in (True, False):
        drafter = Medusa(head, successors=successors)
        speculator = Speculator(model, drafter, execution="native", shape=shape)
        assert drafter._kernel is not None
        if not kernel:
            drafter._kernel = None
        drafts, draft = [], drafter.draft
        drafter.draft = lambda request, drafts=drafts, draft=draft: (drafts.append(draft(request)), drafts[-1])[1]
        out = speculator.generate(**ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0).sequences
        speculator.close()
        seen.append((out.tolist(), [(tree.tokens.tolist(), tree.parents.tolist()) for tree in drafts]))
    assert len(seen[0][1]) > 5 and seen[0] == seen[1]
    assert seen[0][0][0] == written[: len(seen[0][0][0])]


def test_options_are_checked():
    with pytest.raises(ConfigurationError, match="successors must be auto, stored, off; got 'on'"):
        Medusa(successors="on")
