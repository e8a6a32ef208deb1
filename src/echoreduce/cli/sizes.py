"""Size arguments of the command line: what "64M" means, and how a bad one is refused.

Why: a benchmark that reads "2M" as 2 bytes measures something else and says nothing. One parser for every command, one
sentence for every help text, one line for every refusal. Leaves out: printing sizes in tables beyond `format_bytes`.
Source: nccl-tests, whose -b, -e, -i, -f these options follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from echoreduce.errors import ConfigError

#: For help texts.
SIZE_HELP = "bytes, e.g. 64M, 1.5G, 2MiB, 500kB, 1e6 (K, M, G, T and KiB .. TiB are powers of 1024, kB .. TB powers of 1000; either case)"

LARGEST = 1 << 62

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e\+?([0-9]{1,2}))?\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_size(text: str, option: str) -> int:
    """Bytes that the text names.

    Args:
        text: a number >= 0, optionally with an exponent and a unit, see `SIZE_HELP`.
        option: the option's name, for the message.
    Raises:
        ConfigError: not such a text, not a whole number of bytes, or beyond 2^62; one line that names the option.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{option}: {text!r} is not a size; accepted are {SIZE_HELP}")
    digits, _, fraction = match[1].partition(".")
    value = int((digits or "0") + fraction) * 10 ** int(match[2] or 0) * unit
    whole, rest = divmod(int(value), int(10 ** len(fraction)))
    if rest:
        raise ConfigError(f"{option}: {text!r} is not a whole number of bytes")
    if whole > LARGEST:
        raise ConfigError(f"{option}: {text!r} is more than 2^62 bytes")
    return whole


def parse_range(smallest: str, largest: str, factor: float = 2.0, step: str | None = None, prefix: str = "--") -> list[int]:
    """Sizes from `--min-size` to `--max-size`, each the one before times `--factor`, or plus `--step` where that is given.

    Args:
        smallest, largest: size texts; `smallest` may equal `largest`.
        factor: > 1, unused with `step`; a start at 0 goes on with 1.
        step: size text of the increment, > 0.
        prefix: what stands before the option names in messages.
    Returns:
        Ascending sizes, at most 10,000.
    Raises:
        ConfigError: a bad size, smallest above largest, factor <= 1, a step of 0, or too many sizes; one line that names the option.
    """
    low, high = parse_size(smallest, f"{prefix}min-size"), parse_size(largest, f"{prefix}max-size")
    if low > high:
        raise ConfigError(f"{prefix}min-size: {smallest!r} is more than {prefix}max-size {largest!r}")
    increment = 0 if step is None else parse_size(step, f"{prefix}step")
    if step is not None and increment == 0:
        raise ConfigError(f"{prefix}step: must be more than 0, got {step!r}")
    if step is None and not 1.0 < factor < float("inf"):
        raise ConfigError(f"{prefix}factor: must be more than 1, got {factor}")
    sizes = [low]
    while sizes[-1] < high and len(sizes) <= 10_000:
        following = sizes[-1] + increment if step is not None else max(int(sizes[-1] * factor), sizes[-1] + 1)
        if following > high:
            break
        sizes.append(following)
    if len(sizes) > 10_000:
        raise ConfigError(f"{prefix}{'step' if step is not None else 'factor'}: more than 10,000 sizes between {smallest} and {largest}")
    return sizes


def format_bytes(nbytes: float) -> str:
    """64 MiB, 1.5 KiB, 12 B: binary units, at most 3 significant digits."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 1000 * scale else f"{nbytes / scale:.0f} {unit}"
    return f"{nbytes:.0f} B"


@contextmanager
def refused() -> Iterator[None]:
    """Turn a ConfigError in the arguments into one line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        Console(stderr=True, soft_wrap=True).print(str(error), markup=False, highlight=False)
        raise typer.Exit(2) from None
