"""What `pip install` gives: the right files, the right imports, true requirements."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[1]
PACKAGES = ("precompute", "sampling", "store_format", "train")
MODULES = (*PACKAGES, "prebake")


def run(*command: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def project() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def files_below(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, as a release is."""
    folder = tmp_path_factory.mktemp("dist")
    result = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPO)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone; what it depends on comes from the running environment."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", folder)
    result = run(sys.executable, "-m", "pip", "install", *options, wheel)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Make a folder whose own modules have our names and must never be imported."""
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text("raise SystemExit('hostile module imported')\n")
    return tmp_path


def run_installed(
    installed: Path, cwd: Path, *command: str | Path
) -> subprocess.CompletedProcess[str]:
    return run(*command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(installed)})


def test_the_wheel_holds_the_packages_and_the_front_door(wheel: Path) -> None:
    top_level = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top_level == {*PACKAGES, "prebake.py", f"prebake-{project()['version']}.dist-info"}


def test_the_wheel_holds_what_is_read_at_run_time_byte_for_byte(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    bundled = REPO / "examples" / "bundled"
    expected = {f"precompute/bundled/{p.as_posix()}": bundled / p for p in files_below(bundled)}
    assert any(name.endswith("unet/diffusion_pytorch_model.safetensors") for name in expected)
    expected["store_format/FORMAT.md"] = REPO / "store_format" / "FORMAT.md"
    expected[f"prebake-{project()['version']}.dist-info/licenses/LICENSE"] = REPO / "LICENSE"
    for package in PACKAGES:
        for path in (REPO / package).rglob("*.py"):
            expected[path.relative_to(REPO).as_posix()] = path
    missing = sorted(set(expected) - set(archive.namelist()))
    assert missing == []
    changed = [name for name, path in expected.items() if archive.read(name) != path.read_bytes()]
    assert changed == []


def test_the_sdist_holds_the_sources_and_nothing_that_is_ignored(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {"LICENSE", "Makefile", "README.md", "pyproject.toml", "constraints-dev.txt"}
    assert names >= sources | {"examples/make_model.py", "tests/test_packaging.py"}
    tops = {name.split("/")[0] for name in names}
    assert tops & {".git", ".venv", "build", "dist", "out", ".mypy_cache"} == set()
    assert [name for name in names if "__pycache__" in name] == []


def test_the_hostile_modules_would_be_imported_without_the_flag(
    installed: Path, hostile: Path
) -> None:
    result = run_installed(installed, hostile, sys.executable, "-c", "import train")
    assert "hostile module imported" in result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_python_with_p_imports_ours_beside_hostile_modules(
    installed: Path, hostile: Path, module: str
) -> None:
    program = f"import {module}; print({module}.__file__)"
    result = run_installed(installed, hostile, sys.executable, "-P", "-c", program)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(installed)


@pytest.mark.parametrize("arguments", [("--help",), ("precompute", "--help"), ("train", "--help")])
def test_the_command_imports_ours_beside_hostile_modules(
    installed: Path, hostile: Path, arguments: tuple[str, ...]
) -> None:
    result = run_installed(installed, hostile, installed / "bin" / "prebake", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" ".join(("Usage: prebake", *arguments[:-1])))


def third_party_imports() -> dict[str, Path]:
    """Map the top-level name of each import that is neither stdlib nor ours to a file."""
    found: dict[str, Path] = {}
    for path in (REPO / "prebake.py", *(p for n in PACKAGES for p in (REPO / n).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {name.split(".")[0]: path.relative_to(REPO) for name in names}
    ours = sys.stdlib_module_names | {*MODULES}
    return {name: path for name, path in found.items() if name not in ours}


def test_everything_imported_is_a_declared_requirement() -> None:
    optional = project()["optional-dependencies"]["heic"]
    declared = {
        canonicalize_name(Requirement(line).name)
        for line in (*project()["dependencies"], *optional)
    }
    owners = packages_distributions()
    undeclared = {
        name: str(path)
        for name, path in third_party_imports().items()
        if not {canonicalize_name(owner) for owner in owners.get(name, [name])} & declared
    }
    assert undeclared == {}


def test_the_pins_of_the_tests_satisfy_every_requirement() -> None:
    lines = (REPO / "constraints-dev.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[0-9.]+(post[0-9]+)?", version) for version in pins.values())
    wanted = [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints-dev.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), f"{requirement} against {pins[name]}"


def test_the_build_can_be_run_by_ci_from_any_folder() -> None:
    script = REPO / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in text
    assert text.index("make lint") < text.index("make test")
