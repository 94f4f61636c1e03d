"""Write docs/config.md from the config's JSON Schema, docs/commands.md from the command's help, the table of
Determined's fields in docs/determined-reference.md, and the API's description from the server's routes:
``python docs/generate.py``. The Python API needs no such step: mkdocstrings reads it from the docstrings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from dray.cli import app
from dray.config.determined_fields import IGNORED_FIELDS, REMOVED_FIELDS
from dray.config.faults import KINDS, SECTIONS
from dray.config.json_schema import json_schema
from dray.config.section import CLASS
from dray.config.yaml_file import as_yaml
from dray.serve.site import OPENAPI
from dray.text import one_line

COMMANDS_PAGE = Path(__file__).parent / "commands.md"
CONFIG_PAGE = Path(__file__).parent / "config.md"
DETERMINED_PAGE = Path(__file__).parent / "determined-reference.md"
#: The fields of Determined's experiment file, by its JSON schemas.
DETERMINED_FIELDS = Path(__file__).parents[1] / "tests" / "config" / "determined_fields.txt"

#: Pages about fields of the config, by path: the text of a link, and its target.
GUIDES = {
    "entrypoint": ("own loops", "core-api.md"),
    "searcher": ("searches", "search.md"),
    "searcher.name": ("methods", "search.md#methods"),
    "searcher.metrics": ("several objectives", "objectives.md"),
    "searcher.source_checkpoint_uuid": ("starting from a checkpoint", "search.md#starting-from-a-checkpoint"),
    "searcher.max_time": ("lengths and rungs", "search.md#lengths-and-rungs"),
    "searcher.points": ("hyperparameters", "search.md#hyperparameters"),
    "searcher.like": ("learning from experiments", "priors.md#learning-from-earlier-experiments"),
    "searcher.prior": ("priors", "priors.md"),
    "searcher.sampler": ("samplers", "search.md#samplers"),
    "searcher.options": ("your own method", "own-method.md"),
    "searcher.population": ("population-based training", "population-based-training.md"),
    "searcher.variant": ("stop or pause", "search.md#stop-or-pause"),
    "searcher.max_concurrent_trials": ("concurrent trials", "search.md#concurrent-trials"),
    "searcher.skip_uninformative_rungs": ("uninformative rungs", "how-it-works.md#uninformative-rungs"),
    "budget": ("budgets", "budgets.md"),
    "prices": ("prices", "budgets.md#prices"),
    "until": ("targets", "budgets.md"),
    "repeat": ("repeats", "repeats.md"),
    "resources": ("slots", "clusters.md#slots"),
    "resources.slots_per_trial": ("sharing a GPU", "clusters.md#several-trials-on-one-gpu"),
    "resources.slots_per_trial.min": ("elastic trials", "stopping.md#elastic-trials"),
    "resources.priority": ("shares", "serve.md#shares"),
    "resources.slot_type": ("types of GPUs", "clusters.md#types-of-gpus"),
    "resources.mesh": ("meshes", "sharded-training.md#other-dimensions-of-the-mesh"),
    "resources.reuse_workers": ("processes that trials share", "worker-processes.md"),
    "optimizations.aggregation_frequency": ("batch sizes", "batch-size.md"),
    "isolation": ("sandboxes", "sandbox.md"),
    "records_per_epoch": ("streams", "streaming.md"),
    "checkpoint_policy": ("when checkpoints are written", "checkpoints.md#when-they-are-written"),
    "checkpoint_format": ("sharded models", "sharded-training.md#sharded-models"),
    "checkpoint_storage": ("checkpoints", "checkpoints.md"),
    "max_restarts": ("restarts", "faults.md#restarts"),
    "profiling": ("a profile", "looking.md#a-profile"),
    "stop_on_nan": ("NaN", "faults.md#losses-that-are-nan"),
    "hang_timeout_s": ("hangs", "hangs.md"),
    "collective_timeout_s": ("collectives", "hangs.md#slots-that-wait-for-one-another"),
    "loggers": ("trackers", "tracking.md"),
    "notify": ("alerts", "alerts.md"),
    "reproducibility.experiment_seed": ("two runs", "exact-resumption.md#two-runs-of-the-same-search"),
    "reproducibility.deterministic": ("bit-identical runs", "exact-resumption.md#bit-identical-runs"),
}

CONFIG_INTRODUCTION = """\
# The experiment file

<!-- Written by docs/generate.py from the config's JSON Schema: change dray/config/, not this. -->

