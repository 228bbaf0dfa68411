"""Sessions of the workspace: ``nox -l`` is the manual, and CI runs the same sessions as a developer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))
from ck.sources import PACKAGE as CK_PACKAGE  # noqa: E402
from cpu_torch import CudaTorchOnly, cpu_source, nvidia_packages  # noqa: E402
from rocm_machine import RUNNERS, absent_rows, decide, detect  # noqa: E402

if sys.version_info < (3, 11):
    sys.exit(f"attn needs Python 3.11 or newer, and this nox runs on {sys.version.split()[0]}: make the environment with a newer python3.")
if not os.environ.get("UV_FIND_LINKS"):
    os.environ["UV_FIND_LINKS"] = ",".join(os.environ.get("PIP_FIND_LINKS", "").split())

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

NAMES = ["attn-spec", "attn-reference", "attn-triton", "attn-cuda", "attn-jax-rocm-sink"]
FOLDERS = {**{name: f"packages/{name}" for name in NAMES}, "attn-shared-tests": "shared_tests"}
TEST_TOOLS = ["pytest", "pytest-xdist", "hypothesis", "safetensors", "flatbuffers", "pybind11", "cmake", "ninja"]
TEST_PATHS = ["-n2", "--dist=worksteal", "--durations=20", "--attn-sample=12", "ci/tests", "packages", "--pyargs", "attn_shared_tests"]
TESTED, CPU, OLDEST, BUILD = (f"ci/constraints{part}.txt" for part in ("", "-cpu", "-oldest", "-build"))
NATIVE = ("*.h", "*.cuh", "*.cpp", "*.cc", "*.cu", "*.hip")
CLANG = "clang++-22"


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and "GPU " in subprocess.run([tool, "-L"], capture_output=True, text=True, check=False).stdout


def interpreter() -> dict[str, str]:
    """Environment in which Triton's kernels run: its CPU interpreter where there is no GPU, of NVIDIA or AMD."""
    return {} if has_nvidia_gpu() or Path("/dev/kfd").exists() else {"TRITON_INTERPRET": "1"}


def session_python(session: nox.Session) -> str:
    """Path of the session's Python."""
    return str(Path(session.bin) / "python")


def require(session: nox.Session, tool: str, package: str) -> None:
    """Stop when ``tool`` is missing, and name the Debian package that has it."""
    if shutil.which(tool) is None:
        session.error(f"{tool} is not on PATH; on Debian: apt-get install {package}")


def require_uv(session: nox.Session) -> None:
    """Stop when nox has no uv, and name the remedy."""
    if session.virtualenv.venv_backend != "uv":
        session.error("uv was not found beside nox: install it into the same environment, .venv/bin/pip install uv")


def native_sources() -> list[str]:
    """Every C++, CUDA and HIP file of the tree."""
    roots = [Path("packages"), Path("ci")]
    files = {path for root in roots for pattern in NATIVE for path in root.rglob(pattern)}
    return sorted(str(path) for path in files if "build" not in path.parts)


def third_party(*projects: str) -> list[str]:
    """What the packages need from others, as their own pyproject files state it."""
    documents = [tomllib.loads((ROOT / project / "pyproject.toml").read_text()) for project in projects]
    return sorted({entry for document in documents for entry in document["project"]["dependencies"] if not entry.startswith("attn-")})


def resolve(session: nox.Session, *arguments: str) -> tuple[bool, str]:
    """Resolve an installation without downloading it: whether that worked, and what uv printed. With ``-R`` nothing is asked."""
    report = session.run_install("uv", "pip", "install", "--dry-run", *arguments, silent=True, success_codes=[0, 1, 2], log=False)
    return (True, "") if report is None else ("Would " in str(report), str(report))


def install_third_party(
    session: nox.Session,
    *requirements: str,
    constraints: tuple[str, ...] = (TESTED, CPU),
    into: str | None = None,
    cuda_torch: bool = False,
) -> None:
    """Install from the indexes under ``constraints``, into the session's environment or the Python ``into``.

    Without an NVIDIA GPU torch comes first, from whatever offers a CPU build; when nothing does, the session stops before the download,
    unless ``cuda_torch`` accepts the CUDA build.
    """
    require_uv(session)
    gpu = has_nvidia_gpu()
    target = ["--python", into] if into else []
    general = [*target, *(part for name in constraints if name != CPU for part in ("-c", name))]
    limits = [*general, "-c", CPU] if CPU in constraints and not gpu else general
    if not gpu and any(requirement.startswith("torch") for requirement in requirements):
        try:
            source = cpu_source(lambda extra: resolve(session, *extra, *general, "torch"))
        except CudaTorchOnly as error:
            if not cuda_torch:
                session.error(str(error))
            session.warn("no CPU build of this torch is offered here: taking the CUDA build")
        else:
            session.install(*source, *general, "torch")
    if not gpu and not cuda_torch:
        found = nvidia_packages(resolve(session, *limits, *requirements)[1])
        if found:
            session.error(f"this machine has no NVIDIA GPU, yet {', '.join(found)} would be installed; nothing was downloaded")
    session.install(*limits, *requirements)


