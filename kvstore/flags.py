"""Command lines made from what they set, so that no option is written down twice.

`from_model` offers every field of a pydantic model as a flag, `from_function` every parameter of a function. Both are
typer commands built when they are asked for: importing `kvstore.cli` imports none of the parts that it can start.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvstore.errors import InvalidField
from kvstore.sizes import format_bytes, parse_bytes

Values = dict[str, Any]


def from_model(model: type[BaseModel], doc: str, call: Callable[[Path | None, Values], int | None]) -> typer.Typer:
    """A command with `--config FILE` and one flag for each field of `model`.

    `call` gets the file and the flags that were given, and returns an exit status. Values stay text, for the model to
    read; sizes (`*_bytes`) may be written "8GiB", mappings as JSON.
    """

    def command(**flags: Any) -> None:
        config = flags.pop("config")
        given = {name: _read(name, text, model.model_fields[name]) for name, text in flags.items() if text is not None}
        raise typer.Exit(call(config, given) or 0)

    parameters = [_parameter("config", Path | None, "TOML file", "FILE")]
    parameters += [_parameter(n, str | None, _help(f), _metavar(n)) for n, f in model.model_fields.items()]
    return _app(command, parameters, doc)


def from_function(function: Callable[..., Any]) -> typer.Typer:
    """A command with the parameters of `function`; an int that it returns is the exit status."""

    def command(**flags: Any) -> None:
        result = function(**flags)
        raise typer.Exit(result if isinstance(result, int) else 0)

    parameters = inspect.signature(function, eval_str=True).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return _app(command, named, inspect.getdoc(function) or "")


def start(app: typer.Typer, name: str, args: list[str]) -> None:
    """Run `app` as `kvstore <name>`. Leaves by SystemExit, or by whatever error the command raised."""
    app(args, prog_name=f"kvstore {name}")


def new_app() -> typer.Typer:
    """A typer application in the house's manner: plain text, no completion, errors handled by `cli.main`."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _app(command: Callable[..., None], parameters: list[inspect.Parameter], doc: str) -> typer.Typer:
    by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in by_name}
    app = new_app()
    app.command(help=doc)(command)
    return app


def _parameter(name: str, kind: Any, text: str, metavar: str) -> inspect.Parameter:
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.default_factory is not None or field.is_required() or "default" in text:
        return text
    return f"{text} [{_shown(field)}]".strip()


def _shown(field: FieldInfo) -> str:
    value = field.get_default()
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20
    return format_bytes(value) if is_size else getattr(value, "label", getattr(value, "name", str(value))).lower()


def _metavar(name: str) -> str:
    for ending, metavar in (
        ("_bytes", "SIZE"),
        ("_bytes_per_s", "SIZE"),
        ("_s", "SECONDS"),
        ("_dir", "DIR"),
        ("port", "PORT"),
    ):
        if name.endswith(ending):
            return metavar
    return "VALUE"


def _read(name: str, text: str, field: FieldInfo) -> Any:
    if name.endswith("_bytes"):
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise InvalidField(name, str(error), f"it is: {field.description or 'a size in bytes'}") from None
    if isinstance(field.default, Mapping) or field.default_factory is dict:
        return _read_json(name, text)
    return text


def _read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidField(
            name, f"no JSON: {error}", 'give an object, such as \'{"acme": {"max_leases": 10}}\''
        ) from None
