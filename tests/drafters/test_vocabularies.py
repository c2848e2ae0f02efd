"""Draft models with another tokenizer than the target's."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
import torch
from drafting import Row
from helpers import alone, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from vocabularies import TEXTS, letters, model, tokenizer

from foredraft import ConfigurationError, DrafterError, Speculator
from foredraft.auditing.statistical import draft_of
from foredraft.drafters.draft_model import BACK, DraftModel
from foredraft.drafters.foreign import Foreign, Intersection
from foredraft.drafters.several import Several
from foredraft.drafters.spelling import LIKELY, Branch, Spelling, Writer
from foredraft.drafters.vocabularies import Reading, Vocabularies, Words
from foredraft.logits.sampler import Sampler
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.testing import ProbabilityTable, TableTarget, continuation_law, distance, plain_law
from foredraft.tree import TokenTree
from foredraft.verification import create

PROMPT, NEW = TEXTS[0], 24
PAIRS = [
    ("byte-level", "unigram", "chain(4)"),
    ("byte-level", "unigram", "product(2,2,1)"),
    ("byte-level", "unigram", "dynamic(depth=3,k=3,total=8)"),
    ("byte-level", "wordpiece", "chain(4)"),
    ("byte-level", "byte-level", "chain(4)"),
    ("unigram", "byte-level", "chain(4)"),
    ("unigram", "wordpiece", "product(2,1)"),
]
BY_TEXT = [(target, draft) for target in ("byte-level", "unigram") for draft in ("byte-level", "unigram", "wordpiece")]


def speculator(
    target: str = "byte-level", draft: str = "unigram", *, seed: int = 1, vocabulary: str = "intersection", **options
) -> Speculator:
    drafter = DraftModel(model(draft, seed), tokenizer=tokenizer(draft), vocabulary=vocabulary, execution="eager")
    return Speculator(model(target), drafter, tokenizer=tokenizer(target), execution="eager", **options)


def ids(kind: str, text: str = PROMPT) -> list[int]:
    return tokenizer(kind)(text)["input_ids"]


@cache
def plain_text(target: str, text: str) -> list[int]:
    return alone(model(target), ids(target, text), max_new_tokens=NEW)


@pytest.mark.parametrize(("target", "draft", "shape"), PAIRS)
def test_greedy_text_is_that_of_transformers(target, draft, shape):
    made = speculator(target, draft, shape=shape)
    for seed_text in (PROMPT, "\u00fc \U0001f642 caf\u00e9"):
        prompt = ids(target, seed_text)
        out = made.generate(torch.tensor([prompt]), max_new_tokens=NEW)
        assert out.sequences[0, len(prompt) :].tolist() == plain_text(target, seed_text)
        assert out.stats.drafted > 0


# -- laws by enumeration --------------------------------------------------------------------------------------------------

P = ProbabilityTable.random(3, seed=1)
Q = ProbabilityTable.random(4, seed=2)
START = [0, 2]  # a and ab


class TableDraft(TableTarget):
    """A draft that is a probability table."""

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.score(TokenTree.root(tokens))[:, 0]
        self.commit(None, [1] * len(tokens))
        return logits


def crossing(proposal: str, q: ProbabilityTable = Q, target: str = "target") -> DraftModel:
    """A draft model of four tokens bound to a target of three."""
    drafter = DraftModel("a table", siblings={"deterministic": "top-k"}.get(proposal, proposal))
    drafter._target = TableDraft(q)
    words = Vocabularies(Words(letters("target")), Words(letters("draft")), 3, 4)
    drafter.foreign = Foreign(words, 3, torch.device("cpu"), torch.device("cpu"))
    return drafter


def law(rule: str, proposal: str, shape: str, count: int = 3, *, drafter: DraftModel | None = None, verify=None) -> float:
    """How far the law of ``count`` tokens is from the target's."""
    verification_rule = create(rule)
    if verify is not None:
        verification_rule.verify = verify(verification_rule.verify)

    def session(randomness):
        own = drafter or crossing(proposal)
        return Session(TableTarget(P), own, verification_rule, proposal=proposal, planner=FixedPlanner(shape), randomness=randomness)

    return distance(continuation_law(session, START, count), plain_law(P, START, count))


