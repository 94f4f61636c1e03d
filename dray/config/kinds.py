"""Sections of several kinds, such as a searcher's methods: each kind has a model with just its fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Discriminator, GetCoreSchemaHandler, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema

from dray.config.entrypoint import is_class
from dray.config.section import Section
from dray.errors import did_you_mean

#: The kind of all names of classes.
CLASS = "module:Class"
_NOT_IN_JSON_SCHEMA = SkipJsonSchema()  # type: ignore[type-arg]
ABSENT, UNKNOWN = "absent", "unknown"


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kinds of a section. As a field's annotation, it selects the model that validates the section.

    Attributes:
        field: The field that says which kind a section is.
        models: By kind.
        absent: The model of a section without that field; None: it is required.
        unknown: A model with the fields of all kinds: it finds the other faults of a section of an unknown kind.
    """

    field: str
    models: Mapping[str, type[Section]]
    unknown: type[Section]
    absent: type[Section] | None = None

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
    """Refuses an unknown kind, with the nearest known one.

    Args:
        known: The kinds.
        removed: Kinds of Determined's older configs, each with what to use instead.
    """

    def refuse(kind: object) -> object:
        if isinstance(kind, str) and kind in removed:
            raise ValueError(f"{kind} was removed from Determined; use {removed[kind]}")
        raise ValueError(f"must be one of {', '.join(known)}, got {kind!r:.60}{did_you_mean(kind, known)}")

    return BeforeValidator(refuse)
