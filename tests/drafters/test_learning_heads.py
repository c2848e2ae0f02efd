"""Heads that learn while they serve: what is kept for them, their text and its law while weights change, and what they gain."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import HEADS, make
from helpers import batch_of, generate, prompts, tiny
from kernel_cases import always, needs_kernels
from kernel_cases import build as build_with_kernels
from learning_cases import exact_law, law_of, never_started, noisy, restless, small
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import ConfigurationError, Speculator, drafters, heads
from foredraft.drafters.learning import buffer
from foredraft.drafters.learning.buffer import Layout
from foredraft.drafters.learning.serving import Learning
from foredraft.heads.base import Batch
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.hydra import HydraHead
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.heads.rnn import RnnHead
from foredraft.losses import compare
from foredraft.quantization import quantize
from foredraft.testing import distance
from foredraft.training import online
from foredraft.training.online import OnlineLearner, gained

__all__ = ["always"]
VOCABULARY = 24
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (MedusaHead, {"heads": 3}),
    "hydra": (HydraHead, {"heads": 3}),
    "rnn": (RnnHead, {"steps": 3}),
    "rnn-text": (RnnHead, {"hidden_states": False, "width": 16}),
    "eagle3": (Eagle3Head, {"steps": 3}),
}
SOME = ("medusa", "medusa-shared", "eagle3")  # of HEADS
every_kind = pytest.mark.parametrize("kind", KINDS)
ROWS = prompts((12, 5, 9), vocabulary=VOCABULARY)
SAMPLED = {"do_sample": True, "seed": 7, "temperature": 1.0, "top_k": 0}


@cache
def target() -> LlamaForCausalLM:
    """Of few tokens, so that random heads are right now and then."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, bos_token_id=None, initializer_range=0.5, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return LlamaForCausalLM(config).eval()


def head_of(kind: str, model: Any, seed: int = 0) -> Any:
    made, options = KINDS[kind]
    head = made.for_target(model, **options)
    head.load_state_dict({**head.state_dict(), **noisy(dict(head.named_parameters()), seed)})
    return head.requires_grad_(False)


def drafter_of(head: Any, learn: Any, **options: Any) -> Any:
    return drafters.find(head.kind)(head, learn=learn, **options)


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch):
    """No test starts a learner."""
    monkeypatch.setitem(Learning.__init__.__kwdefaults__, "start", never_started)


# -- the text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [pytest.param({"do_sample": False}, marks=pytest.mark.nightly), SAMPLED], ids=["greedy", "sampled"])
@every_kind
def test_the_text_is_that_of_plain_decoding_with_a_swap_after_every_round(kind: str, options: dict, tmp_path: Path):
    expected = generate(Speculator(target(), "none"), ROWS, max_new_tokens=12, **options)
    source = head_of(kind, target())
    before = {name: value.clone() for name, value in source.named_parameters()}
    drafter = drafter_of(source, tmp_path / "learnt")
    speculator = Speculator(target(), drafter, shape="chain(3)" if options is SAMPLED else "product(2,2,1)", rule="match")
    learning = restless(drafter)
    for _ in range(2):  # the second call finds what the first left behind
        swaps = learning.swaps
        assert generate(speculator, ROWS, max_new_tokens=12, **options) == expected
        assert learning.swaps > swaps + 3
    assert learning.unusable == 0
    assert all(torch.equal(value, before[name]) for name, value in source.named_parameters()), "the user's head is as it was"


@pytest.mark.parametrize("kind", ["hydra", "rnn-text", "eagle3"])
def test_the_law_holds_with_a_swap_after_every_round(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.testing.RESOLUTION", 1e-5)  # rounding of float32 is no outcome
    drafter = drafter_of(head_of(kind, small(0)), tmp_path)
    assert distance(law_of(drafter, "rejection", swapping=True), exact_law()) < 1e-3


def drafts_of(drafter: Any, speculator: Speculator, rows: list[list[int]], count: int) -> list[list[int]]:
    """The trees of the rounds of a call."""
    drafts, draft = [], type(drafter).draft
    drafter.draft = lambda request: drafts.append(tree := draft(drafter, request)) or tree
    generate(speculator, rows, max_new_tokens=count)
    del drafter.draft
    return [tree.tokens.tolist() for tree in drafts]


@needs_kernels
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16], ids=str)
@every_kind
def test_after_a_swap_drafts_are_those_of_the_new_weights(kind: str, dtype: torch.dtype, tmp_path: Path, always: None):
    """Whatever layout they are in: of one row by the kernels that make whole drafts, and of several."""
    model = build_with_kernels("llama", dtype)
    drafter = drafter_of(head_of(kind, model), tmp_path)
    speculator = Speculator(model, drafter, shape="chain(3)", execution="native")
    weights = noisy(drafter.learning.versions.load(0), 1, amount=1.0)
    if kind in ("medusa", "eagle3"):
        assert drafter._kernel is not None
    first = [drafts_of(drafter, speculator, rows, 9) for rows in (ROWS[:1], ROWS)]
    drafter.learning.versions.save(1, weights)
    drafter.learning.buffer["published"] = 1
    drafter._take_up(1)
    model = build_with_kernels("llama", dtype)
    head = head_of(kind, model)
    head.load_state_dict({**head.state_dict(), **weights})
    other = type(drafter)(head)
    fresh = Speculator(model, other, shape="chain(3)", execution="native")
    for rows, before in zip((ROWS[:1], ROWS), first):
        after = drafts_of(drafter, speculator, rows, 9)
        assert after == drafts_of(other, fresh, rows, 9) and after != before
    drafter.forget()
    assert drafts_of(drafter, speculator, ROWS, 9) == first[1]
    speculator.close()


