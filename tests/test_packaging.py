"""Wheel, sdist and editable install hold ordinary packages, and imports point one way (DESIGN §2)."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.null

REPO = Path(__file__).resolve().parent.parent
FOLDERS = ("compiler", "passes", "executor")

# What each package may import of SlideDP, and what it may not import of others.
MAY_IMPORT = {
    "compiler": {"slidedp.compiler"},
    "passes": {"slidedp.compiler", "slidedp.passes"},
    "executor": {"slidedp.compiler", "slidedp.executor"},
}
MAY_NOT_IMPORT = {
    "compiler": {"torch.distributed", "torch.cuda", "torch.multiprocessing", "threading", "multiprocessing"},
    "passes": {"torch.distributed", "torch.cuda", "torch.multiprocessing", "threading", "multiprocessing"},
    "executor": {"ortools"},
}

EVERYTHING = """
import importlib, pkgutil, slidedp
for module in pkgutil.walk_packages(slidedp.__path__, "slidedp."):
    importlib.import_module(module.name)
"""
PROBE = """
import importlib.resources, importlib.util, sys
import slidedp
print(slidedp.__file__)
for bare in ("compiler", "passes", "executor"):
    assert bare not in sys.modules, f"{bare} was imported by its bare name"
    assert importlib.util.find_spec(bare) is None, f"{bare} can be imported by its bare name"
assert list(importlib.resources.files("slidedp").joinpath("profiles").iterdir())
"""


def source_files() -> dict[str, bytes]:
    """Every file that an installation must hold, by its path there."""
    wanted = {".py", ".yaml", ".cpp", ".h"}
    found: dict[str, bytes] = {}
    for folder in ("", *FOLDERS):
        root = REPO / "slidedp" / folder
        for path in root.rglob("*"):  # does not enter links, so each file comes once
            if path.suffix in wanted or path.name == "py.typed":
                found[str(path.relative_to(REPO))] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, links as links, so that building leaves nothing in the checkout."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("slidedp", *FOLDERS):
        shutil.copytree(REPO / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that was built out of the sdist."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree))
    return dist


def run(*command: str, pythonpath: str = "", cwd: Path | None = None) -> str:
    env = {**os.environ, "PYTHONPATH": pythonpath, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}"
    return done.stdout


def test_sdist_holds_the_packages_once(dist: Path) -> None:
    (archive,) = dist.glob("slidedp-*.tar.gz")
    with tarfile.open(archive) as tar:
        members = {member.name.split("/", 1)[1]: member for member in tar.getmembers() if "/" in member.name}
    assert set(source_files()) <= set(members)
    assert not [name for name in members if name.split("/")[0] in FOLDERS]
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


def test_wheel_holds_exactly_the_packages(dist: Path) -> None:
    (archive,) = dist.glob("slidedp-*.whl")
    with zipfile.ZipFile(archive) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
        licenses = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert held == source_files()
    assert licenses


def test_installed_wheel_imports_whole(dist: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("slidedp-*.whl")
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(archive))
    location = run(sys.executable, "-c", EVERYTHING + PROBE, pythonpath=str(site), cwd=tmp_path)
    assert location.splitlines()[0] == str(site / "slidedp" / "__init__.py")
    assert "plan" in run(sys.executable, str(site / "bin" / "slidedp"), "--help", pythonpath=str(site), cwd=tmp_path)


def test_editable_install_follows_the_links(tree: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # This environment's packages, whether or not it is itself a virtual environment: torch, setuptools, pip.
    (Path(site) / "borrowed.pth").write_text("\n".join(dict.fromkeys(packages_of_this_environment())))
    pip = (python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    run(*pip, "--editable", str(tree), cwd=tmp_path)
    (tree / "compiler" / "added_later.py").write_text("ANSWER = 42\n")
    try:
        probe = f"from slidedp.compiler.added_later import ANSWER\n{PROBE}print(ANSWER)"
        assert run(python, "-c", probe, cwd=tmp_path).splitlines() == [str(tree / "slidedp" / "__init__.py"), "42"]
    finally:
        (tree / "compiler" / "added_later.py").unlink()


def packages_of_this_environment() -> Iterator[str]:
    yield from (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    yield from (entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")))


def imports_of(path: Path, for_types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, at any depth; `from a import b` counts as both `a` and `a.b`. `for_types`: also
    what is imported for annotations only.
    """
    tree = ast.parse(path.read_text(), str(path))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = set() if for_types else {inner for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def starts_with(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder: str) -> None:
    allowed, forbidden = MAY_IMPORT[folder], MAY_NOT_IMPORT[folder]
    wrong = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in (REPO / folder).rglob("*.py")
        for line, name in imports_of(path)
        if (starts_with(name, {"slidedp"}) and not starts_with(name, allowed)) or starts_with(name, forbidden)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ["slidedp", "compiler", "executor"])
def test_imports_point_up_the_folders_map(folder: str) -> None:
    """Folders import what the map in ``__init__.py`` names before them; files beside it none of them, but for the package's own,
    which are its face.
    """
    rooms = [path.parent.name for path in (REPO / folder).glob("*/__init__.py")]
    doc = ast.get_docstring(ast.parse((REPO / folder / "__init__.py").read_text()), clean=False) or ""
    order = [name for line in doc.splitlines() if line.startswith(" " * 8) for name in line.split() if name in rooms]
    assert sorted(order) == sorted(rooms)
    wrong = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in (REPO / folder).rglob("*.py")
        if folder != "slidedp" or path.parent.name in rooms
        for line, name in imports_of(path, for_types=False)
        for room in order[order.index(path.parent.name) + 1 if path.parent.name in rooms else 0 :]
        if starts_with(name, {f"slidedp.{folder}.{room}" if folder != "slidedp" else f"slidedp.{room}"})
    ]
    assert not wrong


def test_imports_are_absolute_and_never_bare() -> None:
    wrong = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for folder in ("slidedp", *FOLDERS, "examples", "tests")
        for path in (REPO / folder).glob("*.py")
        for line, name in imports_of(path)
        if name.startswith(".") or starts_with(name, set(FOLDERS))
    ]
    assert not wrong


def test_import_rules_see_what_they_forbid(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def f():\n    from slidedp import executor\n    import compiler.ops\n    from . import ops\n")
    assert list(imports_of(source)) == [
        (2, "slidedp"), (2, "slidedp.executor"), (3, "compiler.ops"), (4, "."), (4, "..ops"),
    ]  # fmt: skip


def test_links_are_relative() -> None:
    assert {name: os.readlink(REPO / "slidedp" / name) for name in FOLDERS} == {name: f"../{name}" for name in FOLDERS}


def test_top_level_holds_nothing_else() -> None:
    tracked = subprocess.run(["git", "-C", str(REPO), "ls-files"], capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a git checkout")
    assert {path.split("/")[0] for path in tracked.stdout.splitlines()} == {
        "slidedp", *FOLDERS, "tests", "examples", "pyproject.toml", "README.md", "Makefile", "LICENSE", ".gitignore", ".ci",
    }  # fmt: skip
