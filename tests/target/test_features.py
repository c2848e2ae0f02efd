"""Hidden states that the target hands out are those of a plain forward pass over each path, in every execution."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch
from architectures import ARCHITECTURES, build_wide
from cover import by_turns, covered, nightly_but
from helpers import clone, generate, make_drafter, prompts, random_tree, repetitive, tiny
from tape import Tape

from foredraft import ConfigurationError, Speculator, TokenTree, UnsupportedModelError
from foredraft.backends import compilation, native, recorder
from foredraft.backends import packing as packing_module
from foredraft.backends.graphs import PATIENCE, TRIALS
from foredraft.backends.packing import HINTS
from foredraft.backends.products import NATIVE
from foredraft.drafters.base import Drafter
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.drafters.several import Several
from foredraft.models.features import LAST, taps_of
from foredraft.target import Target
from foredraft.testing import ProbabilityTable, TableTarget

pytestmark = pytest.mark.filterwarnings("ignore:.*longrope")

TOLERANCE = 5e-5  # of the largest number of a hidden state
LENGTHS = (30, 5, 14)  # of which the last two are prefilled together
SERVED = [name for name, entry in ARCHITECTURES.items() if entry.support != "refused"]
STREAMS = {"gemma3n_text"}  # whose layers hand several streams to each other: only what the LM head reads is one vector
LONGER = {"llama", "gemma3_text", "qwen3_next"}  # one of each sort decodes on after a row has joined
BY_HEAD = {"gemma2", "gemma3n_text", "vaultgemma"}  # whose logits are capped behind the LM head
REPLAYED = [(family, whole) for family in ("llama", "gemma3_text", "gpt2", "opt", "gemma2") for whole in (True, False)]
needs_kernels = pytest.mark.skipif(native.refusal(torch.float32) is not None, reason="no kernels here")


@cache
def model_of(family: str):
    """The tiny model of ``family``, or a wide one; nobody hooks it."""
    return build_wide(family)


@cache
def plain(family: str):
    """Another copy, for transformers' own hidden states, whose hooks stay."""
    return clone(model_of(family))


def every_feature(family: str) -> tuple[int, ...]:
    """All that there are, in no order."""
    last = plain(family).config.get_text_config().num_hidden_layers
    return (LAST,) if family in STREAMS else (LAST, *range(1, last), 0)


def states_of(family: str, ids, features) -> torch.Tensor:
    """``[len(ids), F * d]``, by a plain pass."""
    return _states_of(family, tuple(ids), tuple(features))


@lru_cache(2048)
@torch.inference_mode()
def _states_of(family: str, ids: tuple[int, ...], features: tuple[int, ...]) -> torch.Tensor:
    model, given = plain(family), torch.tensor([ids])
    if family in STREAMS:
        return model.base_model(input_ids=given, use_cache=False).last_hidden_state[0]
    states = model(input_ids=given, use_cache=False, output_hidden_states=True).hidden_states
    found = [states[number] for number in features]
    return torch.cat(found, -1)[0]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().max() <= tolerance * wanted.abs().max()


def assert_nodes(target, family, texts, tree, *, first: int = 0, tolerance: float = TOLERANCE) -> None:
    """What the target hands out at every real node of ``tree`` from ``first`` on is what its path says."""
    assert target.hidden.shape[:2] == (tree.rows, tree.nodes - first) and target.hidden.dtype == target.model.dtype
    valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
    for row, text in enumerate(texts):
        real = valid[row].nonzero().flatten().tolist()
        for leaf in set(real) - {int(tree.parents[row, node]) for node in real}:
            path = tree.path(row, leaf)
            wanted = states_of(family, text + tree.tokens[row, path].tolist(), target.features)[len(text) :]
            places = [place for place, node in enumerate(path) if node >= first]
            if places:  # the rest came in earlier passes
                assert_close(target.hidden[row, [path[place] - first for place in places]], wanted[places], tolerance)


def assert_head(target, family, logits) -> None:
    """What the LM head makes of the last hidden state are the logits."""
    if target.features[0] != LAST or family in BY_HEAD:
        return
    size = target.model.config.get_text_config().hidden_size
    assert_close(target.model.get_output_embeddings()(target.hidden[..., :size]), logits, 1e-4)


