"""The table of C functions that other packages call: found in the compiled module without torch, Python bindings or a device."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import attn_spec
from attn_cuda._extension import extension

TABLE = """
import ctypes, importlib.machinery, importlib.util, pathlib, sys
folders = importlib.util.find_spec("attn_cuda").submodule_search_locations
names = ["_cuda" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
paths = [path for folder in folders for name in names if (path := pathlib.Path(folder) / name).exists()]
entry = ctypes.CDLL(str(paths[0])).attn_cuda_interface_v1
entry.restype = ctypes.POINTER(ctypes.c_int64)
print(*entry()[:4])
function = ctypes.CFUNCTYPE(ctypes.c_char_p)
print(ctypes.cast(entry(), ctypes.POINTER(function))[4]().decode())
assert "torch" not in sys.modules and "attn_cuda" not in sys.modules
"""


def test_the_table_is_read_without_torch_and_has_the_sizes_of_the_header(tmp_path: Path) -> None:
    module = extension()
    assert not isinstance(module, str), module
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    sizes, fingerprint = done.stdout.splitlines()
    assert fingerprint == module.FINGERPRINT
    source = tmp_path / "sizes.cc"
    structs = ("attn_cuda_attention", "attn_cuda_attention_results", "attn_cuda_attention_gradients")
    values = ", ".join(["ATTN_CUDA_INTERFACE_VERSION", *(f"sizeof({name})" for name in structs)])
    source.write_text(f'#include "attn/cuda/interface.h"\nextern "C" const int64_t sizes[4] = {{{values}}};\n')
    library = tmp_path / "sizes.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{attn_spec.include_dir()}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    expected = (ctypes.c_int64 * 4).in_dll(ctypes.CDLL(str(library)), "sizes")
    assert [int(size) for size in sizes.split()] == list(expected)