CASES = [
    ("rejection", "iid", "chain(2)", 4),
    ("block", "iid", "chain(2)", 4),
    ("match", "keyed", "chain(2)", 4),
    ("match", "deterministic", "chain(2)", 4),
    ("match", "keyed", "product(2,1)", 4),
    ("match", "keyed", "dynamic(depth=2,k=2,total=3)", 4),
    ("multi-candidate", "iid", "product(2)", 3),
    ("multi-candidate", "without-replacement", "product(2,1)", 3),
    ("k-seq", "iid", "product(2)", 3),
    ("traversal", "iid", "product(2)", 3),
    ("traversal", "without-replacement", "product(2,1)", 3),
]


@pytest.mark.parametrize(("rule", "proposal", "shape", "count"), CASES)
def test_every_rule_keeps_the_targets_law(rule, proposal, shape, count):
    assert law(rule, proposal, shape, count) < 1e-9


def test_drafted_tokens_are_those_of_the_intersection_with_the_draft_renormalised():
    seen = []

    def watching(verify):
        def watched(tree, p, noise):
            if tree.q is not None:
                seen.append((tree.q[:, 0], tree.tokens))
            return verify(tree, p, noise)

        return watched

    law("multi-candidate", "iid", "product(2)", 3, verify=watching)
    q = Q([1, 1, 0])  # the draft reads a, a, b
    a, b = float(q[1] + q[2]), float(q[0])  # two tokens of the draft are the target's a
    assert max(int(tokens[:, 1:].max()) for _, tokens in seen) == 1
    first = torch.cat([q[tokens[:, 0] == 2] for q, tokens in seen])
    assert (first - torch.tensor([a, b, 0.0]) / (a + b)).abs().sum(1).min() < 1e-6


def test_a_q_that_is_not_renormalised_is_found(monkeypatch):
    distribution = Sampler.distribution

    def leaking(self, scores):
        q = distribution(self, scores)
        return q if bool((q > 0).all()) else 0.8 * q  # what is outside the intersection counts as drafted nowhere

    monkeypatch.setattr(Sampler, "distribution", leaking)
    with pytest.raises(DrafterError, match=r"q sums to 0\.8"):
        law("multi-candidate", "iid", "product(2)")


def test_target_mass_outside_the_intersection_that_is_lost_is_found():
    def losing(verify):
        def lossy(tree, p, noise):
            p = p.clone()
            p[..., 2] = 0
            return verify(tree, p / p.sum(-1, keepdim=True), noise)

        return lossy

    assert law("rejection", "iid", "chain(2)", verify=losing) > 0.1


def test_an_intersection_of_nothing_has_no_token_left():
    nothing = Intersection.of({}, 3, torch.device("cpu"))
    assert nothing.scattered(torch.randn(2, 4)).tolist() == [[float("-inf")] * 3] * 2
    assert nothing.mass(torch.randn(2, 4)) == 0
    for rule, proposal, shape in (("rejection", "iid", "chain(2)"), ("match", "keyed", "chain(2)"), ("traversal", "iid", "product(2)")):
        drafter = crossing(proposal)
        drafter.foreign.intersection = nothing
        assert law(rule, proposal, shape, 2, drafter=drafter) < 1e-9
        assert drafter.foreign.readings == {}


def test_several_tokens_of_one_meaning_add_up():
    logits = torch.randn(5, 6, dtype=torch.float64)
    found = Intersection.of({0: 2, 1: 0, 2: 2, 5: 2}, 4, torch.device("cpu")).scattered(logits).exp()
    q = logits.exp()
    expected = torch.stack([q[:, 1], torch.zeros(5), q[:, [0, 2, 5]].sum(1), torch.zeros(5)], 1)
    assert torch.allclose(found, expected)


# -- what the draft writes in other tokens than the target ------------------------------------------------------------------


def test_below_its_likeliest_token_the_draft_looks_ahead(monkeypatch):
    """q against a sum over the ways to write a token: the target has one for what the draft writes as a and b."""
    seen, taken = [], Spelling.after

    def after(self, path):
        logits = taken(self, path)
        if len(path) == 1:
            seen.extend((tuple(row.ids), each.softmax(-1)) for row, each, limit in zip(self._rows, logits, self._limits) if limit)
        return logits

    monkeypatch.setattr(Spelling, "after", after)
    law("rejection", "iid", "chain(1)", 4)
    looked = 0
    for text, q in seen:
        said = Q(list(text))
        likeliest = int(said.argmax())
        expected = torch.tensor([said[1] + said[2], said[0], 0.0], dtype=q.dtype)
        if likeliest in (1, 2) and said[likeliest] >= LIKELY:
            looked += 1
            both = said[likeliest] * Q([*text, likeliest])[0]
            expected += torch.tensor([-both, 0.0, both], dtype=q.dtype)
        assert torch.allclose(q, expected / expected.sum(), atol=1e-6), text
    assert 0 < looked < len(seen)