@torch.inference_mode()
def check(target, family, features, *, branches: bool = True, whole: bool = True, rounds: int = 2, tolerance: float = TOLERANCE) -> None:
    """Ragged prompts, rounds of trees and chains of which rows keep different parts, rows that leave and a row that joins."""
    target.read(features, whole=whole)
    texts = prompts(LENGTHS)
    join(target, family, texts, 0, tolerance)
    for seed in range(rounds):
        if branches:
            tree = random_tree(len(texts), 6, seed)
            valid = torch.ones_like(tree.tokens, dtype=torch.bool)
            valid[1, 4:] = False
            tree = TokenTree(tree.tokens, tree.parents, valid)
            logits = target.score(tree)
            assert target.prompt_hidden is None
            assert_nodes(target, family, texts, tree, tolerance=tolerance)
            assert_head(target, family, logits)
            for first, last in ((0, 1), (1, 4), (4, 6)):
                part = TokenTree(tree.tokens[:, :last], tree.parents[:, :last], valid[:, :last])
                target.score(part, first=first)
                assert_nodes(target, family, texts, part, first=first, tolerance=tolerance)
            paths = [tree.path(row, max(0, 3 - row + seed)) for row in range(len(texts))]
            width = max(map(len, paths))
            target.commit(torch.tensor([path + [0] * (width - len(path)) for path in paths]), [len(path) for path in paths])
            texts = [text + tree.tokens[row, path].tolist() for row, (text, path) in enumerate(zip(texts, paths))]
        tokens = torch.randint(3, 128, (len(texts), 4), generator=torch.Generator().manual_seed(seed))
        counts = [4 - row - seed for row in range(len(texts))]
        chain = TokenTree.from_chain(tokens, valid=torch.arange(4)[None] < torch.tensor(counts)[:, None])
        target.score(chain)
        assert_nodes(target, family, texts, chain, tolerance=tolerance)
        target.commit(None, [max(0, count - 1) for count in counts])
        texts = [text + line[: max(0, count - 1)] for text, line, count in zip(texts, tokens.tolist(), counts)]
        logits = target.advance(tokens[:, 3])
        step = TokenTree.root(tokens[:, 3])
        assert_nodes(target, family, texts, step, tolerance=tolerance)
        assert_head(target, family, logits[:, None])
        texts = [[*text, int(token)] for text, token in zip(texts, tokens[:, 3])]
        if seed == 0:
            target.compact([0, 2])
            texts = [texts[0], texts[2], *prompts((11, 40), seed=3)]
            join(target, family, texts, 2, tolerance)
            target.compact([0, 1, 3])
            texts = [texts[0], texts[1], texts[3]]
    target.release()
    assert target.hidden is None and target.prompt_hidden is None


def join(target, family, texts, first, tolerance) -> None:
    """Prefill the rows from ``first`` on."""
    new = texts[first:]
    target.open(new)
    target.prefill(new, first=first)
    assert len(target.prompt_hidden) == len(new)
    whole = target.backend.features.whole
    for text, found in zip(new, target.prompt_hidden):
        wanted = states_of(family, text, target.features)
        assert_close(found, wanted if whole else wanted[-1:], tolerance)


@pytest.fixture
def rigged(monkeypatch):
    """Layers are laid out as is said."""

    def lay_out(hint):
        monkeypatch.setattr(packing_module, "PREFERRED", (hint,))

    return lay_out


# -- every execution --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", by_turns(SERVED, 0, always={*LONGER, *STREAMS, *BY_HEAD}))
def test_every_family(family):
    """Trees through the cache of our own, chains by replay."""
    model = clone(model_of(family))
    target = Target(model, execution="eager", test=False, prefill_chunk=16)
    check(target, family, every_feature(family), branches=target.chains_only is None, rounds=2 if family in LONGER else 1)
    target.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("family", "execution"),
    covered(
        ["llama wide", "qwen2 wide", "qwen3 wide", "mistral wide", "qwen2_window wide", "phi3 wide", "gemma3_text wide"],
        ["packed", "native"],
        ways=1,
    ),
)
def test_weights_that_are_laid_out(family, execution, rigged):
    """The whole decoder in one call of a kernel, layers that are one each, and products alone."""
    if execution == "native" and (why := native.refusal(torch.float32)):
        pytest.skip(f"no kernels here: {why}")
    rigged(NATIVE if execution == "native" else HINTS[-1])
    target = Target(clone(model_of(family)), execution=execution, test=False, prefill_chunk=16)
    assert target.execution == execution
    with torch.inference_mode():
        assert (target.backend.direct is not None) == (execution == "native")
    check(target, family, every_feature(family))
    target.close()


