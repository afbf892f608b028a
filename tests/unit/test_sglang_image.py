"""Windrow's wheel comes into an SGLang image without changing anything that SGLang pins."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pip
import pytest

ROOT = Path(__file__).resolve().parents[2]
ADD_WHEEL = ROOT / "tools" / "sglang" / "add_wheel.py"


def files_of(name, version, *requires, modules=()):
    """Return the files of a distribution, by their place in it."""
    info = f"{name}-{version}.dist-info"
    head = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", "Provides-Extra: sidecar"]
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    made = {
        f"{info}/METADATA": "\n".join(
            [*head, *(f"Requires-Dist: {each}" for each in requires), ""]
        ),
        f"{info}/WHEEL": tag,
        f"{info}/INSTALLER": "test\n",
        **{module: (ROOT / "api" / module).read_text() for module in modules},
    }
    made[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*made, f"{info}/RECORD"])
    return made


def wheel(folder, name, version, *requires, modules=()):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in files_of(name, version, *requires, modules=modules).items():
            archive.writestr(place, text)
    return path


@pytest.fixture
def image(tmp_path):
    """A Python with an SGLang that pins torch, and an index with a newer one.

    Yields a function that runs the script with a wheel of ours, and the folder of its packages.
    """
    index = tmp_path / "index"
    index.mkdir()
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    for name, version, *requires in (("torch", "1.0"), ("sglang", "0.5.23", "torch==1.0")):
        write(packages, name, version, *requires)
    wheel(index, "torch", "2.0")
    wheel(index, "peft", "1.0", "torch")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
    }

    def add(*requires):
        needs = [f'{each}; extra == "sidecar"' for each in requires]
        modules = ("windrow/__init__.py", "windrow/errors.py", "windrow/sglang.py")
        made = wheel(tmp_path, "windrow_harvest", "0.1.0", *needs, modules=modules)
        command = [tmp_path / "venv/bin/python", ADD_WHEEL, made, "--extras=sidecar"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return add, packages


def write(packages, name, version, *requires):
    """Install a distribution."""
    for place, text in files_of(name, version, *requires).items():
        path = packages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def installed(packages):
    return {path.name.removesuffix(".dist-info") for path in packages.glob("*.dist-info")}


def test_a_wheel_that_needs_another_torch_is_refused_and_changes_nothing(image):
    add, packages = image
    before = installed(packages)
    done = add("torch>=2")
    assert done.returncode == 1
    assert "do not fit what the image has; nothing was changed" in done.stderr
    assert "torch" in done.stderr
    assert installed(packages) == before


def test_a_wheel_adds_what_it_needs_and_leaves_the_rest(image):
    add, packages = image
    done = add("torch>=1", "peft")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "added: peft 1.0, windrow-harvest 0.1.0\n"
    assert {"torch-1.0", "sglang-0.5.23", "peft-1.0"} <= installed(packages)


def test_an_image_whose_sglang_nobody_has_tested_is_refused_with_the_versions(image):
    add, packages = image
    shutil.rmtree(packages / "sglang-0.5.23.dist-info")
    write(packages, "sglang", "0.5.9")
    done = add()
    assert done.returncode == 1
    assert "SGLang 0.5.9 is not one that the plugin was tested with (0.5.22, 0.5.23" in done.stderr


def test_the_image_is_built_from_a_digest_and_by_this_script():
    text = (ROOT / "deploy/images/sglang/Dockerfile").read_text()
    assert "\nARG SGLANG\n" in text, "no default: which SGLang serves is the user's choice"
    assert "add_wheel.py /wheels/windrow_harvest-*.whl" in text
    build = ["bash", str(ROOT / "deploy/images/build.sh"), "sglang"]
    environment = {**os.environ, "SGLANG": "registry.example/sglang:latest"}
    if shutil.which("buildah") is None:
        pytest.skip("no buildah")
    done = subprocess.run(build, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not an image with a digest" in done.stdout