def test_a_network_that_reads_texts_itself_reads_them_again(tmp_path: Path):
    """Its states are not those of former weights."""
    drafter = drafter_of(head_of("rnn-text", target()), tmp_path)
    speculator = Speculator(target(), drafter, shape="chain(2)")
    weights = noisy(drafter.learning.versions.load(0), 1)
    drafter.learning.versions.save(1, weights)
    states, turns = [], iter((None, None, 1))
    drafter.learning._newer = lambda now: next(turns, None)
    caught = drafter._caught_up
    drafter._caught_up = lambda rows: states.append(([list(row.ids) for row in rows], found := caught(rows))) or found
    generate(speculator, ROWS, max_new_tokens=9)
    ids, found = states[-1]
    head = drafter.head
    expected = [head.read(torch.tensor([text[:-1]]), head.begin(None, 1))[1][0] for text in ids]
    assert drafter.learning.version == 1
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


# -- what is kept ---------------------------------------------------------------------------------------------------------


def pieces_of(drafter: Any, speculator: Speculator, rows: list[list[int]], count: int) -> list[Any]:
    """Of a call in which there is time for every round."""
    pieces: list[Any] = []
    drafter.learning.duty.elapsed, add = 1e9, drafter.learning.buffer.add
    drafter.learning.collector.keep = lambda piece: (pieces.append(piece.copy()), add(piece))
    texts = [row + new for row, new in zip(rows, generate(speculator, rows, max_new_tokens=count, **SAMPLED))]
    return [(next(text for text in texts if contains(text, piece)), piece) for piece in pieces]


def contains(text: list[int], piece: Any) -> bool:
    return start_of(text, piece) >= 0


def start_of(text: list[int], piece: Any) -> int:
    tokens = piece["tokens"][: piece["length"]].tolist()
    return next((start for start in range(len(text)) if text[start : start + len(tokens)] == tokens), -1)


@pytest.mark.parametrize(("kind", "shape"), [("medusa", "chain(3)"), ("eagle3", "product(2,2,1)")])
def test_pieces_hold_the_states_that_the_head_reads(kind: str, shape: str, tmp_path: Path):
    """Of every token but the last, as in the target's own pass over the text, and the target's probabilities at some places."""
    drafter = drafter_of(head_of(kind, target()), tmp_path)
    speculator = Speculator(target(), drafter, shape=shape)
    pieces = pieces_of(drafter, speculator, ROWS[:2], 150)
    assert len(pieces) >= 4 and any(1.0 in piece["weights"] for _, piece in pieces)
    for text, piece in pieces:
        batch = batch_of(target(), drafter.head, [text])
        start, length = start_of(text, piece), int(piece["length"])
        states = torch.from_numpy(piece["states"][: length - 1]).view(torch.bfloat16).float()
        torch.testing.assert_close(states, batch.hidden[0, start : start + length - 1].flatten(1), rtol=1e-2, atol=1e-2)
        logs = batch.logits[0].log_softmax(-1)[start:]
        for place, likely, ids in zip(piece["places"][: piece["count"]], piece["logs"], piece["ids"]):
            torch.testing.assert_close(logs[int(place), torch.from_numpy(ids).long()], torch.from_numpy(likely), rtol=1e-3, atol=1e-3)
    begins = {0} if kind == "eagle3" else {len(row) - 1 for row in ROWS[:2]}
    assert begins <= {start_of(*each) for each in pieces}, "a prompt's last states are in front"
    assert max(piece["length"] for _, piece in pieces) > 70


def test_a_round_that_is_left_out_ends_no_piece_and_begins_none(tmp_path: Path):
    """Where collecting would take too long: pieces have no gaps."""
    drafter = drafter_of(head_of("medusa", target()), tmp_path)
    speculator = Speculator(target(), drafter, shape="chain(3)")
    observe, rounds = drafter.learning.collector.observe, iter(range(10**6))
    drafter.learning.collector.observe = lambda rows, feedback, *, wanted: observe(rows, feedback, wanted=next(rounds) == 5)
    pieces = pieces_of(drafter, speculator, ROWS[:1], 150)
    assert len(pieces) == 1
    text, piece = pieces[0]
    assert len(ROWS[0]) + 5 <= start_of(text, piece) and 60 < piece["length"] <= 128
    expected = batch_of(target(), drafter.head, [text]).hidden[0, start_of(text, piece) :][: piece["length"] - 1, 0]
    states = torch.from_numpy(piece["states"][: len(expected)]).view(torch.bfloat16).float()
    torch.testing.assert_close(states, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [0, 64, 4096, 3 * 4096, 3 * 16384])
