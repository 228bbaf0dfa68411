"""attn-spec: attention operators as data, and contracts that fix their bits.

Axes: B batch, H query heads, K kv heads, S queries, T keys, D head dim of q and k, V head dim of v. Canonical layout [B, H, S, D].
Importing this package loads numpy and no framework.
"""

from pathlib import Path

from attn_spec._arrays import bfloat16 as bfloat16
from attn_spec._backend import Backend as Backend
from attn_spec._backend import Call as Call
from attn_spec._capabilities import Capabilities as Capabilities
from attn_spec._capabilities import OperatorSupport as OperatorSupport
from attn_spec._contract import Contract as Contract
from attn_spec._dispatch import get_op as get_op
from attn_spec._errors import UnsupportedProblem as UnsupportedProblem
from attn_spec._problem import Problem as Problem
from attn_spec._qat import QATConfig as QATConfig
from attn_spec._registry import backends as backends
from attn_spec._trace import Trace as Trace

__version__ = "0.1.0"


def include_dir() -> Path:
    """Directory of the C++17 headers (``#include "attn/ordered.h"``)."""
    return Path(__file__).parent / "include"