@needs_kernels
def test_somebody_who_watches_a_decoder_in_one_call(rigged):
    """It is run layer by layer then."""
    rigged(NATIVE)
    model = clone(model_of("llama wide"))
    target = Target(model, execution="native", test=False)
    handle = model.model.layers[1].register_forward_hook(lambda *given: None)
    with torch.inference_mode():
        assert target.backend.direct is None
    check(target, "llama wide", every_feature("llama wide"), rounds=1)
    handle.remove()
    with torch.inference_mode():
        assert target.backend.direct is not None
    check(target, "llama wide", every_feature("llama wide"), rounds=1)


@pytest.mark.parametrize(("family", "whole"), nightly_but({("gemma3_text", False), ("gemma2", True)}, REPLAYED))
def test_passes_that_are_replayed(family, whole, monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Tape())
    Tape.clear()
    target = Target(clone(model_of(family)), execution="graphs", prefill_chunk=16)
    before = target.backend.recordings.captures
    check(target, family, every_feature(family), whole=whole, rounds=1)
    target.backend.recordings.replays = 0
    with torch.inference_mode():
        texts = prompts((30, 17, 22))
        target.open(texts)
        target.prefill(texts, first=0)
        for seed in range(PATIENCE + TRIALS + 3):
            tree = random_tree(3, 7, seed)
            target.score(tree)
            assert_nodes(target, family, texts, tree)
            target.commit(None, (1, 0, 1))
            texts = [text + ([] if row == 1 else [int(tree.tokens[row, 0])]) for row, text in enumerate(texts)]
        held, copy = target.hidden, target.hidden.clone()
        target.score(random_tree(3, 7, 99))
        assert torch.equal(held, copy), "a tensor of the caller's own"
        assert (
            target.backend.recordings.replays >= 3
            and target.backend.recordings.captures > before
            and target.backend.recordings.refused is None
        )
        target.read(())
        for seed in range(PATIENCE + TRIALS + 1):
            target.score(random_tree(3, 7, seed))
        assert target.hidden is None and {len(each.outputs) for each in target.backend.recordings._kept.values()} == {1}


@torch.inference_mode()
def test_recordings_with_wrong_hidden_states_are_given_up(monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Tape())
    target = Target(clone(model_of("llama")), execution="graphs")
    target.read((LAST, 1))
    texts = prompts((30, 17))
    target.open(texts)
    target.prefill(texts, first=0)
    run = type(target.backend.recordings.passes).__call__

    def wrong(self, *given):
        output = run(self, *given)
        return replace(output, hidden=output.hidden.roll(1, -1))

    monkeypatch.setattr(type(target.backend.recordings.passes), "__call__", wrong)
    for seed in range(2 * (PATIENCE + TRIALS)):
        tree = random_tree(2, 7, seed)
        target.score(tree)
        assert_nodes(target, "llama", texts, tree)
    assert "hidden states differ from those of an eager pass" in target.reasons.get("graphs")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_flex_attention(family, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)  # not traced
    target = Target(clone(model_of(family)), attention="flex", test=False, prefill_chunk=16)
    check(target, family, every_feature(family), rounds=1)
    assert target.backend.flexed


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3_text", "gpt2"))])
def test_compiled_layers(family, monkeypatch):
    """As torch traces them."""
    torch._dynamo.reset()
    monkeypatch.setattr(compilation.torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compilation, "_no_compiler", lambda: None)
    target = Target(clone(model_of(family)), execution="compiled", test=False, prefill_chunk=16)
    assert target.execution == "compiled"
    check(target, family, every_feature(family), rounds=1)
    target.close()