def test_every_token_of_a_chain_follows_what_the_draft_has_read(monkeypatch):
    """Of every row of a ragged batch: its cache, with tokens that it looked at in vain, against the model without one."""
    draft, fed, counts = model("unigram", 1), Spelling._feed, Counter()

    def watched(self, tokens):
        found = fed(self, tokens)
        for writer, token, logits in found:
            row = writer._reading
            whole = [*row.ids[: len(row.ids) - writer.back], *writer.fed, token]
            with torch.no_grad():
                assert torch.allclose(logits, draft(torch.tensor([whole])).logits[0, -1].log_softmax(-1), atol=1e-4)
            counts["looked" if writer.next is None else "read"] += 1
            counts["within a token"] += writer.back > 0
            counts["ahead of the text"] += bool(writer._here.said)
        return found

    monkeypatch.setattr(Spelling, "_feed", watched)
    monkeypatch.setattr("foredraft.drafters.spelling.LIKELY", 0.05)
    rows = [ids("byte-level", text) for text in (PROMPT, "import os, sys", PROMPT[:20])]
    for options in ({}, {"do_sample": True, "seed": [1, 2, 3]}):
        generate(speculator(shape="chain(4)"), rows, max_new_tokens=NEW, **options)
    assert all(counts[each] for each in ("looked", "read", "within a token", "ahead of the text")), counts


def test_a_draft_ahead_of_the_text_goes_on_with_what_it_has_written():
    """Whatever it says next, the target's tokens spell that first."""
    both = words("byte-level", "unigram")
    foreign = Foreign(both, len(tokenizer("byte-level")), torch.device("cpu"), torch.device("cpu"))
    reading = Reading(both, Row(ids("byte-level", "x = ")))
    scores = torch.randn(1, len(tokenizer("unigram")), generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    writer = Writer(foreign, reading, scores, math.inf)
    writer._here = Branch(b"width", scores[0])
    spelt = b""
    while writer._here is not None and writer._here.said:
        q = writer.offered()
        token = int(q.argmax())
        spelt += both.target.bytes[token]
        writer.take(token)
        if writer.next is not None:
            break
    assert spelt.startswith(b"width") and writer.fed == []
    assert spelt == b"width" if writer.next is None else len(spelt) > 5


def test_what_would_make_another_token_of_the_drafted_one_does_not_follow_it():
    words_of = Vocabularies(Words(letters("target")), Words(letters("draft")), 3, 4)
    branch = Branch(b"a", torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    branch.find(Foreign(words_of, 3, torch.device("cpu"), torch.device("cpu")))
    assert branch.only(0).exp().tolist() == pytest.approx([0.0, 0.5, 0.2 / 0.6, 0.1 / 0.6])  # with b it would be ab
    assert branch.only(2).exp().tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])


def test_parts_of_a_character_are_drafted_where_they_are_likeliest():
    """No text is found below the first of its bytes: they are drafted as without a look ahead."""
    both, smile = words("byte-level", "unigram"), "\U0001f642".encode()
    spelt = [tokenizer("unigram").convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in smile]
    foreign = Foreign(both, len(tokenizer("byte-level")), torch.device("cpu"), torch.device("cpu"))
    scores = torch.full((1, len(tokenizer("unigram"))), 0.3 / len(tokenizer("unigram")))
    scores[0, spelt[0]] = 0.7
    writer = Writer(foreign, Reading(both, Row(ids("byte-level", "x"))), scores.log(), math.inf)
    before = writer.offered()
    assert writer.looks() in (spelt[0], None)
    writer.look(spelt[0], scores[0].index_fill(0, torch.tensor(spelt[:1]), 0.0).index_fill(0, torch.tensor(spelt[1:2]), 0.7).log())
    first = both.target.single[smile[0]]
    assert int(writer.offered().argmax()) == first and float(writer.offered()[first].exp()) == pytest.approx(float(before[first].exp()))
    writer.take(first)
    assert writer.next == spelt[0] and writer.extra == 1


