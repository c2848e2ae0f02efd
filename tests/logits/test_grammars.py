"""The grammars of llguidance, xgrammar and outlines-core in trees, batches and sessions: exact, and one mask per path."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from grammar_cases import CONFIGURATIONS, LIST, NEW, STRINGS, DropsForbidden, constrained, speculator
from helpers import LENGTHS, alone, generate, prompts, tiny
from laws import law_of
from tokenizers import Tokenizer, decoders, models
from transformers import LogitsProcessor, PreTrainedTokenizerFast

import foredraft
from foredraft import ConfigurationError, Grammar, RowParameters, Speculator, grammars
from foredraft.logits import grammar_masks
from foredraft.logits.grammar_masks import Walk
from foredraft.logits.processors import Pipeline
from foredraft.testing import ProbabilityTable, ScriptedDrafter, continuations, distance, plain_law

EOS, END = 1, 2


def library(name):
    """The backend ``name``, or the test is skipped by the name of what is missing."""
    pytest.importorskip(grammars.MODULES[name])
    return name


@pytest.fixture(params=grammars.MODULES)
def backend(request):
    return library(request.param)


def pairs(*cases):
    """Each case with one of the libraries in turn; with the others in nightly runs."""
    for number, case in enumerate(cases):
        for index, name in enumerate(grammars.MODULES):
            marks = () if number % len(grammars.MODULES) == index else pytest.mark.nightly
            case_values = case if isinstance(case, tuple) else (case,)
            yield pytest.param(*case_values, name, marks=marks)


def byte_level(strings, special=("<pad>", "<eos>", "<end>")):
    """A tokenizer of ASCII ``strings`` after its special tokens."""
    core = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate([*special, *strings])}, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


TOKENIZER = byte_level(STRINGS)  # of fewer tokens than the tiny models have


def run(speculator, rows, backend, **options):
    given = {"regex": LIST, "grammar_backend": backend, "tokenizer": TOKENIZER, "max_new_tokens": NEW, "eos_token_id": EOS}
    return generate(speculator, rows, **{**given, **options})


def text_of(tokens):
    assert tokens[-1] in (EOS, END)
    return TOKENIZER.decode(tokens[:-1])


@pytest.fixture(scope="module")
def rows():
    """Prompts of tokens the grammar knows, so that copying from them breaks it."""
    return prompts(LENGTHS, vocabulary=len(TOKENIZER))


# --- against the libraries themselves


class Replays(LogitsProcessor):
    """llguidance and outlines-core by their own interfaces: a new matcher for every history."""

    def __init__(self, backend, prompt_length):
        self.backend, self.prompt_length = backend, prompt_length
        if backend == "llguidance":
            import llguidance.hf

            vocabulary = llguidance.hf.from_tokenizer(TOKENIZER, eos_token=EOS)
            self.start = lambda: llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_regex(LIST))
        else:
            from outlines_core import Index, Vocabulary

            self.index = Index(LIST, Vocabulary(EOS, {text: [number] for number, text in enumerate(STRINGS, 3)}))

    def allowed(self, text):
        if self.backend == "outlines":
            state = self.index.get_initial_state()
            for token in text:
                state = self.index.get_next_state(state, token)
            return self.index.get_allowed_tokens(state)
        matcher = self.start()
        assert matcher.consume_tokens(text)
        return [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]

    def __call__(self, input_ids, scores):
        masked = torch.full_like(scores, -torch.inf)
        for line, given, history in zip(masked, scores, input_ids.tolist()):
            allowed = torch.tensor(self.allowed(history[self.prompt_length :]))
            line[allowed] = given[allowed]
        return masked


def own_processor(backend, prompt_length):
    """What the library offers for transformers' own ``generate``, or the least that uses its interface."""
    if backend != "xgrammar":
        return Replays(backend, prompt_length)
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor as Own

    return Own(xgrammar.GrammarCompiler(grammars.xgrammar_vocabulary(TOKENIZER, 128, (EOS,))).compile_regex(LIST))


@pytest.mark.parametrize(("name", "backend"), pairs(*CONFIGURATIONS))
def test_greedy_as_transformers_with_the_librarys_own_processor(name, backend, rows):
    library(backend)
    wanted = [alone(tiny(), row, max_new_tokens=NEW, eos_token_id=EOS, logits_processor=[own_processor(backend, len(row))]) for row in rows]
    assert run(speculator(name), rows, backend) == wanted
    for tokens in wanted:
        assert 4 <= len(json.loads(text_of(tokens))) <= 6


@pytest.mark.parametrize(("name", "backend"), pairs("top-k", "grown", "lookup", "keyed"))
def test_the_same_seed_the_same_text(name, backend, rows):
    library(backend)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 11}
    wanted = run(Speculator(tiny(), "none"), rows, backend, **options)
    assert run(speculator(name, rule="match"), rows, backend, **options) == wanted
    assert len({text_of(tokens) for tokens in wanted}) == len(rows)