def cuda_architectures() -> str:
    """Code for this machine's GPU, or Hopper where there is none, and its PTX, which tests read: a development build of attn-cuda."""
    found = "90"
    if has_nvidia_gpu():
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0].replace(".", "")
    name = "90a" if found == "90" else found
    return f"{name}-real;{name}-virtual"


def build_into_dist(session: nox.Session, architectures: str | None = None) -> None:
    """Sdists and wheels of all packages in dist/; attn-cuda has kernels if nvcc is on PATH. What has not changed is not built again."""
    require_uv(session)
    target = ["--cuda-architectures", cuda_architectures() if architectures is None else architectures]
    command = ["python", "ci/wheels.py", "--uv", nox.virtualenv.UV, "--python", session_python(session), *target]
    session.run_install(*command, *FOLDERS.values())


def install_everything(session: nox.Session, *extra: str, constraints: tuple[str, ...] = (TESTED, CPU), cuda_torch: bool = False) -> None:
    """Third party first, then the project's own fresh wheels alone, so that nothing stale stays and nothing else moves.

    In an environment that is not nox's own (``--no-venv``) everything must be there already.
    """
    if not session.virtualenv.is_sandboxed:
        return
    install_third_party(session, *third_party(*FOLDERS.values()), *TEST_TOOLS, *extra, constraints=constraints, cuda_torch=cuda_torch)
    build_into_dist(session)
    session.install("--no-deps", "--force-reinstall", "--no-index", "--find-links", "dist", *FOLDERS)


@nox.session
def cross_backend(session: nox.Session) -> None:
    """Build every package, run every operator on every backend that this machine has, and compare the bytes."""
    install_everything(session)
    session.run("python", "benchmarks/cross_backend.py", "--output", "build/cross_backend", *session.posargs, env=interpreter())


@nox.session
def tests(session: nox.Session) -> None:
    """Build and install every package, then run the tests of all of them and the shared suite, of which slow engines run a sample."""
    install_everything(session)
    session.run("pytest", *(session.posargs or TEST_PATHS), env=interpreter())