def test_what_is_left_after_a_look_ahead_stays_with_the_token_itself():
    both = Vocabularies(Words(letters("target")), Words(letters("draft")), 3, 4)
    foreign = Foreign(both, 3, torch.device("cpu"), torch.device("cpu"))
    writer = Writer(foreign, Reading(both, Row([0])), torch.tensor([[0.1, 0.6, 0.2, 0.1]]).log(), math.inf)
    writer.look(1, torch.tensor([0.5, 0.2, 0.1, 0.2]).log())
    assert writer.offered().exp().tolist() == pytest.approx([0.2 + 0.6 * 0.5, 0.1, 0.6 * 0.5])


@pytest.mark.parametrize("target", ["byte-level", "unigram", "prepended"])
def test_the_first_token_of_a_text_does_not_depend_on_its_place(target):
    """SentencePiece puts a space before a text, which is none of it."""
    if target == "prepended":
        made = Tokenizer.from_str(tokenizer("unigram").backend_tokenizer.to_str())
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.pre_tokenizer, made.post_processor = None, None
        of = PreTrainedTokenizerFast(tokenizer_object=made)
    else:
        of = tokenizer(target)
    found = Words(of)
    for text in ("return width", " return", "name,", "(index", "\n    return"):
        first = found.first(text.encode())
        assert first is not None and text.encode().startswith(found.bytes[first]), text
    spaced = [word for word in found.bytes.values() if len(word) > 2 and word[:1] == b" " and word[1:].isalpha()]
    own = [word for word in spaced if found.bytes[found.first(word)] == word]
    assert len(own) > 0.9 * len(spaced) > 3, "a space belongs to its word"
    assert found.first("\u00e9".encode()[:1]) is None


def test_a_token_that_the_draft_does_not_say_ends_its_chain():
    both = words("byte-level", "unigram")
    foreign = Foreign(both, len(tokenizer("byte-level")), torch.device("cpu"), torch.device("cpu"))
    scores = torch.full((1, len(tokenizer("unigram"))), -math.inf)
    scores[0, tokenizer("unigram").convert_tokens_to_ids(",")] = 0.0
    writer = Writer(foreign, Reading(both, Row(ids("byte-level", "x"))), scores, math.inf)
    assert writer.offered().isfinite().sum() == 1
    writer.take(ids("byte-level", ")")[0])  # a processor asked for it
    assert writer.next is None and writer.looks() is None and not writer.offered().isfinite().any()


# -- reading ---------------------------------------------------------------------------------------------------------------


@cache
def words(target: str, draft: str) -> Vocabularies:
    return Vocabularies(Words(tokenizer(target)), Words(tokenizer(draft)), len(tokenizer(target)), len(tokenizer(draft)))


def spelling(read: Reading, token: int) -> bytes:
    return read._words.draft.bytes.get(token, b"")


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(max_size=60) | st.text("ab\u00e9\u0301\u200d\U0001f469 \n", max_size=60),
    steps=st.lists(st.integers(1, 9)),
    long=st.booleans(),
)
@pytest.mark.parametrize("draft", ["byte-level", "unigram"])
def test_a_text_that_is_read_on_is_the_same_text(draft, text, steps, long):
    whole = ids("byte-level", (PROMPT * 2 if long else "") + text)
    read = Reading(words("byte-level", draft), Row([]))
    for step in [*steps, len(whole)]:
        read.follow(whole[: read.read + step])
    spelt = b"".join(spelling(read, each) for each in read.ids)
    expected = tokenizer("byte-level").decode(whole).encode()
    assert spelt.lstrip(b" ") == expected.lstrip(b" ")  # SentencePiece begins a text with a space
    assert not read.behind