RULES = [("chain", "rejection"), ("chain", "block"), ("without-replacement", "multi-candidate"), ("without-replacement", "traversal")]


@pytest.mark.parametrize(("name", "rule", "backend"), pairs(*RULES))
def test_every_sampled_text_matches(name, rule, backend, rows):
    library(backend)
    decoder = speculator(name, rule=rule)
    for seed in range(2):
        for tokens in run(decoder, rows, backend, do_sample=True, temperature=1.2, top_k=0, seed=seed):
            assert re.fullmatch(LIST, text_of(tokens))


def tokens_of(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def masks_of(compiled, text):
    matcher, masks = compiled.start(), np.zeros((1, compiled.words), np.int32)
    assert all(compiled.accept(matcher, token) for token in text)
    compiled.fill([matcher], masks)
    return tokens_of(masks[0])


def test_when_the_text_is_complete_only_its_ends_are_allowed(backend):
    compiled = Grammar(TOKENIZER, regex="1[0-9]?", backend=backend, eos=[EOS, END]).compiled
    one, two = TOKENIZER.convert_tokens_to_ids(["1", "12"])
    assert {EOS, END} < masks_of(compiled, [one])
    assert masks_of(compiled, [two]) == tokens_of(compiled.end_mask) == {EOS, END}


def test_a_model_with_several_ends_takes_any_of_them(backend, rows):
    """Under flat distributions every end comes up."""
    options = {"do_sample": True, "temperature": 50.0, "top_k": 0, "eos_token_id": [EOS, END]}
    ends = [tokens[-1] for seed in range(3) for tokens in run(speculator("top-k"), rows, backend, seed=seed, **options)]
    assert set(ends) == {EOS, END}


# --- sessions


def test_rows_join_and_leave_with_grammars_of_their_own(rows):
    """Rows of several libraries and patterns, and one without; a row leaves in the middle. Each has the text that it has alone."""
    patterns = {"llguidance": LIST, "xgrammar": r"\[[0-9]{8,12}\]", "outlines": r"(1|23){6,9}"}
    installed = [name for name in patterns if grammars.find_spec(grammars.MODULES[name])]
    if not installed:
        library("llguidance")
    ours = [Grammar(TOKENIZER, regex=patterns[name], backend=name) for name in installed]

    def parameters(prompt, own):
        pipeline = Pipeline.alone([own], prompt_length=len(prompt)) if own else Pipeline()
        return RowParameters(NEW, do_sample=True, pipeline=pipeline, seed=(3, len(prompt)), eos=frozenset({EOS}))

    jobs = [(row, own) for row, own in product(rows, [*ours, None])]
    decoder = speculator("keyed", rule="match")
    wanted = [continuations(decoder.session(), [row], [parameters(row, own)])[0] for row, own in jobs]
    shared = {}
    session, texts = decoder.session(), {}
    for turn, (row, own) in enumerate(jobs):  # a row joins in every turn; the same parameters serve several
        slot = session.add(row, shared.setdefault((len(row), id(own)), parameters(row, own)))
        texts[slot] = []
        if turn == 4:
            session.remove(1)
        for commit in session.step():
            texts[commit.slot] += commit.tokens
    while session.live:
        for commit in session.step():
            texts[commit.slot] += commit.tokens
    for slot, (text, alone_) in enumerate(zip(texts.values(), wanted)):
        assert tuple(text) == (alone_[: len(text)] if slot == 1 else alone_)
        own = jobs[slot][1]
        if own is not None and slot != 1:
            assert re.fullmatch(patterns[own.backend], text_of(text))


def test_rows_may_share_their_parameters(backend, rows):
    """The state belongs to the row: two samples of one prompt go different ways."""
    decoder = speculator("keyed", rule="match")
    pipeline = Pipeline.alone([Grammar(TOKENIZER, regex=LIST, backend=backend)], prompt_length=len(rows[0]))
    shared = RowParameters(NEW, do_sample=True, pipeline=pipeline, eos=frozenset({EOS}))
    both = [replace(shared, seed=(7, number)) for number in range(3)]
    texts = continuations(decoder.session(), [rows[0]] * 3, both)
    assert texts == [continuations(decoder.session(), [rows[0]], [each])[0] for each in both]
    assert len(set(texts)) > 1 and all(re.fullmatch(LIST, text_of(text)) for text in texts)


def test_rows_of_one_library_may_end_with_tokens_of_their_own():
    walks = [Walk.begin(Grammar(TOKENIZER, regex="1", backend=library("outlines"), eos=end), 0) for end in (EOS, END)]
    done = tuple(TOKENIZER.convert_tokens_to_ids(["1"]))
    grammar_masks.fill([(walk, [done]) for walk in walks])
    assert [tokens_of(walk.masks[done]) for walk in walks] == [{EOS}, {END}]


# --- one mask per path


def test_a_mask_is_computed_once_per_path(backend, rows, monkeypatch):
    """Though the draft model asks for it before it goes on, and the target again; and the rows' masks are filled together."""
    texts, asked, together = {}, [], []
    follow, fill = Walk.follow, grammar_masks.fill

    def followed(walk, tokens):
        texts[walk] = (*texts.get(walk, ()), *tokens)
        follow(walk, tokens)

    def filled(missing):
        asked.extend((id(walk), *texts[walk], *path) for walk, paths in missing for path in paths)
        together.append(sum(bool(paths) for _, paths in missing))
        fill(missing)

    monkeypatch.setattr(Walk, "follow", followed)
    monkeypatch.setattr(grammar_masks, "fill", filled)
    run(speculator("grown", rule="match"), rows, backend, do_sample=True, temperature=1.2, top_k=0, seed=5)
    assert len(asked) == len(set(asked)) > 3 * NEW
    assert max(together) == len(rows)


# --- the law

SPELLED = byte_level(["a", "b", "ab"], ("<eos>",))
PATTERN = "(a|bb)(ab|b){1,2}a?"
MATCHES = {"".join(parts) for parts in product(["a", "bb"], ["ab", "b", "abab", "abb", "bab", "bb"], ["", "a"])}


def may_follow(history, token):
    """From the list of all texts that match; the first token is the prompt."""
    text = "".join(["", "a", "b", "ab"][each] for each in history[1:])
    if token == 0 or 0 in history[1:]:
        return token == 0 and text in MATCHES
    return any(match.startswith(text + ["", "a", "b", "ab"][token]) for match in MATCHES)


TARGET, DRAFT = ProbabilityTable.random(4, seed=1), ProbabilityTable.random(4, seed=3)
LAWS = [
    ("rejection", "iid", "chain(2)"),
    ("block", "iid", "chain(2)"),
    ("traversal", "iid", "product(2,1)"),
    ("multi-candidate", "without-replacement", "product(2,1)"),
]


def error(drafter, backend, rule, shape):
    pipeline = Pipeline.alone([Grammar(SPELLED, regex=PATTERN, backend=backend)], prompt_length=1)
    law = law_of(TARGET, drafter, rule, shape, prompt=[1], pipeline=pipeline)
    return distance(law, plain_law(constrained(TARGET, may_follow), [1], 3))


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])  # outlines-core leaves out some tokens of some patterns
@pytest.mark.parametrize(("rule", "proposal", "shape"), LAWS)
def test_the_law_under_a_grammar(rule, proposal, shape, name):
    assert error(ScriptedDrafter(DRAFT, proposal=proposal), library(name), rule, shape) < 1e-9


