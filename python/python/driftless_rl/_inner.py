"""Inner functions of engines: looked up, and compared with those that the plugins know, before anything is hooked."""

import inspect
import pkgutil


def resolve(name: str):
    """What a dotted name leads to, or None."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def find(names: tuple[str, ...], parameters: tuple[str, ...]) -> tuple[str | None, str]:
    """The first of the names that there is, if it takes these parameters; otherwise None and why."""
    for name in names:
        if (function := resolve(name)) is not None:
            taken = tuple(inspect.signature(function).parameters)
            if taken[: len(parameters)] == parameters:
                return name, ""
            return None, f"{name} takes {', '.join(taken)}, expected {', '.join(parameters)}"
    return None, f"there is no {' and no '.join(names)}"