@settings(max_examples=40, deadline=None)
@given(bytes_given=st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_are_read(bytes_given):
    target = words("byte-level", "unigram").target
    read = Reading(words("byte-level", "unigram"), Row([]))
    text = [target.single[byte] for byte in bytes_given]
    for length in range(len(text) + 1):
        read.follow(text[:length])
    spelt = b"".join(spelling(read, each) for each in read.ids).removeprefix(b" ")
    given = bytes(bytes_given)
    assert spelt.decode(errors="replace").lstrip() == given.decode(errors="replace").lstrip()


def test_only_what_changes_is_read_again():
    whole = ids("byte-level", PROMPT * 4)
    read = Reading(words("byte-level", "unigram"), Row(whole[:20]))
    again = 0
    for length in range(21, len(whole) + 1):
        read.drafted([])
        before = len(read.ids)
        again += before - read.follow(whole[:length])
    assert again < 3 * len(whole)


def test_special_tokens_are_read_by_what_they_say():
    end, turn = tokenizer("byte-level").convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    middle = ids("byte-level", "area")
    read = Reading(words("byte-level", "unigram"), Row([end, *middle, turn, *middle, end]))
    names = tokenizer("unigram").convert_ids_to_tokens(read.ids)
    assert names[0] == "<s>" and names.count("<s>") == 1, "the draft's own beginning stands for the target's"
    assert names[-1] == "</s>" and names.count("<|im_end|>") == 1
    shared = words("byte-level", "unigram").target_of
    theirs = tokenizer("unigram").convert_tokens_to_ids
    assert shared[theirs("</s>")] == end and shared[theirs("<|im_end|>")] == turn
    assert theirs("<unk>") not in shared


def test_nothing_is_drafted_where_the_draft_cannot_say_what_the_text_ends_in():
    """WordPiece knows no bytes, so after half a character this drafter waits."""
    read = Reading(words("byte-level", "wordpiece"), Row(ids("byte-level", "area \u00fc \U0001f642")[:-1]))
    assert read.behind and read.unfinished == "\U0001f642".encode()[:3]
    read.follow([*ids("byte-level", "area \u00fc \U0001f642"), *ids("byte-level", " area")])
    assert not read.behind


def test_a_processor_that_leaves_nothing_of_the_intersection_ends_the_draft():
    turn = tokenizer("byte-level").convert_tokens_to_ids("<|im_end|>")
    assert turn not in words("byte-level", "wordpiece").target_of.values()
    prompt = ids("byte-level")

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return [turn] if len(text) % 2 else list(range(2, len(tokenizer("byte-level"))))

    options = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": NEW}
    for sampled in ({}, {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 4}):
        plain = Speculator(model("byte-level"), "none", execution="eager")
        expected = plain.generate(torch.tensor([prompt]), **options, **sampled).sequences
        for shape in ("chain(4)", "product(2,1)"):
            made = speculator(draft="wordpiece", shape=shape)
            out = made.generate(torch.tensor([prompt]), **options, **sampled)
            assert out.sequences.tolist() == expected.tolist()
            assert 0 < out.stats.drafted <= 2 * out.stats.row_passes


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)"])
def test_seeded_rows_of_a_ragged_batch_are_those_of_plain_decoding(shape):
    rows = [ids("byte-level", text) for text in (PROMPT, "import os", "caf\u00e9 \U0001f642")]
    options = {"max_new_tokens": NEW, "do_sample": True, "seed": [1, 2, 3], "temperature": 0.8}
    plain = generate(Speculator(model("byte-level"), "none", execution="eager"), rows, **options)
    assert generate(speculator(shape=shape, rule="match"), rows, **options) == plain


def test_the_users_tokenizers_and_model_stay_as_they_are():
    own = tokenizer("unigram")
    own.backend_tokenizer.enable_truncation(4)
    try:
        before = own.backend_tokenizer.to_str(), {name: each.clone() for name, each in model("unigram", 1).state_dict().items()}
        made = speculator()
        prompt = ids("byte-level")
        made.generate(torch.tensor([prompt]), max_new_tokens=8)
        made.close()
        assert own.backend_tokenizer.to_str() == before[0]
        assert all(torch.equal(each, before[1][name]) for name, each in model("unigram", 1).state_dict().items())
    finally:
        own.backend_tokenizer.no_truncation()


# -- by text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), BY_TEXT)
def test_greedy_text_drafted_by_text_is_that_of_transformers(target, draft):
    made = speculator(target, draft, vocabulary="text", shape="chain(4)")
    for seed_text in (PROMPT, "\u00fc \U0001f642 caf\u00e9"):
        prompt = ids(target, seed_text)
        out = made.generate(torch.tensor([prompt]), max_new_tokens=NEW)
        assert out.sequences[0, len(prompt) :].tolist() == plain_text(target, seed_text)
    assert made.rule.name == "match" and made.proposal == "deterministic"


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_a_draft_that_is_the_target_is_accepted(vocabulary):
    """It reads and writes its own tokens as if they were another tokenizer's."""
    drafter = DraftModel("zoo:python-1m", vocabulary=vocabulary, execution="eager")
    made = Speculator("zoo:python-1m", drafter, execution="eager", shape="chain(6)")
    prompt = torch.tensor([made.tokenizer("def area(width, height):\n    return")["input_ids"]])
    out = made.generate(prompt, max_new_tokens=2 * NEW)
    assert out.stats.accepted > 0.8 * out.stats.drafted > 2 * out.stats.row_passes