def test_buffers_have_a_bounded_size(width: int):
    layout = Layout(width)
    assert layout.pieces * layout.piece.itemsize <= buffer.LARGEST + buffer.TRIAL * layout.piece.itemsize
    assert min(layout.new, layout.old) >= buffer.FEWEST and layout.trial == buffer.TRIAL


# -- what is learnt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SOME else pytest.mark.nightly) for name in HEADS])
def test_the_learner_computes_what_the_head_drafts_without_a_target(name: str, tmp_path: Path):
    """α of what it makes of a folder, against that of the head beside its target, with and without shared or scaled parts."""
    head = make(name)
    if name == "medusa":
        head.log_odds = NgramLogOdds.count([torch.randint(0, 9, (3000,)).numpy()], 128, heads=3)
    drafter = drafter_of(head, tmp_path)
    speculator = Speculator(tiny(), drafter, shape="chain(2)")
    (text, piece), *_ = pieces_of(drafter, speculator, prompts((9,)), 60)
    learner = OnlineLearner(tmp_path)
    found = learner._alphas(learner.model, piece)
    whole, start = batch_of(tiny(), head, [text]), start_of(text, piece)
    beside = [each[:, start : start + piece["length"]] for each in (whole.ids, whole.valid, whole.counted, whole.hidden, whole.logits)]
    _, places, few = learner._tensors(piece)
    with torch.no_grad():
        for line, (logits, ends) in zip(found, head.said(Batch(*beside)), strict=True):
            alpha = dict(zip(ends.tolist(), logits))
            known = [index for index, mine in enumerate(line.tolist()) if mine != torch.inf]
            assert len(known) > 5
            expected = compare(learner.loss, torch.stack([alpha[int(places[index])] for index in known]), few[torch.tensor(known)]).alpha
            torch.testing.assert_close(line[known], expected, rtol=0.05, atol=0.02)  # states are rounded to bfloat16


@pytest.mark.parametrize("kind", ["medusa", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in list(KINDS)[1:])])
def test_a_head_accepts_more_of_a_text_that_comes_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From serving to a version that the server takes up."""
    monkeypatch.setattr(online, "TIMES", 1000)
    drafter = drafter_of(head_of(kind, target()), {"folder": tmp_path, "share": 0.0, "between": False})
    speculator, ids = Speculator(target(), drafter, shape="chain(3)"), torch.tensor(3 * prompts((6,) * 4, vocabulary=VOCABULARY))
    drafter.learning.duty.elapsed = 1e9  # there is time for every round

    def served() -> float:
        return speculator.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0).stats.acceptance_rate

    before = served()
    learner, alphas = OnlineLearner(tmp_path, rate=6e-3), []
    turns, first = learner.turns(), learner.published
    while learner.buffer["trials"] < 5 and next(turns):
        pass
    for weights in (first, learner.published):
        online._copy(learner.beside, weights)
        alphas.append(torch.stack([each[each != torch.inf].mean() for each in map(alphas_of(learner), learner.buffer.trial())]).mean())
    assert learner.buffer["published"] >= 2 and alphas[1] > alphas[0] + 0.02
    assert served() > before + 0.01 and drafter.learning.version == learner.buffer["published"]


def alphas_of(learner: OnlineLearner) -> Any:
    return lambda piece: learner._alphas(learner.beside, piece)


def test_a_token_further_ahead_counts_as_often_as_drafts_get_there():
    inf = torch.inf
    before = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.2, inf, 0.2, 0.2]])
    after = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.4, inf, 0.4, 0.4]])
    was, gain, error = gained(before, after, torch.ones(4))
    assert was == pytest.approx((4 * 0.5 + 0.5 * 3 * 0.2) / 5.5) and gain == pytest.approx(0.5 * 3 * 0.2 / 5.5)
    assert 0 < error < gain
    assert gained(before, after * torch.nan, torch.ones(4))[1] != gain


# -- bad input ------------------------------------------------------------------------------------------------------------


def test_heads_that_cannot_learn_say_so(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="quantized head cannot learn"):
        drafters.create("medusa", {"quantization": "int8", "learn": True})
    head = MedusaHead.for_target(tiny(), heads=2)
    quantize(head)
    with pytest.raises(ConfigurationError, match="quantized head cannot learn"):
        Speculator(tiny(), drafter_of(head, tmp_path))
    with pytest.raises(ConfigurationError, match="takes a hydra head"):
        Speculator(tiny(), drafters.find("hydra")(heads.find("medusa").for_target(tiny()), learn=tmp_path))
    with pytest.raises(ConfigurationError, match="no option 'learn'"):
        drafters.create("layer-skip", {"learn": True})


def test_a_folder_belongs_to_one_head(tmp_path: Path):
    Speculator(target(), drafter_of(head_of("medusa", target()), tmp_path)).close()
    Speculator(target(), drafter_of(head_of("medusa", target()), tmp_path)).close()
    with pytest.raises(ConfigurationError, match="another draft"):
        Speculator(target(), drafter_of(head_of("medusa", target(), seed=3), tmp_path))
