"""Each attack of sandbox_attacks.py with each isolation that works here, as this user and as an ordinary one."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sandbox_attacks import ATTACKS, Host, chosen, problems

from grpo_kit.more.code.sandbox.pool import LauncherError, Pool, interpreter

KINDS = ("sandlock", "bubblewrap")
HERE = [kind for kind in KINDS if kind == "sandlock" or shutil.which("bwrap")]
LIMITS = {"seconds": 30.0, "memory_mb": 256, "output_kb": 64}
NOBODY = 65534

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")


@pytest.fixture(scope="module", params=HERE)
def pool(request):
    """Launchers of one kind; skipped with the reason where it does not work."""
    pool = Pool(request.param)
    try:
        fields, out, err = pool.run([(b"print('runs')", b"")], LIMITS, 1)[0]
    except LauncherError as problem:
        pytest.skip(f"no {request.param} here: {problem}")
    if out != b"runs\n":
        pytest.skip(f"no {request.param} here: {err.decode(errors='replace')[-200:]}")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def host():
    host = Host()
    yield host
    host.close()


def test_there_are_at_least_forty():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 40


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_contained_and_reported_as_what_it_was(attack, pool, host):
    assert problems(attack, pool, host) == []


@pytest.fixture(scope="module")
def readable_copy():
    """A folder that every user can read: the interpreter, sandlock, this package and the attacks."""
    python = interpreter()
    with tempfile.TemporaryDirectory(prefix="readable-") as folder:
        os.chmod(folder, 0o755)
        place = Path(folder)
        executable = place / "bin" / Path(python["executable"]).name
        executable.parent.mkdir()
        shutil.copy2(python["executable"], executable)
        skipped = shutil.ignore_patterns(
            "site-packages", "dist-packages", "test", "idlelib", "config-*"
        )
        stdlib = place / "lib" / python["version"]
        shutil.copytree(python["stdlib"], stdlib, ignore=skipped, symlinks=True)
        for library in python["libraries"]:
            if library.startswith(python["prefix"] + "/lib/libpython"):
                shutil.copy2(library, place / "lib")
        package = Path("grpo_kit", "more", "code")
        sandbox = package / "sandbox"
        shutil.copytree(
            Path(__file__).parents[2] / sandbox, place / "code" / sandbox, ignore=skipped
        )
        # the sandbox needs nothing else of the package
        for folder in (package, *package.parents[:-1]):
            (place / "code" / folder / "__init__.py").touch()
        shutil.copy2(Path(__file__).with_name("sandbox_attacks.py"), place / "code")
        sandlock = pytest.importorskip("sandlock")
        shutil.copytree(
            Path(sandlock.__file__).parent, place / "code" / "sandlock", ignore=skipped
        )
        yield place


def reports(readable_copy, which):
    """What each kind let through when an ordinary user ran the attacks; the kinds run side by side."""
    started = {
        kind: subprocess.Popen(
            [next((readable_copy / "bin").iterdir()), "-B", "sandbox_attacks.py", kind, which],
            cwd=readable_copy / "code",
            env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(readable_copy / "lib")},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in HERE
    }
    try:
        return {kind: process.communicate(timeout=400) for kind, process in started.items()}
    finally:
        for process in started.values():
            process.kill()


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="this user is no root already"
)
@pytest.mark.parametrize("which", ["rights", pytest.param("all", marks=pytest.mark.campaign)])
def test_contained_as_an_ordinary_user_too(which, readable_copy):
    assert len(chosen("rights")) > 60 and len(chosen("all")) == len(ATTACKS)
    for kind, (out, err) in reports(readable_copy, which).items():
        if "setting up uid map" in err or "namespace" in err:
            pytest.skip(f"no {kind} for ordinary users here: {err[-200:]}")
        assert out, err[-2000:]
        assert json.loads(out) == {"uid": NOBODY, "attacks": len(chosen(which)), "failed": {}}
