"""Prepare JSON schemas for the grammar library, so that each text of a grammar obeys its schema.

The library rounds numbers to double precision, and takes schemas whose texts come to a place where
nothing may follow. What it cannot obey is refused by the path of the keyword, or, where the schema
is lenient, left out in its place.

A part with the keyword OPTIONS is a schema with references of its own: errors call it by its
`"name"`, and it is lenient with `"lenient": true`.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

from quadriga.server.grammars.exact_integers import (
    BOUNDS,
    EXACT,
    InexpressibleInteger,
    exact_rule,
    holds_exact,
)

Schema = Any
# No draft of JSON Schema has this keyword; the library calls its own options so, too.
OPTIONS = "x-guidance"

_OF_SCHEMA = ("items", "additionalItems", "additionalProperties")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties")
# Keywords without a meaning for a text, beside those of references, which are resolved.
_NOTES = {
    "title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly",
    "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "$id", "id", "$anchor",
    "$schema", "$defs", "definitions", OPTIONS,
}  # fmt: skip
_WITH_NUMBERS = ("enum", "const", "multipleOf", *BOUNDS)
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords in the order in which they are kept where not all of them can be.
_KEPT_FIRST = (
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "$ref",
    "prefixItems", "additionalProperties", "minItems", "maxItems", "minLength", "maxLength",
    *BOUNDS, "allOf", "patternProperties", "multipleOf", "pattern", "format",
)  # fmt: skip
_DRAFT = re.compile(r"https?://json-schema\.org/(draft(-0[467]|/2019-09|/2020-12))/schema#?")
# Every integer below this is a double, and so is the one after it.
MAX_EXACT_INTEGER = 2**53
MAX_DIGITS_OF_BOUND = 60
# Largest number of texts of a pattern that becomes names of properties.
MAX_NAMES_OF_PATTERN = 64
MAX_SHOWN_CHARS = 80
_INEXACT: Final = object()
_ROUNDED = (
    "grammars keep numbers in double precision, and this one not to the last digit; use a string"
)


class _Fault(NamedTuple):
    """A keyword that the library cannot obey. path: of the schema that has it."""

    path: str
    keyword: str
    value: Any
    reason: str

    def __str__(self) -> str:
        where = ".".join(part for part in (self.path, self.keyword) if part) or "the schema"
        value = json.dumps(self.value, ensure_ascii=False, default=str) if self.keyword else ""
        if len(value) > MAX_SHOWN_CHARS:
            value = value[:MAX_SHOWN_CHARS] + "…"
        return f"{where}{f' is {value}' if value else ''}: {self.reason}"


class SchemaLibrary(Protocol):
    """What the preparation of a schema asks the grammar library."""

    def error(self, schema: dict[str, Any]) -> str:
        """Return why the library cannot compile a schema, or an empty string."""

    def accepts(self, schema: dict[str, Any], text: str) -> bool:
        """Return whether a text obeys the grammar of a schema."""

    def texts(self, pattern: str, max_texts: int) -> list[str] | None:
        """Return the texts that a pattern matches; None if there are more than max_texts."""


def parse_schema(text: str) -> Schema:
    """Return the schema in a JSON text.

    Raises:
        ValueError: the text is not JSON.
    """

    def refuse(number: str) -> float:
        raise ValueError(f"the schema has the number {number}, which JSON does not have")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def prepared_schema(
    schema: Schema,
    library: SchemaLibrary,
    *,
    finds_faults: bool = True,
    frees_lenient: bool = False,
) -> dict[str, Any]:
    """Return a schema for the library, all of whose texts have an end.

    Args:
        schema: the schema as it was given.
        library: compiles schemas.
        finds_faults: try whether the library compiles the schema, and look for the keywords that
            it cannot: they are refused, or left out.
        frees_lenient: leave out everything that lenient schemas say beside their types.

    Raises:
        ValueError: the library cannot obey the schema, or no value obeys it. The message names the
            keyword and its path.
    """
    try:
        return _Preparation(schema, library, frees_lenient).run(finds_faults)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Scope(NamedTuple):
    """What a schema of its own says about its parts.

    Attributes:
        root: the schema, to which references are relative.
        path: where it is.
    """

    root: Schema
    is_lenient: bool
    path: str


class _Preparation:
    """One schema on its way to the library.

    Every local reference becomes one to a definition of its own, so that a part of the schema can
    be compiled without what is around it.
    """

    def __init__(self, schema: Schema, library: SchemaLibrary, frees_lenient: bool) -> None:
        self._given = schema
        self._library = library
        self._frees_lenient = frees_lenient
        self._definitions: dict[str, Schema] = {}
        self._paths: dict[str, str] = {}
        self._lenient: dict[str, bool] = {}
        self._names: dict[tuple[str, int, bool], str] = {}
        self._references: dict[str, str] = {}
        self._dead_ends: list[_Fault] = []
        self._titles: dict[str, str] = {}
        self._draft = _draft_of(schema)

    def run(self, finds_faults: bool) -> dict[str, Any]:
        """Return the prepared schema. Raise ValueError."""
        is_lenient = _is_lenient(self._given)
        root = self._normal(self._given, "", _Scope(self._given, is_lenient, ""))
        root = self._without_dead_ends(root, is_lenient)
        if finds_faults:
            root = self._without_faults(root, is_lenient)
        return _with_exact_integers(self._document(root))

    def _without_faults(self, root: Schema, is_lenient: bool) -> Schema:
        """Return a schema that the library compiles. Raise ValueError."""
        for error_of in (self._shallow_error, self._error):
            if not self._error(root):
                return root
            for name, part in self._definitions.items():
                self._definitions[name] = self._repaired(
                    part, self._paths[name], self._lenient[name], error_of
                )
            root = self._repaired(root, "", is_lenient, error_of)
        if error := self._error(root):
            raise ValueError(self._shown(_Fault("", "", None, _reason(error))))
        return root

    def _refuse(self, fault: _Fault, is_lenient: bool) -> None:
        """Raise ValueError for what cannot be obeyed, unless the schema is lenient."""
        if not is_lenient:
            raise ValueError(self._shown(fault))

    def _shown(self, fault: _Fault) -> str:
        """Return a fault as text. A schema with a name is shown by it."""
        for path in sorted(self._titles, key=len, reverse=True):
            if fault.path == path or not path or fault.path.startswith((f"{path}.", f"{path}[")):
                rest = fault.path[len(path) :].removeprefix(".")
                return f"{self._titles[path]}: {fault._replace(path=rest)}"
        return str(fault)

    # --- the normal form --------------------------------------------------------------------------

    def _normal(self, schema: Schema, path: str, scope: _Scope) -> Schema:
        """Return a schema without notes, with exact numbers and references to definitions."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            reason = "a schema must be an object or a boolean"
            self._refuse(_Fault(path, "", schema, reason), scope.is_lenient)
            return {}
        if options := _options(schema):
            scope = _Scope(schema, _is_lenient(schema), path)
            if isinstance(name := options.get("name"), str):
                self._titles[path] = name
        if scope.is_lenient and self._frees_lenient:
            return {"type": schema["type"]} if schema.get("type") in _TYPES else {}
        normal = self._own_keywords(schema, path, scope)
        normal = _mapped(normal, path, lambda part, where: self._normal(part, where, scope))
        return self._with_names_of_patterns(normal)

    def _own_keywords(self, schema: Mapping[str, Any], path: str, scope: _Scope) -> dict[str, Any]:
        """Return the keywords of a schema whose parts are still as they were given."""
        normal: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in _WITH_NUMBERS:
                is_integer = keyword in BOUNDS and _is_of_integers(schema.get("type"))
                exact = self._exact(keyword, value, is_integer)
                self._add_numbers(normal, _Fault(path, keyword, value, _ROUNDED), exact, scope)
            elif keyword == "$ref":
                definition = self._definition(value, path, scope)
                if definition is not None:
                    normal[keyword] = f"#/$defs/{definition}"
            elif keyword not in _NOTES:
                is_count = keyword in _COUNTS and isinstance(value, float) and value.is_integer()
                normal[keyword] = int(value) if is_count else value
        return normal

    def _add_numbers(
        self, normal: dict[str, Any], fault: _Fault, exact: Any, scope: _Scope
    ) -> None:
        """Add a keyword whose value has numbers.

        Args:
            normal: takes the keyword.
            fault: has the keyword and its value; what is wrong if its numbers are rounded.
            exact: the value as the library keeps it, or _INEXACT.
            scope: of the schema.
        """
        if exact is not _INEXACT:
            normal[fault.keyword] = exact
        elif _is_expressible(fault.keyword, fault.value):
            place = self._shown(fault._replace(reason="")).removesuffix(": ")
            kept = normal.setdefault(
                EXACT, {"keywords": {}, "place": place, "is_lenient": scope.is_lenient}
            )
            kept["keywords"][fault.keyword] = fault.value
        else:
            self._refuse(fault, scope.is_lenient)

    def _definition(self, reference: Any, path: str, scope: _Scope) -> str | None:
        """Return the name of the definition to which a reference points; None: it is left out."""
        key = str(reference), id(scope.root), scope.is_lenient
        if key in self._names:
            return self._names[key]
        try:
            target = _referred(key[0], scope.root)
        except LookupError:
            reason = "the schema has no such part, and other documents are not read"
            self._refuse(_Fault(path, "$ref", reference, reason), scope.is_lenient)
            return None
        name = self._names[key] = f"d{len(self._names)}"
        self._references[name] = key[0]
        steps = (scope.path, *key[0].removeprefix("#").split("/"))
        where = ".".join(step for step in steps if step)
        self._paths[name], self._lenient[name] = where, scope.is_lenient
        self._definitions[name] = True  # while it is made
        self._definitions[name] = self._normal(target, where, scope)
        return name

    def _exact(self, keyword: str, value: Any, is_integer: bool = False) -> Any:
        """Return the value of a keyword as the library keeps it; _INEXACT if it would round it.

        Args:
            keyword: the keyword.
            value: its value, or a part of it.
            is_integer: the value is a bound of integers, to which the library adds 1.
        """
        if isinstance(value, bool | str | None):
            return value
        if isinstance(value, list):
            parts = [self._exact(keyword, part) for part in value]
            return _INEXACT if any(part is _INEXACT for part in parts) else parts
        if isinstance(value, Mapping):
            values = self._exact(keyword, list(value.values()))
            return _INEXACT if values is _INEXACT else dict(zip(value, values, strict=True))
        if isinstance(value, float) and math.isinf(value):
            return _INEXACT
        if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_INTEGER:
            return int(value)
        if isinstance(value, int) and abs(value) < MAX_EXACT_INTEGER:
            return value
        if is_integer or (keyword in ("enum", "const") and value == int(value)):
            return _INEXACT if abs(value) >= MAX_EXACT_INTEGER else value
        if keyword not in ("enum", "const"):
            return value if _is_double(value) else _INEXACT
        is_kept = self._library.accepts({"const": value}, json.dumps(value))
        return value if is_kept else _INEXACT

    def _with_names_of_patterns(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema in which patterns of names with few texts are properties.

        The library would otherwise let a name begin although all texts of its pattern are taken.
        """
        patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
        if not isinstance(patterns, dict) or not isinstance(properties, dict):
            return schema
        properties, others = dict(properties), {}
        for pattern, part in patterns.items():
            names = self._library.texts(pattern, MAX_NAMES_OF_PATTERN)
            if names is None:
                others[pattern] = part
                continue
            for name in names:
                known = properties.get(name)
                properties[name] = part if known is None else {"allOf": [known, part]}
        schema = {**schema, "properties": properties, "patternProperties": others}
        if not others:
            del schema["patternProperties"]
        return schema

    # --- texts without an end ---------------------------------------------------------------------

    def _without_dead_ends(self, root: Schema, is_lenient: bool) -> Schema:
        """Return the schema without parts that no value obeys, such as endless references.

        Raises:
            ValueError: no value obeys the schema.
        """
        known = dict.fromkeys(self._definitions, False)
        while True:
            now = {name: _conflict(part, known) is None for name, part in self._definitions.items()}
            if now == known:
                break
            known = now
        for name, part in self._definitions.items():
            where, lenient = self._paths[name], self._lenient[name]
            self._definitions[name] = self._pruned(part, where, lenient, known)
        root = self._pruned(root, "", is_lenient, known)
        if root is False:
            raise ValueError(self._shown(self._cause_of_dead_end()))
        return root

    def _cause_of_dead_end(self) -> _Fault:
        """Return because of which part no value obeys the schema."""
        if not self._dead_ends:
            return _Fault("", "", None, "the schema is false: no value obeys it")
        last = self._dead_ends[-1]
        prefix = f"{last.path}.{last.keyword}" if last.path else last.keyword
        if last.keyword == "required":
            prefix = prefix.removesuffix("required") + "properties"
        return next(each for each in self._dead_ends if each is last or prefix in each.path)

    def _pruned(
        self, schema: Schema, path: str, is_lenient: bool, known: Mapping[str, bool]
    ) -> Schema:
        """Return a schema in which what no value obeys is false, or anything if it is lenient."""
        if not isinstance(schema, dict):
            return {} if schema is False and is_lenient and not path else schema
        schema = _mapped(
            schema, path, lambda part, where: self._pruned(part, where, is_lenient, known)
        )
        while isinstance(schema, dict) and (conflict := _conflict(schema, known)) is not None:
            keyword, reason = conflict
            if is_lenient:
                possible = _possible_names(schema, known) if keyword == "required" else []
                schema = {key: value for key, value in schema.items() if key != keyword}
                schema |= {"required": possible} if possible else {}
                continue
            value = schema.get(keyword)
            if keyword == "$ref":
                value = self._references[_name_in(schema)]
            self._dead_ends.append(_Fault(path, keyword, value, reason))
            schema = False
        return schema

    # --- what the library cannot compile ----------------------------------------------------------

    def _document(self, schema: Schema) -> dict[str, Any]:
        """Return a schema as a document of its own."""
        body = schema if isinstance(schema, dict) else {} if schema else {"allOf": [False]}
        used: dict[str, Schema] = {}
        todo = [body]
        while todo:
            for name in _references(todo.pop()):
                if name not in used:
                    used[name] = self._definitions[name]
                    todo.append(used[name])
        return {**self._draft, **body, **({"$defs": used} if used else {})}

    def _error(self, schema: Schema) -> str:
        """Return why the library cannot compile a schema, or an empty string."""
        return self._library.error(self._document(schema))

    def _shallow_error(self, schema: Schema) -> str:
        """Return why the library cannot compile a schema, whatever its parts say."""
        shallow = _mapped(schema, "", lambda part, _: part if isinstance(part, bool) else True)
        shallow.pop("$ref", None)
        return self._library.error({**self._draft, **shallow})

    def _repaired(
        self, schema: Schema, path: str, is_lenient: bool, error_of: Callable[[Schema], str]
    ) -> Schema:
        """Return a schema without the keywords that the library cannot compile.

        Raises:
            ValueError: there are some, and the schema is not lenient.
        """
        if not isinstance(schema, dict):
            return schema
        schema = _mapped(
            schema, path, lambda part, where: self._repaired(part, where, is_lenient, error_of)
        )
        error = error_of(schema)
        if not error:
            return schema
        keywords = sorted(schema, key=_reluctance, reverse=True)
        for keyword in keywords:
            rest = {key: value for key, value in schema.items() if key != keyword}
            if not error_of(rest):
                self._refuse(_Fault(path, keyword, schema[keyword], _reason(error)), is_lenient)
                return rest
        kept: dict[str, Any] = {}
        for keyword in reversed(keywords):
            if error := error_of({**kept, keyword: schema[keyword]}):
                self._refuse(_Fault(path, keyword, schema[keyword], _reason(error)), is_lenient)
            else:
                kept[keyword] = schema[keyword]
        return {key: value for key, value in schema.items() if key in kept}


def _with_exact_integers(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document all of whose integers can be expressed.

    Raises:
        ValueError: one cannot be, and its schema is not lenient.
    """
    while holds_exact(document):
        try:
            exact_rule(document, {"whitespace_pattern": ""}, lambda _: "rule")
            break
        except InexpressibleInteger as error:
            exact, *reasons = error.args
            if not exact["is_lenient"]:
                raise ValueError(f"{exact['place']}: {(*reasons, _ROUNDED)[0]}") from None
            document = _without_exact(document, exact)
    return document


def _without_exact(part: Any, exact: Any) -> Any:
    """Return a part of a document without some integers that cannot be expressed."""
    if isinstance(part, list):
        return [_without_exact(each, exact) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get(EXACT) is not exact:
        return {key: _without_exact(value, exact) for key, value in part.items()}
    keywords = part[EXACT]["keywords"]
    values = keywords.get("enum", [keywords.get("const")])
    kept = {key: value for key, value in part.items() if key != EXACT}
    return {"type": "integer", **kept} if _are_integers(values) else kept


# --- parts of schemas -----------------------------------------------------------------------------


def _draft_of(schema: Schema) -> dict[str, str]:
    """Return the keyword $schema by its official address; empty for one that is not known."""
    draft = schema.get("$schema") if isinstance(schema, Mapping) else None
    known = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
    if known is None:
        return {}
    protocol, end = ("https", "") if "/" in known[1] else ("http", "#")
    return {"$schema": f"{protocol}://json-schema.org/{known[1]}/schema{end}"}


def _options(schema: Schema) -> Mapping[str, Any]:
    options = schema.get(OPTIONS) if isinstance(schema, Mapping) else None
    return options if isinstance(options, Mapping) else {}


def _is_lenient(schema: Schema) -> bool:
    return _options(schema).get("lenient") is True


def _mapped(
    schema: dict[str, Any], path: str, change: Callable[[Schema, str], Schema]
) -> dict[str, Any]:
    """Return a schema with its parts changed. `change` takes a part and its path."""
    mapped: dict[str, Any] = {}
    for keyword, value in schema.items():
        where = f"{path}.{keyword}" if path else keyword
        if keyword in _OF_SCHEMAS and isinstance(value, list):
            mapped[keyword] = [change(part, f"{where}[{i}]") for i, part in enumerate(value)]
        elif keyword in _OF_NAMED_SCHEMAS and isinstance(value, Mapping):
            mapped[keyword] = {
                name: change(part, f"{where}.{name}") for name, part in value.items()
            }
        elif keyword in _OF_SCHEMA and isinstance(value, bool | Mapping):
            mapped[keyword] = change(value, where)
        else:
            mapped[keyword] = value
    return mapped


def _references(schema: Schema) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield _name_in(schema)
        found: list[Schema] = []
        _mapped(schema, "", lambda part, _: found.append(part))
        for part in found:
            yield from _references(part)


def _name_in(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")


def _referred(reference: str, root: Schema) -> Schema:
    """Return the part of a schema to which a reference points. Raise LookupError."""
    own_id = root.get("$id") if isinstance(root, Mapping) else None
    if isinstance(own_id, str) and own_id and not reference.startswith("#"):
        reference = reference.removeprefix(own_id.removesuffix("#"))
    if not reference.startswith("#") and reference:
        raise LookupError(reference)
    pointer = unquote(reference.removeprefix("#"))
    if pointer and not pointer.startswith("/"):
        return _anchored(pointer, root)
    part = root
    for step in pointer.removeprefix("/").split("/") if pointer not in ("", "/") else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        elif isinstance(part, Mapping) and step in part:
            part = part[step]
        else:
            raise LookupError(reference)
    return part


def _anchored(anchor: str, part: Any) -> Schema:
    """Return the part of a schema with an anchor. Raise LookupError."""
    todo = [part]
    while todo:
        part = todo.pop()
        if isinstance(part, Mapping):
            if part.get("$anchor") == anchor or part.get("$id", part.get("id")) == f"#{anchor}":
                return part
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    raise LookupError(anchor)


# --- values ---------------------------------------------------------------------------------------


def _is_double(number: float) -> bool:
    """Return whether double precision has a number."""
    try:
        return float(number) == number
    except OverflowError:
        return False


def _is_of_integers(kinds: Any) -> bool:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return isinstance(kinds, list) and "integer" in kinds


def _is_expressible(keyword: str, value: Any) -> bool:
    """Return whether a rule can have the numbers of a keyword as text."""
    if keyword in ("enum", "const"):
        return _are_finite(value)
    is_number = isinstance(value, int | float)
    return keyword in BOUNDS and is_number and abs(value) < 10**MAX_DIGITS_OF_BOUND


def _are_finite(value: Any) -> bool:
    """Return whether no number in a value is infinite."""
    if isinstance(value, list):
        return all(map(_are_finite, value))
    if isinstance(value, Mapping):
        return all(map(_are_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def _are_integers(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def _conflict(schema: Schema, known: Mapping[str, bool]) -> tuple[str, str] | None:
    """Return a keyword because of which no value obeys a schema, and why; None if some may.

    Args:
        schema: in the normal form.
        known: names of definitions, and whether values are known that obey them.
    """
    if not isinstance(schema, dict):
        return ("", "the schema is false: no value obeys it") if schema is False else None
    if "$ref" in schema and not known.get(_name_in(schema), True):
        return "$ref", "it leads to itself without an end, so that no value obeys it"
    if schema.get("enum") == []:
        return "enum", "it must have a value"
    for keyword in ("anyOf", "oneOf"):
        ways = schema.get(keyword)
        if isinstance(ways, list) and all(_conflict(way, known) for way in ways):
            return keyword, "no value obeys one of its schemas"
    ways = schema.get("allOf")
    if isinstance(ways, list) and any(_conflict(way, known) for way in ways):
        return "allOf", "no value obeys one of its schemas"
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds:
        return None
    conflicts = [_conflict_of_type(kind, schema, known) for kind in kinds]
    return conflicts[0] if all(conflicts) else None


def _conflict_of_type(
    kind: Any, schema: dict[str, Any], known: Mapping[str, bool]
) -> tuple[str, str] | None:
    match kind:
        case "object":
            return _conflict_of_objects(schema, known)
        case "array":
            return _conflict_of_arrays(schema, known)
        case "string":
            return _above(schema, "minLength", "maxLength")
        case "integer" | "number":
            return _above(schema, "minimum", "maximum")
    return None


def _conflict_of_objects(
    schema: dict[str, Any], known: Mapping[str, bool]
) -> tuple[str, str] | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    others, has_patterns = schema.get("additionalProperties"), "patternProperties" in schema
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    for name in required:
        if not isinstance(name, str):
            continue
        if name not in properties and has_patterns:
            continue
        if _conflict(properties.get(name, others), known) is not None:
            if name in properties:
                return "required", f"no value is possible for {name!r}"
            return "required", f"it names {name!r}, which additionalProperties forbids"
    least = schema.get("minProperties")
    if others is False and not has_patterns and isinstance(least, int):
        num_possible = sum(_conflict(part, known) is None for part in properties.values())
        if num_possible < least:
            return "minProperties", f"only {num_possible} properties are possible"
    return _above(schema, "minProperties", "maxProperties")


def _possible_names(schema: dict[str, Any], known: Mapping[str, bool]) -> list[Any]:
    """Return the required names for which there is a value."""

    def is_possible(name: Any) -> bool:
        conflict = _conflict_of_objects({**schema, "required": [name]}, known)
        return conflict is None or conflict[0] != "required"

    return [name for name in schema["required"] if is_possible(name)]


def _conflict_of_arrays(
    schema: dict[str, Any], known: Mapping[str, bool]
) -> tuple[str, str] | None:
    least, items = schema.get("minItems", 0), schema.get("items")
    if not isinstance(least, int):
        return None
    first = schema.get("prefixItems", items if isinstance(items, list) else [])
    first = first if isinstance(first, list) else []
    rest = schema.get("additionalItems") if isinstance(items, list) else items
    needed = [*first[:least], *([rest] if least > len(first) else [])]
    if any(_conflict(part, known) for part in needed):
        return "minItems", "no value is possible for an item that must be there"
    return _above(schema, "minItems", "maxItems")


def _above(schema: dict[str, Any], lower: str, upper: str) -> tuple[str, str] | None:
    least, most = schema.get(lower), schema.get(upper)
    if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
        return lower, f"it is above {upper}, which is {most}"
    return None


def _reluctance(keyword: str) -> int:
    """Return how late a keyword is kept where not all can be: unknown ones last."""
    return _KEPT_FIRST.index(keyword) if keyword in _KEPT_FIRST else len(_KEPT_FIRST)


def _reason(error: str) -> str:
    """Return the library's error as the reason why a keyword is refused."""
    if error.startswith("Unimplemented keys"):
        return "grammars cannot enforce this keyword; leave it out"
    if error.startswith("Unknown format"):
        return "grammars do not know this format; leave it out, or give a pattern"
    lines = [line for line in error.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("error: ") if lines else "it cannot be compiled"
    return reason.removeprefix("Unsatisfiable schema: ")