@pytest.mark.parametrize("execution", ["eager", "native"])
def test_in_bfloat16_and_eight_bits(execution, rigged):
    quantization = pytest.importorskip("foredraft.quantization")
    pytest.importorskip("torchao.quantization")
    if execution == "native" and (why := native.refusal(torch.bfloat16)):
        pytest.skip(f"no kernels here: {why}")
    rigged(NATIVE)
    for quantized in (False, True):
        model = clone(model_of("llama wide")).to(torch.bfloat16)
        if quantized:
            quantization.quantize(model)
        target = Target(model, execution=execution, owned=True, test=False)
        assert target.execution == execution
        with torch.inference_mode():
            target.read((LAST, 0, 1))
            texts = prompts((9, 14))
            target.open(texts)
            target.prefill(texts, first=0)
            logits = target.score(random_tree(2, 6, 1))
            assert target.hidden.dtype == torch.bfloat16
            assert_close(model.lm_head(target.hidden[..., :64]), logits.float(), 4e-2)
            assert torch.equal(target.hidden[..., 64:128], model.model.embed_tokens(random_tree(2, 6, 1).tokens))
            assert not torch.equal(target.hidden[..., 128:], target.hidden[..., 64:128])
        target.close()


# -- what is asked for, and what that changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "llama wide"])
def test_prompts_of_which_the_last_token_is_read(family, rigged):
    rigged(NATIVE)
    how = {"execution": "native", "owned": True} if "wide" in family and native.refusal(torch.float32) is None else {"execution": "eager"}
    target = Target(clone(model_of(family)), test=False, prefill_chunk=16, **how)
    check(target, family, every_feature(family), branches=target.chains_only is None, whole=False, rounds=1)


@torch.inference_mode()
def test_the_head_is_spared_for_prompts_that_are_read_as_a_whole():
    model, seen = clone(model_of("llama")), []
    target = Target(model, execution="eager", test=False, prefill_chunk=16)
    target.read((LAST,), whole=True)
    model.lm_head.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    texts = prompts((40, 5, 5))
    target.open(texts)
    target.prefill(texts, first=0)
    assert seen == [1, 1, 1, 1]


@torch.inference_mode()
def test_prefixes_are_not_reused_while_whole_texts_are_read():
    target, text = Target(clone(model_of("llama")), execution="eager", test=False), prompts((40,))[0]

    def reused() -> int:
        target.open([text])
        length = target.lengths[0]
        target.prefill([text], first=0)
        target.reset()
        return length

    assert (reused(), reused()) == (0, 39)
    target.read((1,), whole=True)
    assert reused() == 0 and len(target.prompt_hidden[0]) == 40
    target.read((LAST,), whole=True)
    assert reused() == 0
    target.read((LAST,))
    assert reused() == 39 and len(target.prompt_hidden[0]) == 1
    target.read((LAST,), whole=True)
    target.read(())
    assert reused() == 39 and target.prompt_hidden is None and target.features == ()
    never = Target(clone(model_of("llama")), execution="eager", test=False, reuse_prefix=False)
    never.read((1,), whole=True)
    never.read(())
    assert not never.reuse_prefix


def test_numbers_that_there_are_not_and_states_that_can_not_be_caught_are_refused():
    target = Target(clone(model_of("llama")), execution="eager", test=False)
    for number in (-2, 3, 7):
        with pytest.raises(ConfigurationError, match=rf"LlamaForCausalLM.* has hidden states 0 to 2, and -1 for the last one; {number} is"):
            target.read((0, number))
        assert target.features == ()
    target.read((2, 1))
    assert target.features == (LAST, 1), "transformers' last one is behind the final norm"
    with pytest.raises(UnsupportedModelError, match=r"hidden state 1 of Gemma3nForCausalLM.* cannot be passed .*last one alone"):
        Target(clone(model_of("gemma3n_text")), execution="eager", test=False).read((LAST, 1))