@nox.session
def jax_matrix(session: nox.Session) -> None:
    """Run every cell of JAX's matrix of features (hours; ``-- --part 3/8`` runs a part). The tests session runs a sample of it."""
    install_everything(session)
    session.run("python", "packages/attn-jax-rocm-sink/tests/whole_matrix.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, spelling, layering and that all packages have one version."""
    session.install("-c", TESTED, "ruff", "clang-format", "import-linter", "typos", *third_party(FOLDERS["attn-spec"]))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("clang-format", "--dry-run", "--Werror", *native_sources())
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(str(ROOT / folder / "src") for folder in FOLDERS.values())})
    session.run("typos")
    session.run("python", "ci/check_versions.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of every package against the real torch and JAX."""
    install_third_party(session, *third_party(*FOLDERS.values()), "mypy")
    session.run("mypy", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Write wheels and sdists of all packages to dist/, attn-cuda for every architecture; ``-- 90a-real`` names fewer."""
    build_into_dist(session, ";".join(session.posargs))


@nox.session
def install(session: nox.Session) -> None:
    """Install each package of dist/ alone, run its README, and build each sdist without git, nvcc or a compiler."""
    build_into_dist(session)
    session.install("-c", TESTED, "pytest", "pytest-xdist", "uv", "pip")
    for name, folder in FOLDERS.items():
        environment = Path("build/install", name)
        python = str(environment / "bin/python")
        session.run_install("uv", "venv", "--quiet", "--clear", "--python", session_python(session), str(environment))
        needed = [FOLDERS["attn-spec"], folder, *([FOLDERS["attn-reference"]] if name == "attn-shared-tests" else [])]
        install_third_party(session, *third_party(*needed), into=python)
        session.run_install("python", "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--find-links", "dist", name)
    session.run("pytest", "-n", "2", "ci/installs", *session.posargs, env=interpreter())


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the host kernels beside torch and, where there is an NVIDIA GPU, the GPU kernels beside a copy."""
    install_everything(session)
    session.run("python", "packages/attn-reference/benchmarks/host_speed.py", *session.posargs)
    if has_nvidia_gpu():
        Path("build").mkdir(exist_ok=True)
        session.run("python", "benchmarks/softmax_gpu.py", "--output", "build/softmax_gpu.json")


@nox.session
def gen(session: nox.Session) -> None:
    """Write the generated parts of README.md; ``nox -s gen -- --check`` only says whether they are current."""
    install_everything(session)
    session.run("python", "ci/guarantees_table.py", *session.posargs, env=interpreter())


@nox.session
def aarch64(session: nox.Session) -> None:
    """Cross-compile the arithmetic and the host kernels for aarch64 and run them emulated: the digest must be that of this machine."""
    require(session, "aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    require(session, "qemu-aarch64-static", "qemu-user-static")
    session.install("-c", BUILD, "cmake", "ninja")
    cross = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]
    digests = []
    for folder, options, emulator in (("build/arithmetic/native", [], []), ("build/arithmetic/aarch64", cross, ["qemu-aarch64-static"])):
        session.run("cmake", "-G", "Ninja", "-S", "ci/arithmetic", "-B", folder, *options, silent=True)
        session.run("cmake", "--build", folder)
        digests.append(session.run(*emulator, f"{folder}/digest", external=True, silent=True, stderr=None))
    session.log(f"this machine:\n{digests[0]}")
    if digests[0] != digests[1]:
        session.error(f"aarch64 gives other bits:\n{digests[1]}")


@nox.session
def clang(session: nox.Session) -> None:
    """Compile headers, HIP kernels and Triton kernels for AMD GPUs without one: read the code objects, and run them in the interpreter."""
    require(session, CLANG, f"{CLANG.replace('++', '')} lld-22")
    require(session, "llvm-objdump-22", "llvm-22")
    require(session, "clang-offload-bundler-22", "clang-tools-22")
    install_everything(session)
    session.run("pytest", "ci/amd", *session.posargs)


@nox.session
def aiter_headers(session: nox.Session) -> None:
    """Check the types of the ck engine's calls against AITER's headers; ``-- FOLDER`` names a checkout, else one is cloned to build."""
    require(session, CLANG, f"{CLANG.replace('++', '')} lld-22")
    folder = session.posargs[0] if session.posargs else "build/aiter"
    if not Path(folder).exists():
        clone = ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:none", "--sparse", "https://github.com/ROCm/aiter", folder]
        session.run(*clone, external=True)
        session.run("git", "-C", folder, "sparse-checkout", "set", "csrc/include", external=True)
    session.install("-c", TESTED, "numpy")
    session.install("-c", CPU, "--no-deps", "triton")
    session.install("--no-deps", FOLDERS["attn-spec"])
    session.run("python", "ci/amd/aiter_headers.py", folder, "build/aiter_headers")


@nox.session
def ck(session: nox.Session) -> None:
    """Build CK's attention from AITER's package of sources (a 40 MB download) and run it under the ck engine in the interpreter."""
    require(session, CLANG, f"{CLANG.replace('++', '')} lld-22")
    require(session, "llvm-objdump-22", "llvm-22")
    install_everything(session, "pip")
    session.run("python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "build/ck", CK_PACKAGE)
    session.run("pytest", "ci/ck", *session.posargs)


@nox.session
def rocm(session: nox.Session) -> None:
    """Build the hip engine and run everything on this machine's AMD GPUs; without HIP say so; HIP that cannot be built with is an error.

    Engines over torch need its ROCm build: ``nox --no-venv -s rocm`` takes the environment as it is.
    """
    machine = detect()
    step = decide(machine)
    session.log(step.text)
    if step.error is not None:
        session.error(step.error)
    if step.build:
        install_everything(session)
        install_hip_engine(session, str(machine.compiler))
    if not step.run:
        session.log("\n".join(["not run:", *absent_rows(step.text if not step.build else "no AMD GPU here; the hip engine was built")]))
        return
    backends = [argument for name in RUNNERS for argument in ("--attn-backend", name)]
    session.run("pytest", *backends, "--attn-device", "rocm", "--pyargs", "attn_shared_tests", *session.posargs)
    session.run("python", "benchmarks/cross_backend.py", "--output", "build/rocm")


def install_hip_engine(session: nox.Session, folder: str) -> None:
    """JAX's ROCm plugin, and attn-jax-rocm-sink built with the compiler in ``folder``; an error where the build has no hip engine."""
    if session.virtualenv.is_sandboxed:
        version = str(session.run("python", "-c", "import jax; print(jax.__version__)", silent=True)).strip()
        session.install(f"jax-rocm7-plugin=={version}", f"jax-rocm7-pjrt=={version}")
        built = ["--no-deps", "--force-reinstall", "--no-cache", "--find-links", "dist", FOLDERS["attn-jax-rocm-sink"]]
        session.install(*built, env={"ROCM_PATH": folder})
    session.run("python", "ci/hip_engine.py")


@nox.session(python="3.12")
def python312(session: nox.Session) -> None:
    """Run all tests on Python 3.12 with the oldest supported torch and Triton (3 GB of downloads where no CPU build is offered)."""
    install_everything(session, constraints=(OLDEST,), cuda_torch=True)
    session.run("pytest", *(session.posargs or TEST_PATHS), env=interpreter())
