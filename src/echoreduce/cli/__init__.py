"""The `echoreduce` command: arguments and printing only; each subcommand lives in its own module with a `register(app)`.

Exit codes: 0 success, 1 a check failed or a run raised an EchoReduceError, 2 wrong arguments.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from echoreduce.cli import analyze, bench, check, collectives, demo, evaluate, info, recommend
from echoreduce.errors import EchoReduceError

app = typer.Typer(
    name="echoreduce",
    help="4-bit error-compensated all-reduce for tensor parallelism: judge it on a model, run it, price it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (demo, evaluate, recommend, analyze, bench, check, info, collectives):
    command.register(app)


def main() -> None:
    """Entry point of the `echoreduce` command and of `python -m echoreduce`."""
    try:
        app()
    except EchoReduceError as error:
        Console(stderr=True).print(
            f"{type(error).__name__}: {error}", style="red", markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        sys.exit(1)