@pytest.mark.parametrize("target", ["byte-level", "unigram"])
@settings(max_examples=40, deadline=None)
@given(
    text=st.text("ab \n(.1\u00e9\u0301\u200d\U0001f469", max_size=25)
    | st.sampled_from(TEXTS).map(lambda each: each[:40])
    | st.text(max_size=12),
    cut=st.integers(0, 40),
)
def test_what_is_proposed_stands_whatever_follows(target, text, cut):
    """For every beginning of a text: the tokens that are proposed are those that begin the whole text's."""
    both = words(target, "byte-level")
    whole = both.target.encode_after("x\n", text) or []
    settled = both.target.settled("x\n", text[:cut])
    assert settled is None or whole[: len(settled)] == settled


def test_an_unfinished_piece_is_held_back_and_would_be_found(monkeypatch):
    both = words("byte-level", "unigram")
    reading = Reading(both, Row(ids("byte-level", "def ")))
    spelt = tokenizer("unigram").convert_tokens_to_ids

    def proposed(letters: str, *more: str) -> list[str]:
        written = [spelt("\u2581" if each == " " else each) for each in letters] + [spelt(each) for each in more]
        return tokenizer("byte-level").convert_ids_to_tokens(both.continued(reading, written))

    whole = tokenizer("byte-level").convert_ids_to_tokens(ids("byte-level", "name"))
    assert len(whole) == 1, "one token of the target"
    assert proposed("nam") == []
    assert proposed("name") == []  # names, name(
    assert proposed("name,") == [*whole, ","]  # no token begins with a comma and goes on
    assert proposed("nam", "</s>")[-1] == "<|endoftext|>" and len(proposed("nam", "</s>")) > 1, "an end finishes the last piece"
    assert proposed("name,", "<0xC3>") == [*whole, ","], "half a character is no text"
    monkeypatch.setattr(Words, "settled", Words.encode_after)
    assert proposed("nam") != []


def test_half_a_character_goes_on_in_bytes():
    both = words("byte-level", "unigram")
    smile = ids("byte-level", "\U0001f642")
    reading = Reading(both, Row([*ids("byte-level", "area"), *smile[:-2]]))
    spelt = tokenizer("unigram").convert_tokens_to_ids
    assert both.continued(reading, [spelt(each) for each in ("<0x99>", "<0x82>", "a", "(", ")", "\n", "x")])[:2] == smile[-2:]
    assert both.continued(reading, [spelt("</s>")]) == [], "a text does not end in half a character"


def test_nothing_is_proposed_behind_half_a_character_that_the_target_writes_whole():
    both, spelt = words("byte-level", "unigram"), tokenizer("unigram").convert_tokens_to_ids
    whole = "\u00e9".encode()
    assert whole in both.target.bytes.values()
    reading = Reading(both, Row([*ids("byte-level", "caf"), both.target.single[whole[0]]]))
    assert both.continued(reading, [spelt(each) for each in (f"<0x{whole[1]:X}>", "a", "(", ")", "\n", "x")]) == []


def test_a_text_that_ends_inside_a_piece_of_the_drafts_goes_on_with_that_piece():
    """Such as with "n" where it has a piece "na": whether it reads "n" or writes "na" is up to its probabilities."""
    both, spelt = words("byte-level", "unigram"), tokenizer("unigram").convert_tokens_to_ids
    foreign = Foreign(both, len(tokenizer("byte-level")), torch.device("cpu"), torch.device("cpu"), "text")
    for letter in "abcdefghijklmnopqrstuvwxyz":
        text = ids("byte-level", "1, " + letter)
        foreign.readings[0] = reading = Reading(both, Row(text))
        first, last = both.longer(letter.encode())
        longer = [number for number in both.sorted[first:last] if both.draft.bytes[number].isalpha()]
        if longer and spelling(reading, reading.ids[-1]) == letter.encode():
            break
    whole = longer[0]
    again = spelling(reading, whole)[len(spelling(reading, reading.ids[-1])) :].decode()
    for likely, expected in ((5.0, (whole, 1)), (-5.0, (spelt(","), 0))):
        logits = torch.zeros(len(reading.ids), len(tokenizer("unigram")))
        logits[-2, whole], logits[-2, reading.ids[-1]], logits[-1, spelt(",")] = likely, 0.0, 1.0
        logits[-3, reading.ids[-2]] = 30.0  # what is read before it stands
        assert foreign.first(reading, logits) == expected
    (continued,) = foreign.written([reading], [[whole, spelt(","), spelt(",")]], [1])
    assert tokenizer("byte-level").decode(continued).startswith(again + ","), "what is there already is not proposed again"
    before = len(reading.ids)
    assert reading.follow([*text, *ids("byte-level", ", 2")]) == before - 1, "the cache has another token in its place"


