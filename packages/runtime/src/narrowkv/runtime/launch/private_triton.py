"""A second copy of Triton's Python modules, of which the rest of the process knows nothing.

Triton's interpreter replaces functions of `triton.language`. In the copy they can stay replaced: what other
threads compile meanwhile, and what a signal or a fork interrupts, uses the modules that everybody imports.
The copy shares Triton's compiled library and its backends with them.
"""

from __future__ import annotations

import builtins
import enum
import importlib
import importlib.util
import sys
import types
from typing import Any

# Compiled code cannot be loaded twice; backends are not the interpreter's; `extra` writes to `sys.modules`.
_SHARED = ("triton._C", "triton.backends", "triton.language.extra")


def _in_tree(name: str, root: str) -> bool:
    return name == root or name.startswith(root + ".")


class PrivateTriton:
    """The copy: `import` statements in its modules find each other, and not those of `sys.modules`."""

    def __init__(self) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    @staticmethod
    def owns(name: str) -> bool:
        """Whether the copy has its own module of this name."""
        return _in_tree(name, "triton") and not any(_in_tree(name, shared) for shared in _SHARED)

    def module(self, name: str) -> types.ModuleType:
        """The copy of a module of Triton, loaded when first asked for; shared modules come as they are."""
        if not self.owns(name):
            return importlib.import_module(name)
        if name not in self._modules:
            parent, _, child = name.rpartition(".")
            if parent:
                above = self.module(parent)
                # Importing the parent may have loaded this module already.
                if name in self._modules:
                    return self._modules[name]
            spec = importlib.util.find_spec(name)
            if spec is None or spec.loader is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            module = importlib.util.module_from_spec(spec)
            vars(module)["__builtins__"] = self._builtins
            self._modules[name] = module
            if parent:
                # Before the module is complete: `import a.b as c` in a cycle looks for the attribute.
                setattr(above, child, module)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del self._modules[name]
                raise
            # Under another name, so that the end of the process clears it like any module.
            sys.modules[f"{__name__}:{name}"] = module
        return self._modules[name]

    def _import(
        self,
        name: str,
        globals: dict[str, Any] | None = None,
        locals: dict[str, Any] | None = None,
        fromlist: tuple[str, ...] = (),
        level: int = 0,
    ) -> types.ModuleType:
        """`builtins.__import__` for the modules of the copy."""
        package = (globals or {}).get("__package__")
        absolute = importlib.util.resolve_name("." * level + name, package) if level else name
        if not _in_tree(absolute, "triton"):
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = self.module(absolute)
        if not fromlist:
            return self.module("triton")
        for child in fromlist:
            if child != "*" and not hasattr(module, child) and hasattr(module, "__path__"):
                try:
                    self.module(f"{absolute}.{child}")
                except ModuleNotFoundError as error:
                    if error.name != f"{absolute}.{child}":
                        raise
        return module

    def counterpart(self, value: Any) -> Any:
        """The copy's counterpart of an object that one of Triton's own modules made."""
        if isinstance(value, types.ModuleType):
            return self.module(value.__name__) if self.owns(value.__name__) else value
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and self.owns(module) and hasattr(value, "__qualname__"):
            return self._named(module, value.__qualname__)
        if self.owns(type(value).__module__):
            cls = self._named(type(value).__module__, type(value).__qualname__)
            if isinstance(value, enum.Enum):
                return cls[value.name]
            twin = object.__new__(cls)
            vars(twin).update({name: self.counterpart(part) for name, part in vars(value).items()})
            return twin
        return value

    def _named(self, module: str, qualname: str) -> Any:
        found: Any = self.module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
        return found
