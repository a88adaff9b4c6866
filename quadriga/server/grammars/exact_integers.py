"""Grammars of JSON schemas with integers that double precision does not have, in Lark.

The grammar library would round such integers. The parts of a schema that hold one become rules
here, with the integer as text; the library compiles the others.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Keywords whose numbers the library would round are kept in an object of this name, which it
# passes over as it does every unknown one.
EXACT = "\0exact"
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_STRING = r'"([^"\\\x00-\x1F\x7F]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}

# Takes the body of a rule and returns the rule's name.
AddRule = Callable[[str], str]


class InexpressibleInteger(Exception):
    """A schema that no rule can be made of.

    Its arguments are the value of its keyword EXACT, and why, if it is not for the place.
    """


def holds_exact(document: Any) -> bool:
    """Return whether a schema has an integer that the library would round."""
    if isinstance(document, Mapping):
        return EXACT in document or any(map(holds_exact, document.values()))
    return isinstance(document, list) and any(map(holds_exact, document))


def exact_rule(document: dict[str, Any], options: Mapping[str, Any], add: AddRule) -> str:
    """Return the name of the rule of a schema.

    Args:
        document: the schema, prepared; its references are to its `$defs`.
        options: the library's options for the parts that it compiles, with the pattern of
            whitespace.
        add: adds a rule.

    Raises:
        InexpressibleInteger: an integer is where this cannot express it.
    """
    return _ExactRules(document, options, add).rule(
        {key: value for key, value in document.items() if key not in ("$defs", "$schema")}
    )


class _ExactRules:
    def __init__(self, document: dict[str, Any], options: Mapping[str, Any], add: AddRule) -> None:
        self._definitions: dict[str, Any] = document.get("$defs", {})
        self._draft = {key: document[key] for key in ("$schema",) if key in document}
        self._options = dict(options)
        self._add = add
        self._open: set[str] = set()
        self._space = add(f"/{options['whitespace_pattern']}/?")
        self._comma = add(f'{self._space} "," {self._space}')

    def rule(self, schema: Any) -> str:
        """Return the name of the rule of a schema."""
        if not self._holds_exact(schema, set()):
            return self._of_library(schema)
        keywords = schema.keys() - {EXACT}
        if EXACT in schema:
            return self._of_integers(schema, schema[EXACT]["keywords"], keywords)
        if keywords == {"$ref"}:
            return self._of_definition(schema["$ref"].removeprefix("#/$defs/"))
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self.rule(schema["allOf"][0])
        for keyword in ("anyOf", "oneOf"):
            if keywords == {keyword}:
                return self._any_of([self.rule(part) for part in schema[keyword]])
        if schema.get("type") == "object" and keywords <= {
            "type", "properties", "required", "additionalProperties"
        }:  # fmt: skip
            return self._of_object(schema)
        if schema.get("type") == "array" and keywords <= {
            "type", "items", "prefixItems", "minItems", "maxItems"
        }:  # fmt: skip
            return self._of_array(schema)
        raise InexpressibleInteger(self._found(schema, set()))

    def _holds_exact(self, schema: Any, seen: set[str]) -> bool:
        return self._found(schema, seen) is not None

    def _found(self, part: Any, seen: set[str]) -> Any:
        """Return the first keywords with integers that the library would round."""
        if isinstance(part, list):
            return next((f for p in part if (f := self._found(p, seen)) is not None), None)
        if not isinstance(part, Mapping):
            return None
        if EXACT in part:
            return part[EXACT]
        name = str(part.get("$ref", "")).removeprefix("#/$defs/")
        if name in self._definitions and name not in seen:
            seen.add(name)
            found = self._found(self._definitions[name], seen)
            if found is not None:
                return found
        return self._found(list(part.values()), seen)

    def _of_library(self, schema: Any) -> str:
        body = schema if isinstance(schema, dict) else {} if schema else {"allOf": [False]}
        definitions = {"$defs": self._definitions} if "$ref" in json.dumps(body) else {}
        document = {**self._draft, **body, **definitions, "x-guidance": self._options}
        return self._add("%json " + json.dumps(document))

    def _of_definition(self, name: str) -> str:
        if name in self._open:  # it holds itself
            raise InexpressibleInteger(self._found(self._definitions[name], set()))
        self._open.add(name)
        rule = self.rule(self._definitions[name])
        self._open.remove(name)
        return rule

    def _any_of(self, rules: Iterable[str]) -> str:
        return self._add(" | ".join(rules))

    def _of_integers(
        self, schema: dict[str, Any], exact: Mapping[str, Any], keywords: Iterable[str]
    ) -> str:
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        others = set(keywords) - {"type", "format"}
        if exact.keys() <= {"enum", "const"} and not others:
            values = [exact["const"]] if "const" in exact else exact["enum"]
            texts = [json.dumps(v, ensure_ascii=False) for v in values if _has_type(v, kinds)]
            if not texts:
                raise InexpressibleInteger(schema[EXACT], f"no value has the type {kinds}")
            return self._any_of(json.dumps(text, ensure_ascii=False) for text in texts)
        if exact.keys() <= set(BOUNDS) and "integer" in kinds and "number" not in kinds:
            own = {key: value for key, value in schema.items() if key in BOUNDS}
            if not others <= set(BOUNDS):
                raise InexpressibleInteger(schema[EXACT])
            least, most = integer_bounds({**own, **exact})
            if least is not None and most is not None and least > most:
                reason = f"no integer is within {json.dumps({**own, **exact})}"
                raise InexpressibleInteger(schema[EXACT], reason)
            integers = f"/{integers_between(least, most)}/"
            rest = [self._of_library({"type": kind}) for kind in kinds if kind != "integer"]
            return self._any_of([self._add(integers), *rest])
        raise InexpressibleInteger(schema[EXACT])

    def _of_object(self, schema: dict[str, Any]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        extra = "" if others is False else self._extra_pair(properties, others)
        members = {**properties, **{n: others for n in required if n not in properties}}
        first = self._add(f"({extra} ({self._comma} {extra})*)?") if extra else self._add('""')
        after = self._add(f"({self._comma} {extra})*") if extra else first
        for name, part in reversed(members.items()):
            if part is False:
                continue
            pair = self._pair(_terminal(name), self.rule(part))
            if name in required:
                first, after = (
                    self._add(f"{pair} {after}"),
                    self._add(f"{self._comma} {pair} {after}"),
                )
            else:
                first, after = (
                    self._add(f"{pair} {after} | {first}"),
                    self._add(f"({self._comma} {pair})? {after}"),
                )
        return self._add(f'"{{" {self._space} {first} {self._space} "}}"')

    def _pair(self, key: str, value: str) -> str:
        return self._add(f'{key} {self._space} ":" {self._space} {value}')

    def _extra_pair(self, properties: Mapping[str, Any], schema: Any) -> str:
        names = "|".join(re.escape(json.dumps(name, ensure_ascii=False)) for name in properties)
        names = names.replace("/", "\\/")
        taken = f" & ~/({names})/" if names else ""
        return self._pair(self._add(f"/{_STRING}/{taken}"), self.rule(schema))

    def _of_array(self, schema: dict[str, Any]) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        first = first[:most]
        num_rest = max(least - len(first), 0)
        tail = ""
        if rest is not False and most != len(first):
            up_to = "" if most is None else most - len(first)
            tail = self._add(f"({self._comma} {self.rule(rest)}){{{num_rest},{up_to}}}")
        # The tail begins with a comma, so that it cannot be alone.
        alone = '""' if least == 0 else ""
        if not first:
            if not tail:
                return self._add(f'"[" {self._space} "]"')
            more = "" if most is None else most - 1
            item = self.rule(rest)
            repeated = f"{item} ({self._comma} {item}){{{max(num_rest - 1, 0)},{more}}}"
            items = self._add(" | ".join(filter(None, (repeated, alone))))
            return self._add(f'"[" {self._space} {items} {self._space} "]"')
        rules = [self.rule(part) for part in first]
        chain = tail or '""'
        for index in range(len(rules) - 1, 0, -1):
            chain = self._add(f"{self._comma} {rules[index]} {chain}")
            chain = chain if index < least else self._add(f"({chain})?")
        begun = self._add(f"{rules[0]} {chain}")
        items = self._add(" | ".join(filter(None, (begun, alone))))
        return self._add(f'"[" {self._space} {items} {self._space} "]"')


def _terminal(name: str) -> str:
    """Return a name of a property as a string of Lark."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)


