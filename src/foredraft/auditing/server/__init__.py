"""Does an OpenAI server answer exactly, and does it repeat itself? Whatever runs it: only HTTP is spoken.

``repeating.py`` compares answers byte for byte; ``contents.py`` counts tokens and looks for what is lost or leaks; ``probabilities.py``
looks at the log-probabilities; ``samples.py`` tests sampled tokens against them; ``report.py`` has the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foredraft.auditing.prompts import GENERAL, default_prompts
from foredraft.auditing.report import INTERRUPTED, blind
from foredraft.auditing.server.report import Check, Samples, ServerReport
from foredraft.errors import ConfigurationError, Interrupted, whole

if TYPE_CHECKING:
    from foredraft.auditing.server.plan import Plan

__all__ = ["Check", "Samples", "ServerReport", "audit_server"]

BIAS = 0.03  # total variation per token
SAMPLES = "sampled tokens follow the log-probabilities"


def audit_server(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    prompts: Sequence[str] | None = None,
    seed: int = 0,
    max_new_tokens: int = 48,
    samples: int | None = None,
    at_once: int = 8,
    significance: float = 1e-3,
    bias: float = BIAS,
    transport: Any = None,
    progress: Callable[[str], None] = lambda what: None,
) -> ServerReport:
    """Check that the server at ``url`` repeats its answers and samples from its own log-probabilities.

    Args:
        url: its address, with or without ``/v1``.
        model: None for the first that it lists.
        prompts: texts; None for built-in ones.
        seed: the first of those that requests have.
        max_new_tokens: of each answer.
        samples: answers for the statistical tests; None for as many as find a bias of ``bias`` with probability 0.9.
        at_once: requests at a time where there is to be load.
        significance: how often a correct server may be accused by the statistical tests; the other checks leave nothing to chance.
        bias: total variation per token that the number of samples is made for.
        transport: of httpx, in place of the network.
        progress: is told what happens next.

    Raises:
        ConfigurationError: an option that cannot work, or no server at the address.
        ServerError: the server stops answering while it is found out what it takes.
        Interrupted: Ctrl-C during a check; ``.output`` is the report of those before it.
    """
    for name, count in (("max_new_tokens", max_new_tokens), ("at_once", at_once), ("samples", 1 if samples is None else samples)):
        whole(name, count)
    for name, share in (("significance", significance), ("bias", bias)):
        if not 0 < share < 0.5:
            raise ConfigurationError(f"{name} must lie between 0 and 0.5, got {share!r}")
    if prompts is not None and (isinstance(prompts, str) or not prompts or not all(prompts)):
        raise ConfigurationError(f"prompts must be a list of texts, with at least one and none of them empty, got {prompts!r}")
    if find_spec("httpx") is None:
        raise ConfigurationError("--server needs httpx; install it with: pip install 'foredraft[serve]'")
    from foredraft.auditing.server import abilities
    from foredraft.auditing.server.client import Client
    from foredraft.auditing.server.plan import Plan

    with closing(Client(url, api_key=api_key, at_once=at_once, transport=transport)) as client:
        progress("asking the server what it takes")
        client.model = abilities.find_model(client, model)
        texts = list(built_in(client.model) if prompts is None else prompts)
        plan = Plan(client, abilities.find(client, texts[0]), texts, seed, max_new_tokens)
        client.seen.clear()
        before = abilities.drafted(client)
        checks, found = run(plan, samples, significance, bias, progress)
        after = abilities.drafted(client)
        drafted, accepted = (None, None) if before is None or after is None else (after[0] - before[0], after[1] - before[1])
        report = ServerReport(
            url=client.url,
            model=client.model,
            endpoint="/v1/chat/completions" if client.chat else "/v1/completions",
            fingerprints=sorted({answer.fingerprint for answer in client.seen if answer.fingerprint}),
            seed=seed,
            max_tokens=max_new_tokens,
            at_once=at_once,
            requests=client.requests,
            notes=notes(plan),
            tokens=sum(answer.usage or len(answer.tokens or ()) for answer in client.seen if answer.request.n == 1),
            drafted=drafted,
            accepted=accepted,
            checks=checks,
            samples=found,
        )
    if not report.complete:
        raise Interrupted(report)
    return report


def built_in(model: str) -> list[str]:
    """Prompts for a model by its name on the server; those of an embedded one need its package."""
    return default_prompts(model) if model.startswith("zoo:") and find_spec("foredraft_zoo") is not None else list(GENERAL)


def run(
    plan: Plan, samples: int | None, significance: float, bias: float, progress: Callable[[str], None]
) -> tuple[list[Check], Samples | None]:
    """All checks; those of everything that was answered come last. After Ctrl-C the others are not asked."""
    from foredraft.auditing.server import contents, probabilities, repeating
    from foredraft.auditing.server.plan import run as ask

    optional: dict[str, Any] = {"needed": False}
    found: list[Check] = []

    def add(name: str, check: Callable[[Plan], Check], **known: Any) -> None:
        progress(name)
        try:
            if found and found[-1].found == INTERRUPTED:
                raise KeyboardInterrupt
            found.append(ask(check, plan, name, **known))
        except KeyboardInterrupt:
            found.append(Check(name, "not asked", INTERRUPTED, **known))

    add("the same request again", repeating.again)
    add("the same request under load", repeating.under_load)
    add("log-probabilities under load", repeating.probabilities)
    add("streamed or not", repeating.streamed)
    add("with log-probabilities or not", repeating.without_logprobs, **optional)
    add("speculation on and off", repeating.speculation, **optional)
    add("other seeds, other texts", repeating.seeds)
    add("n choices", repeating.choices, **optional)
    add("a shorter answer is the beginning", contents.shorter)
    add("stop strings", contents.stops)
    drawn: list[Samples] = []
    add(SAMPLES, lambda plan: sampled(plan, samples, significance, bias, drawn))
    add("no token is missing", contents.counts)
    add("the text is its tokens", contents.joined, **optional)
    add("log-probabilities are possible", probabilities.sane)
    add("greedy takes the likeliest token", probabilities.greedy, **optional)
    return found, drawn[0] if drawn else None


def sampled(plan: Plan, samples: int | None, significance: float, bias: float, drawn: list[Samples]) -> Check:
    """The statistical tests as a check; their numbers go to ``drawn``."""
    from foredraft.auditing.server.plan import NotAskedError
    from foredraft.auditing.server.samples import check

    if (plan.abilities.logprobs or 0) < 2:
        raise NotAskedError("the server gives no log-probabilities of alternatives, so samples cannot be tested")
    found = check(plan, samples=samples, significance=significance, bias=bias)
    if blind(found.power):
        few = "they are too few, or the model is sure of every token"
        raise NotAskedError(f"nothing could be tested by {found.answers:,} answers, {found.tokens:,} tokens: {few}")
    drawn.append(found)
    seen = f"{found.answers:,} answers, {found.tokens:,} tokens: p = {found.p_value:.2g}, corrected (a fault below {significance:g})"
    if not found.passed:
        refused = plan.abilities.refused
        why = f"; it does not take {', '.join(refused)}, so a filter of its own may be on" if refused else ""
        return Check(SAMPLES, "fault", f"{seen}; {found.worst.name}{why}")
    return Check(SAMPLES, "ok", seen, "; ".join(map(str, found.power)))


def notes(plan: Plan) -> list[str]:
    """What the server does not take, or may ignore."""
    abilities, found = plan.abilities, []
    if abilities.refused:
        found.append(f"the server does not take {', '.join(abilities.refused)}: its own defaults hold")
    if not abilities.strict:
        found.append("the server takes a field that no server has, so it may ignore others too")
    if abilities.logprobs is None:
        found.append("the server gives no log-probabilities")
    elif abilities.logprobs < 20:
        found.append(f"the server gives {abilities.logprobs} alternatives at each token")
    if not plan.client.stream_usage:
        found.append("the server does not take stream_options")
    return found
