"""What else is called ``driftless`` here: an older wheel of this package, or the package of another project."""

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder


def find() -> tuple[str, bool] | None:
    """Where the package ``driftless`` lies, and whether it is an older wheel of ours; None if there is none."""
    spec = PathFinder.find_spec("driftless")
    # A mere folder of that name, such as a clone of the repository, has no origin.
    if spec is None or spec.origin is None:
        return None
    folders = filter(os.path.isdir, spec.submodule_search_locations or ())
    ours = any(name.startswith("_driftless.") for folder in folders for name in os.listdir(folder))
    return spec.origin, ours


def warn() -> None:
    """Names it, with what to do."""
    if (found := find()) is None:
        return
    place, ours = found
    if ours:
        text = (
            f"{place} is an older wheel of this package, `driftless`: `pip uninstall driftless`, and then install"
            " driftless-rl once more, because the command `driftless` goes with the older wheel"
        )
    else:
        text = (
            f"{place} is the package `driftless` of another project: the command `driftless` may be theirs;"
            " `python -m driftless_rl` is ours"
        )
    warnings.warn(text, stacklevel=3)


def take_over(plugin: str, register: Callable[[], None]) -> None:
    """Has the plugin of an older wheel register this one instead. Engines load all plugins before they call one, and call
    one of each name.

    Args:
        plugin: the older plugin's module of hooks, in its package.
        register: registers this plugin, once.
    """
    found = find()
    if found is None or not found[1]:
        return
    import logging

    log = logging.getLogger("driftless")
    try:
        import_module(f"driftless.{plugin}").register = register
    except Exception as error:  # what cannot be loaded registers nothing
        log.warning("driftless: the plugin of the older wheel `driftless` cannot be loaded: %s", error)
    else:
        log.warning("driftless: the plugin of the older wheel `driftless` (%s) is refused, this one patches", found[0])