def test_looking_for_hidden_states_leaves_no_hooks():
    model = clone(model_of("llama"))
    handle = model.model.layers[0].register_forward_hook(lambda *given: None)
    before = {module: list(module._forward_hooks) for module in model.modules()}
    taps = taps_of(model, torch.arange(5)[None])
    assert {module: list(module._forward_hooks) for module in model.modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert "_output_capturing_hooks_installed" not in vars(model) and len(taps) == 3
    handle.remove()
    assert model(torch.arange(5)[None], output_hidden_states=True).hidden_states is not None
    taps_of(model, torch.arange(5)[None])  # what transformers put there before goes, too: it does so again when it is asked
    assert not any(module._forward_hooks for module in model.modules())
    assert model(torch.arange(5)[None], output_hidden_states=True).hidden_states is not None


@torch.inference_mode()
def test_a_target_without_a_reader_is_not_hooked(monkeypatch):
    target = Target(clone(model_of("llama")), execution="eager", test=False)
    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", lambda *given, **more: pytest.fail("hooked"))
    target.open([[3, 4, 5]])
    target.prefill([[3, 4, 5]], first=0)
    target.score(TokenTree.root(torch.tensor([7])))
    assert target.hidden is None and target.prompt_hidden is None


# -- what a drafter sees ------------------------------------------------------------------------------------------------------


class Reads(Drafter):
    """Compares what it is told with plain passes; what it proposes is its base's affair."""

    family = "llama"

    def reading(self, features, *, whole: bool = False):
        self.info = replace(self.info, features=features, whole_prompt=whole)
        self.texts, self.kept, self.whole_trees = {}, 0, 0
        return self

    def bind(self, target) -> None:
        super().bind(target)
        target.read(self.info.features, whole=self.info.whole_prompt)

    def read(self, rows, hidden) -> None:
        self.handed = [row.slot for row in rows]
        for row, states in zip(rows, hidden, strict=True):
            wanted = states_of(self.family, row.ids[: row.prompt_length], self.info.features)
            assert_close(states, wanted if self.info.whole_prompt else wanted[-1:], 1e-4)

    def begin(self, rows) -> None:
        assert self.handed == [row.slot for row in rows], "read comes first"
        self.texts.update((row.slot, list(row.ids)) for row in rows)
        super().begin(rows)

    def observe(self, rows, feedback) -> None:
        tree = feedback.tree
        assert feedback.hidden.shape[:2] == tree.tokens.shape
        for index, row in enumerate(rows):
            text = self.texts[row.slot]
            nodes = range(tree.nodes) if tree.valid is None else tree.valid[index].nonzero().flatten().tolist()
            for node in nodes:
                said = tree.tokens[index, tree.path(index, node)].tolist()
                assert said[0] == text[-1]
                assert_close(feedback.hidden[index, node], states_of(self.family, text[:-1] + said, self.info.features)[-1], 1e-4)
            accepted = feedback.accepted[index]
            last = accepted if feedback.path is None else int(feedback.path[index, accepted])
            new = row.ids[len(text) :]
            if LAST in self.info.features and len(new) == accepted + 1:  # else it ended before
                place = self.info.features.index(LAST) * 32
                bonus = plain(self.family).get_output_embeddings()(feedback.hidden[index, last, place : place + 32]).argmax()
                assert int(bonus) == new[-1]
                self.kept += accepted
            self.texts[row.slot] = list(row.ids)
        super().observe(rows, feedback)


class ReadingModel(Reads, DraftModel):
    pass


class ReadingLookup(Reads, PromptLookup):
    pass


@pytest.mark.parametrize(("shape", "whole"), covered(["chain(3)", "product(2,2,1)", "dynamic(depth=3,k=2,total=5)"], [True, False], ways=1))
def test_feedback_brings_the_states_of_every_node_and_the_text_stays_the_same(shape, whole):
    rows = repetitive((23, 9, 15))
    drafter = ReadingModel(draft_of("llama")).reading((LAST, 1, 0), whole=whole)
    speculator = Speculator(clone(tiny()), drafter, shape=shape)
    assert speculator.target.features == (LAST, 1, 0)
    found = generate(speculator, rows, max_new_tokens=14)
    without = Speculator(clone(tiny()), DraftModel(draft_of("llama")), shape=shape)
    assert found == generate(without, rows, max_new_tokens=14) and drafter.kept > 5
    speculator.close()
    assert speculator.target.features == ()


def draft_of(family: str):
    return make_drafter("draft-model", family).source


def test_rows_that_join_and_leave():
    from foredraft.rows import RowParameters

    drafter = ReadingModel(draft_of("llama")).reading((1, LAST), whole=True)
    session = Speculator(clone(tiny()), drafter, shape="product(2,1)").session()
    lengths = [3, 12, 7, 9]
    slots = [session.add(text, RowParameters(max_new_tokens=length)) for text, length in zip(repetitive((23, 9)), lengths)]
    for text, length in zip(repetitive((30, 12), seed=4), lengths[2:]):
        session.step()
        session.step()
        slots.append(session.add(text, RowParameters(max_new_tokens=length)))
    while session.live:
        session.step()
    assert len(drafter.texts) == 4 and drafter.kept


def test_rounds_without_a_draft_are_told_as_well():
    drafter = ReadingModel(draft_of("llama")).reading((LAST,))
    speculator = Speculator(clone(tiny()), drafter, shape="chain(3)")
    told = []
    observe = drafter.observe
    drafter.observe = lambda rows, feedback: (told.append(feedback.tree.nodes), observe(rows, feedback))
    generate(speculator, repetitive((23,)), max_new_tokens=2)
    assert told == [1]


@pytest.mark.parametrize("others", [["prompt-lookup"], []])
def test_members_of_several_get_their_share(others):
    """Those that read are told of the merged tree, whatever they proposed."""
    first, second = ReadingLookup().reading((LAST,)), ReadingLookup().reading((1, LAST, 0), whole=True)
    model = DraftModel(draft_of("llama"))
    several = Several([first, second, model, *others])
    speculator = Speculator(clone(tiny()), several, shape="product(2,1,1)")
    assert speculator.target.features == several.info.features == (LAST, 1, 0) and several.info.whole_prompt
    rows = repetitive((23, 9))
    found = generate(speculator, rows, max_new_tokens=14)
    assert found == generate(Speculator(clone(tiny()), "none"), rows, max_new_tokens=14)
    assert first.kept == second.kept > 0
    alone = Several([ReadingLookup().reading((1,))])
    generate(Speculator(clone(tiny()), alone, shape="chain(3)"), rows, max_new_tokens=8)
    assert alone.info.features == (1,) and not alone.info.whole_prompt


def test_the_planner_measures_a_drafter_that_reads():
    drafter = ReadingModel(draft_of("llama")).reading((LAST,))
    checked, drafter.read = [], lambda rows, hidden: checked.append([tuple(each.shape) for each in hidden])
    drafter.observe = lambda rows, feedback: (checked.append(feedback.hidden.shape), DraftModel.observe(drafter, rows, feedback))
    drafter.begin = functools.partial(DraftModel.begin, drafter)
    speculator = Speculator(clone(tiny()), drafter, shape="auto")
    generate(speculator, repetitive((23,)), max_new_tokens=4)
    assert checked.count([(1, 32)]) > 1 and (1, 2, 32) in checked


def test_a_table_hands_out_its_distributions():
    table = ProbabilityTable.random(3, seed=1)
    target = TableTarget(table)
    target.open([[0, 1]])
    target.prefill([[0, 1]], first=0)
    assert target.prompt_hidden is None
    target.read((LAST, 1), whole=True)
    target.prefill([[0, 1]], first=0)
    assert torch.equal(target.prompt_hidden[0], torch.stack([table([0]), table([0, 1])]).repeat(1, 2))
    target.score(TokenTree.from_chain(torch.tensor([[2, 0]])))
    assert torch.allclose(target.hidden[0], torch.stack([table([0, 1, 2]), table([0, 1, 2, 0])]).repeat(1, 2))


def test_what_transformers_leaves_behind_does_not_keep_passes_off_the_kernels():
    """Asked for hidden states once, it hooks the layers for good."""
    model = clone(tiny())
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids, output_hidden_states=True).hidden_states
    assert any(module._forward_hooks for module in model.modules())
    target = Target(model)
    assert not any(module._forward_hooks for module in model.modules())
    model(ids, output_hidden_states=True)
    target.open([[5, 6, 7]])
    assert not any(module._forward_hooks for module in model.modules())
    assert all(map(torch.equal, model(ids, output_hidden_states=True).hidden_states, before))
