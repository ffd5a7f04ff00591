"""What lets the CUDA packages of the GPU lock run up to their kernels without a GPU: a driver stub, and a platform."""

import ctypes
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE, which every function of the stub returns."""

# Read at the first imports: Triton interprets its kernels, and vLLM keeps Triton although no driver is active.
os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def pytest_sessionstart(session: pytest.Session) -> None:
    load_driver_stub(Path(session.config.rootpath) / "build" / "cuda-driver-stub")
    stand_on_a_gpu_node()


def load_driver_stub(folder: Path) -> None:
    """Compile a libcuda.so.1 that defines what the installed packages need of it, and load it."""
    site = Path(sysconfig.get_paths()["purelib"])
    libraries = [path for name in ("vllm", "transformer_engine*") for path in site.glob(f"{name}/**/*.so")]
    libraries += site.glob("transformer_engine_torch*.so")
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    names = {
        name for name in re.findall(r" U (cu[A-Z]\w+)$", listed.stdout, re.M) if "_" not in name.removesuffix("_v2")
    }
    folder.mkdir(parents=True, exist_ok=True)
    stub = folder / "libcuda.so.1"
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(names))
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{stub.name}", "-o", str(stub), "-xc", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)


def stand_on_a_gpu_node() -> None:
    """Give vLLM its CUDA platform, with what a node of eight H100 would answer."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class HopperNode(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda *_, **__: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda *_, **__: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda *_, **__: 80 << 30)
        device_count = classmethod(lambda _: 8)

    vllm.platforms._current_platform = HopperNode()
