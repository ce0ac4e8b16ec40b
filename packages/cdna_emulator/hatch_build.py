"""Puts the compiled engine into the wheel if there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltEngine(BuildHookInterface[Any]):
    """Adds the libraries of `compiled.library.prebuild`, and the platform's tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is packed."""
        if version == "editable":
            return
        folder = Path(self.root) / "src/narrowkv/cdna_emulator/compiled"
        package = types.ModuleType("compiled")  # the package itself would import numpy
        package.__path__ = [str(folder)]
        sys.modules["compiled"] = package
        library = importlib.import_module("compiled.library")
        try:
            libraries = library.prebuild()
        except library.BuildError as error:
            self.app.display_warning(f"the wheel has no compiled engine: {error}")
            return
        for name, path in libraries.items():
            build_data["force_include"][str(path)] = f"narrowkv/cdna_emulator/compiled/{name}"
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + re.sub(r"\W", "_", sysconfig.get_platform())
