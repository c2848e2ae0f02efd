"""Texts that a target writes: the same files however often the run was killed, and exactly what the target says."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import alone, perturbed, prompts, tiny
from training_helpers import LENGTHS, answering, make_data, was_killed
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.errors import ConfigurationError
from foredraft.text import encode
from foredraft.training.data import Manifest, Shard, Texts, refuse_other_data, shard_file
from foredraft.training.prompts import read_entries, windows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "data"
    make_data(folder, top=3)
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def asked(count=32):
    return prompts([LENGTHS[index % len(LENGTHS)] for index in range(count)])


# -- what is written --------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_generate_and_prompts_are_kept(data):
    texts = Texts(data)
    assert len(texts) == 32 and [texts.prompt(index) for index in range(32)] == asked()
    for index in range(0, 32, 2):
        assert texts[index].tolist() == asked()[index] + alone(tiny(), asked()[index], max_new_tokens=16)


def test_sampled_answers_follow_their_own_seed_whatever_they_were_batched_with(data, tmp_path):
    make_data(tmp_path / "one", batch=1, top=3)
    make_data(tmp_path / "other", seed=1, top=3)
    texts, one, other = Texts(data), Texts(tmp_path / "one"), Texts(tmp_path / "other")
    for index in range(32):
        assert texts[index].tolist() == one[index].tolist()
        assert (texts[index].tolist() == other[index].tolist()) == (index % 2 == 0), "greedy ones have no seed"


def test_top_k_probabilities_are_the_targets(data):
    for number in range(4):
        shard = Shard.load(shard_file(data, number))
        row = 0
        for start, length, prompt in zip(np.cumsum(shard.lengths) - shard.lengths, shard.lengths, shard.prompt_lengths):
            ids = torch.from_numpy(shard.ids[start : start + length].astype(np.int64))
            with torch.no_grad():
                said = tiny()(input_ids=ids[None]).logits[0, prompt - 1 : -1].log_softmax(-1).topk(3)
            count = int(length - prompt)
            assert shard.top_ids[row : row + count].tolist() == said.indices.tolist()
            np.testing.assert_allclose(shard.top_logprobs[row : row + count], said.values, atol=1e-4)
            row += count
        assert row == len(shard.top_ids) == len(shard.top_logprobs)


def test_an_answer_ends_with_the_end_of_text(tmp_path):
    greedy = alone(tiny(), asked()[0], max_new_tokens=16)
    model = perturbed(amount=0.0)
    model.generation_config.eos_token_id = greedy[3]
    try:
        make_data(tmp_path, count=8, model=model, temperatures=(0.0,))
    finally:
        model.generation_config.eos_token_id = None
    text = Texts(tmp_path)[0].tolist()
    assert text == asked()[0] + greedy[: greedy.index(greedy[3]) + 1]


def test_rows_join_while_others_are_under_way(tmp_path, monkeypatch):
    from foredraft.session import Session

    seen, step = [], Session.step
    monkeypatch.setattr(Session, "step", lambda session: (seen.append((len(session.rows), len(session.waiting))), step(session))[1])
    greedy = alone(tiny(), asked()[0], max_new_tokens=16)
    model = perturbed(amount=0.0)
    model.generation_config.eos_token_id = greedy[3]
    try:
        make_data(tmp_path, count=8, per_shard=8, model=model)
    finally:
        model.generation_config.eos_token_id = None
    assert any(rows and waiting for rows, waiting in seen)


# -- stopping and going on --------------------------------------------------------------------------------------------------


def killed(folder, where, left):
    def die():
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "save":
        fsync = os.fsync
        os.fsync = lambda handle: (die(), fsync(handle))[1]
    make_data(folder, top=3, report=(lambda count: die()) if where == "step" else None)


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_killed_run_goes_on_and_nothing_is_lost_or_double(data, tmp_path, where):
    folder = tmp_path / "data"
    after = random.Random(os.urandom(4)).randrange(20, 110) if where == "step" else 5
    assert was_killed(killed, folder, where, after)
    before = {name: content for name, content in files(folder).items() if name.startswith("texts")}
    assert len(before) < 4
    make_data(folder, top=3)
    there = {name: content for name, content in files(folder).items() if not name.startswith(".")}
    assert there == files(data), f"killed after {after}"
    assert all(there[name] == content for name, content in before.items())


def test_what_is_there_is_not_made_again(data, tmp_path):
    counts = []
    make_data(data, top=3, report=counts.append)
    assert counts == []
    shard_file(data, 2).rename(tmp_path / "kept")
    with pytest.raises(ConfigurationError, match=r"3 of 4 shards.*--partial"):
        Texts(data)
    assert len(Texts(data, partial=True)) == 24
    make_data(data, top=3)
    assert shard_file(data, 2).read_bytes() == (tmp_path / "kept").read_bytes()


def test_parts_of_a_run_make_the_same_files(data, tmp_path):
    from foredraft.training import generation

    for part in ((2, 3), (3, 3), (1, 3)):
        generation.generate(tiny(), asked(), answering(top=3), tmp_path, source={}, per_shard=8, part=part)
    assert files(tmp_path) == files(data)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 3}, "seed was 0 and is now 3"),
        ({"temperatures": (0.5,)}, r"temperatures was \[0.0, 1.0\] and is now \[0.5\]"),
        ({"count": 24}, "count was 32 and is now 24"),
        ({"model": "other"}, "weights was .* and is now"),
    ],
)
def test_a_changed_setting_is_refused_by_name(data, changed, message):
    before = files(data)
    if "model" in changed:
        changed = {"model": perturbed()}
    with pytest.raises(ConfigurationError, match=message):
        make_data(data, **{"top": 3, **changed})
    assert files(data) == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"top_p": 1.5}, "top_p"),
        ({"batch": 0}, "batch"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 0, "top": 3}, "probabilities are recorded for answers"),
    ],
)
def test_settings_that_are_none(changed, message):
    with pytest.raises(ConfigurationError, match=message):
        answering(**changed)


def test_texts_as_they_are(tmp_path):
    make_data(tmp_path, count=11, per_shard=4, max_new_tokens=0)
    texts = Texts(tmp_path)
    assert len(texts.shards) == 3 and [text.tolist() for text in map(texts.__getitem__, range(11))] == asked()[:11]
    assert texts.lengths.tolist() == texts.prompt_lengths.tolist()


def test_texts_of_several_folders_are_read_together(data, tmp_path):
    make_data(tmp_path, count=5, max_new_tokens=0)
    both = Texts.together([Texts(data), Texts(tmp_path)])
    assert [both[index].tolist() for index in range(len(both))] == [
        part[index].tolist() for part in both.parts for index in range(len(part))
    ]
    assert len(both) == len(Texts(data)) + 5 and both.prompt(len(both) - 5) == asked()[0]
    assert both.digest() != Texts(data).digest()


# -- whose texts ------------------------------------------------------------------------------------------------------------


def test_texts_of_another_target_are_refused(data):
    manifest = Manifest.read(data)
    refuse_other_data(manifest, tiny())
    with pytest.raises(ConfigurationError, match=r"other weights.*--other-target"):
        refuse_other_data(manifest, perturbed())
    refuse_other_data(manifest, perturbed(), other_target=True)
    smaller = Manifest(**{**vars(manifest), "vocab_size": 100})
    with pytest.raises(ConfigurationError, match=r"another vocabulary .*100 and 128 ids"):
        refuse_other_data(smaller, tiny(), other_target=True)


def test_folders_that_are_none(tmp_path, data):
    with pytest.raises(ConfigurationError, match="holds no data; make some with: foredraft data generate"):
        Texts(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ConfigurationError, match="another format"):
        Texts(tmp_path)
    (tmp_path / "manifest.json").write_bytes((data / "manifest.json").read_bytes())
    shard_file(tmp_path, 0).write_bytes(shard_file(data, 0).read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"texts-00000.safetensors' is not a shard of texts"):
        Texts(tmp_path, partial=True)


# -- prompts ----------------------------------------------------------------------------------------------------------------


def zoo_tokenizer():
    from foredraft.zoo import load_tokenizer

    return load_tokenizer("python-8m")


def test_prompts_are_read_and_encoded(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "import os"}\n\n{"text": "def f():", "path": "x"}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    (tmp_path / "b.txt").write_text("class A:\n")
    entries = list(read_entries([tmp_path / "a.jsonl", tmp_path / "b.txt"]))
    assert entries == ["import os", "def f():", [{"role": "user", "content": "hi"}], "class A:\n"]
    tokenizer = zoo_tokenizer()
    with pytest.raises(ConfigurationError, match="no chat template"):
        [encode(tokenizer, each) for each in entries]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    ids = [encode(tokenizer, each) for each in entries]
    assert [tokenizer.decode(each) for each in ids] == ["import os", "def f():", "<hi>", "class A:\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not JSON"), ("[]", 'a text "prompt"'), ('{"prompt": 3}', 'a text "prompt"'), ('{"other": "x"}', 'a text "prompt"')],
)
def test_lines_that_are_no_prompts(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=f"a.jsonl, line 2.*{message}"):
        list(read_entries([tmp_path / "a.jsonl"]))


def test_windows_begin_with_lines_at_random_places():
    source = Path(json.__file__).read_text()
    tokenizer = zoo_tokenizer()
    found = windows(tokenizer, [source, "x = 1\n"], count=20, tokens=12, seed=0)
    lines = {line.rstrip() for line in source.splitlines()}
    assert all(len(ids) == 12 for ids in found) and len({tuple(ids) for ids in found}) > 10
    assert all(any(line.startswith(tokenizer.decode(ids).split("\n")[0].rstrip()[:20]) for line in lines) for ids in found)
    assert windows(tokenizer, [source], count=20, tokens=12, seed=1) != windows(tokenizer, [source], count=20, tokens=12, seed=0)
    with pytest.raises(ConfigurationError, match="no text with 50 tokens"):
        windows(tokenizer, ["x = 1\n"], count=1, tokens=50, seed=0)
    with pytest.raises(ConfigurationError, match="no text with 50 tokens"):
        windows(tokenizer, [""], count=1, tokens=50, seed=0)


# -- the command ------------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"text": "import os\\nimport sys\\n"}\n{"text": "def main():\\n"}\n')
    arguments = ["data", "generate", str(tmp_path / "prompts.jsonl"), "--target", "zoo:python-8m", "--out", str(tmp_path / "out")]
    arguments += [
        "--max-new-tokens",
        "8",
        "--temperature",
        "0,0.8",
        "--prompt-tokens",
        "5",
        "--top-k-probabilities",
        "2",
        "--shard-size",
        "1",
    ]
    for made in (2, 0):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert f"{made} shards made" in done.stdout
    done = CliRunner().invoke(app, ["data", "info", str(tmp_path / "out"), "--json"])
    facts = json.loads(done.stdout)
    assert (facts["target"], facts["texts"], facts["shards"], facts["of_shards"]) == ("zoo:python-8m", 2, 2, 2)
    assert (facts["prompt_tokens"], facts["answer_tokens"]) == (5 + 4, 16) and facts["settings"]["temperatures"] == [0.0, 0.8]
    done = CliRunner().invoke(app, [*arguments, "--seed", "7"])
    assert done.exit_code == 2 and "seed was 0 and is now 7" in done.stderr
    for wrong in (["--temperature", "x"], ["--part", "3/2"]):
        done = CliRunner().invoke(app, [*arguments, *wrong])
        assert done.exit_code == 2 and wrong[0] in done.stderr
