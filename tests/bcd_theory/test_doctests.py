"""The examples in bcd_theory's docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import bcd_theory

MODULES = [module.name for module in pkgutil.iter_modules(bcd_theory.__path__, "bcd_theory.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_examples_exist() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    counts = {
        name: sum(len(test.examples) for test in finder.find(importlib.import_module(name)))
        for name in MODULES
    }
    assert sum(counts.values()) >= 20, counts
