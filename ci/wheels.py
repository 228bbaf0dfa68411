"""Build sdists and wheels into dist/, and build a package again only when something that goes into it has changed.

``python ci/wheels.py --uv UV --python PYTHON [--cuda-architectures LIST] FOLDER ...``: the first folder is that of attn-spec, which the
others need. Each wheel is built in isolation from its sdist, as a user's installer would, and all but attn-cuda's without git and nvcc.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from poorer_path import path_without

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = "ci/constraints-build.txt"
SHARED = ("packages/attn-spec/src", CONSTRAINTS)
"""What goes into every build: headers and CMake modules of attn-spec, and the versions of the build tools."""
IGNORED = {"build", "dist", "__pycache__", ".pytest_cache", ".hypothesis"}


def sources(path: Path) -> list[Path]:
    """The files of a folder, or the file itself, without what builds and tests leave behind."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not IGNORED & set(file.relative_to(path).parts))


def environment(folder: str, scratch: Path) -> dict[str, str]:
    """Variables of the build of ``folder``: only attn-cuda's finds git and nvcc, so the other wheels prove that they need neither."""
    if Path(folder).name == "attn-cuda":
        return dict(os.environ)
    return {**os.environ, "PATH": path_without(scratch / Path(folder).name, "git", "nvcc")}


def tools(python: str) -> list[str]:
    """Versions of what compiles: Python, and the C++ and CUDA compilers on PATH."""
    commands = ([python, "-VV"], ["c++", "--version"], ["nvcc", "--version"])
    return [
        subprocess.run(command, capture_output=True, text=True, check=False).stdout if shutil.which(command[0]) else "none"
        for command in commands
    ]


def inputs(root: Path, folder: str, compilers: Sequence[str]) -> str:
    """Hash of everything that decides what is built from ``folder``."""
    digest = hashlib.sha256("\0".join(compilers).encode())
    for part in (folder, *SHARED):
        for file in sources(root / part):
            digest.update(f"\0{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


class Record:
    """What dist/ holds for one package and Python: the hash of its inputs and the files that were built."""

    def __init__(self, dist: Path, folder: str, python: str) -> None:
        tag = hashlib.sha256(python.encode()).hexdigest()[:8]
        self.dist, self.path = dist, dist / ".inputs" / f"{Path(folder).name}-{tag}.json"
        found = json.loads(self.path.read_text()) if self.path.exists() else {"inputs": "", "files": []}
        self.inputs: str = found["inputs"]
        self.files: list[str] = found["files"]

    def is_current(self, digest: str) -> bool:
        return self.inputs == digest and bool(self.files) and all((self.dist / name).exists() for name in self.files)

    def replace(self, digest: str, built: Path) -> None:
        """Put the files of ``built`` in the place of the earlier ones."""
        for name in self.files:
            (self.dist / name).unlink(missing_ok=True)
        names = sorted(file.name for file in built.iterdir() if file.suffix in {".whl", ".gz"})
        for name in names:
            shutil.move(built / name, self.dist / name)
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps({"inputs": digest, "files": names}))
        self.inputs, self.files = digest, names


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--cuda-architectures", default="", help="ATTN_CUDA_ARCHITECTURES of attn-cuda; default: all that it supports")
    parser.add_argument("folders", nargs="+")
    options = parser.parse_args(arguments)
    dist, fresh = ROOT / "dist", ROOT / "build" / "dist"
    dist.mkdir(exist_ok=True)
    with (dist / ".lock").open("w") as lock, tempfile.TemporaryDirectory() as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions may run side by side
        return build(options, dist, fresh, Path(scratch))


def build(options: argparse.Namespace, dist: Path, fresh: Path, scratch: Path) -> int:
    """Build what has changed, the first package alone and the others two at a time; 1 where a build fails."""
    compilers = tools(options.python)

    def package(folder: str) -> bool:
        architectures = options.cuda_architectures if Path(folder).name == "attn-cuda" else ""
        digest, record = inputs(ROOT, folder, (*compilers, architectures)), Record(dist, folder, compilers[0])
        if record.is_current(digest):
            print(f"{folder}: unchanged", flush=True)
            return True
        built = fresh / Path(folder).name
        shutil.rmtree(built, ignore_errors=True)
        print(f"{folder}: building", flush=True)
        started = time.perf_counter()
        command = [
            shutil.which(options.uv) or options.uv,
            "build",
            "--quiet",
            "--out-dir",
            str(built),
            "--find-links",
            str(dist),
            "--refresh-package",
            "attn-spec",
        ]
        command += ["--build-constraints", str(ROOT / CONSTRAINTS), "--python", options.python, str(ROOT / folder)]
        if architectures:
            command += ["--config-setting", f"cmake.define.ATTN_CUDA_ARCHITECTURES={architectures}"]
        if subprocess.run(command, check=False, env=environment(folder, scratch)).returncode:
            print(f"{folder}: failed", flush=True)
            return False
        record.replace(digest, built)
        print(f"{folder}: {', '.join(record.files)} in {time.perf_counter() - started:.0f} s", flush=True)
        return True

    first, *others = options.folders
    if not package(first):
        return 1
    with ThreadPoolExecutor(2) as pool:  # one compiler is often alone with its largest file
        return 0 if all(list(pool.map(package, others))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
