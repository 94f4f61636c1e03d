"""Writes docs/pytorch-api.md out of the docstrings, docs/config.md out of the config's JSON Schema, and the table of
Determined's fields in docs/migration.md: ``python docs/generate.py``."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parent / "pytorch-api.md"
CONFIG_PAGE = Path(__file__).parent / "config.md"
MIGRATION_PAGE = Path(__file__).parent / "migration.md"

INTRODUCTION = """\
# The PyTorch API

Written by `docs/generate.py` out of the docstrings: change those, not this.

```python
import dray
from dray import core, pytorch
```

How to bring a training loop of your own here: [porting](porting.md).
"""

CHAPTERS = {
    "The trial": {"pytorch": ["PyTorchTrial", "PyTorchTrialContext", "PyTorchExperimentalContext"]},
    "Training": {"pytorch": ["init", "Trainer", "Batch", "Epoch", "TrainUnit"]},
    "Data": {
        "pytorch": ["DataLoader", "cached", "TorchData", "samplers", "adapt_batch_sampler", "data_length", "to_device"],
    },
    "Schedules and metrics": {"pytorch": ["LRScheduler", "Reducer", "MetricReducer"]},
    "Callbacks": {"pytorch": ["PyTorchCallback"]},
    "TensorBoard": {"tensorboard.metric_writers.pytorch": ["TorchWriter"]},
    "Leaving training": {"pytorch": ["ShouldExit", "InvalidHP", "DataExhausted", "PeerFailed"]},
    "Checkpoints": {"pytorch": ["load_trial_from_checkpoint_path", "CheckpointLoadContext"]},
    "Going through a data set once": {
        "pytorch.experimental": [
            "torch_batch_process",
            "TorchBatchProcessor",
            "TorchBatchProcessorContext",
            "get_default_device",
        ]
    },
    "Loops of your own": {
        "core": [
            "init",
            "Context",
            "TrainContext",
            "CheckpointContext",
            "PreemptContext",
            "SearcherContext",
            "SearcherOperation",
            "PreemptMode",
            "SearcherMode",
            "DownloadMode",
            "TensorboardMode",
            "EarlyExitReason",
            "Unit",
        ],
    },
    "Where it runs": {
        "core": ["DistributedContext", "ClusterInfo", "TrialInfo"],
        "": ["get_cluster_info", "import_from_path", "LOG_FORMAT"],
    },
    "By the name of Determined": {"compat": ["install", "NotSupported"]},
}
"""What is told, in this order: chapters, modules of dray ("" is dray itself), names."""

#: Made by dray, not by its users: how does not matter.
NOT_CONSTRUCTED = {
    "pytorch.PyTorchTrialContext",
    "pytorch.PyTorchExperimentalContext",
    "pytorch.experimental.TorchBatchProcessorContext",
    "core.Context",
    "core.TrainContext",
    "core.CheckpointContext",
    "core.PreemptContext",
    "core.SearcherContext",
    "core.SearcherOperation",
}


def page() -> str:
    """The whole document."""
    parts = [INTRODUCTION]
    for chapter, modules in CHAPTERS.items():
        parts.append(f"## {chapter}\n")
        for module, names in modules.items():
            home = importlib.import_module(f"dray.{module}".rstrip("."))
            for name in names:
                parts += _entry(f"{module}.{name}" if module else f"dray.{name}", getattr(home, name))
    return "\n".join(parts)


def _entry(name: str, thing: Any) -> list[str]:
    if inspect.ismodule(thing):
        inside = [part for each in thing.__all__ for part in _entry(f"{name}.{each}", getattr(thing, each))]
        return [f"### `{name}`\n", _docstring(thing), *inside]
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        members = ", ".join(f"`{member.name}`" for member in thing)
        return [f"### `{name}`\n", _docstring(thing), f"Members: {members}.\n"]
    if inspect.isclass(thing):
        base = thing.__bases__[0]
        line = f"class {name}{_signature(thing.__init__, method=True)}".removesuffix(" -> None")
        if issubclass(thing, Exception):
            line += f"  # a {base.__name__}" if base is not Exception else ""
        shown = [] if name in NOT_CONSTRUCTED else [f"```python\n{line}\n```\n"]
        parts = [f"### `{name}`\n", *shown, _docstring(thing)]
        for method, function in vars(thing).items():
            parts += _member(name.rpartition(".")[2], method, function)
        return parts
    if inspect.isfunction(thing):
        return [f"### `{name}`\n", f"```python\n{name}{_signature(thing)}\n```\n", _docstring(thing)]
    # A constant or a type alias: what it is says it all.
    told = (
        json.dumps(thing)
        if isinstance(thing, str)
        else str(thing).replace("typing.", "").replace("collections.abc.", "")
    )
    return [f"### `{name}`\n", f"```python\n{name} = {told}\n```\n"]


def _member(owner: str, name: str, thing: Any) -> list[str]:
    """A method, a property or a class within a class."""
    special = name in ("__init__", "__iter__", "__len__") and thing.__doc__
    if name.startswith("_") and not special:
        return []
    title = f"#### `{owner}.{name}`\n"
    if isinstance(thing, property):
        assert thing.fget is not None
        return [title, _docstring(thing.fget)]
    if inspect.isclass(thing):
        return [part.replace("###", "####", 1) for part in _entry(f"{owner}.{name}", thing)]
    function, prefix = thing, "abstract " if getattr(thing, "__isabstractmethod__", False) else ""
    if isinstance(thing, classmethod | staticmethod):
        function, prefix = thing.__func__, "classmethod " if isinstance(thing, classmethod) else "staticmethod "
    if not inspect.isfunction(function):
        return []
    bound = not isinstance(thing, staticmethod)
    return [title, f"```python\n{prefix}{name}{_signature(function, method=bound)}\n```\n", _docstring(function)]


def _signature(function: Any, method: bool = False) -> str:
    signature = inspect.signature(function)
    if not hasattr(function, "__code__"):
        return ""
    parameters = list(signature.parameters.values())[1 if method else 0 :]
    told: list[str] = []
    keyword_only = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
                told.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = f"{stars}{parameter.name}"
        annotated = parameter.annotation is not parameter.empty
        if annotated:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f"{' = ' if annotated else '='}{_value(parameter.default)}"
        told.append(text)
    result = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    line = f"({', '.join(told)}){result}"
    if len(line) <= 90:
        return line
    return "(\n" + "".join(f"    {each},\n" for each in told) + f"){result}"


def _value(default: Any) -> str:
    return f"{type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else repr(default)


def _docstring(thing: Any) -> str:
    """A docstring as Markdown: its sections as lists, its examples as code."""
    text = inspect.getdoc(thing)
    if not text or (inspect.isclass(thing) and not thing.__doc__):
        raise SystemExit(f"{getattr(thing, '__qualname__', thing)} has no docstring: give it one, it is public")
    out: list[str] = []
    section = False
    blocks = re.split(r"\n(?=\S*(?:Args|Returns|Raises|Attributes|Yields):\n)|\n\n", text)
    for block in blocks:
        head, _, rest = block.partition("\n")
        section = bool(re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", head))
        if section:
            out.append(f"**{head[:-1]}**\n")
            out.append(_items(inspect.cleandoc(f"\n{rest}"), as_list=head not in ("Returns:", "Yields:")) + "\n")
        elif head.startswith(">>> "):
            out.append(f"```python\n{block}\n```\n")
        elif head.startswith(".. code-block::"):
            continue  # what is indented below it is the code
        elif block.startswith("    "):
            out.append(f"```python\n{inspect.cleandoc(block)}\n```\n")
        else:
            out.append(block.replace("``", "`") + "\n")
    return "\n".join(out)


def _items(text: str, *, as_list: bool) -> str:
    text = text.replace("``", "`")
    if not as_list:
        return text
    items = re.split(r"\n(?=\S)", text)
    lines = []
    for item in items:
        name, colon, told = item.partition(":")
        name, told = name.replace(", ", "`, `"), " ".join(told.split())
        lines.append(f"- `{name}`: {told}" if colon else f"- {' '.join(item.split())}")
    return "\n".join(lines)


CONFIG_INTRODUCTION = """\
# The experiment file

