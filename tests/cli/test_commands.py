"""The command line, as a person meets it: what it prints where, what it refuses and how, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import typer
from helpers import forked
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from foredraft import Speculator, __version__, drafters, verification, zoo
from foredraft.cli import app, demo, main, printers
from foredraft.cli.demo import Comparison, Demo, Difference, Run, Setting
from foredraft.cli.figures import combine, counted, figures_line, sentence
from foredraft.cli.progress import Progress
from foredraft.cli.settings import Configuration, Decoding, parse_options
from foredraft.detokenizer import UNFINISHED, Detokenizer
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.loading import parse_device
from foredraft.planning import costs
from foredraft.speedup import Speedup
from foredraft.stats import Stats
from foredraft.target import Target
from foredraft.text import MAX_NEW_TOKENS

POISON = "~"  # the tiny model answers this token with NaN
EXACT = ("--target", "zoo:python-1m", "--dtype", "float32", "--max-new-tokens", "24")


def cli(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="foredraft")


def generate(*arguments, stdin=None):
    result = cli("generate", *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def hear_interrupts():
    """A process started in the background of a shell inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_a_terminal(stdout, stderr, *arguments):
    """A command without a drafter, in a process of its own."""
    hear_interrupts()
    sys.stdout, sys.stderr = (os.fdopen(each, "w") for each in (stdout, os.open(stderr, os.O_CREAT | os.O_WRONLY)))
    sys.argv = ["foredraft", *map(str, arguments), "--drafter", "none"]
    main()


def process(*arguments, **options):
    command = [sys.executable, "-m", "foredraft", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, **options)


