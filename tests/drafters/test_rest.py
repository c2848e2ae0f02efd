"""The datastore against naive search, its files under crashes, two writers and strangers, and the drafter that retrieves from it."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from cover import covered
from helpers import PAD, alone, forked, generate, padded, plainly, prompts, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from foredraft import ConfigurationError, Speculator, loading, zoo
from foredraft.cli import app
from foredraft.drafters.datastore import SIBLINGS, SORTED, Datastore, most_frequent
from foredraft.drafters.ngram_model import NGramModel
from foredraft.drafters.rest import Rest
from foredraft.drafters.stores import sorted_positions
from foredraft.drafters.tries import Trie
from foredraft.files import replacing
from foredraft.loading import load_tokenizer

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6).filter(any)
VOCAB = 5


# -- the suffix array -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_positions_are_in_the_order_of_what_follows(text: list[int]):
    order = sorted_positions(np.array(text, np.uint16), SORTED, "stable").tolist()
    assert order == sorted(range(len(text)), key=lambda position: (text[position : position + SORTED], position))


def test_long_repetitions_are_sorted_as_far_as_is_promised():
    text = [1, 2] * 500 + [0] + [1, 2] * 500
    order = sorted_positions(np.array(text, np.uint16), SORTED, "stable").tolist()
    keys = [text[position : position + SORTED] for position in order]
    assert keys == sorted(keys) and sorted(order) == list(range(len(text)))


@settings(deadline=None)
@given(
    DOCUMENTS, st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 3), st.sampled_from([VOCAB, 1 << 16])
)
def test_the_longest_ending_is_found_with_all_its_occurrences(documents, context, longest, shortest, vocab_size):
    store = Datastore.build(documents, vocab_size=vocab_size)
    tokens = store.tokens.tolist()
    occurring = {
        length: [place for place in range(len(tokens)) if tokens[place : place + length] == context[-length:]]
        for length in range(1, min(longest, len(context)) + 1)
    }
    expected = max((length for length, places in occurring.items() if places), default=0)
    found = store.find(context, longest=longest, shortest=shortest)
    if expected < shortest:
        assert found is None
    else:
        assert found is not None and found.length == expected
        assert sorted(store.suffixes[found.first : found.last].tolist()) == occurring[expected]


@settings(deadline=None)
@given(DOCUMENTS, st.integers(0, 3), st.integers(1, 5), st.integers(1, 12))
def test_the_trie_holds_the_most_frequent_continuations(documents, token, depth, budget):
    store = Datastore.build(documents, vocab_size=VOCAB)
    found = store.occurrences([token])
    if found is None:
        return
    trie = Trie()
    most_frequent(trie, store.followers(found, depth, 10_000), store.separator, budget=budget, chain=False)
    counts: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for place, each in enumerate(document):
            if each == token:
                for length in range(1, depth + 1):
                    if place + length < len(document):
                        counts[tuple(document[place + 1 : place + 1 + length])] += 1
    said = [()]
    for new, parent in zip(trie.tokens, trie.parents):
        said.append((*said[parent], new))
    mine = [counts[text] for text in said[1:]]
    assert len(set(said)) == len(said) and mine == sorted(mine, reverse=True)
    assert mine == sorted(counts.values(), reverse=True)[:budget]
    chain = Trie()
    most_frequent(chain, store.followers(found, depth, 10_000), store.separator, budget=depth, chain=True)
    text: tuple[int, ...] = ()
    for new in chain.tokens:
        assert counts[(*text, new)] == max(counts[(*text, other)] for other in range(VOCAB))
        text = (*text, new)
    assert chain.parents == list(range(len(text)))
    assert len(text) == depth or not any(counts[(*text, other)] for other in range(VOCAB))


def test_many_siblings_and_many_occurrences_are_bounded():
    store = Datastore.build([[0, token] for token in range(1, 40)] * 3 + [[0, 40]] * 900, vocab_size=41)
    found = store.occurrences([0])
    assert found is not None and found.count == 3 * 39 + 900
    followers = store.followers(found, 3, 100)
    assert followers.shape == (100, 3)
    spread = store.followers(found, 1, 100)[:, 0].tolist()
    assert 85 <= spread.count(40) <= 92, "occurrences are taken evenly from all"
    trie = Trie()
    most_frequent(trie, store.followers(found, 1, 10_000), store.separator, budget=64, chain=False)
    assert trie.tokens[0] == 40 and len(trie.tokens) == SIBLINGS


def test_ids_of_large_vocabularies():
    store = Datastore.build([[99_999, 1, 99_999, 2], [70_000, 99_999, 1]], vocab_size=100_000)
    assert store.tokens.dtype == np.uint32 and store.separator == 2**32 - 1
    found = store.find([5, 70_000, 99_999], longest=3)
    assert found is not None and (found.length, found.count) == (2, 1)
    edge = Datastore.build([[65_534, 3, 65_534]], vocab_size=65_535)
    assert edge.tokens.dtype == np.uint16 and edge.find([65_534], longest=1).count == 2
    assert store.occurrences([100_000]) is None and store.occurrences([-1]) is None


@pytest.mark.parametrize(
    ("documents", "vocab_size", "message"),
    [
        ([[1, 7]], 5, "token id 7 is outside the vocabulary of 5"),
        ([[-1]], 5, "token id -1"),
        ([], 5, "no tokens"),
        ([[], []], 5, "no tokens"),
        ([[[1, 2]]], 5, "one sequence"),
        ([[1]], 0, "vocab_size"),
    ],
)
def test_what_makes_no_datastore(documents, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        Datastore.build(documents, vocab_size=vocab_size)


# -- files ----------------------------------------------------------------------------------------------------------------


def a_store(seed: int = 0, tokens: int = 2000, fingerprint: str = "") -> Datastore:
    generator = np.random.default_rng(seed)
    return Datastore.build([generator.integers(0, 50, tokens)], vocab_size=64, fingerprint=fingerprint)


def same(one: Datastore, other: Datastore) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "suffixes", "starts"))


def test_a_saved_store_is_the_same_and_a_safetensors_file(tmp_path: Path):
    store = a_store(fingerprint="abc")
    store.save(tmp_path / "new" / "store")
    loaded = Datastore.load(tmp_path / "new" / "store")
    assert same(store, loaded) and (loaded.vocab_size, loaded.fingerprint, loaded.documents) == (64, "abc", 1)
    assert isinstance(loaded.tokens, np.memmap) and not loaded.tokens.flags.writeable
    assert np.array_equal(load_file(tmp_path / "new" / "store")["suffixes"], store.suffixes)
    assert loaded.find([1, 2, 3], longest=3) == store.find([1, 2, 3], longest=3)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["store"]


def test_a_new_file_has_the_usual_mode_and_the_umask_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another thread may make a file meanwhile; or read the umask in the same way, and put back what it found, which is none."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    with replacing(tmp_path / "file") as new:
        new.write_text("")
    (tmp_path / "usual").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_lookups_read_a_few_pages_of_a_large_store(tmp_path: Path):
    a_store(tokens=400_000).save(tmp_path / "store")
    size = (tmp_path / "store").stat().st_size
    tracemalloc.start()
    drafter = Rest(tmp_path / "store")
    for seed in range(20):
        context = np.random.default_rng(seed).integers(0, 50, 30).tolist()
        found = drafter.store.find(context, longest=16)
        assert found is not None
        most_frequent(Trie(), drafter.store.followers(found, 12, 512), drafter.store.separator, budget=64, chain=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 2_000_000 and peak < 400_000


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
@pytest.mark.parametrize("kind", ["datastore", "ngram"])
def test_a_crash_while_saving_leaves_the_old_file_whole(at: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "store"
    old, new = (a_store(0), a_store(1)) if kind == "datastore" else (NGramModel.from_tokens([[1, 2, 3]]), NGramModel.from_tokens([[4, 5]]))
    old.save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        if at == "write":
            Path(args[1]).write_bytes(b"half of it")
        raise OSError("the disk is full")

    target = {
        "write": "safetensors.numpy.save_file",
        "fsync": "foredraft.files.os.fsync",
        "replace": "foredraft.files.os.replace",
    }
    monkeypatch.setattr(target[at], fail)
    with pytest.raises(OSError, match="disk is full"):
        new.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["store"]
    new.save(path)
    assert path.read_bytes() != before


def write(seed: int, rounds: int, path: Path) -> None:
    store = Datastore.build([np.random.default_rng(seed).integers(0, 50, 20_000 + seed)], vocab_size=64, fingerprint=str(seed))
    for _ in range(rounds):
        store.save(path)


def whole(store: Datastore) -> bool:
    """Its parts belong together: the tokens are those of its fingerprint, and the order is theirs."""
    seed = int(store.fingerprint)
    tokens = np.append(np.random.default_rng(seed).integers(0, 50, 20_000 + seed), store.separator)
    return np.array_equal(store.tokens, tokens) and np.array_equal(np.sort(store.suffixes), np.arange(20_000 + seed))


def test_two_processes_do_not_corrupt_one_store_nor_what_is_being_read(tmp_path: Path):
    path = tmp_path / "store"
    a_store(0).save(path)
    held = Datastore.load(path)
    kept = held.tokens.copy()
    writers = [forked(write, seed, 40, path) for seed in (1, 2)]
    seen = set()
    while any(each.is_alive() for each in writers):
        store = Datastore.load(path)
        seen.add(store.fingerprint)
        assert store.fingerprint == "" or whole(store)
    assert [each.exitcode for each in writers] == [0, 0]
    assert whole(Datastore.load(path)) and seen & {"1", "2"}
    assert np.array_equal(held.tokens, kept), "whoever has it open goes on with what was there"
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


def test_a_killed_writer_leaves_a_whole_store(tmp_path: Path):
    path = tmp_path / "store"
    for seed in (1, 2):
        process = forked(write, seed, 10**6, path)
        while not path.exists():
            assert process.is_alive()
        for _ in range(20):
            assert whole(Datastore.load(path))
        process.kill()
        process.join()
        assert whole(Datastore.load(path))


def test_files_of_another_kind_are_refused(tmp_path: Path):
    path = tmp_path / "x"
    with pytest.raises(ConfigurationError, match="foredraft datastore build"):
        Rest(path)
    for content in (b"", b"no tensors here, not at all", b"\xff" * 40, (20).to_bytes(8, "little") + b'{"__metadata__": 3}  '):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="not a safetensors file"):
            Rest(path)
    save_file({"weight": np.zeros(1, np.int64)}, path)
    with pytest.raises(ConfigurationError, match="not written by"):
        Rest(path)
    a_store().save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ConfigurationError, match="cut short"):
        Rest(path)
    path.write_bytes(content.replace(b'"version":"1"', b'"version":"9"'))
    with pytest.raises(ConfigurationError, match="version 9"):
        Rest(path)
    arrays = load_file(path) if path.write_bytes(content) else {}
    metadata = {"format": "foredraft-datastore", "version": "1", "vocab_size": "64", "tokenizer": ""}
    save_file({**arrays, "starts": arrays["starts"][:-1]}, path, metadata)
    with pytest.raises(ConfigurationError, match="do not fit together"):
        Rest(path)
    save_file({"tokens": arrays["tokens"]}, path, metadata)
    with pytest.raises(ConfigurationError, match="missing"):
        Rest(path)


# -- the drafter ----------------------------------------------------------------------------------------------------------


def corpus(rows: list[list[int]], new: int = 24) -> Datastore:
    """What the target says after each of ``rows``, so that there is something to find."""
    return Datastore.build([row[-20:] + alone(tiny(), row, max_new_tokens=new) for row in rows], vocab_size=128)


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 4}


@pytest.mark.parametrize(
    ("shape", "options"), covered(["chain(5)", "product(3,2,1)", "dynamic(depth=4,k=3,total=9)"], [{}, SAMPLED], ways=1)
)
def test_the_text_is_that_of_plain_decoding(shape: str, options: dict):
    rows = prompts()
    expected = plainly(tiny(), rows, max_new_tokens=24, **options)
    speculator = Speculator(tiny(), drafter=Rest(corpus(rows)), shape=shape)
    out = speculator.generate(**padded(rows), max_new_tokens=24, pad_token_id=PAD, **options)
    assert [row[-24:] for row in out.sequences.tolist()] == expected
    if not options:
        assert expected == [alone(tiny(), row, max_new_tokens=24) for row in rows]
        assert out.stats.accepted > 20


def test_what_was_seen_is_drafted_whole():
    rows = prompts((40,))
    stats = Speculator(tiny(), drafter=Rest(corpus(rows)), shape="chain(6)").generate(**padded(rows), max_new_tokens=22).stats
    assert stats.accepted == stats.drafted and stats.target_passes == 1 + 3


def test_tokens_that_the_target_does_not_know_end_a_draft():
    store = Datastore.build([[1, 2, 3, 90, 5], [1, 2, 3, 90, 5]], vocab_size=128)
    found = store.find([1, 2], longest=4)
    assert found is not None and (found.length, found.count) == (2, 2)
    trie = Trie()
    most_frequent(trie, store.followers(found, 3, 9), 90, budget=9, chain=False)
    assert trie.tokens == [3]


@pytest.mark.parametrize(
    "options", [{"max_match": 0}, {"min_match": 0}, {"min_match": 5, "max_match": 4}, {"max_match": 64}, {"occurrences": 0}]
)
def test_options_that_make_no_sense(options):
    with pytest.raises(ConfigurationError, match=r"rest needs"):
        Rest(a_store(), **options)


def test_a_store_of_another_tokenizer_is_refused():
    mine = loading.fingerprint(load_tokenizer("zoo:python-8m"))
    store = Datastore.build([[5, 6, 7]], vocab_size=4096, fingerprint=mine)
    speculator = Speculator("zoo:python-8m", drafter=Rest(store), dtype="float32")
    assert loading.fingerprint_of(speculator.target.model) == mine
    other = Datastore.build([[5, 6, 7]], vocab_size=4096, fingerprint="0" * 32)
    for drafter in (Rest(other), "several"):
        options = {"drafter_options": {"source": [Rest(other), "prompt-lookup"]}} if drafter == "several" else {}
        with pytest.raises(ConfigurationError, match="another tokenizer"):
            Speculator("zoo:python-8m", drafter=drafter, dtype="float32", **options)
    with pytest.raises(ConfigurationError, match="300 token ids, the target 128"):
        Speculator(tiny(), drafter=Rest(Datastore.build([[1, 299]], vocab_size=300)))
    unnamed = Speculator(tiny(), drafter=Rest(Datastore.build([[1, 2]], vocab_size=100, fingerprint="0" * 32)))
    assert generate(unnamed, repetitive((20,)), max_new_tokens=4) == [alone(tiny(), repetitive((20,))[0], max_new_tokens=4)]


def test_a_fingerprint_is_of_what_ids_mean():
    class Words:
        def __init__(self, words):
            self.words = words

        def get_vocab(self):
            return dict(self.words)

    one = loading.fingerprint(Words([("a", 0), ("b", 1)]))
    assert one == loading.fingerprint(Words([("b", 1), ("a", 0)]))
    assert one != loading.fingerprint(Words([("b", 0), ("a", 1)]))
    assert one != loading.fingerprint(Words([("a", 0), ("b", 2)]))


# -- the command line -----------------------------------------------------------------------------------------------------


def cli(*arguments):
    return CliRunner().invoke(app, ["datastore", *map(str, arguments)])


def test_building_a_datastore_and_drafting_from_it(tmp_path: Path):
    (tmp_path / "a.py").write_text("for index in range(10):\n    print(index)\n" * 4)
    (tmp_path / "b.jsonl").write_text('{"text": "def area(width, height):\\n    return width * height\\n"}\n\n{"text": "import os\\n"}\n')
    out = tmp_path / "store"
    result = cli("build", tmp_path / "a.py", tmp_path / "b.jsonl", "--target", "zoo:python-8m", "--out", out)
    assert result.exit_code == 0 and "3 documents" in result.stdout, result.output
    tokenizer = zoo.load_tokenizer("zoo:python-8m")
    store = Datastore.load(out)
    text = (tmp_path / "a.py").read_text()
    assert store.tokens[: len(tokenizer(text)["input_ids"])].tolist() == tokenizer(text)["input_ids"]
    assert store.fingerprint == loading.fingerprint(tokenizer)
    details = cli("info", out)
    assert details.exit_code == 0 and store.fingerprint in details.stdout and f"{len(store.suffixes)} tokens" in details.stdout
    assert json.loads(cli("info", out, "--json").stdout)["tokens"] == len(store.suffixes)
    prompt = torch.tensor([tokenizer("for index in range(10):\n    print(index)\nfor index")["input_ids"]])
    speculator = Speculator("zoo:python-8m", drafter=f"rest:{out}", dtype="float32", shape="chain(4)")
    plain = Speculator("zoo:python-8m", drafter="none", dtype="float32")
    found = speculator.generate(prompt, max_new_tokens=16)
    assert found.sequences.tolist() == plain.generate(prompt, max_new_tokens=16).sequences.tolist() and found.stats.accepted > 0
    sourced = cli("build", tmp_path / "a.py", "--target", "zoo:t5-ast", "--out", out)
    assert sourced.exit_code == 0 and Datastore.load(out).fingerprint == loading.fingerprint(zoo.load_tokenizer("zoo:t5-ast"))


def test_what_can_not_be_built(tmp_path: Path):
    good = tmp_path / "good.txt"
    good.write_text("some text")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"prompt": "no text"}\n')
    (tmp_path / "worse.jsonl").write_text("{nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    out = tmp_path / "store"
    target = ("--target", "zoo:python-8m", "--out", out)
    for files, message in (
        ((tmp_path / "missing",), "cannot read"),
        ((tmp_path,), "is a folder"),
        ((good, tmp_path / "bad.jsonl"), 'line 2: a line of a .jsonl file must be a JSON object with a "text"'),
        ((tmp_path / "worse.jsonl",), "line 1: this is not JSON"),
        ((tmp_path / "binary",), "not UTF-8 text"),
        ((tmp_path / "empty",), "no tokens"),
    ):
        result = cli("build", *files, *target)
        assert result.exit_code == 2 and message in result.output, (message, result.output)
        assert not out.exists()
    result = cli("build", good, "--target", "zoo:nothing", "--out", out)
    assert result.exit_code == 2 and not out.exists()
    result = cli("build", good, "--target", "zoo:python-8m", "--out", tmp_path)
    assert result.exit_code == 2 and "is a folder" in result.output
    assert cli("build", "--target", "x", "--out", out).exit_code == 2
    result = cli("info", tmp_path / "nothing")
    assert result.exit_code == 2 and "there is no datastore" in result.output


def test_a_datastore_written_under_the_former_name_loads(tmp_path):
    path = tmp_path / "store"
    a_store().save(path)
    data = path.read_bytes()
    assert data.count(b"foredraft-datastore") == 1
    path.write_bytes(data.replace(b"foredraft-datastore", b"foretoken-datastore"))
    assert len(Datastore.load(path).tokens) == len(a_store().tokens)
