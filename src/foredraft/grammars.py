"""Grammars of llguidance, xgrammar and outlines-core: text that matches a JSON schema, a regular expression or a grammar.

A :class:`Grammar` is a logits processor for Foredraft. The libraries compile it and fill bit masks of allowed tokens in their own code;
:mod:`foredraft.logits.grammar_masks` walks them along the paths of a draft tree. Importing this loads no library, and neither torch nor
NumPy.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from foredraft.errors import ConfigurationError, GrammarError, unknown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Masks = npt.NDArray[np.int32]  # [n, words]: bit t of a row says whether token t is allowed

Kind = Literal["json_schema", "regex", "grammar"]
FORCED = 16  # tokens that are looked for ahead
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # how llguidance is to have JSON written
MODULES = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}  # in order of preference


def choose_backend(backend: str = "auto") -> str:
    """The library to use: the one named, or the first that is installed.

    Raises:
        ConfigurationError: an unknown name, or it is not installed; the message names the extra to install.
    """
    if backend not in ("auto", *MODULES):
        raise unknown("unknown grammar backend", backend, ["auto", *MODULES])
    wanted = MODULES if backend == "auto" else [backend]
    found = next((name for name in wanted if find_spec(MODULES[name])), None)
    if found is None:
        extra = "grammar" if backend == "auto" else backend
        what = "no grammar library is" if backend == "auto" else f"{MODULES[backend]} is not"
        raise ConfigurationError(f"{what} installed: pip install 'foredraft[{extra}]'")
    return found


class Compiled(ABC):
    """A grammar that a library compiled for one vocabulary. Its matchers hold the state of one text each.

    Args:
        tokenizer: a fast tokenizer of transformers.
        ends: the tokens that may end a text. A complete text can go on with them alone.
        kind, source: a JSON schema, a regular expression or a grammar, as text.

    Raises:
        Exception: whatever the library raises on a source that it cannot use.
    """

    def __init__(self, tokenizer: Any, ends: tuple[int, ...], kind: Kind, source: str):
        self.tokenizer, self.ends = tokenizer, ends
        self.width = width(tokenizer, ends)

    @property
    def words(self) -> int:
        return (self.width + 31) // 32

    @cached_property
    def end_mask(self) -> Masks:
        """``[words]``: only the tokens that end a text."""
        import numpy as np

        bits = np.zeros(self.words * 32, np.uint8)
        bits[list(self.ends)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    @abstractmethod
    def start(self) -> Any:
        """A matcher before the first token."""

    @abstractmethod
    def accept(self, matcher: Any, token: int) -> bool:
        """Go on by ``token``, which ends no text. If it is forbidden, return False and change nothing."""

    def rollback(self, matcher: Any, count: int) -> None:
        """Take the last ``count`` tokens back."""
        matcher.rollback(count)

    @abstractmethod
    def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
        """Write the tokens that may follow in each of the different ``matchers`` to ``masks`` ``[n, words]``, which hold zeros."""

    def forced(self, matcher: Any) -> list[int]:
        """Tokens that the grammar leaves no choice about, up to :data:`FORCED` of them; ``matcher`` stays where it is."""
        import numpy as np

        found: list[int] = []
        while len(found) < FORCED:
            masks = np.zeros((1, self.words), np.int32)
            self.fill([matcher], masks)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            if len(allowed) != 1 or allowed[0] in self.ends or not self.accept(matcher, int(allowed[0])):
                break
            found.append(int(allowed[0]))
        self.rollback(matcher, len(found))
        return found


class LLGuidance(Compiled):
    """https://github.com/guidance-ai/llguidance. Grammars are Lark, or EBNF as llama.cpp has it."""

    def __init__(self, tokenizer: Any, ends: tuple[int, ...], kind: Kind, source: str, *, most_items: int | None = None):
        import llguidance

        super().__init__(tokenizer, ends, kind, source)
        if kind == "json_schema":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(source, defaults=ONE_LINE)
        else:
            grammar = llguidance.grammar_from("ebnf" if is_ebnf(kind, source) else "lark" if kind == "grammar" else kind, source)
        limits = llguidance.LLParserLimits(step_max_items=most_items)
        self.first = llguidance.LLMatcher(_llguidance_tokenizer(tokenizer, self.width, ends), grammar, log_level=0, limits=limits)
        if self.first.is_error():
            raise ValueError(self._why(self.first))

    def start(self) -> Any:
        return self.first.deep_copy()

    def accept(self, matcher: Any, token: int) -> bool:
        accepted = bool(matcher.try_consume_tokens([token]))
        if not accepted:
            self._check(matcher)
        return accepted

    def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
        size = masks.shape[1] * masks.itemsize
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, size)
        else:
            numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
            _llguidance_executor(threads()).unsafe_compute_mask_ptr(numbered, masks.ctypes.data, size, len(matchers))
        for matcher in matchers:
            self._check(matcher)

    def forced(self, matcher: Any) -> list[int]:
        """In the tokens that the tokenizer would make of the forced text, where the masks allow shorter ones as well."""
        return list(matcher.compute_ff_tokens())

    def _check(self, matcher: Any) -> None:
        """Its matchers raise nothing: they enter a state of error."""
        if matcher.is_error():
            raise GrammarError(f"the grammar library gave up: {self._why(matcher)}; simplify the grammar")

    @staticmethod
    def _why(matcher: Any) -> str:
        """Without the parser's state and the grammar, which follow."""
        return str(matcher.get_error().partition("<state>")[0].strip())


