"""Play SGLang's stages (`benchmarks.sglang_gpu`) on a machine without a GPU, over the shim of CUDA.

What is checked is that names, arguments, files, processes and their order fit: kernels compute
nothing there, or torch's on the host, so no figure means anything. SGLang's own compiled kernels do
not run on a shim; `--kernels` names a folder with a module `sgl_kernel` in their place. SGLang
compiles others as they are first called, with the nvcc of `--cuda-home`: a toolkit, or
FOLDER/nvidia/cu13 after `pip install --target FOLDER nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
nvidia-cuda-cccl nvidia-cuda-runtime`. A daemon of MPS is `tests/contract/fake_mps_control.py`.

For example:
  python -m benchmarks.sglang_over_shim --kernels FOLDER --cuda-home FOLDER --only stock plugin
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.sglang_gpu import STAGES
from benchmarks.torch_shim import NotBuilt, build_shim, environment_of

_STANDIN = ROOT / "build" / "libcuda_standin"
# Small enough for one core, and for so long that steps of a second or more are seen. SGLang
# captures a graph for each batch size up to that many requests.
_LOAD = {"requests": 3, "context": 48, "generate": 40, "kv-tokens": 131_072, "seconds": 30}
_LOAD |= {"row-tokens": 64}


def main(argv: list[str] | None = None) -> int:
    """Build the shim and run the stages over it; return their exit code."""
    options = _parser().parse_args(argv)
    if not (options.kernels / "sgl_kernel").is_dir():
        print(f"{options.kernels} has no sgl_kernel: name a folder with kernels for the host")
        return 2
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        try:
            build_shim(_standin(), folder)
        except NotBuilt as missing:
            print(f"the shim is not built: {missing}")
            return 2
        (folder / "bin").mkdir()
        daemon = folder / "bin" / "nvidia-cuda-mps-control"
        daemon.symlink_to(ROOT / "tests" / "contract" / "fake_mps_control.py")
        home = _toolkit(folder / "cuda", options.cuda_home) if options.cuda_home else None
        environment = _environment(options, folder, home)
        return subprocess.run(_words(options), cwd=ROOT, env=environment, check=False).returncode


def _toolkit(home: Path, given: Path) -> Path:
    """Return a folder with a toolkit's parts under a toolkit's names: wheels have others."""
    (home / "lib64").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (home / name).symlink_to((given / name).resolve())
    libraries = given / "lib64" if (given / "lib64").is_dir() else given / "lib"
    for library in libraries.iterdir():
        (home / "lib64" / library.name).symlink_to(library.resolve())
    runtime = next(libraries.glob("libcudart.so.*"), None)
    if runtime is not None and not (home / "lib64" / "libcudart.so").exists():
        (home / "lib64" / "libcudart.so").symlink_to(runtime.resolve())
    return home


def _standin() -> Path:
    """Return the stand-in for libcuda, built here."""
    configure = ["cmake", "-DWINDROW_PYTHON=OFF", "-DWINDROW_CUDA_STANDIN=ON"]
    configure += ["-DCMAKE_BUILD_TYPE=Debug", "-S", str(ROOT), "-B", str(_STANDIN)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for words in (configure, ["cmake", "--build", str(_STANDIN), "--target", "cuda_standin"]):
        subprocess.run(words, env=os.environ | {"PATH": path}, capture_output=True, check=True)
    return _STANDIN / "tests" / "libcuda_standin" / "libcuda.so.1"


def _words(options: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.sglang_gpu", "--driver=cuda", "--shape=tiny"]
    words += [f"--{name}={value}" for name, value in _LOAD.items()]
    words += [f"--out={options.out}", f"--budget={options.budget}", "--patience=8"]
    # What SGLang would choose for such a GPU is compiled for it alone.
    words.append("--server=--attention-backend=triton")
    return words + (["--only", *options.only] if options.only else [])


def _environment(options: argparse.Namespace, folder: Path, home: Path | None) -> dict[str, str]:
    programs = [folder / "bin", *([home / "bin"] if home else [])]
    modules = [options.kernels.resolve(), ROOT / "tests" / "shim" / "site"]
    modules += [
        Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder
    ]
    of_cuda = {"CUDA_HOME": str(home)} if home else {}
    return {
        **os.environ,
        **environment_of(folder),
        **of_cuda,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, modules)),
        "WINDROW_SHIM_CAPABILITY": "9",
        "WINDROW_STANDIN_MPS": "1",
        # Cores of a machine under load try a client of the daemon slowly.
        "WINDROW_MPS_WAIT_SECONDS": "60",
        # Those kernels have no version of their own.
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # torch's newer communicator opens the GPU at once; the older one when it first sends.
        "TORCH_DIST_USE_NCCL2": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kernels", type=Path, required=True, help="a folder that has a module sgl_kernel")
    add("--cuda-home", type=Path, help="a folder that has bin/nvcc")
    add("--out", type=Path, default=Path("out/sglang-shim"), help="default: %(default)s")
    add("--budget", type=float, default=3600.0, metavar="SECONDS", help="default: %(default)s")
    add("--only", nargs="+", choices=[*STAGES], metavar="STAGE", help=f"of {', '.join(STAGES)}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
