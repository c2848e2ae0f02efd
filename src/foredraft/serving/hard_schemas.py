"""JSON schemas on which llguidance may work for ever: they are refused before it sees them.

Its own limits end regular expressions, grammars and large schemas within seconds, but neither intersections of patterns, whose cost
doubles with each, nor common multiples, nor patterns of property names, each of which is compared with all others. At these
bounds each takes some 0.2 s on a vocabulary of 4,096 tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from foredraft.errors import ConfigurationError

TOGETHER = 8  # patterns and formats that one string has to match
MULTIPLE = 10_000  # least common multiple of what numbers have to be multiples of
NAMES = 64  # patterns of property names
PROPERTIES = 1_000  # of one object; the cost grows with their square
SAME = ("anyOf", "oneOf", "not", "if", "then", "else")  # these say more about the same value
EMBEDDED = re.compile(r"%json\s*")  # a schema in a Lark grammar
# Its strings, comments and patterns, closed or not: so that a match begins at each of them, and nothing is read twice.
QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?:#|//)[^\n]*|/(?:\\[\s\S]|[^/\\])+/?')


def check(kind: str, source: Any) -> None:
    """``kind`` and ``source`` as :class:`~foredraft.grammars.Grammar` has them.

    Raises:
        ConfigurationError: it may never be compiled; the message says what is too much.
    """
    try:
        if kind == "json_schema":
            schemas = [json.loads(source) if isinstance(source, str) else source]
        elif kind == "grammar":
            if QUOTED.sub("", source).count("&") >= TOGETHER:
                raise ConfigurationError(f"the grammar has {TOGETHER} or more '&', which intersect terminals; use fewer")
            schemas = [json.JSONDecoder().raw_decode(source, found.end())[0] for found in EMBEDDED.finditer(source)]
        else:
            return
        for schema in schemas:
            check_schema(schema)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:  # JSON, or a number with more digits than Python reads
        raise ConfigurationError(f"the schema is no JSON: {error}") from None


def check_schema(schema: Any) -> None:
    steps, names = list[Fraction](), 0
    for each in objects(schema):
        if each is not schema and isinstance(each.get("$id"), str):
            raise ConfigurationError("only the schema itself can have an $id, and no part of it; leave it out")
        properties, patterns, step = (each.get(word) for word in ("properties", "patternProperties", "multipleOf"))
        names += len(patterns) if isinstance(patterns, dict) else 0
        if isinstance(step, (int, float)) and not isinstance(step, bool) and abs(step) < math.inf:
            steps.append(Fraction(str(step)))
        if isinstance(properties, dict) and len(properties) > PROPERTIES:
            raise ConfigurationError(f"an object has more than {PROPERTIES:,} properties; use fewer")
    scale = math.lcm(*(step.denominator for step in steps))
    if math.lcm(*(int(step * scale) for step in steps)) > MULTIPLE:
        raise ConfigurationError(f"the values of multipleOf have a common multiple above {MULTIPLE:,}; use fewer or smaller ones")
    if names > NAMES:
        raise ConfigurationError(f"there are more than {NAMES} patternProperties; use fewer")
    if together(schema, schema, {}) > TOGETHER:
        raise ConfigurationError(f"a string may have to match more than {TOGETHER} patterns and formats at once; use fewer")


def objects(data: Any) -> Iterator[dict[str, Any]]:
    """All objects in ``data``."""
    level = [data]
    while level:
        each = level.pop()
        if isinstance(each, dict):
            yield each
        level += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def together(schema: Any, root: Any, known: dict[int, int]) -> int:
    """At most how many patterns and formats one string in a value of ``schema`` has to match: of ``allOf`` and what is said beside it all
    count, elsewhere the alternative or the property that has most."""
    if isinstance(schema, list):
        return max((together(each, root, known) for each in schema), default=0)
    if not isinstance(schema, dict):
        return 0
    if id(schema) not in known:
        known[id(schema)] = 0  # where it refers to itself
        every = schema.get("allOf")
        same = [*(every if isinstance(every, list) else ()), *(schema.get(word) for word in SAME), referred(schema.get("$ref"), root)]
        inside = [value for word, value in schema.items() if word not in SAME and word != "allOf"]
        own = sum(isinstance(schema.get(word), str) for word in ("pattern", "format"))
        known[id(schema)] = max(own, together(inside, root, known)) + sum(together(each, root, known) for each in same)
    return known[id(schema)]


def referred(reference: Any, root: Any) -> Any:
    """What ``#/a/b`` stands for; None for what is no reference.

    Raises:
        ConfigurationError: another kind of reference.
    """
    if not isinstance(reference, str):
        return None
    if reference != "#" and not reference.startswith("#/"):
        raise ConfigurationError(f"a $ref has to begin with '#/', as in '#/$defs/name'; got {reference[:80]!r}")
    found = root
    for part in unquote(reference).split("/")[1:]:
        if isinstance(found, list):
            found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
        else:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
