"""Packages for a machine with a GPU and without a package index: fetched here, carried in parts, installed there.

    python -m benchmarks.gpu.carry make loop --there freeze.txt --out parts    # here; freeze.txt: `pip freeze` there
    python -m benchmarks.gpu.carry install parts/loop-1of2 --keep FOLDER       # there, for each part in any order

`make` uses the pip index that is configured here, and takes binary wheels for the Python of `packages.toml`, which also
lists the packages of each stage. Every part is a folder of at most `--mib`. `install` copies its part to `--keep`, and
installs after the last one. pip reads conditions such as `python_version < "3.12"` for the Python that runs this, so
run `make` with the other machine's version of Python if you can.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).with_name("packages.toml")
MANIFEST = "manifest.json"
THERE = "there"
"""Local part of the versions that the machine has."""


def normal(name: str) -> str:
    """Normalise a distribution's name as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def frozen(text: str) -> dict[str, str]:
    """Read versions by name from the lines `name==version` of a `pip freeze`, without local parts such as `+cu130`."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    return {normal(name): version for name, version in found}


def stand_ins(there: Mapping[str, str], folder: Path) -> list[str]:
    """Write an empty wheel without requirements for each package of the machine; returns the pins of the wheels.

    With them pip finds packages that fit the machine, and fetches none that the machine has.
    """
    pins = []
    for name, version in there.items():
        stem, local = name.replace("-", "_"), f"{version}+{THERE}"
        info = f"{stem}-{local}.dist-info"
        with zipfile.ZipFile(folder / f"{stem}-{local}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {local}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        pins.append(f"{name}=={local}")
    return pins


def split(file: Path, stage: str, out: Path, limit: int, wheels: Sequence[str]) -> list[Path]:
    """Cut a file into folders of one part each, every one with the manifest of all; returns the folders."""
    data = file.read_bytes()
    chunks = [data[start : start + limit] for start in range(0, len(data), limit)]
    names = [f"{stage}-{number}of{len(chunks)}" for number in range(1, len(chunks) + 1)]
    digests = [hashlib.sha256(chunk).hexdigest() for chunk in chunks]
    manifest = {"stage": stage, "parts": dict(zip(names, digests, strict=True)), "wheels": list(wheels)}
    folders = []
    for name, chunk in zip(names, chunks, strict=True):
        folder = out / name
        folder.mkdir(parents=True)
        (folder / name).write_bytes(chunk)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        folders.append(folder)
    return folders


def join(parts: Path, manifest: Mapping[str, Any], wheels: Path) -> list[str]:
    """Unpack the wheels of all parts in `parts` into `wheels`; returns the names of missing or damaged parts."""
    wanted: dict[str, str] = manifest["parts"]
    absent = [
        name
        for name, digest in wanted.items()
        if not (parts / name).is_file() or hashlib.sha256((parts / name).read_bytes()).hexdigest() != digest
    ]
    if absent:
        return absent
    whole = parts / f"{manifest['stage']}.tar"
    with whole.open("wb") as joined:
        for name in wanted:
            joined.write((parts / name).read_bytes())
    with tarfile.open(whole) as archive:
        archive.extractall(wheels, filter="data")
    whole.unlink()
    return []


def pip(*arguments: str) -> str:
    """Run a pip command and return its output. Raises RuntimeError if it fails."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def make(stage: str, there: Path, out: Path, mib: int) -> list[Path]:
    """Fetch the packages that the machine lacks for a stage, and cut them into parts; returns their folders."""
    data = tomllib.loads(PACKAGES.read_text())
    stages = list(data["stages"])
    # Together, so that the versions of a stage also fit those before it.
    wanted = [package for name in stages[: stages.index(stage) + 1] for package in data["stages"][name]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels, pins = folder / "wheels", folder / "pins.txt"
        wheels.mkdir()
        pip("wheel", "--no-deps", "--wheel-dir", str(wheels), *data["built"])
        # Packages of the machine stay as they are, and decide the versions of others.
        pins.write_text("\n".join(stand_ins(frozen(there.read_text()), wheels)) + "\n")
        target = [
            *("--only-binary=:all:", "--python-version", data["python"], "--implementation", "cp"),
            *(part for platform in data["platforms"] for part in ("--platform", platform)),
            *("--find-links", str(wheels)),
        ]
        report = folder / "report.json"
        pip(
            *("install", "--dry-run", "--ignore-installed", "--report", str(report), "--target", str(folder / "none")),
            *("--constraint", str(pins), *target, *wanted),
        )
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
        chosen = {normal(entry["name"]): entry["version"] for entry in found if THERE not in entry["version"]}
        if not chosen:
            print(f"{stage}: nothing has to be carried")
            return []
        pinned = [f"{package}=={version}" for package, version in chosen.items()]
        pip("download", "--no-deps", "--dest", str(wheels), *target, *pinned)
        kept = [file for file in sorted(wheels.glob("*.whl")) if carried(file.name, chosen)]
        whole = folder / "whole.tar"
        with tarfile.open(whole, "w") as archive:
            for file in kept:
                archive.add(file, file.name)
        return split(whole, stage, out, mib * 2**20, [file.name for file in kept])


def carried(wheel: str, chosen: Mapping[str, str]) -> bool:
    """Return whether the file is the wheel of a chosen version."""
    name, version = wheel.split("-")[:2]
    return chosen.get(normal(name)) == version


def install(part: Path, keep: Path, target: Path | None) -> bool:
    """Keep a part; after the last one, install the packages of all. Returns whether it was the last."""
    manifest = json.loads((part / MANIFEST).read_text())
    keep.mkdir(parents=True, exist_ok=True)
    shutil.copy(part / part.name, keep / part.name)
    wheels = keep / "wheels"
    if absent := join(keep, manifest, wheels):
        print(f"{manifest['stage']}: kept {part.name}; still to come: {', '.join(absent)}")
        return False
    into = ["--target", str(target), "--upgrade"] if target else []
    names = [str(wheels / name) for name in manifest["wheels"]]
    pip("install", "--no-index", "--find-links", str(wheels), "--no-deps", "--no-compile", *into, *names)
    print(f"{manifest['stage']}: installed {len(names)} packages" + (f"; PYTHONPATH={target}" if target else ""))
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.carry", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="fetch the packages of a stage and cut them into parts")
    making.add_argument("stage", choices=tomllib.loads(PACKAGES.read_text())["stages"])
    making.add_argument("--there", type=Path, required=True, help="`pip freeze` of the machine")
    making.add_argument("--out", type=Path, default=Path("parts"))
    making.add_argument("--mib", type=int, default=50, help="most MiB of a part (default: 50)")
    taking = commands.add_parser("install", help="keep a part, and install when all parts are there")
    taking.add_argument("part", type=Path, help="folder of the part")
    taking.add_argument("--keep", type=Path, required=True, help="folder there that stays between commands")
    taking.add_argument("--target", type=Path, help="folder to install into, for PYTHONPATH; else the environment")
    args = parser.parse_args(argv)
    try:
        if args.command == "make":
            for folder in make(args.stage, args.there, args.out, args.mib):
                print(folder)
        else:
            install(args.part, args.keep, args.target)
    except (RuntimeError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