Written by `docs/generate.py` out of what `dray config schema` prints: change `dray/config/`, not this.

The format is that of Determined's experiment configuration. What a search does with it: [searches](search.md); where
results go: [checkpoints](checkpoints.md); slots: [clusters](clusters.md). Mistakes are told before anything starts, all
of them at once (the first 20, if there are more), each with its path. [An editor](cli.md#the-config-in-an-editor) can
complete and check it as you write. YAML's anchors and merges (`<<`) work. A config has at most 100,000 values, counting
each where an anchor repeats it, 100 levels, 100,000,000 trials and integers of 64 bits.

A field that is null has its default; what has none, and is not required, may be left out, but for `max_length` where
nothing else says how long a trial trains. An experiment without a `name` has its file's; without an `experiment_seed`,
one is drawn, which the experiment's copy of the config then names.

A **length** is `{batches: 100}`, `{epochs: 16}` or `{records: 64000}`; a plain number as `max_length` counts batches.

## Hyperparameters

Each is a constant (a number, string, list, ...), a space to search, or a mapping of nested hyperparameters:

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
    columns = ["field", "what it is", "value", "default", "example", *([f"{said.field}s"] if said else [])]
    if said and said.field == "name":
        columns[-1] = "methods"
    description = kinds[""]["description"] if "" in kinds else " ".join(str(base.__doc__).partition("\n\n")[0].split())
    parts = [f"## {title}\n", description.replace("``", "`") + "\n"]
    parts += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, about in model.model_fields.items():
        forms = {kind: each["properties"][name] for kind, each in kinds.items() if name in each["properties"]}
        # Determined's, without a meaning here, are in docs/migration.md.
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
    """As it stands in a config; nothing, for what has nothing in it."""
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
    """Each field of Determined's experiment file: what becomes of it (used, not used, error), and what it does here."""
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
    """The page as it is, with the table of today."""
    begin, end = "<!-- fields -->\n", "<!-- end of fields -->"
    before, rest = MIGRATION_PAGE.read_text().split(begin)
    lines = ["| field | here | what it does, or what there is instead |", "|---|---|---|"]
    for path, (state, what) in determined_fields().items():
        section, _, name = path.partition(".")
        shown = f"`{section}`: `{name}`" if section == "log_policies" and name else f"`{path}`"
        lines.append(f"| {shown} | {state} | {what} |".replace("{", "`{").replace("}", "}`"))
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]


def main() -> None:
    """Write the pages."""
    for file, text in ((PAGE, page()), (CONFIG_PAGE, config_page()), (MIGRATION_PAGE, migration_page())):
        file.write_text(text)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
