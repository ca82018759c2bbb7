"""What is built from the source: wheel and sdist, and the wheel alone in an environment of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is under version control, so that a build leaves nothing in the checkout."""
    place = tmp_path_factory.mktemp("source")
    for folder in sorted({path.split("/")[0] for path in FOLDERS.values()}):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, place)
    return place


def build(source, kind, target):
    """Build as pip does, with the installed setuptools."""
    code = f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


def expected(root):
    """Files of the packages: modules, types markers, data."""
    found = set()
    for package, folder in FOLDERS.items():
        for file in (root / folder).iterdir():
            if file.suffix in (".py", ".yaml", ".typed", ".html", ".j2") and file.is_file():
                found.add(f"{package.replace('.', '/')}/{file.name}")
    return found


def test_the_wheel_has_every_file_of_every_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected(ROOT)
    markers = {name.rpartition("/")[0] for name in names if name.endswith("/py.typed")}
    tops = {package.replace(".", "/") for package in FOLDERS if package.count(".") == 1}
    assert tops - markers <= {"kvtide/cli"}


def test_every_folder_with_modules_is_a_package():
    tops = {path.split("/")[0] for path in FOLDERS.values()}
    folders = {file.parent.relative_to(ROOT).as_posix() for top in tops for file in (ROOT / top).rglob("*.py")}
    assert {folder for folder in folders if "__pycache__" not in folder} == set(FOLDERS.values())


def test_a_wheel_can_be_built_from_the_sdist(source, wheel, tmp_path):
    (tmp_path / "sdist").mkdir()
    sdist = build(source, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "LICENSE").is_file()
    (tmp_path / "again").mkdir()
    again = build(unpacked, "wheel", tmp_path / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert set(one.namelist()) == set(other.namelist())


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with the wheel, and the dependencies of this one behind it."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    folders = [path for path in sys.path if Path(path).name == "site-packages"]  # this environment's, and what it names
    (site / "zz_dependencies.pth").write_text("\n".join(folders) + "\n")
    return python


def run(python, code, cwd):
    done = subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_demo_runs_from_the_wheel_alone(environment, tmp_path):
    code = """
import json, sys
sys.argv = ["kvtide", "demo"]
from kvtide.cli.main import run
run()
modules = [m.__file__ for name, m in sys.modules.items() if name.startswith("kvtide.") and m.__file__]
print(json.dumps(modules))
"""
    *shown, modules = run(environment, code, tmp_path).splitlines()
    assert any("read them back, byte for byte" in line for line in shown)
    # The checkout, or another installation of it, plays no part.
    home = str(environment.parents[1])
    assert all(path.startswith(home) for path in json.loads(modules))


def test_the_allocator_imports_neither_torch_nor_what_stores_need(environment, tmp_path):
    code = "import sys, kvtide.hma; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(run(environment, code, tmp_path).split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "triton", "lmdb", "click", "rich", "msgspec", "redis", "boto3", "transformers"}


def test_the_version_is_written_once_and_the_changelog_has_it(environment, tmp_path):
    version = PROJECT["project"]["version"]
    shown = run(
        environment, "import sys; sys.argv[1:] = ['--version']; from kvtide.cli.main import run; run()", tmp_path
    )
    assert shown.strip().endswith(f"version {version}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE)
    for file in [path for folder in FOLDERS.values() for path in (ROOT / folder).glob("*.py")]:
        assert f'"{version}"' not in file.read_text(), file
