"""The tables of C functions that other packages call: found in the compiled module without torch, Python bindings or a device."""

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
library = ctypes.CDLL(str(paths[0]))
entries = library.attn_cuda_interface_v1, library.attn_cuda_sm90_interface_v1
for entry in entries:
    entry.restype = ctypes.POINTER(ctypes.c_int64)
    print(*(entry()[:4] if entry() else ()))
function = ctypes.CFUNCTYPE(ctypes.c_char_p)
print(ctypes.cast(entries[0](), ctypes.POINTER(function))[4]().decode())
assert "torch" not in sys.modules and "attn_cuda" not in sys.modules
"""


def test_the_table_is_read_without_torch_and_has_the_sizes_of_the_header(tmp_path: Path) -> None:
    module = extension()
    assert not isinstance(module, str), module
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    sizes, sm90_sizes, fingerprint = done.stdout.splitlines()
    assert fingerprint == module.FINGERPRINT
    source = tmp_path / "sizes.cc"
    structs = ("attn_cuda_attention", "attn_cuda_attention_results", "attn_cuda_attention_gradients")
    sm90_structs = ("attn_cuda_attention", "attn_cuda_sm90_results", "attn_cuda_sm90_gradients")
    values = ", ".join(["ATTN_CUDA_INTERFACE_VERSION", *(f"sizeof({name})" for name in structs)])
    values += ", " + ", ".join(["ATTN_CUDA_SM90_INTERFACE_VERSION", *(f"sizeof({name})" for name in sm90_structs)])
    source.write_text(f'#include "attn/cuda/sm90_interface.h"\nextern "C" const int64_t sizes[8] = {{{values}}};\n')
    library = tmp_path / "sizes.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{attn_spec.include_dir()}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    expected = list((ctypes.c_int64 * 8).in_dll(ctypes.CDLL(str(library)), "sizes"))
    assert [int(size) for size in sizes.split()] == expected[:4]
    assert [int(size) for size in sm90_sizes.split()] == (expected[4:] if module.SM90 else [])