@pytest.fixture(scope="session")
def tokenizer():
    return zoo.load_tokenizer("python-8m")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tokenizer):
    """A random model that never ends by itself, with a chat template and without a pad token."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, max_position_embeddings=32768, eos_token_id=None, **sizes))
    model.get_input_embeddings().weight.data[tokenizer(POISON)["input_ids"]] = float("nan")
    model.save_pretrained(folder)
    own = zoo.load_tokenizer("python-8m")
    own.chat_template = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    own.pad_token = None
    own.save_pretrained(folder)
    return folder


# -- help and lists -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        *map(
            str.split,
            ("", "generate", "chat", "demo", "models", "drafters", "rules", "audit", "tune", "alpha", "table", "theory", "skip search"),
        )
    ],
)
def test_help(command):
    result = cli(*command, "--help")
    assert result.exit_code == 0 and "Usage: foredraft" in result.stdout and "--help" in result.stdout


def test_help_begins_with_what_most_people_want():
    command = typer.main.get_command(app)
    assert list(command.list_commands(typer.Context(command)))[:3] == ["generate", "chat", "tune"]
    assert "foredraft[zoo]" in process("models", "--help").communicate()[0]


def test_one_is_singular():
    assert counted(1, "token") == "1 token" and counted(2000, "text") == "2,000 texts"
    assert counted(2, "target pass", "es") == "2 target passes"


def test_the_gpu_is_a_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    assert parse_device("gpu") == torch.device("cpu")
    generate("x", "--device", "gpu", "--max-new-tokens", 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "torch finds no GPU" in cli("generate", "x", "--device", "gpu").stderr


def test_every_option_of_generate_is_explained():
    text = process("generate", "--help", env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}).communicate()[0]
    options = (
        "target drafter drafter-option rule draft-length temperature top-k top-p min-p repetition-penalty stop seed max-new-tokens "
        "batch-size prompts chat system dtype device"
    )
    for option in [*options.split(), "threads", "json", "logprobs", "show", "json-schema", "regex", "grammar", "grammar-backend"]:
        line = next(line for line in text.splitlines() if f"--{option} " in line)
        assert line.rstrip("│ ").endswith((".", ")", "]")), line


def test_version_and_lists_of_files_need_no_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom foredraft.cli import app\n"
        "for arguments in (['--version'], ['models'], ['generate', '--help']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    assert cli("--version").stdout == f"foredraft {__version__}\n"


def test_a_terminal_that_lacks_a_character_shows_another():
    running = process("models", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    stdout, stderr = running.communicate()
    assert (running.returncode, stderr) == (0, "") and "?" in stdout and stdout.isascii()


def test_models_lists_all_and_labels_the_instrument():
    lines = cli("models").stdout.splitlines()
    for model in zoo.describe():
        line = next(line for line in lines if line.startswith(f"zoo:{model.name} "))
        assert f"{model.parameters:,}" in line
        assert ("benchmark instrument" in line) == (model.kind == "inflated")


def test_drafters_lists_all_with_options_and_defaults():
    text = cli("drafters").stdout
    for name in drafters.names():
        details = cli("drafters", name).stdout
        assert f"\n{name} " in text and drafters.find(name).summary in text and drafters.find(name).summary in details
        for option in drafters.options(name).values():
            shown = f"{option.name} (required)" if option.default is option.empty else f"{option.name}={option.default!r}"
            assert shown in text and shown in details
    unknown = cli("drafters", "nope")
    assert unknown.exit_code == 2 and "unknown drafter 'nope'" in unknown.stderr


def test_rules_lists_all():
    lines = cli("rules").stdout.splitlines()
    for name in verification.names():
        rule = verification.create(name)
        line = next(line for line in lines if line.startswith(f"{name} "))
        assert all(proposal in line for proposal in rule.proposals) if rule.lossless else " none " in line
        assert ("LOSSY" in line) == (not rule.lossless)


class Registered(PromptLookup):
    name = "registered"
    summary = "a drafter of this test"

    def __init__(self, *, depth: int = 2):
        super().__init__(max_ngram=depth)


def test_a_registered_drafter_is_found_by_name(monkeypatch):
    monkeypatch.setitem(drafters.REGISTRY, "registered", f"{__name__}:Registered")
    assert "a drafter of this test" in cli("drafters").stdout
    result = generate("a b a b", "--drafter", "registered", "--drafter-option", "depth=3", "--max-new-tokens", 4, "--verbose")
    assert "drafter registered" in result.stderr


# -- generate -----------------------------------------------------------------------------------------------------------


def test_prompt_from_argument_and_stdin_give_the_same_text():
    prompt = "def area(radius):\n"
    given = generate(prompt, *EXACT)
    assert given.stdout.strip() and given.stdout.endswith("\n")
    assert generate(*EXACT, stdin=prompt).stdout == generate("-", *EXACT, stdin=prompt).stdout == given.stdout


def test_stderr_says_in_one_sentence_whether_it_was_faster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "REPEATS", 7)  # where each pass is timed once, nothing counts as measured
    result = generate("def area(radius):\n", *EXACT, "--drafter", "draft-model:zoo:python-1m")
    (line,) = result.stderr.splitlines()
    assert "× plain decoding (measured)" in line or "drafting does not pay here: decoded plainly, nothing lost" in line
    assert "acceptance" not in line and "pass" not in line and "seed" not in line
    fixed = generate("a b a b a b", *EXACT, "--target", "zoo:python-1m", "--shape", "chain(2)")  # three tokens per pass
    assert "× plain decoding (measured)" in fixed.stderr
    assert generate("a b a b a b", *EXACT, "--drafter", "none").stderr == "plain decoding, as asked\n"


def test_verbose_shows_all_figures_in_one_line():
    result = generate("def area(radius):\n", *EXACT, "--drafter", "draft-model:zoo:python-1m", "--verbose")
    execution, _, line = result.stderr.splitlines()
    assert execution.startswith("execution ")
    for words in (" tokens/s", "acceptance length ", "target pass", " drafted, ", " accepted", "first token after", "rule match", "greedy"):
        assert words in line
    assert "drafter draft-model:zoo:python-1m" in line and "LOSSY" not in line and "seed" not in line
    assert "drafter none" in generate("x", *EXACT, "--drafter", "none", "--verbose", "--json").stderr


@pytest.mark.nightly  # what is interrupted below has the same libraries
def test_libraries_keep_quiet(tiny):
    running = process("generate", "x", "--target", tiny, "--max-new-tokens", 4)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 0 and stdout.strip()
    assert len(stderr.splitlines()) == 1 and "plain decoding" in stderr


def test_greedy_text_does_not_depend_on_the_drafter():
    texts = {
        generate("class Stack:\n    def push(self, item):\n", *EXACT, "--target", "zoo:python-8m", "--drafter", spec).stdout
        for spec in ("none", "prompt-lookup", "ngram", "draft-model:zoo:python-1m")
    }
    assert len(texts) == 1


def test_prompts_from_a_text_file_come_back_under_headers(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def first():\n\ndef second():\nclass Third:\n")
    text = generate("--prompts", file, *EXACT, "--batch-size", 2).stdout
    for header in ("── 1 of 3: def first():", "── 2 of 3: def second():", "── 3 of 3: class Third:"):
        assert text.count(header) == 1


def lines(*arguments):
    """What ``generate --json`` writes, in the order of the prompts."""
    return sorted(map(json.loads, generate(*arguments, "--json").stdout.splitlines()), key=lambda line: line["index"])


def test_json_is_a_line_per_prompt(tmp_path, tokenizer):
    file = tmp_path / "prompts.jsonl"
    prompts = ["def first():\n    return", "import os\nimport", "x"]
    file.write_text("".join(json.dumps({"prompt": prompt, "other": 1}) + "\n" for prompt in prompts))
    found = lines("--prompts", file, *EXACT, "--batch-size", 2)
    assert [line["prompt"] for line in found] == prompts and [line["index"] for line in found] == [0, 1, 2]
    for line in found:
        assert line["text"] == tokenizer.decode(line["tokens"], skip_special_tokens=True)
        assert line["finish_reason"] in ("eos", "length") and line["seed"] is None and line["target"] == "zoo:python-1m"
        assert line["stats"]["tokens"] == len(line["tokens"]) <= 24 and line["stats"]["acceptance_length"] >= 1


def test_json_has_log_probabilities_where_asked_for():
    (entry,) = lines("def first():\n    return", *EXACT, "--logprobs", 2)
    chosen, ids, values = (entry["logprobs"][name] for name in ("chosen", "ids", "values"))
    assert len(chosen) == len(ids) == len(values) == len(entry["tokens"])
    assert [best for best, _ in ids] == entry["tokens"], "greedy"
    assert chosen == pytest.approx([best for best, _ in values], abs=1e-5)
    assert all(second <= best <= 0 for best, second in values)
    own = lines("x", "--max-new-tokens", 3, "--logprobs", 0)[0]["logprobs"]
    assert len(own["chosen"]) == 3 and own["ids"] == [[]] * 3
    assert "logprobs" not in lines("x", "--max-new-tokens", 3)[0]


def test_json_says_null_where_there_is_no_figure():
    assert lines("x", "--max-new-tokens", 1)[0]["stats"]["acceptance_length"] is None


def test_a_seed_gives_its_text_whatever_the_drafter_and_the_batch(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("def one():\n", "import re\n", "def one():\n")))

    def texts(*arguments):
        found = lines("--prompts", file, *EXACT, "--temperature", 0.9, "--top-p", 0.95, *arguments)
        return [line["text"] for line in found], found[0]["seed"]

    reference = texts("--seed", 5, "--drafter", "none", "--batch-size", 1)
    assert reference[1] == 5 and reference[0][0] != reference[0][2], "each prompt has randomness of its own"
    assert texts("--seed", 5, "--drafter", "prompt-lookup", "--batch-size", 3) == reference
    assert texts("--seed", 6, "--drafter", "none")[0] != reference[0]


def test_without_a_seed_one_is_drawn_and_shown():
    first, second = (generate("def a", *EXACT, "--temperature", 1).stderr for _ in range(2))
    seeds = [line.rpartition("seed ")[2].split()[0] for line in (first, second)]
    assert seeds[0] != seeds[1] and all(seed.isdecimal() for seed in seeds)


def test_show_sets_accepted_tokens_off_in_brackets_and_changes_nothing_else():
    arguments = ("a = 1\nb = 2\na = 1\nb = 2\na =", *EXACT, "--shape", "chain(5)")
    shown, bare = generate(*arguments, "--show"), generate(*arguments)
    assert "⟦" in shown.stdout and "⟦drafted and accepted⟧" in shown.stderr and "\x1b" not in shown.stdout
    assert shown.stdout.replace("⟦", "").replace("⟧", "") == bare.stdout
    assert lines(*arguments)[0]["stats"]["accepted"] > 0


@pytest.mark.parametrize(("environment", "opening"), [({}, "\x1b[4;32m"), ({"NO_COLOR": "1"}, "⟦"), ({"TERM": "dumb"}, "⟦")])
def test_colour_on_a_terminal_unless_refused(monkeypatch, environment, opening):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, encoding="utf-8"))
    mark = printers.Marking(show=True)
    assert mark([("own ", False), ("draf", True), ("ted", True)]) == f"own {opening}drafted{mark.close}"
    assert mark([("\x1b]0;evil\x07\tb\n", False)]) == f"{UNFINISHED}]0;evil{UNFINISHED}\tb\n"


def test_chat_applies_the_template(tiny):
    how = ("--target", tiny, "--max-new-tokens", 8)
    assert lines("hello", *how, "--chat")[0]["tokens"] == lines("# user: hello\n", *how)[0]["tokens"]
    both = lines("hello", *how, "--chat", "--system", "be brief")[0]["tokens"]
    assert both == lines("# system: be brief\n# user: hello\n", *how)[0]["tokens"]
    assert "--system needs --chat" in cli("generate", "hello", *how, "--system", "be brief").stderr


def test_a_batch_without_a_pad_token(tiny, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a\nsome longer prompt\n")
    how = ("--target", tiny, "--max-new-tokens", 6)
    assert lines("--prompts", file, *how)[0]["tokens"] == lines("a", *how)[0]["tokens"]


def test_the_ngram_drafter_counts_a_text_with_the_targets_tokenizer(tmp_path):
    file = tmp_path / "counted.txt"
    file.write_text("from collections.abc import Callable\n" * 20)
    how = ("--drafter", f"ngram:{file}", "--drafter-option", "order=3", "--drafter-option", "learn=false", "--shape", "chain(3)")
    (line,) = lines("import os\n", *how, "--max-new-tokens", 8)
    assert line["stats"]["accepted"] > 0, "it drafts what the file has, in the target's tokens"


def test_greedy_decoding_says_that_filters_change_nothing():
    assert "--top-k, --top-p and --min-p change nothing" in generate("x", "--top-k", 5, "--max-new-tokens", 2).stderr


@pytest.fixture
def sampling(tiny):
    """``tiny`` with a generation config of its own."""
    own = tiny / "generation_config.json"
    before = own.read_text()
    own.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 5, "repetition_penalty": 1.3}))
    yield tiny
    own.write_text(before)


def test_the_models_generation_config_holds_as_in_python(sampling, tokenizer):
    """A model that samples by its own config samples here, with its filters, penalty and length."""
    (found,) = lines("a b", "--target", sampling, "--seed", 3)
    speculator = Speculator(str(sampling))
    expected = speculator.generate(**tokenizer("a b", return_tensors="pt"), seed=[(3, 0)]).sequences[0, -5:].tolist()
    assert found["tokens"] == expected and found["seed"] == 3 and Decoding().longest == MAX_NEW_TOKENS
    (greedy,) = lines("a b", "--target", sampling, "--temperature", 0, "--max-new-tokens", 7)
    assert len(greedy["tokens"]) == 7 and greedy["seed"] is None and greedy["tokens"][:5] != expected


def test_stop_min_p_and_repetition_penalty():
    assert lines("x = 1\nx = 1\nx", *EXACT)[0]["tokens"] != lines("x = 1\nx = 1\nx", *EXACT, "--repetition-penalty", 3)[0]["tokens"]
    (free,) = lines("import os\n", *EXACT)
    word = free["text"].split()[1]
    (stopped,) = lines("import os\n", *EXACT, "--stop", word, "--stop", "never there")
    assert stopped["finish_reason"] == "stop" and stopped["text"].count(word) == 1 and free["text"].startswith(stopped["text"])
    how = ("def a", *EXACT, "--temperature", 3, "--seed", 1)
    (likely,) = lines(*how, "--min-p", 1.0)
    assert likely["tokens"] == lines("def a", *EXACT)[0]["tokens"] != lines(*how)[0]["tokens"]


# -- refusals and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--drafter", "nope"), "unknown drafter 'nope'; choose none, prompt-lookup"),
        (("x", "--drafter", "draft-model"), "needs source; write 'draft-model:SOURCE'"),
        (("x", "--drafter", "draft-model:/no/such/path"), "no model at '/no/such/path'"),
        (("x", "--drafter-option", "nope=1"), "has no option 'nope'; its options: max_ngram, min_ngram"),
        (("x", "--learn"), "drafter 'prompt-lookup' has no option 'learn'"),
        (("x", "--learn", "--drafter-option", "learn=here"), "--learn and --drafter-option learn=here exclude each other"),
        (("x", "--drafter-option", "nope"), "takes KEY=VALUE, got 'nope'"),
        (("x", "--drafter-option", "max_ngram=many"), "drafter 'prompt-lookup' cannot take these options: max_ngram must be int"),
        (("x", "--rule", "nope"), "unknown rule 'nope'; choose auto, match"),
        (("x", "--rule", "rejection"), "not exact for deterministic proposals"),
        (("x", "--target", "/no/such/path"), "no model at '/no/such/path'"),
        (("x", "--target", "zoo:nope"), "no embedded model 'zoo:nope'; there are zoo:python-8m"),
        (("x", "--target", "zoo:python-ngram"), "is an n-gram table, not a model"),
        (("x", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("x", "--device", "nope"), "device 'nope' cannot be used here"),
        (("x", "--chat"), "has no chat template; give a text"),
        (("x", "--show", "--json"), "--show does not work with --json"),
        (("x", "--logprobs", "2"), "--logprobs needs --json"),
        (("x", "--logprobs", "999999", "--json"), "output_logprobs must be a whole number from 0"),
        (("x", "--draft-length", "-1"), "--draft-length"),
        (("x", "--top-p", "1.5"), "--top-p"),
        (("x", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("",), "the prompt is empty"),
        (("x", "--prompts", "x.txt"), "not both"),
        (("--prompts", "/no/such/file"), "cannot read '/no/such/file'"),
    ],
)
def test_what_cannot_work_is_refused_with_exit_code_2(arguments, message):
    result = cli("generate", *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output and result.stdout == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected an object with a text "prompt"'),
        (b"{\n", "line 1: this is not JSON"),
        (b'{"prompt": "\\ud800"}', "the prompt is not UTF-8"),
        (b'{"prompt": ""}\n{"prompt": "a"}\n', "prompt 1 is empty"),
        (b"\n\n", "contains no prompt"),
        (b"\xff", "is not UTF-8 text: invalid start byte at byte 0"),
    ],
)
def test_bad_files_of_prompts(tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    result = cli("generate", "--prompts", file)
    assert result.exit_code == 2 and message in result.stderr


def test_a_target_that_answers_nan_is_a_failure_while_running(tiny):
    result = cli("generate", f"a {POISON}", "--target", tiny)
    assert result.exit_code == 1 and "logits are NaN for row 0" in result.stderr and "Traceback" not in result.output


def test_out_of_memory_is_a_message(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("foredraft.cli.generation.Speculator", fail)
    result = cli("generate", "x")
    assert result.exit_code == 1 and "error: out of memory" in result.stderr


def test_a_full_context_ends_the_text_and_is_said(tiny, tokenizer):
    config = json.loads((tiny / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    (tiny / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32, "rope_parameters": rope}))
    try:
        result = generate("a b c d", "--target", tiny, "--max-new-tokens", 100, "--verbose")
    finally:
        (tiny / "config.json").write_text(json.dumps(config))
    expected = 32 - len(tokenizer("a b c d")["input_ids"])
    assert f"{expected} tokens" in result.stderr and "the model's context is full" in result.stderr


# -- Ctrl-C -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupt_prints_what_was_generated_and_the_figures(tiny, tmp_path):
    readable, writable = os.pipe()
    running = forked(in_a_terminal, writable, tmp_path / "stderr", "generate", "x", "--target", tiny, "--max-new-tokens", 30000)
    os.close(writable)
    with open(readable) as stdout:
        begin = stdout.read(1)
        os.kill(running.pid, signal.SIGINT)
        rest = stdout.read()
    running.join(timeout=60)
    assert running.exitcode == 130
    assert begin and rest.endswith("\n")
    stderr = (tmp_path / "stderr").read_text()
    assert stderr.startswith("interrupted · ") and "plain decoding" in stderr and len(stderr.splitlines()) == 1


def test_interrupt_with_json_still_gives_the_line(tiny, monkeypatch):
    calls, real = [], printers.JsonPrinter.committed

    def committed(self, result, pieces):
        real(self, result, pieces)
        calls.append(result)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(printers.JsonPrinter, "committed", committed)
    result = cli("generate", "x", "--target", tiny, "--max-new-tokens", 500, "--drafter", "none", "--json")
    line = json.loads(result.stdout)
    assert result.exit_code == 130 and line["finish_reason"] == "interrupted" and len(line["tokens"]) == 3


def test_interrupt_while_loading(monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("foredraft.cli.generation.load_tokenizer", interrupt)
    result = cli("generate", "x")
    assert result.exit_code == 130 and result.stderr == "interrupted\n"


# -- streaming without half characters ----------------------------------------------------------------------------------


def test_streamed_text_holds_no_half_characters(tokenizer):
    text = "naïve = '日本語 🙂👩‍🚀' # …\n" * 5
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any(UNFINISHED in tokenizer.decode([token]) for token in ids), "the text must have characters of several tokens"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert "".join(pieces) == text and not any(UNFINISHED in piece for piece in pieces)
    assert detokenizer.flush() == ""


def test_a_character_that_stays_unfinished_comes_out_at_the_end(tokenizer):
    ids = tokenizer("ok 🙂", add_special_tokens=False)["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.feed([token]) for token in ids) == tokenizer.decode(ids).rstrip(UNFINISHED)
    assert detokenizer.flush() == UNFINISHED


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_text(data, tokenizer):
    ids = data.draw(st.lists(st.integers(0, 4095) | st.integers(2, 257), max_size=80))
    cut = data.draw(st.integers(0, len(ids)))
    whole, begun = tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(ids[:cut], skip_special_tokens=True)
    if begun.endswith(UNFINISHED):
        return  # prompts are whole texts
    detokenizer = Detokenizer(tokenizer, ids[:cut])
    assert "".join(detokenizer.feed([token]) for token in ids[cut:]) + detokenizer.flush() == whole[len(begun) :]


def test_bytes_that_are_no_characters_cost_no_more_than_others(tokenizer):
    """A window that waited for a character to end would grow with the text."""

    class Counting:
        tokens = 0

        def decode(self, ids, **options):
            self.tokens += len(ids)
            return tokenizer.decode(ids, **options)

    lone = tokenizer("\N{GRINNING FACE}")["input_ids"][-1]
    assert tokenizer.decode([lone]) == UNFINISHED
    for prompt, ids in (([], [lone] * 500), ([lone] * 500, [lone] * 100), ([], tokenizer("日" * 200)["input_ids"])):
        counting = Counting()
        detokenizer = Detokenizer(counting, prompt)
        text = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush()
        assert text == tokenizer.decode(ids)
        assert counting.tokens < 100 * len(ids)


def test_spaces_and_bytes_of_a_sentencepiece_tokenizer():
    words = ["▁a", "▁b", "c", "<0xE6>", "<0x97>", "<0xA5>"]
    raw = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    detokenizer = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), [0])
    assert [detokenizer.feed([token]) for token in (1, 2, 3, 4, 5, 1)] == [" b", "c", "", "", "日", " b"]
    assert "".join(detokenizer.feed([token]) for token in (3, 4, 5) * 30) == "日" * 30  # longer than any window
    assert detokenizer.feed((3, 4, 5) * 30 + (3,)) == "日" * 30  # however many come together


# -- parts --------------------------------------------------------------------------------------------------------------


def test_option_values():
    given = ["a=1", "b=0.5", "c=true", "d=None", "e=zoo:x=y", "f-g=-3", 'h={"share": 0.1, "cores": [1]}', "i={source} German:"]
    plain = {"a": 1, "b": 0.5, "c": True, "d": None, "e": "zoo:x=y", "f_g": -3, "i": "{source} German:"}
    assert parse_options(given) == {**plain, "h": {"share": 0.1, "cores": [1]}}


def test_default_drafters():
    assert Configuration("zoo:python-8m").drafter_name == "prompt-lookup"
    assert Configuration("zoo:python-300m").drafter_name == "draft-model:zoo:python-1m"
    assert Configuration("zoo:python-300m", drafter="none").drafter_name == "none"


def test_figures_of_several_calls_add_up():
    first = Stats(
        target_passes=3, row_passes=2, new_tokens=5, kept=4, drafted=6, accepted=2, drafted_by_depth=[2, 1], accepted_by_depth=[2]
    )
    second = Stats(target_passes=2, row_passes=1, new_tokens=2, kept=1, drafted=1, accepted=0, drafted_by_depth=[1], accepted_by_depth=[])
    first.speedup, second.speedup = Speedup(seconds=1.0, plain=1.0, replaced=1.0), Speedup(seconds=2.0, replaced=4.0)
    first.seconds["total"], second.seconds["total"], first.time_to_first_token = 1.0, 2.5, 0.25
    total = combine([first, second], seed=9)
    assert (total.target_passes, total.new_tokens, total.drafted_by_depth, total.accepted_by_depth) == (5, 7, [3, 1], [2])
    assert total.acceptance_length == 5 / 3 and total.tokens_per_second == 2.0 and total.time_to_first_token == 0.25
    assert "7 tokens · 2.0 tokens/s · acceptance length 1.67 · 5 target passes" in figures_line(total, drafter="none", sampled=True)
    assert total.speedup.seconds == 3.0 and total.speedup.value == 2.0


def test_a_lossy_rule_names_the_flag_that_accepts_it(tiny):
    result = cli("generate", "x", "--target", tiny, "--rule", "typical")
    assert result.exit_code == 2 and "'typical' is lossy" in result.stderr and "--lossy" in result.stderr


def test_several_drafters_may_count_a_text(tmp_path, tiny):
    (tmp_path / "corpus.txt").write_text("def f(x):\n    return x\n" * 20)
    arguments = ("--target", tiny, "--max-new-tokens", 8)
    alone = cli("generate", "def f", *arguments, "--drafter", "none")
    merged = cli("generate", "def f", *arguments, "--drafter", f"several:prompt-lookup, ngram:{tmp_path / 'corpus.txt'}")
    assert (merged.exit_code, merged.stdout) == (0, alone.stdout), merged.stderr
    unknown = cli("generate", "x", *arguments, "--drafter", "several:prompt-lookup,nonsense")
    assert unknown.exit_code == 2 and "nonsense" in unknown.stderr


def test_a_lossy_rule_is_called_lossy():
    stats = Stats(rule="typical", lossless=False, seed=1)
    assert "LOSSY: rule typical" in sentence(stats, sampled=True) and "LOSSY" not in sentence(stats, sampled=False)


# -- demo ---------------------------------------------------------------------------------------------------------------


def test_demo_shows_transformers_plain_and_drafted_decoding_side_by_side():
    result = cli("demo", "--max-new-tokens", 6, "--seconds", 1)
    assert result.exit_code == 0, result.output
    said = result.stdout
    for words in (
        "\ntransformers ",
        "Foredraft, plain decoding",
        "Foredraft, draft-model:zoo:python-1m",
        "Foredraft, prompt-lookup",
        "× transformers",
    ):
        assert said.count(words) == 2, words
    assert said.count("The text is the same in all 4 ways, token for token.") == 2
    for drafter in ("draft-model:zoo:python-1m: ", "prompt-lookup: "):
        lines = [line for line in said.splitlines() if line.startswith(drafter)]
        assert len(lines) == 2 and all("plain decoding (measured)" in line or "nothing lost" in line for line in lines)
    assert "float32, cpu, 1 thread" in said and "s left" in said and "benchmark instrument" not in said


def test_demo_ends_in_time_on_a_machine_that_is_far_too_slow(monkeypatch):
    def slow(self, *arguments, **options):
        time.sleep(0.1)
        return forward(self, *arguments, **options)

    forward = Target.score
    monkeypatch.setattr(Target, "score", slow)
    monkeypatch.setattr("foredraft.cli.demo.TURNS", 50)
    load = Demo.__init__

    def late(self, setting, progress):
        load(self, setting, progress)
        self.deadline = time.monotonic() + 2.0  # loading is not cut short

    monkeypatch.setattr(Demo, "__init__", late)
    setting = Setting(drafters=("prompt-lookup",), max_new_tokens=10_000)
    demo = Demo(setting, Progress("loading"))
    for speculator in demo.speculators.values():
        speculator.planner.budget = 0.0
    begin = time.monotonic()
    comparisons = list(demo.compare())
    assert time.monotonic() - begin < 8.0 and len(comparisons) == 2
    assert all(0 < len(run.tokens) < 10_000 for each in comparisons for runs in each.runs.values() for run in runs)
    assert not any(each.differences for each in comparisons)  # texts of different lengths are compared as far as they go


def test_demo_labels_the_benchmark_instrument(capsys):
    model = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu"))
    setting = Setting("zoo:python-300m")
    demo.introduce(Console(width=200), SimpleNamespace(setting=setting, model=model, prompts=["a", "b"], left=9.0))
    assert "benchmark instrument: the same 8 M model inflated to the cost of 300 M" in capsys.readouterr().out


def test_demo_does_not_hide_a_wrong_text(monkeypatch):
    run = Demo._run

    def tampered(self, way, *arguments):
        done = run(self, way, *arguments)
        if way == "prompt-lookup":
            done.tokens[2] = (done.tokens[2] + 1234) % 4096
        return done

    monkeypatch.setattr(Demo, "_run", tampered)
    monkeypatch.setattr("foredraft.cli.demo.ROUNDING", 0)
    result = cli("demo", "--drafter", "prompt-lookup", "--max-new-tokens", 4, "--seconds", 2)
    assert result.exit_code == 1 and "This is a defect" in " ".join(result.stdout.split())
    assert "leaves that of transformers at new token 3" in result.stdout


def test_demo_explains_ties_in_one_line_and_says_what_is_slower():
    tie = Difference("prompt-lookup", 21, 0.0625, 0.0625)
    assert tie.explained and "new token 22" in demo.explanation(tie) and "tie" in demo.explanation(tie)
    assert not Difference("prompt-lookup", 21, 1.5, 0.0625).explained
    runs = {"none": [Run([1] * 10, 1.0)], "ngram": [Run([1] * 8, 1.0)], "suffix": [Run([1] * 25, 1.0)]}
    compared = Comparison("", "", runs, [])
    assert demo.verdict(compared, "ngram") == "0.80× plain decoding (measured)"
    assert demo.verdict(compared, "suffix") == "2.5× plain decoding (measured)"
