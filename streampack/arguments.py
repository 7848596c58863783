"""Arguments: where they come from, and the checks that many of them need, with one text each."""

from collections.abc import Mapping
from typing import Any


def packages_of(value: object) -> set[str]:
    """The packages that a value's class and the bases of it come from: nothing has to be imported to know."""
    return {kind.__module__.partition(".")[0] for kind in type(value).__mro__}


def check_numbers(numbers: Mapping[str, tuple[int | None, int]]) -> None:
    """Refuse what is no int or too small. Each is name: (value, least); None is an argument that was left out."""
    for name, (value, least) in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}, not an int")
        if value is not None and not least <= value < 1 << 31:
            raise ValueError(f"{name}={value}: must be at least {least}" + (", below 2**31" if value > least else ""))


def check_choices(choices: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Refuse what is none of the choices. Each is name: (value, choices)."""
    for name, (choice, allowed) in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name}={choice!r}: pass one of {', '.join(map(repr, allowed))}")
