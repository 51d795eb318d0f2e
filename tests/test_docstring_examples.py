"""The examples in docstrings: they run, and the classes that users import have one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtrain
from dtrain import data, models, optimizers, precision, tasks
from dtrain.hooks import EarlyStopping, Samples
from dtrain.training.step import TrainStep
from dtrain.training.task import Evaluation, Output

EXPORTED = [vars(package)[name] for package in (data, models, optimizers, precision, tasks) for name in package.__all__]
PUBLIC = [*EXPORTED, EarlyStopping, Samples, TrainStep, Evaluation, Output]


def examples() -> Iterator[doctest.DocTest]:
    """One for each docstring of the package that has ``>>>``."""
    for found in pkgutil.walk_packages(dtrain.__path__, "dtrain."):
        source = importlib.util.find_spec(found.name)
        if source is not None and source.origin is not None and ">>>" in Path(source.origin).read_text():
            tests = doctest.DocTestFinder().find(importlib.import_module(found.name))
            yield from (test for test in tests if test.examples)


EXAMPLES = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(EXAMPLES[name], out=output.append)
    assert not output, "".join(output)


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_a_public_class_has_an_example(public: type) -> None:
    assert f"{public.__module__}.{public.__qualname__}" in EXAMPLES
