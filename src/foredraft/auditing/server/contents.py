"""Nothing is lost and nothing leaks: token counts, the text and its tokens, shorter answers, stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from foredraft.auditing.server.answers import UNCLEAR, Answer, Request
from foredraft.auditing.server.comparing import described, names
from foredraft.auditing.server.plan import SHOWN, NotAskedError, Plan
from foredraft.auditing.server.report import Check

STOPS = (2, 5, 9)  # characters of stop strings
PLACE = 0.4  # where in a text they are taken from


def counts(plan: Plan) -> Check:
    """``max_tokens`` is reached where the answer says so, and ``usage`` counts the tokens that were delivered."""
    name, off, number, listed = "no token is missing", [], 0, 0
    for answer in plan.client.seen:
        most, tokens, usage = answer.request.max_tokens, answer.tokens, answer.usage if answer.request.n == 1 else None
        number += usage is not None or tokens is not None
        listed += tokens is not None
        delivered = None if tokens is None else len(tokens)
        said = [each for each in (usage, delivered) if each is not None]
        if answer.finish not in ("length", "stop"):
            off.append(f"{described(answer)}: finish_reason {answer.finish!r}")
        elif answer.finish == "length" and any(each != most for each in said):
            off.append(f"{described(answer)}: {counted(usage, delivered)}, though it ended at max_tokens = {most}")
        elif any(each > most for each in said):
            off.append(f"{described(answer)}: {counted(usage, delivered)}, more than max_tokens = {most}")
        elif len(said) == 2 and usage not in (delivered, len(tokens or ()) + 1):  # the end-of-text token may count without being listed
            off.append(f"{described(answer)}: {counted(usage, delivered)}")
    if not number and not off:
        raise NotAskedError("the server gives neither usage nor log-probabilities, so tokens cannot be counted")
    rest = "" if listed else "; only by usage: without log-probabilities, the tokens themselves are unknown"
    return verdict(name, off, len(plan.client.seen), f"counts agree in {number} answers{rest}")


def counted(usage: int | None, delivered: int | None) -> str:
    parts = [] if usage is None else [f"usage says {usage} tokens"]
    return " and ".join(parts + ([] if delivered is None else [f"{delivered} are listed"]))


def joined(plan: Plan) -> Check:
    """The text is its tokens, one after another."""
    name = "the text is its tokens"
    read = [answer for answer in plan.client.seen if answer.tokens and not answer.request.stop and readable(answer)]
    if not read:
        raise NotAskedError("the server lists no tokens that can be read as text")
    off = [f"{described(each)}: the tokens end {listed(each)[-16:]!r}, the text {each.text[-16:]!r}" for each in read if not fits(each)]
    related = [answer for answer in read if begins(listed(answer), answer.text)]
    if off and not related:
        raise NotAskedError("the tokens that the server lists are not pieces of its text")
    return verdict(name, off, len(read), f"{len(read)} texts are their tokens joined")


def readable(answer: Answer) -> bool:
    """Whether its tokens are whole characters, and no ids."""
    parts = any(token.text.startswith("bytes:\\x") for token in answer.tokens or ())  # as vLLM names a part of a character
    return UNCLEAR not in listed(answer) + answer.text and not parts and "return_tokens_as_token_ids" not in answer.request.extra


def listed(answer: Answer) -> str:
    return "".join(token.text for token in answer.tokens or ())


def begins(tokens: str, text: str) -> bool:
    """Whether one begins with the other; some vocabularies write a space before the first word."""
    return tokens.startswith(text[: len(tokens)]) or tokens.lstrip(" ").startswith(text[: len(tokens)])


def fits(answer: Answer) -> bool:
    """The end-of-text token may be listed without being text."""
    tokens = answer.tokens or ()
    endings = {listed(answer)}
    if answer.finish == "stop":
        endings.add("".join(token.text for token in tokens[:-1]))
    return any(answer.text in (each, each.lstrip(" ")) for each in endings)


def shorter(plan: Plan) -> Check:
    """With a smaller ``max_tokens``, the same request gets the beginning of the same text."""
    lengths = sorted({1, max(1, plan.max_tokens // 3), max(1, plan.max_tokens - 1)})
    off, number = [], 0
    for length in lengths:
        wanted, requests = plan.repeated(max_tokens=length)
        for whole, answer in zip(wanted, plan.client.in_turn(requests)):
            number += 1
            text = answer.text.rstrip(UNCLEAR)
            same = whole.tokens is None or answer.tokens is None or names(answer) == names(whole)[:length]
            if not whole.text.startswith(text) or not same:
                off.append(f"{described(answer)}, max_tokens {length}: {answer.text[-16:]!r} is not how the longer answer goes on")
    check = verdict("a shorter answer is the beginning", off, number, f"{number} shorter answers are the beginning of the longer ones")
    return replace(check, reproducibility=True)


def stops(plan: Plan) -> Check:
    """Text ends before the first stop string, streamed or not; one that almost appears changes nothing."""
    wanted, _ = plan.repeated()
    off, number = [], 0
    for whole in wanted:
        for stop, shown in stop_strings(whole.text):
            for stream in (False, True):
                answer = plan.client.one(request(whole, stop, stream))
                number += 1
                if problem := wrong(answer, stop, shown, whole.finish):
                    off.append(f"{described(answer)}, stop {stop!r}{', streamed' * stream}: {problem}")
    if not number:
        raise NotAskedError("the texts are too short to take stop strings from")
    return verdict("stop strings", off, number, f"{number} answers end where they should, whole and streamed; none has the stop string")


def request(whole: Answer, stop: str, stream: bool) -> Request:
    return replace(whole.request, stop=(stop,), stream=stream, logprobs=None)


def stop_strings(text: str) -> Iterable[tuple[str, str]]:
    """Stop strings and the text that is left: pieces of ``text``, which begin and end within tokens, and one that almost appears."""
    place = int(len(text) * PLACE)
    for length in STOPS:
        stop = text[place : place + length]
        if len(stop) == length and UNCLEAR not in stop and stop.strip():
            yield stop, text[: text.index(stop)]
    almost = text[place : place + 4] + "\N{SNOWMAN}"
    if len(almost) == 5 and UNCLEAR not in almost:
        yield almost, text


def wrong(answer: Answer, stop: str, shown: str, finish: str | None) -> str | None:
    """What is wrong with an answer that should be ``shown``; ``finish`` is how it ends without the stop string."""
    if stop in answer.text:
        return f"the stop string is in the text {answer.text[-24:]!r}"
    if answer.text != shown:
        return f"the text ends {answer.text[-16:]!r} where {shown[-16:]!r} is due"
    due = finish if "\N{SNOWMAN}" in stop else "stop"
    return None if answer.finish == due else f"finish_reason {answer.finish!r} instead of {due!r}"


def verdict(name: str, off: Sequence[str], number: int, fine: str, *, what: str = "answers") -> Check:
    if off:
        return Check(name, "fault", f"{len(off)} of {number:,} {what} are wrong, the first: {off[0]}", differences=off[:SHOWN])
    return Check(name, "ok", fine)