The format is Determined's experiment configuration. See also [searches](search.md), [checkpoints](checkpoints.md) for
where results go, and [slots](clusters.md#slots). Errors are reported before anything starts, all at once (the first
20), each with its path. [An editor](cli.md#the-config-in-an-editor) can complete and check the file as you type. YAML
anchors and merges (`<<`) work. Limits: 100,000 values (a repeated anchor counts each time), 100 levels, 100,000,000
trials, and 64-bit integers.

`null` means the default. A field without a default may be omitted unless it is required. `max_length` is required
unless something else says how long a trial trains. Without a `name`, an experiment is named after its file. Without
an `experiment_seed`, one is drawn and stored in the experiment's copy of the config.

A **length** is `{batches: 100}`, `{epochs: 16}` or `{records: 64000}`. For `max_length`, a plain number means
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

A range is a mapping with a `type`. The names of nested hyperparameters are joined by dots in `points`, on the command
line and in results: `model.layers`.

| type | draws | fields |
|---|---|---|
| `const` | always the same value | `val` |
| `categorical` | one of several values, all equally likely | `vals`: values, or [mappings](search.md#hyperparameters) |
| `int` | an integer, both bounds included | `minval`, `maxval`; `step`; `log`; `count` |
| `double` | a number | `minval`, `maxval`; `step`; `count` |
| `log` | `base ** u`, `u` uniform from `minval` to `maxval` | `base`; `minval`, `maxval`; `step`; `count` |

`step` restricts the values: to `minval`, `minval + step`, ... for `int` and `double`, and to multiples of `step` for
`log`. `log: true` makes an `int` uniform in its logarithm, so that 16 to 32 is as likely as 128 to 256. It needs a
`minval` of 1 or more. `count` is the number of values in a `grid` search, evenly spaced with both bounds included (for
`log`, evenly spaced exponents). In a grid, an `int` or `double` with a `step` needs no `count`. Other
searches ignore `count`.
"""

COMMANDS_INTRODUCTION = """\
# All commands

<!-- Written by docs/generate.py from the help of the command: change dray/cli/, not this. -->

`dray COMMAND -h` prints the same. [The command](cli.md) explains how to name experiments and trials, the exit codes and
`--json`. `e`, `t` and `c` are short for `experiment`, `trial` and `checkpoint`, and `ls` for `list`.
"""


def commands_page() -> str:
    """The text of docs/commands.md."""
    sections = (_command(*each) for each in _commands(typer.main.get_command(app), "dray"))
    return "\n".join([COMMANDS_INTRODUCTION, *sections])


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The commands below a group, with their names."""
    for name, command in group.commands.items():
        if command.hidden:  # another name of one that is not
            continue
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")


def _command(path: str, command: Any) -> str:
    """The section of a command: its description, arguments, options and examples."""
    paragraphs = (command.help or "").split("\n\n")
    examples = "\n".join(each.strip("\b\n") for each in paragraphs if each.startswith("\b"))
    rows = []
    for given in sorted(command.params, key=lambda each: each.param_type_name):  # arguments first
        if given.param_type_name == "argument":
            name, default = given.metavar or given.name.upper(), None
            name = name if given.required or name.startswith("[") else f"[{name}]"
        else:
            value = "" if given.is_flag else f" {given.metavar or given.name.upper()}"
            name = ", ".join(reversed(given.opts)) + value
            default = given.default if not given.is_flag and not callable(given.default) else None
        text = one_line(given.help or "").replace("|", "\\|")
        name = " or ".join(name.rsplit("|", 1)).replace("|", ", ")
        rows.append(f"| `{name}` | {text}{f' Default: `{default}`.' if default else ''} |")
    lines = [f"## {path}\n", *(one_line(each) + "\n" for each in paragraphs if not each.startswith("\b"))]
    if rows:
        lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
    if examples:
        lines += ["```sh", re.sub(r" {2,}(\w.*)$", r"  # \1", examples, flags=re.MULTILINE), "```\n"]
    return "\n".join(lines)


def config_page() -> str:
    """The text of docs/config.md."""
    schema = json_schema()
    anchors = {"Hyperparameters": "hyperparameters"}  # of headings, as Markdown makes them, by definition in the schema
    for place, model in SECTIONS.items():
        kinds = KINDS[place].models.values() if place in KINDS else ()
        anchors |= {each.__name__: re.sub(r"[.\[\]]", "", place) for each in (*model.__mro__, *kinds)}
    tables = [line for place in SECTIONS for line in _table(place, schema, anchors)]
    return "\n".join([CONFIG_INTRODUCTION, *tables])


def _table(place: str, schema: dict[str, Any], anchors: dict[str, str]) -> list[str]:
    """A section's heading, what it is, and a table of its fields."""
    model, kinds = SECTIONS[place], KINDS.get(place)
    columns = ["field", "meaning", "value", "default", "example"]
    base = next(each for each in reversed(model.__mro__) if getattr(each, "place", None) == place)
    if kinds is None:
        definitions = {"": schema["$defs"].get(model.__name__, schema)}
    else:  # one table of all kinds, with a column that says which of them each field is for
        columns.append("methods" if kinds.field == "name" else f"{kinds.field}s")
        models = {kind: each for kind, each in kinds.models.items() if kind != "async_halving"}
        definitions = {kind: schema["$defs"][each.__name__] for kind, each in models.items()}
    description = schema["description"] if not place else one_line(str(base.__doc__).partition("\n\n")[0])
    rows = [columns, ["---"] * len(columns)]
    for name, field in model.model_fields.items():
        forms = {kind: each["properties"][name] for kind, each in definitions.items() if name in each["properties"]}
        # Determined's that are ignored are in docs/determined-reference.md.
        forms = {kind: form for kind, form in forms.items() if not form.get("deprecated")}
        form = next(iter(forms.values()))
        is_required = all(name in definitions[kind].get("required", ()) for kind in forms)
        if kinds is not None and name == kinds.field:
            form = {"anyOf": [{"enum": [kind for kind in kinds.models if kind != CLASS]}]}
            form["anyOf"] += [{"pattern": ""}] if CLASS in kinds.models else []
            is_required = field.is_required()
        default = "required" if is_required else _value_of(form.get("default"))
        example = _value_of(next(iter(field.examples or ()), None))
        meaning = str(field.description)
        if guide := GUIDES.get(base.path(name)):
            meaning += " ([{}]({}))".format(*guide)
        row = [f"`{name}`", meaning, _form(form, anchors), default, example]
        if kinds is not None:
            named = [f"`{kind}`" if kind == CLASS else kind for kind in forms]
            row.append("all" if len(forms) == len(definitions) else ", ".join(named))
        rows.append([cell.replace("|", "\\|") for cell in row])
    title = f"`{place}`" if place else "The experiment"
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = "|---" * len(columns) + "|"
    return [f"## {title}\n", description.replace("``", "`") + "\n", *lines, ""]


def _value_of(value: Any) -> str:
    """A value as in a config; "" for an empty one."""
    if value in ({}, [], "", "...", None):
        return ""
    return f"`{as_yaml(value)}`"


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
    return re.sub(r"(^| or )(string|integer|number|mapping)\b", r"\1\2s", form)


def determined_fields() -> dict[str, tuple[str, str]]:
    """Each field of Determined's experiment file: what becomes of it (used, not used, error), and what it does here."""

    known = {line for line in DETERMINED_FIELDS.read_text().splitlines() if not line.startswith("#")}
    found = {path: ("not used", why) for path, why in IGNORED_FIELDS.items()}
    found |= {path: ("error", why) for path, why in REMOVED_FIELDS.items()}
    for section in SECTIONS.values():
        for name, field in section.model_fields.items():
            path = section.path(name)
            # A section is described by its fields; below resources.slots_per_trial there are none of Determined's.
            if path in known and (path not in SECTIONS or path == "resources.slots_per_trial"):
                found[path] = ("used", str(field.description))
    return dict(sorted(found.items()))


def determined_page() -> str:
    """The page, with its table regenerated."""
    begin, end = "<!-- fields -->\n", "<!-- end of fields -->"
    before, rest = DETERMINED_PAGE.read_text().split(begin)
    lines = ["| field | here | what it does, or what to use instead |", "|---|---|---|"]
    for path, (state, what) in determined_fields().items():
        section, _, name = path.partition(".")
        shown = f"`{section}`: `{name}`" if section == "log_policies" and name else f"`{path}`"
        lines.append(f"| {shown} | {state} | {what} |".replace("{", "`{").replace("}", "}`"))
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]


def main() -> None:
    """Write the pages."""
    sys.path.insert(0, str(Path(__file__).parent))
    import openapi

    api = openapi.as_text(openapi.document()) + "\n"
    pages = {
        CONFIG_PAGE: config_page(),
        COMMANDS_PAGE: commands_page(),
        DETERMINED_PAGE: determined_page(),
        OPENAPI: api,
    }
    for file, text in pages.items():
        file.write_text(text)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
