"""The base class of the sections of an experiment config, and sections of several kinds."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema

from dray.config.determined_fields import IGNORED_FIELDS, says_something
from dray.config.entrypoint import is_class
from dray.text import one_line
from searchers.errors import FieldError, did_you_mean


@dataclass(frozen=True, slots=True)
class ConfigNotes:
    """Results of validation besides faults, by path; this is pydantic's context."""

    given: dict[str, Any] = field(default_factory=dict)  # the valid fields, for ``rules.py``
    ignored: dict[str, str] = field(default_factory=dict)  # Determined's fields without effect, with replacements


class Section(BaseModel):
    """A mapping with these fields only; a null field gets its default."""

    # strict: "64" is not a number, and 1 is not true.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    place: ClassVar[str] = ""  # the section's path

    @classmethod
    def path(cls, field: str) -> str:
        return f"{cls.place}.{field}".removeprefix(".")

    @classmethod
    def ignored_fields(cls) -> dict[str, str]:
        """Determined's fields of this section that have no effect, with their replacements."""
        found = {path.rpartition(".")[::2]: why for path, why in IGNORED_FIELDS.items()}
        return {name: why for (place, name), why in found.items() if place == cls.place}

    @classmethod
    def with_current_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The section with older fields replaced by the current ones."""
        return raw

    @model_validator(mode="before")
    @classmethod
    def _from_raw(cls, raw: object, info: ValidationInfo) -> object:
        if not isinstance(raw, Mapping):
            return raw
        fields = {str(name): value for name, value in raw.items() if value is not None}
        for name, why in cls.ignored_fields().items():
            if name in fields and says_something(cls.path(name), fields.pop(name)) and info.context is not None:
                info.context.ignored[cls.path(name)] = why
        return cls.with_current_fields(fields)

    @field_validator("*", mode="wrap")
    @classmethod
    def _noted(cls, raw: object, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        value = validate(raw)
        if info.context is not None:
            info.context.given[cls.path(str(info.field_name))] = value
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The section's JSON Schema, including its ignored fields, and null for each optional field."""
        schema = handler.resolve_ref_schema(found := handler(core_schema))
        schema["description"] = one_line((cls.__doc__ or "").partition("\n\n")[0])
        schema.pop("title", None)
        fields = schema["properties"]
        for name, form in fields.items():
            form.pop("title", None)
            if name not in schema.get("required", ()):
                fields[name] = _or_null(form)
        for name, why in cls.ignored_fields().items():
            fields[name] = {"description": f"ignored: {why}", "deprecated": True}
        return found


def _or_null(form: dict[str, Any]) -> dict[str, Any]:
    kept = {key: form[key] for key in ("description", "examples", "default") if form.get(key) is not None}
    form = {key: value for key, value in form.items() if key not in ("description", "examples", "default")}
    null = {"type": "null"}
    forms = form["anyOf"] if form.keys() == {"anyOf"} else [form]
    return {**kept, "anyOf": forms if null in forms else [*forms, null]}


def replace_older_field(raw: dict[str, Any], place: str, older: str, field: str, values: Mapping[bool, str]) -> None:
    """Replace an older boolean field with the current one."""
    if isinstance(raw.get(older), bool) and (value := values.get(raw[older])) is not None:
        given = str(raw.pop(older)).lower()
        if raw.setdefault(field, value) != value:
            what = f"{given} means {field}: {value}, but {field} is {raw[field]}; remove one"
            raise FieldError([(f"{place}.{older}", what)])


def int_if_whole(number: float) -> float:
    """A float without a fraction as an integer: 4 for 4.0."""
    # Rungs are exact with an integer divisor.
    return int(number) if number == int(number) else number


def named(raw: object) -> object:
    """A name alone as a section with only this name."""
    return {"name": raw} if isinstance(raw, str) else raw


def as_text(raw: object) -> object:
    return os.fspath(raw) if isinstance(raw, os.PathLike) else raw


def _without_credentials(url: str) -> str:
    """Check that a URL has no credentials: URLs are stored and shown."""
    if "@" in url or "?" in url:
        raise ValueError("must not contain a user, password or token, as it is stored; set these in the environment")
    return url


Url: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_without_credentials)]
Directory: TypeAlias = Annotated[str, Field(min_length=1), BeforeValidator(as_text)]


CLASS = "module:Class"  # the kind that stands for all class names
_NOT_IN_JSON_SCHEMA = SkipJsonSchema()  # type: ignore[type-arg]
ABSENT, UNKNOWN = "absent", "unknown"


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kinds of a section. As a field's annotation, it selects the model that validates the section."""

    field: str  # the field with the kind
    models: Mapping[str, type[Section]]
    unknown: type[Section]  # the fields of all kinds, to find further faults in a section of an unknown kind
    absent: type[Section] | None = None  # the model without that field; None: the field is required

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        models: dict[str, Any] = {**self.models, UNKNOWN: Annotated[self.unknown, _NOT_IN_JSON_SCHEMA]}
        if self.absent is not None:
            models = {ABSENT: self.absent, **models}
        kinds = tuple(Annotated[model, Tag(kind)] for kind, model in models.items())
        return handler.generate_schema(Annotated[Union[kinds], Discriminator(self._kind)])  # noqa: UP007

    def _kind(self, section: object) -> str:
        kind = section.get(self.field) if isinstance(section, Mapping) else getattr(section, self.field, None)
        if kind is None and self.absent is not None and isinstance(section, Mapping | Section):
            return ABSENT
        kind = CLASS if is_class(kind) else kind
        return kind if isinstance(kind, str) and kind in self.models else UNKNOWN


def unknown_kind(known: Collection[str], removed: Mapping[str, str]) -> BeforeValidator:
    """A validator that rejects an unknown kind and names the nearest known one."""

    def refuse(kind: object) -> object:
        if isinstance(kind, str) and kind in removed:
            raise ValueError(f"{kind} was removed from Determined; use {removed[kind]}")
        raise ValueError(f"must be one of {', '.join(known)}, got {kind!r:.60}{did_you_mean(kind, known)}")

    return BeforeValidator(refuse)