class XGrammar(Compiled):
    """https://github.com/mlc-ai/xgrammar. Grammars are EBNF as llama.cpp has it, or Lark."""

    def __init__(self, tokenizer: Any, ends: tuple[int, ...], kind: Kind, source: str):
        import xgrammar

        super().__init__(tokenizer, ends, kind, source)
        compiler = xgrammar.GrammarCompiler(xgrammar_vocabulary(tokenizer, self.width, ends), max_threads=threads())
        if kind == "json_schema":
            self.grammar = compiler.compile_json_schema(source, any_whitespace=False)
        elif kind == "regex":
            self.grammar = compiler.compile_regex(source)
        else:
            self.grammar = (compiler.compile_grammar if is_ebnf(kind, source) else compiler.compile_lark)(source)
        self.batch = xgrammar.BatchGrammarMatcher(threads())

    def start(self) -> Any:
        from xgrammar import GrammarMatcher

        return GrammarMatcher(self.grammar)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(masks)
        else:
            self.batch.batch_fill_next_token_bitmask(list(matchers), masks)


class OutlinesCore(Compiled):
    """https://github.com/dottxt-ai/outlines-core: JSON schemas and regular expressions, as automata over the vocabulary."""

    def __init__(self, tokenizer: Any, ends: tuple[int, ...], kind: Kind, source: str):
        from outlines_core import Index
        from outlines_core.json_schema import build_regex_from_schema

        super().__init__(tokenizer, ends, kind, source)
        if kind == "grammar":
            raise ValueError("it has regular expressions and JSON schemas only; use the backend llguidance or xgrammar")
        self.index = Index(build_regex_from_schema(source) if kind == "json_schema" else source, _outlines_vocabulary(tokenizer, ends))

    def start(self) -> Any:
        from outlines_core import Guide

        return Guide(self.index, 1 << 30)  # how far it can go back; it keeps only the states that it has been in

    def accept(self, matcher: Any, token: int) -> bool:
        if not matcher.accepts_tokens([token]):
            return False
        matcher.advance(token, return_tokens=False)
        return True

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback_state(count)

    def fill(self, matchers: Sequence[Any], masks: Masks) -> None:
        for matcher, mask in zip(matchers, masks):
            matcher.write_mask_into(mask.ctypes.data, mask.size, mask.itemsize)
            if matcher.is_finished():  # it knows of one end token
                mask |= self.end_mask


COMPILERS: dict[str, type[Compiled]] = {"llguidance": LLGuidance, "xgrammar": XGrammar, "outlines": OutlinesCore}


