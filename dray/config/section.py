"""What the sections of an experiment config have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from dray.config.determined_fields import IGNORED_FIELDS

#: Linux's.
MAX_PATH = 4096


class Section(BaseModel):
    """A mapping with these fields only; a null field has its default.

    Validation notes each valid field that is given in its context, a dict, under the field's path, so that
    ``rules.py`` can join them whatever else is wrong with the config.
    """

    # strict: "64" is not a number and 1 is not true; a config with these is wrong.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    place: ClassVar[str] = ""
    """Where the section is in a config."""
    passed_over: ClassVar[Mapping[str, str]] = {}
    """Further fields that a file may have, and why they are none of the model."""

    @model_validator(mode="before")
    @classmethod
    def _from_raw(cls, raw: object) -> object:
        if not isinstance(raw, Mapping):
            return raw
        return cls.respelled({str(name): value for name, value in raw.items() if value is not None})

    @classmethod
    def respelled(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The section with its other spellings replaced by the usual one."""
        return raw

    @field_validator("*", mode="wrap")
    @classmethod
    def _noted(cls, raw: object, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        value = validate(raw)
        if info.context is not None:
            info.context[f"{cls.place}.{info.field_name}".removeprefix(".")] = value
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The section's JSON Schema: with its ignored fields, and null for each field that is not required."""
        schema = handler.resolve_ref_schema(found := handler(core_schema))
        schema["description"] = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        schema.pop("title", None)
        fields = schema["properties"]
        for name, field in fields.items():
            field.pop("title", None)
            if "examples" in field:
                field["examples"] = [_value(example) for example in field["examples"]]
            if name not in schema.get("required", ()):
                fields[name] = _or_null(field)
        for name, why in {**_ignored_in(cls.place), **cls.passed_over}.items():
            fields[name] = {"description": why, "deprecated": True}
        return found


def _ignored_in(place: str) -> dict[str, str]:
    found = {path.rpartition(".")[::2]: why for path, why in IGNORED_FIELDS.items()}
    return {name: f"ignored: {why}" for (section, name), why in found.items() if section == place}


def _value(example: Any) -> Any:
    """An example's value: examples are written as YAML, for messages."""
    return yaml.safe_load(example) if isinstance(example, str) and not example.endswith("...") else example


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """A field's JSON Schema that allows null too, which means the default."""
    kept = {key: field[key] for key in ("description", "examples", "default") if field.get(key) is not None}
    form = {key: value for key, value in field.items() if key not in ("description", "examples", "default")}
    null = {"type": "null"}
    forms = form["anyOf"] if form.keys() == {"anyOf"} else [form]
    return {**kept, "anyOf": forms if null in forms else [*forms, null]}


def with_default(model: type[Section], name: str, default: Any) -> Any:
    """A model's required field as one with a default."""
    field = model.model_fields[name]
    return Field(default=default, description=field.description, examples=field.examples)


def whole_if_whole(number: float) -> float:
    """A float without a fraction as an integer: 4 for 4.0."""
    # 4.0 and 4 are the same divisor; with an integer, rungs are computed exactly.
    return int(number) if number == int(number) else number


def as_text(raw: object) -> object:
    """A path as text; other values unchanged."""
    return os.fspath(raw) if isinstance(raw, os.PathLike) else raw


def _without_credentials(url: str) -> str:
    """Check that a URL has no credentials: URLs are stored and shown."""
    if "@" in url or "?" in url:
        raise ValueError("must not contain a user, password or token, as it is stored; set these in the environment")
    return url


Url: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_without_credentials)]
Directory: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_PATH), BeforeValidator(as_text)]
#: Serialises a ``Length`` to the form of a config.
as_dict = PlainSerializer(lambda length: None if length is None else length.to_dict())
