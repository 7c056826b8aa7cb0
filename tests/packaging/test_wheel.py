"""The wheel holds what the package needs at run time, and a request runs on it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROTECTED_REQUEST = """
import os
import flask
import flask_idempotent
from flask_idempotent import Idempotent, idempotent

app = flask.Flask(__name__)
app.config["IDEMPOTENT_REDIS_URL"] = os.environ["REDIS_URL"]
Idempotent(app)
runs = []

@app.post("/orders")
@idempotent()
def create_order():
    runs.append(flask.request.get_json())
    return {"run": len(runs)}, 201

headers = {"Idempotency-Key": "0b7f6c9e-5a51-4f0e-9d6a-0c6e3a0f8b11"}
client = app.test_client()
first = client.post("/orders", json={"item": 1}, headers=headers)
again = client.post("/orders", json={"item": 1}, headers=headers)
assert first.status_code == again.status_code == 201, (first.status, first.text)
assert first.get_json() == again.get_json() == {"run": 1}
assert "Idempotent-Replayed" not in first.headers
assert again.headers["Idempotent-Replayed"] == "true"
assert runs == [{"item": 1}]
print(flask_idempotent.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "flask_idempotent", copy / "flask_idempotent", ignore=shutil.ignore_patterns("__pycache__"))
    run([sys.executable, "-m", "build", "--outdir", str(copy / "dist"), str(copy)])  # the sdist, and the wheel from it
    (path,) = (copy / "dist").glob("*.whl")
    return path


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "flask_idempotent").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == here
    assert "flask_idempotent/py.typed" in names
    scripts = {Path(name).stem for name in names if name.startswith("flask_idempotent/stores/lua/")}
    assert scripts >= {"claim", "renew", "complete", "release"}


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert "Name: flask-idempotent-redis" in lines
    assert "Requires-Python: >=3.10" in lines
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    base = [need for need in needs if "extra ==" not in need]
    assert len(base) == 7
    assert not [need for need in base if "<" in need or "~=" in need or "==" in need]


def test_a_protected_request_runs_on_the_installed_wheel(wheel: Path, redis_url: str, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    # The dependencies are those of this run; the package itself comes from the wheel, which the new venv puts first.
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)])
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")

    script = tmp_path / "request.py"
    script.write_text(PROTECTED_REQUEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    output = run([str(python), "-I", str(script)], cwd=tmp_path, env={**environment, "REDIS_URL": redis_url})
    assert Path(output.strip()).is_relative_to(place)