class Grammar:
    """A logits processor that allows only texts that match a JSON schema, a regular expression or a grammar. Give exactly one of them.

    Pass it in ``logits_processor=[...]``; ``generate(json_schema=...)`` makes one. One Grammar serves any number of rows and calls. The
    text begins after the prompt, and ends with a token of ``eos``. A text that is cut short by a limit is only the beginning of a match.
    JSON is written on one line: where whitespace is free, small models may write it without end.

    Args:
        tokenizer: of the target: a fast tokenizer of transformers.
        json_schema: a schema as text or as a dictionary, or a class of pydantic.
        regex: the whole text matches it; the dialect is that of the library.
        grammar: Lark, or EBNF as llama.cpp has it. (outlines-core has neither.)
        backend: ``llguidance``, ``xgrammar`` or ``outlines``; ``auto`` is the first of them that is installed.
        eos: the tokens that may end the text, if they are not the tokenizer's.
        most_items: how many items llguidance's parser may make for the tokens allowed at one place, 50,000 unless given. A text that needs
            more ends with a GrammarError. 10,000 take about 30 ms.

    Raises:
        ConfigurationError: the library is not installed or cannot use the source; the message says why.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        backend: str = "auto",
        eos: int | Iterable[int] | None = None,
        most_items: int | None = None,
    ):
        kind, source = the_source(json_schema, regex, grammar)
        self.backend = choose_backend(backend)
        eos = tokenizer.eos_token_id if eos is None else eos
        ends = (eos,) if isinstance(eos, int) else tuple(sorted(set(eos or ())))
        if not ends:
            raise ConfigurationError("a grammar needs a token that ends the text: pass eos_token_id")
        if most_items is not None and self.backend != "llguidance":
            raise ConfigurationError(f"most_items is a limit of llguidance, and the backend is {self.backend}; leave it out")
        self.compiled = _compile(self.backend, tokenizer, len(tokenizer), ends, kind, source, most_items)

    def __repr__(self) -> str:
        return f"Grammar(backend={self.backend!r})"

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        raise ConfigurationError(f"a foredraft.Grammar works within Foredraft alone; elsewhere use the logits processor of {self.backend}")


def the_source(json_schema: Any, regex: Any, grammar: Any) -> tuple[Kind, str]:
    """The one that is given, as the libraries take it; JSON keeps the order of its keys.

    Raises:
        ConfigurationError: none or several are given, or it is not of its kind.
    """
    given = [(kind, value) for kind, value in zip(get_args(Kind), (json_schema, regex, grammar)) if value is not None]
    if len(given) != 1:
        got = " and ".join(kind for kind, _ in given) or "none"
        raise ConfigurationError(f"give one of json_schema, regex and grammar, got {got}")
    kind, value = given[0]
    if kind == "json_schema":
        value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        try:
            return kind, json.dumps(json.loads(value) if isinstance(value, str) else value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"json_schema is no JSON: {error}") from error
    if not isinstance(value, str):
        raise ConfigurationError(f"{kind} must be text, got {type(value).__name__}")
    return kind, value


@lru_cache(maxsize=16)
def _compile(backend: str, tokenizer: Any, size: int, ends: tuple[int, ...], kind: Kind, source: str, most_items: int | None) -> Compiled:
    """``size`` is there for the cache: tokens may be added to a tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(f"grammars need a fast tokenizer of transformers, got {type(tokenizer).__name__}")
    try:
        return COMPILERS[backend](tokenizer, ends, kind, source, **({} if most_items is None else {"most_items": most_items}))
    except ConfigurationError:
        raise
    except Exception as error:  # the libraries raise anything
        raise ConfigurationError(f"{MODULES[backend]} cannot use this {kind}: {str(error).strip()}") from error


def is_ebnf(kind: Kind, source: str) -> bool:
    return kind == "grammar" and "::=" in source


def width(tokenizer: Any, ends: Iterable[int]) -> int:
    """How many tokens a mask covers. What a model has beyond them is padding, and never allowed."""
    return max(*tokenizer.get_vocab().values(), *ends) + 1


def threads() -> int:
    from foredraft.device import host_threads

    return host_threads()


@lru_cache(maxsize=4)
def _llguidance_tokenizer(tokenizer: Any, width: int, ends: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=width, eos_token=list(ends))


@lru_cache(maxsize=1)
def _llguidance_executor(threads: int) -> Any:
    from llguidance import LLExecutor

    return LLExecutor(threads)


@lru_cache(maxsize=4)
def xgrammar_vocabulary(tokenizer: Any, width: int, ends: tuple[int, ...]) -> Any:
    """xgrammar's own reading of ``tokenizer``, in which special tokens such as ``<|im_start|>`` are no text."""
    from xgrammar import TokenizerInfo, VocabType

    read = TokenizerInfo.from_huggingface(tokenizer, vocab_size=width, stop_token_ids=list(ends))
    kind = read.vocab_type if isinstance(read.vocab_type, VocabType) else VocabType(read.vocab_type)
    tokens = [""] * width
    for token, number in tokenizer.get_vocab().items():
        if number not in tokenizer.all_special_ids:
            tokens[number] = token
    return TokenizerInfo(tokens, kind, vocab_size=width, stop_token_ids=list(ends), add_prefix_space=read.add_prefix_space)


@lru_cache(maxsize=4)
def _outlines_vocabulary(tokenizer: Any, ends: tuple[int, ...]) -> Any:
    from outlines_core import Vocabulary

    tokens: dict[bytes, list[int]] = {}
    for number, text in token_bytes(tokenizer).items():
        if number not in ends:
            tokens.setdefault(text, []).append(number)
    return Vocabulary(ends[0], tokens)


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes that each token stands for, special tokens left out.

    Raises:
        ValueError: the vocabulary is of another kind than byte-level BPE and SentencePiece.
    """
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    special, added = set(tokenizer.all_special_ids), set(tokenizer.get_added_vocab().values())
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    steps = {each["type"] for each in decoder.get("decoders", [decoder]) if each}
    if "ByteLevel" in steps:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}

        def read(token: str) -> bytes:
            return bytes(letters[letter] for letter in token)
    elif steps & {"ByteFallback", "Metaspace"}:

        def read(token: str) -> bytes:
            byte = token.startswith("<0x") and token.endswith(">") and len(token) == 6
            return bytes([int(token[3:5], 16)]) if byte else token.replace("▁", " ").encode()
    else:
        raise ValueError("its tokenizer is neither byte-level BPE nor SentencePiece; use the backend llguidance or xgrammar")
    known = ((number, token) for token, number in vocabulary.items() if number not in special and token)
    return {number: token.encode() if number in added else read(token) for number, token in known}
