"""What all the command line tools share: errors as one line with an exit code, `--json`, options made from `Knobs`."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.profiles.files import write_error
from seqmoe.profiles.knobs import KnobInfo, Knobs, knob_infos
from seqmoe.profiles.sizes import parse_bytes, parse_duration
from seqmoe.profiles.spec import LinkSpec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

INTERRUPTED = 130
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _OneLine:
    """Mixin for click commands: every error that a user can cause ends as one line on stderr and its exit code.

    With `--json` the error is also the last line of stdout: {"error": {"type", "message", "exit_code"}}.
    A command returns its exit code (None is 0).
    """

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:
        arguments = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in arguments
        extra["standalone_mode"] = False
        try:
            result = super().main(args=arguments, prog_name=prog_name, **extra)  # type: ignore[misc]
            sys.stdout.flush()
            sys.exit(result if isinstance(result, int) else 0)
        except SeqmoeError as error:
            fail(type(error).__name__, str(error), error.exit_code, as_json)
        except click.ClickException as error:
            fail(type(error).__name__, _click_message(error), error.exit_code, as_json)
        except (KeyboardInterrupt, click.Abort):
            fail("Interrupted", "interrupted", INTERRUPTED, as_json)
        except BrokenPipeError:
            # The reader of our output has gone (`| head`): no complaint, and none from Python's own flush at exit.
            _mute_stdout()
            sys.exit(0)
        except OSError as error:
            # Every file that is named by the user is looked after where it is used: what is left is our own output.
            failure = write_error(Path(error.filename or "the output"), error)
            _mute_stdout()
            fail(type(failure).__name__, str(failure), failure.exit_code, as_json)
        except MemoryError:
            fail("SeqmoeError", "out of memory", SeqmoeError.exit_code, as_json)


class Command(_OneLine, click.Command):  # type: ignore[misc]  # main never returns, click's may
    """A click command with the errors above."""


class Group(_OneLine, click.Group):  # type: ignore[misc]
    """A click group with the errors above; `lazy` maps a subcommand's name to "module:attribute", imported when it is used."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.lazy = lazy or {}  # name -> (module:attribute, short help)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without any argument: the help, as it is, on stderr, and exit code 2 (click would make it an error's message)."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, imported or not."""
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now if it is lazy."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        import importlib

        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in --help, without importing what it lists."""
        rows = []
        for name in self.list_commands(ctx):
            known = self.lazy.get(name)
            command = self.commands.get(name)
            rows.append((name, known[1] if known else command.get_short_help_str(80) if command else ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _mute_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):  # ValueError: standard output is no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(kind: str, message: str, exit_code: int, as_json: bool) -> NoReturn:
    """One line on stderr, with `as_json` the same as the last line of stdout, and out."""
    line = " ".join(message.split())
    print(line if kind == "Interrupted" else f"error: {line}", file=sys.stderr, flush=True)
    if as_json:
        emit_json({"error": {"type": kind, "message": line, "exit_code": exit_code}})
    sys.exit(exit_code)


def emit_json(value: dict[str, Any]) -> None:
    """One JSON object as one line of stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


def progress_bar(console: "Console", label: str = "{task.description}", *, left: bool = False, quiet: bool = False) -> "Progress":
    """A bar for what is counted in pieces, with the time so far and, if `left`, the time left; nothing where `console` is
    no terminal. `label` is rich's format of what stands before it."""
    # Here, so that --help does not wait for rich.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    if left:
        columns += [TextColumn("left"), TimeRemainingColumn()]
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal)


def _click_message(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
    return message


class _Converted(click.ParamType):
    """A parameter read by one of our own parsers, whose errors name the option."""

    def __init__(self, name: str, convert: Callable[..., Any]) -> None:
        self.name = name
        self._convert = convert

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The parsed value; a UsageError of ours passes through."""
        if not isinstance(value, str):
            return value
        label = param.opts[-1] if param else self.name
        return self._convert(value) if self.name == "link" else self._convert(value, label)


SIZE = _Converted("size", parse_bytes)
DURATION = _Converted("duration", parse_duration)
LINK = _Converted("link", LinkSpec.parse)


def json_option(function: _Function) -> _Function:
    """`--json`, passed on as `as_json`."""
    text = "Print the result as one JSON object, the last line of stdout."
    return click.option("--json", "as_json", is_flag=True, help=text)(function)


def knob_options(*, without: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """One option for each knob but those `without` (--read-threads, --direct-io, ...), all None when not given; see
    `knobs_from_options`."""

    def add(function: _Function) -> _Function:
        for info in reversed(knob_infos()):
            if info.name not in without:
                function = _knob_option(info)(function)
        return function

    return add


def knobs_from_options(options: dict[str, Any], base: Knobs | None = None) -> Knobs:
    """`base` (default: the defaults) changed by those knob options that were given."""
    known = {info.name for info in knob_infos()}
    return (base or Knobs()).replace(**{k: v for k, v in options.items() if k in known and v is not None})


def _knob_option(info: KnobInfo) -> Callable[[_Function], _Function]:
    flag = "--" + info.name.replace("_", "-").removesuffix("-bytes")
    default = "as many as fit" if info.name == "slots" else "one per core" if info.default is None else info.default
    if info.name.endswith("_bytes"):
        default = f"{info.default >> 20}MiB"
    elif info.type is bool:
        default = "on" if info.default else "off"
    text = f"{info.help[:1].upper()}{info.help[1:].split('; null')[0]}. [default: {default}]"
    if info.type is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", info.name, default=None, help=text)
    kind: Any = SIZE if info.name.endswith("_bytes") else click.Choice(info.choices) if info.type is str else click.INT
    return click.option(flag, info.name, type=kind, default=None, help=text)


def require(condition: bool, message: str) -> None:
    """UsageError with `message` unless `condition`."""
    if not condition:
        raise UsageError(message)