@pytest.mark.parametrize(
    ("after_x", "after_a", "expected"),  # the draft reads x a b; behind these it writes x with probability 0.6
    [
        ({"a": 0.5, "abc": 0.1}, {"b": 0.5, "bq": 0.1}, ("x", 0)),  # bq for b: 0.1 / 0.5; abc for a b: 0.1 / (0.5 * 0.5)
        ({"a": 0.5, "abc": 0.2}, {"b": 0.5, "bq": 0.1}, ("abc", 2)),  # 0.2; 0.8
        ({"a": 0.5, "abc": 0.1}, {"b": 0.4, "bq": 0.3}, ("bq", 1)),  # 0.75; 0.5
        ({"a": 0.5, "abc": 0.16}, {"b": 0.4, "bq": 0.3}, ("abc", 2)),  # 0.75; 0.8
        ({"a": 0.5, "abc": 0.1}, {"b": 0.3, "bq": 0.4}, ("bq", 1)),  # 1.33; 0.67
        ({"a": 0.5, "abc": 0.3}, {"b": 0.4, "bq": 0.45}, ("abc", 2)),  # 1.125; 1.5
    ],
)
def test_of_all_pieces_that_the_text_may_end_in_the_likeliest_is_written(after_x, after_a, expected):
    pieces = ["x", "a", "b", "bq", "abc"]
    unigram = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], None, True))
    unigram.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    both = Vocabularies(Words(letters("target")), Words(PreTrainedTokenizerFast(tokenizer_object=unigram)), 3, len(pieces))
    foreign = Foreign(both, 3, torch.device("cpu"), torch.device("cpu"), "text")
    foreign.readings[0] = reading = Reading(both, Row([]))
    reading.ids += [0, 1, 2]
    scores = torch.tensor([[said.get(piece, 1e-9) for piece in pieces] for said in (after_x, after_a, {"x": 0.6, "a": 0.4})])
    scores = torch.cat([scores, 1 - scores.sum(1, keepdim=True).clamp(max=1)], 1)  # and something else
    token, back = foreign.first(reading, scores.log())
    assert (pieces[token], back) == expected
    covered, begun, said = foreign.covering(reading, scores.log())
    below_b, below_a = after_a.get("bq", 0.0) / after_a["b"], after_x["abc"] / (after_x["a"] * after_a["b"])
    whole = max((1.0, 0, ""), (below_b, 1, "bq"), (below_a, 2, "abc"))
    assert (covered, begun) == (whole[1], whole[1]), "against all that may follow what is read"
    assert not covered or said.exp().tolist() == pytest.approx([float(piece == whole[2]) for piece in (*pieces, "")])


def test_what_is_written_is_what_the_draft_says_after_what_it_reads(monkeypatch):
    """Of every row of a ragged batch, also where a whole piece stands in the place of its beginning."""
    monkeypatch.setattr("foredraft.drafters.draft_model.FEW", 999)
    written, draft, found = Foreign.written, model("unigram", 1), []

    def watched(self, rows, texts, backs):
        for row, text, back in zip(rows, texts, backs):
            whole = self.readings[row.slot].ids
            read = whole[: len(whole) - back]
            with torch.no_grad():
                scores, below = (draft(torch.tensor([each])).logits[0] for each in (whole, [*read, *text[:-1]]))
            assert (text[0], back) in (self.first(row, scores[-1 - BACK :]), self.first(row, scores))
            assert text[1:] == below[len(read) :].argmax(-1).tolist()
            found.append(back)
        return written(self, rows, texts, backs)

    monkeypatch.setattr(Foreign, "written", watched)
    rows = [ids("byte-level", text) for text in (PROMPT, "import os, sys", PROMPT[:20])]
    generate(speculator(vocabulary="text", shape="chain(2)"), rows, max_new_tokens=NEW)
    assert sum(map(bool, found)) > 5


