"""What texts teach a drafter can be taken back: ``Drafter.forget``; and what members of ``several`` learn in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import alone, generate, plainly, prompts, repetitive, tiny

from foredraft import Speculator, drafters
from foredraft.drafters.base import Feedback, Row
from foredraft.drafters.lookahead import Lookahead
from foredraft.drafters.ngram import NGram
from foredraft.drafters.ngram_model import NGramModel
from foredraft.drafters.several import Several
from foredraft.drafters.suffix import Suffix
from foredraft.drafters.suffix_store import SuffixStore
from foredraft.drafters.token_recycling import TokenRecycling
from foredraft.errors import ConfigurationError

LEARNERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "token-recycling": {},
    "suffix": {"learn": True},
    "several:suffix,token-recycling": {},
}


def passes(speculator: Speculator, row: Sequence[int]) -> int:
    return speculator.generate(torch.tensor([row]), max_new_tokens=24).stats.target_passes


@pytest.mark.parametrize("name", LEARNERS)
def test_a_text_that_is_forgotten_takes_as_long_as_it_did(name: str):
    (row,) = prompts((33,))
    speculator = Speculator(tiny(), drafter=name, drafter_options=LEARNERS[name] or None, shape="chain(4)")
    first = passes(speculator, row)
    assert passes(speculator, row) < first
    speculator.drafter.forget()
    assert passes(speculator, row) == first


def test_what_was_loaded_is_kept(tmp_path):
    (row,) = prompts((33,))
    for name, file in (("ngram", "model.safetensors"), ("token-recycling", "matrix.safetensors"), ("suffix", "store.safetensors")):
        taught = Speculator(tiny(), drafter=name, drafter_options=LEARNERS[name] or None, shape="chain(4)")
        first = passes(taught, row)
        taught.drafter.save(tmp_path / file)
        options = None if name == "token-recycling" else {"learn": True}
        loaded = Speculator(tiny(), drafter=f"{name}:{tmp_path / file}", drafter_options=options, shape="chain(4)")
        before = passes(loaded, row)
        loaded.drafter.forget()
        assert before < first and passes(loaded, row) <= before


@pytest.mark.parametrize("name", LEARNERS)
def test_rows_that_live_go_on(name: str):
    rows = repetitive((33, 21))
    speculator = Speculator(tiny(), drafter=name, drafter_options=LEARNERS[name] or None, shape="chain(4)")
    drafter, observe = speculator.drafter, speculator.drafter.observe

    def observe_and_forget(*round: Any) -> None:
        observe(*round)
        drafter.forget()

    drafter.observe = observe_and_forget  # type: ignore[method-assign]
    assert generate(speculator, rows, max_new_tokens=24) == [alone(tiny(), row, max_new_tokens=24) for row in rows]


@pytest.mark.parametrize(
    "drafter", [NGram(source=NGramModel(3), learn=True), Suffix(source=SuffixStore(100), learn=True)], ids=["ngram", "suffix"]
)
def test_what_was_given_to_be_taught_has_no_other_copy(drafter):
    with pytest.raises(ConfigurationError, match="pass the file"):
        drafter.forget()


def test_those_that_learn_nothing_have_nothing_to_forget():
    for name in ("prompt-lookup", "lookahead", "none"):
        drafters.create(name).forget()


# -- extra nodes and logits of members, in batches ------------------------------------------------------------------------


class Listening:
    """Keeps the feedback that a member gets, with the texts that its rows had when it drafted."""

    heard: list[tuple[list[list[int]], Feedback]]

    def draft(self, request: Any) -> Any:
        self.texts = [list(row.ids) for row in request.rows]
        return super().draft(request)  # type: ignore[misc]

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        if feedback.tree.nodes > 1 and feedback.logits is not None:
            told = Feedback(feedback.tree, feedback.accepted, feedback.path, feedback.logits.clone())
            self.heard = [*getattr(self, "heard", []), (self.texts, told)]
        super().observe(rows, feedback)  # type: ignore[misc]


class HeardLookahead(Listening, Lookahead):
    pass


class HeardRecycling(Listening, TokenRecycling):
    pass


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_windows_and_logits_of_members_in_a_batch(options):
    """Rows of three lengths and ends: the text is plain decoding's; every member hears the target's logits at its own nodes, windows
    included; and the windows make as many n-grams as without the others."""
    model, rows = tiny(), repetitive((33, 21, 40))
    window, matrix = HeardLookahead(window=3, ngram=3), HeardRecycling()
    several = Several(["prompt-lookup", window, matrix])
    speculator = Speculator(model, drafter=several, shape="product(3,2,1)")
    assert several.info.needs_logits and several.info.extra_nodes == window.info.extra_nodes > 0
    expected = plainly(model, rows, max_new_tokens=20, **options)
    assert generate(speculator, rows, max_new_tokens=20, **options) == expected
    assert any(len(texts) == 3 for texts, _ in window.heard) and any(feedback.tree.extra for _, feedback in window.heard)
    for member in (window, matrix):
        checked = sum(checked_nodes(model, texts, feedback) for texts, feedback in member.heard[:4])
        assert checked > 20
    assert not any(feedback.tree.extra for _, feedback in matrix.heard)


def checked_nodes(model: Any, texts: Sequence[Sequence[int]], feedback: Feedback) -> int:
    """Compare a member's logits at its real and extra nodes with a pass of their own; how many nodes there were."""
    tree, count = feedback.tree, 0
    assert feedback.logits is not None and feedback.logits.shape[:2] == tree.tokens.shape == (len(texts), tree.nodes)
    parents = tree.parents.expand(tree.rows, -1).tolist()
    first = tree.nodes - tree.extra
    for row, text in enumerate(texts):
        for node in range(tree.nodes):
            if node < first and tree.valid is not None and not tree.valid[row, node]:
                continue
            path, above = [], node
            while above > 0:
                path.append(int(tree.tokens[row, above]))
                above = parents[row][above]
            if node >= first and not path:
                continue
            with torch.no_grad():
                expected = model(torch.tensor([[*text, *reversed(path)]])).logits[0, -1]
            assert torch.allclose(feedback.logits[row, node], expected, atol=1e-4), (row, node)
            count += 1
    return count
