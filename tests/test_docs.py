"""The documentation's examples use what there is: every name and every argument."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import stagehand

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples():
    for page in PAGES:
        text = page.read_text()
        for found in FENCED.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield pytest.param(found[1], id=f"{page.name}:{line}")


def resolve(node, names):
    """Return what an expression of names and attributes stands for, None if unknown."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolve(node.value, names)
    if owner is None:
        return None
    if inspect.ismodule(owner) and not hasattr(owner, node.attr):
        importlib.import_module(f"{owner.__name__}.{node.attr}")
    return getattr(owner, node.attr)


def is_method(func, names):
    """Whether a call passes an instance first, of a class that stands for it."""
    owner = resolve(func.value, names) if isinstance(func, ast.Attribute) else None
    return inspect.isclass(owner) and inspect.isfunction(
        inspect.getattr_static(owner, func.attr)
    )


def imported(tree):
    names = {"stagehand": stagehand}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("stagehand"):
            module = importlib.import_module(node.module)
            names |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
    return names


def made(tree, names):
    """Add the variables that hold an instance of one of our classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            what = resolve(node.value.func, names)
            if inspect.isclass(what) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = what
    return names


@pytest.mark.parametrize("example", list(examples()))
def test_example_names_and_arguments_exist(example):
    tree = ast.parse(example)
    names = made(tree, imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, names)
        if not isinstance(node, ast.Call):
            continue
        called = resolve(node.func, names)
        if called is not None:
            given = [*([None] * is_method(node.func, names)), *node.args]
            words = {keyword.arg: None for keyword in node.keywords}
            inspect.signature(called).bind_partial(*given, **words)
