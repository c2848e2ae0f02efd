"""The model cards of the embedded heads."""

from __future__ import annotations

import json

import pytest

from foredraft import zoo
from recipes.zoo.heads import card, time_to_quality


def test_time_to_quality_stands_beside_what_had_been_done():
    lines = [
        {"acceptance_length": 1.0, "step": 0},
        {"loss": 3.0, "step": 20, "tokens": 100, "seconds": 4.4},
        {"loss": 2.5, "step": 40, "tokens": 210, "seconds": 9.6},
        {"acceptance_length": 2.34567, "step": 40},
        {"loss": 2.0, "step": 60, "tokens": 300, "seconds": 15.0},
    ]
    assert time_to_quality(lines) == [
        {"step": 0, "tokens": 0, "seconds": 0, "acceptance_length": 1.0},
        {"step": 40, "tokens": 210, "seconds": 10, "acceptance_length": 2.346},
    ]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_the_cards_are_made_from_the_figures_beside_them(kind):
    name = f"python-8m-{kind}"
    folder = zoo.path(name)
    figures = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    written = (folder / "README.md").read_text(encoding="utf-8")
    assert written.startswith(card(name, kind, figures))
    assert figures["held_out"]["chain"]["acceptance_length"] > 1.5
    changed = card(name, kind, {**figures, "parameters": 7})
    assert changed != card(name, kind, figures) and "7 parameters" in changed