def test_auto_goes_by_the_mass_on_what_is_shared(caplog):
    same = speculator("byte-level", "byte-level", vocabulary="auto")
    assert same.drafter.foreign is None
    for target, draft in (("byte-level", "unigram"), ("byte-level", "wordpiece")):
        caplog.clear()
        made = speculator(target, draft, vocabulary="auto")
        mass = made.drafter.foreign.mass
        assert made.drafter.foreign.by == ("intersection" if mass >= 0.75 else "text")
        assert f"which have {mass:.0%} of its probability" in caplog.text
        assert f"{made.drafter.foreign.by} (" in repr(made)
        assert made.shape.is_chain or made.drafter.foreign.by == "intersection"
    assert made.drafter.foreign.by == "text" and made.rule.name == "match"


def test_audits_do_not_ask_the_draft_for_tokens_of_the_target():
    """It may not have so many."""
    assert draft_of(speculator("byte-level", "byte-level", vocabulary="auto", shape="chain(2)")) is model("byte-level", 1)
    assert draft_of(speculator(shape="chain(2)")) is None


def test_bad_choices_are_refused():
    with pytest.raises(ConfigurationError, match="unknown vocabulary 'txt', did you mean 'text'"):
        speculator(vocabulary="txt")
    with pytest.raises(ConfigurationError, match=r"chain\(2\).*vocabulary='intersection'"):
        speculator(vocabulary="text", shape="product(2,1)")
    with pytest.raises(ConfigurationError, match="rejection"):
        speculator(vocabulary="text", rule="rejection", shape="chain(2)")
    with pytest.raises(ConfigurationError, match="siblings 'iid'"):
        DraftModel(model("unigram"), siblings="iid", vocabulary="text")
    alien = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"\u4e00": 0, "\u4e8c": 1}, unk_token="\u4e00")))
    drafter = DraftModel(model("unigram"), tokenizer=alien, vocabulary="intersection")
    with pytest.raises(ConfigurationError, match=r"shares no token.*vocabulary='text'"):
        Speculator(model("byte-level"), drafter, tokenizer=tokenizer("byte-level"), execution="eager")


@pytest.mark.parametrize(("missing", "how"), [("target", r"Speculator\(\.\.\., tokenizer="), ("draft", "drafter_options={'tokenizer'")])
def test_a_tokenizer_that_is_missing_is_named_with_how_to_pass_it(missing, how):
    given = {each: None if each == missing else tokenizer(kind) for each, kind in (("target", "byte-level"), ("draft", "unigram"))}
    drafter = DraftModel(model("unigram", 1), tokenizer=given["draft"], vocabulary="intersection", execution="eager")
    with pytest.raises(ConfigurationError, match=how):
        Speculator(model("byte-level"), drafter, tokenizer=given["target"], execution="eager")


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_rows_join_and_leave_and_share_beginnings(vocabulary):
    made = speculator(vocabulary=vocabulary, shape="chain(3)")
    prompts = [ids("byte-level", text) for text in (PROMPT, PROMPT + " caf\u00e9 \U0001f642", "import os", PROMPT)]
    counts = [9, 24, 5, 15]
    for _ in range(2):  # the second time beginnings are copied from rows that are over
        session, texts = made.session(), {}
        waiting = list(zip(prompts, counts))
        while session.live or waiting:
            if waiting:
                prompt, count = waiting.pop(0)
                texts[session.add(prompt, RowParameters(max_new_tokens=count))] = prompt, count, []
            for commit in session.step():
                texts[commit.slot][2].extend(commit.tokens)
        for prompt, count, found in texts.values():
            assert found == alone(model("byte-level"), prompt, max_new_tokens=count, eos_token_id=None)
        assert made.drafter.foreign.readings == {}


def test_it_takes_part_among_several():
    made = Speculator(
        model("byte-level"),
        Several(["prompt-lookup", DraftModel(model("unigram", 1), tokenizer=tokenizer("unigram"), execution="eager")]),
        tokenizer=tokenizer("byte-level"),
        execution="eager",
        shape="chain(3)",
    )
    prompt = ids("byte-level")
    out = made.generate(torch.tensor([prompt]), max_new_tokens=NEW)
    assert out.sequences[0, len(prompt) :].tolist() == alone(model("byte-level"), prompt, max_new_tokens=NEW)