def _has_type(value: Any, kinds: Iterable[str]) -> bool:
    kinds = list(kinds)
    if isinstance(value, bool):
        return not kinds or "boolean" in kinds
    return not kinds or any(isinstance(value, _TYPES.get(kind, ())) for kind in kinds)


def integer_bounds(bounds: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the least and the largest integer within the bounds of a schema."""
    lower, upper = [], []
    exclusive_min, exclusive_max = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
    if "minimum" in bounds:
        lower.append(math.ceil(bounds["minimum"]))
        if exclusive_min is True:
            exclusive_min = bounds["minimum"]
    if "maximum" in bounds:
        upper.append(math.floor(bounds["maximum"]))
        if exclusive_max is True:
            exclusive_max = bounds["maximum"]
    if exclusive_min is not None and not isinstance(exclusive_min, bool):
        lower.append(math.floor(exclusive_min) + 1)
    if exclusive_max is not None and not isinstance(exclusive_max, bool):
        upper.append(math.ceil(exclusive_max) - 1)
    return max(lower, default=None), min(upper, default=None)


# --- integers as patterns -------------------------------------------------------------------------


def integers_between(least: int | None, most: int | None) -> str:
    """Return a pattern of the integers from `least` to `most`; None: without a bound."""
    ways = []
    if least is None or least < 0:
        up_to = None if least is None else -least
        from_ = 1 if most is None or most >= 0 else -most
        ways.append(f"-({_naturals(from_, up_to)})")
    if most is None or most >= 0:
        ways.append(_naturals(max(least or 0, 0), most))
    return f"({'|'.join(ways)})"


def _naturals(least: int, most: int | None) -> str:
    """Return a pattern of the integers from `least`, which is 0 or more."""
    low = str(least)
    if most is None:
        return f"{_at_least(low)}|[1-9][0-9]{{{len(low)},}}"
    high = str(most)
    if len(low) == len(high):
        return _between(low, high)
    ways = [_between(low, "9" * len(low)), _between("1" + "0" * (len(high) - 1), high)]
    if len(high) - len(low) > 1:
        ways.append(f"[1-9][0-9]{{{len(low)},{len(high) - 2}}}")
    return "|".join(ways)


def _between(low: str, high: str) -> str:
    """Return a pattern of the numbers between two of the same number of digits."""
    if low == high:
        return low
    if low[0] == high[0]:
        return f"{low[0]}({_between(low[1:], high[1:])})"
    if len(low) == 1:
        return f"[{low}-{high}]"
    if not low[1:].strip("0") and not high[1:].strip("9"):
        return f"[{low[0]}-{high[0]}]{_any_digits(len(low) - 1)}"
    ways = [f"{low[0]}({_at_least(low[1:])})", f"{high[0]}({_at_most(high[1:])})"]
    if int(low[0]) + 1 < int(high[0]):
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]{_any_digits(len(low) - 1)}")
    return "|".join(ways)


def _at_least(low: str) -> str:
    """Return a pattern of the numbers of as many digits that are not below `low`."""
    if not low.strip("0"):
        return _any_digits(len(low))
    if len(low) == 1:
        return f"[{low}-9]"
    ways = [f"{low[0]}({_at_least(low[1:])})"]
    if low[0] != "9":
        ways.append(f"[{int(low[0]) + 1}-9]{_any_digits(len(low) - 1)}")
    return "|".join(ways)


def _at_most(high: str) -> str:
    """Return a pattern of the numbers of as many digits that are not above `high`."""
    if not high.strip("9"):
        return _any_digits(len(high))
    if len(high) == 1:
        return f"[0-{high}]"
    ways = [f"{high[0]}({_at_most(high[1:])})"]
    if high[0] != "0":
        ways.append(f"[0-{int(high[0]) - 1}]{_any_digits(len(high) - 1)}")
    return "|".join(ways)


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}"
