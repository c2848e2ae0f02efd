"""Whether rows can run at all, and how long they may become."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.errors import CacheMemoryError
from foredraft.serving.failures import refused
from foredraft.serving.jobs import Choice
from foredraft.serving.settings import Settings
from foredraft.session import Session


def sizes_of(choices: Sequence[Choice], session: Session, settings: Settings) -> list[int]:
    """How many tokens each of ``choices`` has at most in the end. Any thread may ask; it takes longer for longer prompts, and a prompt with
    several choices is looked at once.

    Raises:
        ApiError: 400; they are too many, or one of them can never run.
    """
    if len(choices) > settings.max_queue:
        most = settings.max_queue
        raise refused(f"n: the request asks for {len(choices)} texts, and the queue holds {most} (--max-queue); ask for fewer", "n")
    found: list[int] = []
    last: tuple[int, ...] = ()
    for choice in choices:
        alike = id(choice.ids), *(id(value) for name, value in vars(choice.parameters).items() if name != "seed")
        found.append(found[-1] if alike == last else size_of(choice, session, settings.max_batch_tokens))
        last = alike
    return found


def size_of(choice: Choice, session: Session, most: int | None) -> int:
    length = len(choice.ids)
    begin = f"max_tokens: the prompt has {length} tokens and may get"
    end = "; ask for fewer tokens or shorten the prompt"
    try:
        size = session.check(choice.ids, choice.parameters)
    except CacheMemoryError as error:
        more = choice.parameters.max_new_tokens
        what = f"{begin} {more} more, which the server's cache cannot hold (--cache-memory){end}"
        raise refused(what, "max_tokens", "context_length_exceeded") from error
    if most is not None and size > most:
        what = f"{begin} {size - length} more, and the server allows {most} in all (--max-batch-tokens){end}"
        raise refused(what, "max_tokens", "context_length_exceeded")
    return size


def cached(most: int, session: Session) -> int:
    """How many tokens, at most ``most``, the cache can ever hold of one row: the same with guesses and without, so that they change no
    text. Where that is less than ``most``, its binary digits behind the third are zeros: a little more or less memory that is free when a
    server starts, or another drafter, seldom changes it. Any thread may ask."""
    found = session.admission.longest(most, session.loop.most_nodes)
    behind = 0 if found == most else max(0, found.bit_length() - 3)
    return found >> behind << behind
