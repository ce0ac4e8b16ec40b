"""The places that `--on` names."""

from __future__ import annotations

from collections.abc import Sequence

from narrowkv.cli.names import choices
from narrowkv.cli.report import UnsupportedHereError, UsageError
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing import places
from narrowkv.testing.codegen import amd_backend_missing
from narrowkv.testing.places import Place
from narrowkv.testing.words import AMD_TARGETS


def find_places(names: Sequence[str] | None, *, races: bool = False, hazards: bool = False) -> list[Place]:
    """The places named, each once, in the order given; names may also be joined by commas.

    Args:
        names: without any, the GPU if it can be used and the CPU otherwise.
        races, hazards: checks that only emulated targets have.

    Raises:
        UsageError: a name is unknown, or what only an emulated target can is asked of another place.
        UnsupportedHereError: this machine does not have a place.
    """
    # All names are checked before any is looked for: a wrong name is a wrong name on every machine.
    found = choices("--on", names, tuple(places.PLACES)) if names else [places.find_place(None).name]
    if (races or hazards) and not set(found) <= set(AMD_TARGETS):
        option = "--detect-hazards" if hazards else "--detect-races"
        wrong = next(name for name in found if name not in AMD_TARGETS)
        raise UsageError(f"{option} must be with --on {' or '.join(AMD_TARGETS)}; got {wrong}")
    try:
        return [places.find_place(name, detect_races=races, detect_hazards=hazards) for name in found]
    except UnsupportedError as error:
        raise UnsupportedHereError(f"--on {error}") from None


def check_amd_backend() -> None:
    """Refuses a Triton that cannot compile for AMD.

    Raises:
        UnsupportedHereError: it cannot.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
