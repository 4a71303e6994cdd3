"""Each folder's ``__init__.py`` maps its files: none is missing, none is gone."""

import ast
from pathlib import Path

import pytest

import slidedp

pytestmark = pytest.mark.null

HOME = Path(slidedp.__file__).parent


WITH_FILES = HOME / "executor" / "measure", HOME / "executor" / "native"
"""Whose docstrings say more of each file."""

FOLDERS = [HOME, *(file.parent for pattern in ("*/", "compiler/*/", "executor/*/")
                   for file in sorted(HOME.glob(f"{pattern}__init__.py")))]  # fmt: skip


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f not in WITH_FILES], ids=lambda folder: str(folder.relative_to(HOME)))
def test_a_folders_docstring_names_its_files(folder):
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()), clean=False)
    named = [name for line in doc.splitlines() if line.startswith(" " * 8) for name in line.split()]
    files = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(named) == sorted(files - {"__init__"})
