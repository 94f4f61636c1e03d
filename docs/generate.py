"""Write docs/config.md from the config's JSON Schema, and the table of Determined's fields in docs/migration.md:
``python docs/generate.py``. The Python API needs no such step: mkdocstrings reads it from the docstrings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CONFIG_PAGE = Path(__file__).parent / "config.md"
MIGRATION_PAGE = Path(__file__).parent / "migration.md"

CONFIG_INTRODUCTION = """\
# The experiment file

<!-- Written by docs/generate.py from the config's JSON Schema: change dray/config/, not this. -->

The format is Determined's experiment configuration. See also [searches](search.md), [checkpoints](checkpoints.md) for
where results go, and [slots](clusters.md#slots). Errors are reported before anything starts, all at once (the first
20), each with its path. [An editor](cli.md#the-config-in-an-editor) can complete and check the file as you type. YAML
anchors and merges (`<<`) work. Limits: 100,000 values (a repeated anchor counts each time), 100 levels, 100,000,000
trials, and 64-bit integers.

A null field has its default. A field without a default may be omitted unless it is required; `max_length` is required
unless something else says how long a trial trains. Without a `name`, an experiment is named after its file. Without
an `experiment_seed`, one is drawn and stored in the experiment's copy of the config.

A **length** is `{batches: 100}`, `{epochs: 16}` or `{records: 64000}`; for `max_length`, a plain number means
batches.

## Hyperparameters

Each is a constant (a number, string, list, ...), a range to search, or a mapping of nested hyperparameters:

```yaml
hyperparameters:
  global_batch_size: 64
  lr: {type: log, base: 10, minval: -4, maxval: -1}
  hidden: {type: int, minval: 16, maxval: 256, step: 16}
  dropout: {type: double, minval: 0.0, maxval: 0.5}
  model:
    layers: {type: const, val: 3}
    activation: {type: categorical, vals: [relu, gelu]}
```
"""


def config_page() -> str:
    """The whole document."""
    from dray.config.json_schema import json_schema
    from dray.config.sections import KINDS

    schema = json_schema()
    sections: dict[str, list[str]] = {}
    for where, name in _references(schema, schema, ()):
        sections.setdefault(where, []).append(name)
    # What Markdown makes of their headings.
    anchors = {name: where.replace(".", "") for where, names in sections.items() for name in names}
    anchors["Hyperparameters"] = "hyperparameters"
    parts = [CONFIG_INTRODUCTION, *_section("The experiment", "", {"": schema}, anchors)]
    for where, names in sections.items():
        kinds = {"": schema["$defs"][names[0]]}
        if where in KINDS:  # one table of all, with a column that says which of them each field is for
            models = KINDS[where].models
            kinds = {kind: schema["$defs"][model.__name__] for kind, model in models.items() if kind != "async_halving"}
        parts += _section(f"`{where}`", where, kinds, anchors)
    return "\n".join(parts)


def _section(title: str, where: str, kinds: Mapping[str, dict[str, Any]], anchors: dict[str, str]) -> list[str]:
    """A table of its fields, some of which are sections too.

    Args:
        where: its path.
        kinds: its JSON Schema, or several, by kind.
    """
    from dray.config.sections import KINDS, SECTIONS

    model, said = SECTIONS[where], KINDS.get(where)
    base = next(each for each in reversed(model.__mro__) if getattr(each, "place", None) == where and each.__doc__)
    columns = ["field", "meaning", "value", "default", "example", *([f"{said.field}s"] if said else [])]
    if said and said.field == "name":
        columns[-1] = "methods"
    description = kinds[""]["description"] if "" in kinds else " ".join(str(base.__doc__).partition("\n\n")[0].split())
    parts = [f"## {title}\n", description.replace("``", "`") + "\n"]
    parts += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, about in model.model_fields.items():
        forms = {kind: each["properties"][name] for kind, each in kinds.items() if name in each["properties"]}
        # Determined's fields without a meaning here are in docs/migration.md.
        forms = {kind: form for kind, form in forms.items() if not form.get("deprecated")}
        form = next(iter(forms.values()))
        if said and name == said.field:
            known = [kind for kind in said.models if ":" not in kind]
            form = {"anyOf": [{"enum": known}, *({"pattern": ""} for kind in said.models if ":" in kind)]}
            is_required = about.is_required()
        else:
            is_required = all(name in kinds[kind].get("required", ()) for kind in forms)
        default = "required" if is_required else _value_of(form.get("default"))
        example = next(iter(about.examples or ()), None)
        value = yaml.safe_load(example) if isinstance(example, str) and not example.endswith("...") else example
        cells = [f"`{name}`", str(about.description), _form(form, anchors), default, _value_of(value)]
        if said:
            names = [f"`{kind}`" if ":" in kind else kind for kind in forms]
            cells.append("all" if len(forms) == len(kinds) else ", ".join(names))
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*parts, ""]


def _value_of(value: Any) -> str:
    """A value as in a config; "" for an empty one."""
    if value in ({}, [], "", "...", None):
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).removesuffix("...\n").strip()
    return f"`{text}`"


def _form(field: dict[str, Any], anchors: dict[str, str]) -> str:
    """What a value may be, in words."""
    if "anyOf" in field or "oneOf" in field:
        forms = [_form(each, anchors) for each in field.get("anyOf", field.get("oneOf")) if each != {"type": "null"}]
        return " or ".join(dict.fromkeys(form for form in forms if form))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        section = field["$ref"].rpartition("/")[2]
        return f"[as {'above' if section == 'Hyperparameters' else 'below'}](#{anchors[section]})"
    if "pattern" in field:
        return "`module:Class`"
    if field.get("maxProperties") == 1:
        return "a length"
    match field.get("type"):
        case "integer" | "number" as kind:
            if field.get("description") == "in batches":
                return ""
            signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}
            limits = [
                f"{sign} {field[limit]:g}" for limit, sign in signs.items() if limit in field and field[limit] < 1e6
            ]
            return " ".join([kind, ", ".join(limits)]).strip()
        case "array":
            return f"list of {_plural(_form(field['items'], anchors))}" if field.get("items") else "list"
        case kind:
            return {"string": "string", "boolean": "true or false", "object": "mapping", None: "anything"}[kind]


def _plural(form: str) -> str:
    return re.sub(r"^(string|integer|number|mapping)\b", r"\1s", form)


def _references(node: Any, schema: dict[str, Any], path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Where in a config each section stands, as (path, its name)."""
    found: list[tuple[str, str]] = []
    for name, field in node.get("properties", {}).items():
        for target in re.findall(r"#/\$defs/(\w+)", json.dumps(field)):
            if target not in ("Hyperparameters", "Hyperparameter", *(name for _, name in found)):
                found.append((".".join((*path, name)), target))
                found += _references(schema["$defs"][target], schema, (*path, name))
    return found


def determined_fields() -> dict[str, tuple[str, str]]:
    """Each field of Determined's experiment file: whether it is used, not used or an error, and what it does here."""
    from dray.config.determined_fields import DRAY_FIELDS, IGNORED_FIELDS, OLDER_NAMES, REMOVED_FIELDS
    from dray.config.sections import SECTIONS

    tables = {"used": OLDER_NAMES, "not used": IGNORED_FIELDS, "error": REMOVED_FIELDS}
    found = {path: (state, what) for state, table in tables.items() for path, what in table.items()}
    for place, section in SECTIONS.items():
        for name, field in section.model_fields.items():
            path = f"{place}.{name}".removeprefix(".")
            # A section is described by its fields; below resources.slots_per_trial there are none of Determined's.
            is_section = path in SECTIONS and path != "resources.slots_per_trial"
            if not is_section and path not in DRAY_FIELDS and place not in DRAY_FIELDS and path.count(".") < 2:
                found[path] = ("used", str(field.description))
    return dict(sorted(found.items()))


def migration_page() -> str:
    """The page, with its table regenerated."""
    begin, end = "<!-- fields -->\n", "<!-- end of fields -->"
    before, rest = MIGRATION_PAGE.read_text().split(begin)
    lines = ["| field | here | what it does, or what to use instead |", "|---|---|---|"]
    for path, (state, what) in determined_fields().items():
        section, _, name = path.partition(".")
        shown = f"`{section}`: `{name}`" if section == "log_policies" and name else f"`{path}`"
        lines.append(f"| {shown} | {state} | {what} |".replace("{", "`{").replace("}", "}`"))
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]


def main() -> None:
    """Write the pages."""
    for file, text in ((CONFIG_PAGE, config_page()), (MIGRATION_PAGE, migration_page())):
        file.write_text(text)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
