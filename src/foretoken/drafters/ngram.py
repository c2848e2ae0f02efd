"""A back-off n-gram model as the drafter: the most frequent successor of the longest context seen, again and again.

Counted from a text, from a file, or from the target's own outputs while they are generated; a bigram model is order 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.drafters.base import Drafter, DraftRequest, Feedback, Row
from foretoken.drafters.ngram_model import NGramModel
from foretoken.errors import ConfigurationError
from foretoken.tree import TokenTree

if TYPE_CHECKING:
    from foretoken.target import Target


class NGram(Drafter):
    """Options:

    source: a file written by ``save``, a text file to count (with ``tokenizer``), ``zoo:NAME``, or an ``NGramModel``.
    order: longest n-gram counted, context and successor together; 2 is the bigram model. Fixed by a loaded file.
    learn: also count the text of every row, prompt included, as it is committed.
    min_context: draft only while at least so many of the last tokens were seen in a row; more is safer and shorter.
    tokenizer: turns a text file into token ids; a callable, or a tokenizer of transformers.
    """

    name = "ngram"
    summary = "a back-off n-gram model counted from a text, a file or the target's own outputs"

    def __init__(
        self,
        *,
        source: str | Path | NGramModel | None = None,
        order: int | None = None,
        learn: bool | None = None,
        min_context: int = 1,
        tokenizer: Callable[[str], Sequence[int]] | None = None,
    ):
        if min_context < 0:
            raise ConfigurationError(f"min_context must not be negative, got {min_context}")
        self.model = self._load(source, order, tokenizer)
        self.learn = source is None if learn is None else learn
        self.min_context = min_context
        self._counted: dict[int, int] = {}

    def save(self, path: str | Path) -> None:
        """Write the counts, those learned online included; ``source=path`` loads them again."""
        self.model.save(path)

    def bind(self, target: Target) -> None:
        if self.model.vocab_size is not None and self.model.vocab_size > target.vocab_size:
            raise ConfigurationError(
                f"the n-gram model counts {self.model.vocab_size} token ids, the target has {target.vocab_size}; "
                "count it with the target's tokenizer"
            )

    def begin(self, rows: Sequence[Row]) -> None:
        self._count(rows)

    def draft(self, request: DraftRequest) -> TokenTree:
        return request.chains([self._continue(row.ids, limit, request.vocab_size) for row, limit in zip(request.rows, request.limits)])

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        self._count(rows)

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._counted.pop(row.slot, None)

    def reset(self) -> None:
        self._counted.clear()

    def _count(self, rows: Sequence[Row]) -> None:
        if self.learn:
            for row in rows:
                self.model.update(row.ids, self._counted.get(row.slot, 0))
                self._counted[row.slot] = len(row.ids)

    def _continue(self, ids: Sequence[int], count: int, vocab_size: int) -> list[int]:
        reach = self.model.order - 1
        context = list(ids[-reach:])
        draft: list[int] = []
        while len(draft) < count and self.model.matched(context[-reach:]) >= self.min_context:
            token = self.model.predict(context[-reach:])
            if token is None or token >= vocab_size:
                break
            draft.append(token)
            context.append(token)
        return draft

    @staticmethod
    def _load(source: str | Path | NGramModel | None, order: int | None, tokenizer: Callable[[str], Sequence[int]] | None) -> NGramModel:
        if source is None:
            return NGramModel(4 if order is None else order)
        if isinstance(source, NGramModel):
            return source
        if str(source).startswith("zoo:"):
            from foretoken import zoo

            source = Path(zoo.path(str(source))) / "ngram.safetensors"
        path = Path(source)
        if not path.is_file():
            raise ConfigurationError(f"there is no file {str(path)!r} to load or count an n-gram model from")
        if path.suffix == ".safetensors":
            model = NGramModel.load(path)
            if order is not None and order != model.order:
                raise ConfigurationError(f"{str(path)!r} holds an n-gram model of order {model.order}, not {order}; leave order out")
            return model
        if tokenizer is None:
            raise ConfigurationError(f"counting the text {str(path)!r} takes drafter_options={{'tokenizer': ...}}")
        encode = getattr(tokenizer, "encode", tokenizer)
        return NGramModel.from_tokens([encode(path.read_text(encoding="utf-8"))], 4 if order is None else order)