@pytest.mark.parametrize(("rule", "proposal", "shape"), LAWS)
def test_dropping_forbidden_draws_is_found(rule, proposal, shape):
    assert error(DropsForbidden(DRAFT, may_follow, proposal=proposal), library("llguidance"), rule, shape) > 0.01


def test_a_matcher_that_does_not_go_back_is_found(backend, rows, monkeypatch):
    monkeypatch.setattr(grammars.COMPILERS[backend], "rollback", lambda self, matcher, count: None)
    with pytest.raises((AssertionError, ConfigurationError)):
        test_the_same_seed_the_same_text("top-k", backend, rows)


# --- vocabularies and sources

FALLBACK = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
FALLBACK.update({text: 258 + number for number, text in enumerate(["▁a", "a", "▁", "é", "▁caf", "c", "af", "日"])})


def sentencepiece():
    core = Tokenizer(models.BPE(vocab=FALLBACK, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def test_tokens_that_are_bytes(backend):
    """é and 日 can be spelled by their bytes, and a token may begin with a space."""
    tokenizer = sentencepiece()
    compiled = Grammar(tokenizer, regex=" ?caf(é|日)", backend=backend).compiled
    byte = {value: FALLBACK[f"<0x{value:02X}>"] for value in range(256)}
    assert masks_of(compiled, []) == {FALLBACK[text] for text in ("▁", "▁caf", "c")} | {byte[ord(" ")], byte[ord("c")]}
    cafe = masks_of(compiled, [FALLBACK["▁caf"]])
    assert cafe == {FALLBACK["é"], FALLBACK["日"], byte[0xC3], byte[0xE6]}
    assert masks_of(compiled, [FALLBACK["▁caf"], byte[0xE6]]) == {byte[0x97]}
    assert masks_of(compiled, [FALLBACK["c"], FALLBACK["af"], byte[0xC3], byte[0xA9]]) == {1}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


class Model:
    """As a class of pydantic."""

    @staticmethod
    def model_json_schema():
        return SCHEMA


@pytest.fixture(scope="module")
def zoo_speculator():
    return Speculator("zoo:python-8m", shape="chain(4)", dtype="float32", execution="eager")


def answers(speculator, **options):
    """Texts after two prompts; the tokenizer is found under the model's name."""
    tokenizer = foredraft.zoo.load_tokenizer("python-8m")
    inputs = tokenizer(
        ['a = {"name": "x", "tags": ["x"]}\nb = ', 'loads(\'{"name": "y", "tags": []}\')\nloads(\''], return_tensors="pt", padding=True
    )
    output = speculator.generate(**inputs, max_new_tokens=80, **options)
    return tokenizer.batch_decode(output.sequences[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA), Model], ids=["dictionary", "text", "class"])
def test_json_schema(zoo_speculator, backend, schema):
    for text in answers(zoo_speculator, json_schema=schema, grammar_backend=backend):
        found = json.loads(text)
        assert list(found) == ["name", "tags"] and len(found["name"]) <= 12 and set(found["tags"]) <= {"x", "y"}


LARK = 'start: NUMBER "+" NUMBER "+" NUMBER ("+" NUMBER)?\nNUMBER: /[0-9]{1,3}/'
EBNF = 'root ::= num ("+" num){2,3}\nnum ::= [0-9]{1,3}'


@pytest.mark.parametrize("source", [LARK, EBNF], ids=["lark", "ebnf"])
@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_grammar(zoo_speculator, name, source):
    for text in answers(zoo_speculator, grammar=source, grammar_backend=library(name), do_sample=True, temperature=1.5, seed=1):
        assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){2,3}", text)


