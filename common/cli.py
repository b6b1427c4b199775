"""The command line: validated arguments and one-line errors."""
import argparse
import math
from collections.abc import Callable, Mapping
from typing import NoReturn

from .errors import UsageError


class ArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reports errors in one line, shows defaults and accepts no abbreviations."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description.strip(), allow_abbrev=False, formatter_class=_HelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default not in (None, False, argparse.SUPPRESS) and "default" not in str(action.help)
        return f"{action.help} (default: %(default)s)" if shown else str(action.help)


def _number(convert: Callable[[str], float], holds: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def show(values: Mapping[str, float]) -> str:
    """Return the values as text: "accuracy 0.8134  top5 0.9972"."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


positive_int = _number(int, lambda value: value > 0, "a whole number above 0")
count = _number(int, lambda value: value >= 0, "a whole number, 0 or more")
positive = _number(float, lambda value: value > 0, "a number above 0")
not_negative = _number(float, lambda value: value >= 0, "a number, 0 or more")
fraction = _number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
port_number = _number(int, lambda value: 0 < value < 65536, "a port, 1 to 65535")
