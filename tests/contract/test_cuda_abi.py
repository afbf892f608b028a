"""Our declarations of CUDA's driver interface are those of NVIDIA's headers, release by release.

And our one kernel, which is written in PTX, assembles for every GPU that has green contexts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = r"""
#include <cuda.h>
#include "windrow/cuda_abi.h"
using namespace windrow;

#define SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs))
SAME(cuda::kSuccess, CUDA_SUCCESS);
SAME(cuda::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME(cuda::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(cuda::kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(cuda::kDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME(cuda::kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME(cuda::kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
SAME(cuda::kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
SAME(cuda::kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
SAME(cuda::kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
SAME(cuda::kNotFound, CUDA_ERROR_NOT_FOUND);
SAME(cuda::kNotReady, CUDA_ERROR_NOT_READY);
SAME(cuda::kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(cuda::kNotPermitted, CUDA_ERROR_NOT_PERMITTED);
SAME(cuda::kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
SAME(cuda::kInvalidResourceConfiguration, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
#if CUDA_VERSION >= 13050
SAME(cuda::kStreamDetached, CUDA_ERROR_STREAM_DETACHED);
#endif
SAME(cuda::DeviceAttribute::kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(cuda::DeviceAttribute::kComputeCapabilityMajor,
     CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(cuda::DeviceAttribute::kMpsEnabled, CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
SAME(cuda::DeviceAttribute::kVirtualMemorySupported,
     CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(cuda::DeviceAttribute::kPosixDescriptorSupported,
     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(cuda::DeviceAttribute::kRdmaOfVirtualMemorySupported,
     CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(cuda::kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(cuda::kHandlePosixDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(cuda::kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(cuda::kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(cuda::kAccessRead, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(cuda::kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(cuda::kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(cuda::kMemoryTypeHost, CU_MEMORYTYPE_HOST);
SAME(cuda::kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE);
SAME(cuda::kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(cuda::kEventBlockingSync, CU_EVENT_BLOCKING_SYNC);
SAME(cuda::kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(cuda::kGreenDefaultStream, CU_GREEN_CTX_DEFAULT_STREAM);
SAME(cuda::kResourceSm, CU_DEV_RESOURCE_TYPE_SM);
SAME(sizeof(cuda::Uuid), sizeof(CUuuid));
SAME(sizeof(cuda::AllocationProperties), sizeof(CUmemAllocationProp));
SAME(sizeof(cuda::AccessDesc), sizeof(CUmemAccessDesc));
SAME(sizeof(cuda::DeviceResource), sizeof(CUdevResource));
SAME(offsetof(cuda::AllocationProperties, location), offsetof(CUmemAllocationProp, location));
SAME(offsetof(cuda::AllocationProperties, compression),
     offsetof(CUmemAllocationProp, allocFlags));
SAME(offsetof(cuda::AllocationProperties, rdma_capable),
     offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
SAME(offsetof(cuda::AccessDesc, flags), offsetof(CUmemAccessDesc, flags));
SAME(offsetof(cuda::DeviceResource, sm), offsetof(CUdevResource, sm));
SAME(offsetof(cuda::DeviceResource::Sm, count), offsetof(CUdevSmResource, smCount));
#if CUDA_VERSION >= 13000
SAME(offsetof(cuda::DeviceResource::Sm, min_partition),
     offsetof(CUdevSmResource, minSmPartitionSize));
SAME(offsetof(cuda::DeviceResource::Sm, coscheduled_alignment),
     offsetof(CUdevSmResource, smCoscheduledAlignment));
#else
SAME(sizeof(CUdevSmResource), sizeof(unsigned));  // it tells the number of SMs and nothing else
#endif

// As many arguments, each of the same size.
template <class R, class... A>
constexpr long shape(R (*)(A...)) {
  long all = sizeof...(A);
  ((all = all * 31 + static_cast<long>(sizeof(A))), ...);
  return all;
}
#define CALL(name, ...)                                                                      \
  static_assert(shape(static_cast<cuda::Result (*)(__VA_ARGS__)>(nullptr)) ==                \
                shape(static_cast<decltype(&::name)>(nullptr)), #name);
namespace windrow::cuda {
WINDROW_CUDA_CORE_CALLS(CALL)
WINDROW_CUDA_GREEN_CALLS(CALL)
WINDROW_CUDA_CONTEXT_CALLS(CALL)
}
"""

# What `make` puts beside the environment, by release.
HEADERS = Path(sys.prefix) / "cuda-headers"
RELEASES = ("12.6", "12.9", "13.0", "newest")
# Volta is the oldest with green contexts; toolkits of 13 assemble for it no more.
ARCHITECTURES = ("70", "75", "80", "86", "89", "90", "100", "103", "110", "120", "121")


def cuda_header(release: str) -> Path | None:
    """NVIDIA's cuda.h of that release; "installed": of a toolkit, or of torch for CUDA."""
    if release != "installed":
        return next((HEADERS / release).glob("nvidia/*/include/cuda.h"), None)
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include" / "cuda.h"
    return next((p for p in [toolkit, *packages.glob("*/include/cuda.h")] if p.exists()), None)


@pytest.mark.parametrize("release", [*RELEASES, "installed"])
def test_our_header_says_the_same_as_nvidias(release, tmp_path):
    header = cuda_header(release)
    if header is None:
        pytest.skip(f"no cuda.h ({release}): make {HEADERS.parent.name}/.cuda-headers brings them")
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "abi.cpp").write_text(PROGRAM)
    includes = [f"-I{header.parent}", f"-I{ROOT / 'csrc' / 'include'}"]
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", *includes, "abi.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def assemblers() -> list[str]:
    """Return Triton's ptxas programs: one for the newest GPUs, one for all before."""
    triton = pytest.importorskip("triton", reason="no triton, whose wheel has ptxas")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return sorted(str(program) for program in folder.glob("ptxas*"))


def test_the_kernel_that_reads_smid_assembles_for_every_gpu(tmp_path):
    source = (ROOT / "csrc" / "src" / "smid_kernel.cpp").read_text()
    ptx = re.search(r'R"\((.*?)\)"', source, re.DOTALL)
    assert ptx is not None
    (tmp_path / "smid.ptx").write_text(ptx[1])
    programs = assemblers()
    assembled = set()
    for program in programs:
        for architecture in ARCHITECTURES:
            done = subprocess.run(
                [program, "--gpu-name", f"sm_{architecture}", "smid.ptx", "-o", "smid.cubin"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            unknown = "is not defined for option 'gpu-name'" in done.stderr
            assert done.returncode == 0 or unknown, done.stderr
            assembled |= set() if unknown else {architecture}
    assert assembled >= set(ARCHITECTURES) - {"70", "103", "110", "121"}, programs
