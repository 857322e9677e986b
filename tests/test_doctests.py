"""The formulas' examples hold. The engine is left out: importing it needs torch."""

import doctest
import importlib
import pkgutil

import pytest

import bimetal

MODULES = [
    module.name
    for module in pkgutil.walk_packages(bimetal.__path__, "bimetal.", onerror=lambda name: None)
    if not module.ispkg and not module.name.startswith(("bimetal.engine", "bimetal.gateway", "bimetal.cli"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
