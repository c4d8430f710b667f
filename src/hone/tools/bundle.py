"""`make bundle`: one archive with Hone's wheel and its light dependencies, for machines without a network.

    python -m hone.tools.bundle dist [3.11 3.12 3.13]

To be run in a checkout with the project's environment, whose versions it packs. Not in it: torch, Transformers and what
they need, which a GPU machine has in builds of its own, and the packages of `LEFT_OUT`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hone

PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
LIMIT_MIB = 60
THERE = ("torch", "transformers")
LEFT_OUT = {
    "pyarrow": "data in Parquet files",
    "scipy": "rewards that match layouts",
    "grpcio": "nothing that Hone uses of TensorBoard",
    "tensorboard-data-server": "nothing that Hone uses of TensorBoard",
}
"""Packages that are large -> what does not work without them."""

INSTALL = "pip install --no-index --no-deps --find-links {folder} -r {folder}/requirements.txt"
README = """Hone {version} for machines without a network, for Python {pythons} on Linux (x86-64).

Beside torch >= 2.11 and Transformers >= 5.17, which must be there:

    {install}

Left out, and needed for:
{left_out}
"""


def light_packages() -> list[str]:
    """What Hone needs beyond a machine with torch and Transformers, itself first."""
    there = {*THERE, *(name for package in THERE for name in _required(package))}
    found, pending = [], ["hone-rl"]
    while pending:
        name = canonicalize_name(pending.pop(0))
        if name not in found and name not in there and name not in LEFT_OUT:
            found.append(name)
            pending += _required(name)
    return found


def _required(package: str) -> list[str]:
    """Names that a package requires on this platform, without extras."""
    requirements = map(Requirement, metadata.requires(package) or ())
    return [
        canonicalize_name(one.name) for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})
    ]


def requirement_lines() -> list[str]:
    """Of requirements.txt: Hone's own ranges, so that what a machine has and Hone accepts stays; else any version."""
    ranges: dict[str, Requirement] = {
        canonicalize_name(one.name): one for one in map(Requirement, metadata.requires("hone-rl") or ())
    }
    return [f"{name}{ranges[name].specifier if name in ranges else ''}" for name in light_packages()]


def make_bundle(target: Path, pythons: Sequence[str] = PYTHONS, *, checkout: Path) -> Path:
    """Write `hone-bundle-VERSION.tar` into `target`, from a checkout. Returns its path.

    Raises:
        SystemExit: pip could not get a wheel, or the bundle is too large.
    """
    name = f"hone-bundle-{hone.__version__}"
    with TemporaryDirectory(prefix="hone-bundle-") as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        source = Path(scratch) / "source"  # a build in the checkout would find the files of the one before
        shutil.copytree(checkout / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(checkout / file, source)
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
        pins = [f"{package}=={metadata.version(package)}" for package in light_packages()[1:]]
        for python in pythons:
            platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
            _pip(
                *("download", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms),
                *("--dest", str(folder), *pins),
            )
        (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirement_lines()))
        left_out = "\n".join(f"    {package}: {use}" for package, use in LEFT_OUT.items())
        install = INSTALL.format(folder=name)
        readme = README.format(version=hone.__version__, pythons=", ".join(pythons), install=install, left_out=left_out)
        (folder / "README.txt").write_text(readme)
        target.mkdir(parents=True, exist_ok=True)
        made = target / f"{name}.tar"
        with tarfile.open(made, "w") as archive:  # wheels are compressed already
            archive.add(folder, name)
    if (mib := made.stat().st_size / 2**20) > LIMIT_MIB:
        raise SystemExit(f"{made} has {mib:.1f} MiB, more than {LIMIT_MIB}: leave a package out (LEFT_OUT)")
    print(f"{made}: {mib:.1f} MiB, for Python {', '.join(pythons)}")
    return made


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=False)
    if done.returncode:
        raise SystemExit(f"pip {words[0]} failed with exit code {done.returncode}")


if __name__ == "__main__":
    _, target, *pythons = sys.argv
    make_bundle(Path(target), pythons or PYTHONS, checkout=Path.cwd())
