"""The distribution: what the wheel holds, what importing costs, and that it installs where it must."""

import configparser
import json
import os
import shlex
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

VERL = "verl==0.9.1"
TORCH = "torch==2.13.0"
RECORD = """
import spool
with spool.init(project="p", experiment="e") as run:
    run.log({"loss": 0.5}, step=1)
"""
READ = """
import spool
metrics = spool.open("spool-data").runs()[0].metrics()
print(list(zip(*(metrics[name].to_pylist() for name in ("key", "value", "step")))))
"""


def output_of(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, **options: object) -> str:
    return output_of(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, **options)


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, root)
    [path] = folder.iterdir()
    return path


def metadata_file(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/{name}")


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {
        path.relative_to(root).as_posix()
        for package in ("spool", "sync", "trainer")
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert {"spool/py.typed", "sync/py.typed"} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_names_its_commands_and_extras(wheel: Path) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(metadata_file(wheel, "entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {"spool": "spool.cli:main", "spool-sync": "sync.cli:main"}
    metadata = message_from_bytes(metadata_file(wheel, "METADATA"))
    extras = {"mlflow", "wandb", "swanlab", "trainer", "all", "dev"}
    assert (metadata["Name"], set(metadata.get_all("Provides-Extra"))) == ("spool-sync", extras)


def test_the_base_sets_no_upper_bound(wheel: Path) -> None:
    """An upper bound would one day downgrade a package of the training environment."""
    requirements = message_from_bytes(metadata_file(wheel, "METADATA")).get_all("Requires-Dist")
    base = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert base
    assert [requirement for requirement in base if any(sign in requirement for sign in ("<", "==", "~", "!"))] == []


def test_importing_spool_loads_neither_arrow_nor_a_framework_nor_a_tracker() -> None:
    loaded = output_of(sys.executable, "-c", "import spool, sys; print(*sys.modules)").split()
    assert "spool" in loaded
    heavy = {"pyarrow", "numpy", "pandas", "torch", "ray", "click", "mlflow", "wandb", "swanlab", "sync", "trainer"}
    assert heavy.isdisjoint(loaded)


@pytest.mark.slow
def test_the_wheelhouse_installs_and_records_without_network(
    root: Path, tmp_path: Path, without_network: list[str]
) -> None:
    printed = output_of("make", "wheelhouse", "EXTRAS=", f"WHEELHOUSE={tmp_path}/wheelhouse", cwd=root)
    install = shlex.split(printed.splitlines()[-1])
    assert install[:3] == ["pip", "install", "--no-index"]

    python = tmp_path / "venv/bin/python"
    output_of(sys.executable, "-m", "venv", python.parent.parent)
    offline = {
        "cwd": tmp_path,
        "env": {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        | {"PIP_CONFIG_FILE": os.devnull},
    }
    output_of(*without_network, python, "-m", *install, **offline)
    for command in ("spool", "spool-sync"):
        assert "Usage:" in output_of(*without_network, python.with_name(command), "--help", **offline)

    output_of(*without_network, python, "-c", RECORD, **offline)
    assert output_of(*without_network, python, "-c", READ, **offline) == "[('loss', 0.5, 1)]\n"
    assert "intact" in output_of(*without_network, python.with_name("spool"), "verify", **offline)
    assert "loss" in output_of(*without_network, python.with_name("spool"), "show", "--run", "*", **offline)


@pytest.mark.slow
def test_beside_verl_the_base_changes_no_installed_version(wheel: Path, tmp_path: Path) -> None:
    """What pip chooses for verl alone stands for what is installed; with all of it pinned, ours must still fit."""

    def chosen(*requirements: str | Path) -> dict[str, str]:
        report = tmp_path / "report.json"
        pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", report, *requirements)
        distributions = (item["metadata"] for item in json.loads(report.read_text())["install"])
        return {distribution["name"]: distribution["version"] for distribution in distributions}

    before = chosen(VERL, TORCH)
    assert before["verl"] == "0.9.1"
    pins = tmp_path / "verl.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in before.items()))
    ours = chosen("--constraint", pins, wheel)
    assert "spool-sync" in ours
    assert {name: version for name, version in ours.items() if before.get(name, version) != version} == {}


def test_a_users_own_folders_named_as_ours_stay_importable(tmp_path: Path) -> None:
    for name in ("trainer", "sync"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("here = True\n")
    (tmp_path / "train.py").write_text("import spool\nfrom sync.mine import here\nfrom trainer.mine import here\n")
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