# --- what cannot work


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"no grammar library is installed: pip install 'foredraft\[grammar\]'"):
        Grammar(TOKENIZER, regex="a")
    for name in grammars.MODULES:
        with pytest.raises(ConfigurationError, match=rf"{grammars.MODULES[name]} is not installed: pip install 'foredraft\[{name}\]'"):
            Grammar(TOKENIZER, regex="a", backend=name)


def test_the_first_installed_library_is_the_default(monkeypatch):
    monkeypatch.setattr(grammars, "find_spec", lambda name: name != "llguidance" or None)
    assert grammars.choose_backend() == "xgrammar"
    monkeypatch.setattr(grammars, "find_spec", lambda name: name == "outlines_core" or None)
    assert grammars.choose_backend() == "outlines"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of json_schema, regex and grammar, got none"),
        ({"regex": "a", "grammar": "start: a"}, "got regex and grammar"),
        ({"regex": "[0-9"}, "cannot use this regex: "),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": {"type": "banana"}}, "cannot use this json_schema: .*banana"),
        ({"regex": 3}, "regex must be text, got int"),
        ({"regex": "a", "backend": "guidance"}, "unknown grammar backend 'guidance', did you mean 'llguidance'"),
        ({"regex": "a", "eos": []}, "pass eos_token_id"),
    ],
)
def test_what_cannot_work_is_refused(options, message, backend):
    with pytest.raises(ConfigurationError, match=message):
        Grammar(TOKENIZER, **{"backend": backend, **options})


def test_outlines_has_no_grammars():
    with pytest.raises(ConfigurationError, match="use the backend llguidance or xgrammar"):
        Grammar(TOKENIZER, grammar="start: /a/", backend=library("outlines"))


def test_a_model_without_a_name_needs_its_tokenizer(rows):
    with pytest.raises(ConfigurationError, match=r"names no tokenizer; pass Speculator\(\.\.\., tokenizer=\.\.\.\)"):
        generate(Speculator(tiny(), "none"), rows, regex="a", max_new_tokens=4)


def test_a_processor_after_it_cannot_bring_forbidden_tokens_back(backend, rows):
    class Forces(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([3]), 0.0)

    own = Grammar(TOKENIZER, regex=LIST, backend=backend)
    with pytest.raises(ConfigurationError, match="token 3, which its grammar forbids"):
        generate(Speculator(tiny(), "none"), rows, logits_processor=[own, Forces()], max_new_tokens=4)


def test_a_library_that_gives_up_ends_the_text(backend, rows, monkeypatch):
    """No token is chosen without its mask, though each row is tried once more by itself."""

    def gives_up(self, matchers, masks):
        raise ValueError("too complex")

    monkeypatch.setattr(grammars.COMPILERS[backend], "fill", gives_up)
    with pytest.raises(ConfigurationError, match="gave up: too complex"):
        run(Speculator(tiny(), "none"), rows, backend, max_new_tokens=4)


def test_a_grammar_works_within_foredraft_alone(backend, rows):
    own = Grammar(TOKENIZER, regex=LIST, backend=backend)
    with pytest.raises(ConfigurationError, match="works within Foredraft alone"):
        alone(tiny(), rows[0], logits_processor=[own], max_new_tokens=2)
