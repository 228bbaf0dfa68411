"""What the torch backends share: conversion, checked public functions, operator registration and autograd.

Nothing in ``attn_spec`` itself imports this package, so importing ``attn_spec`` loads no framework.
"""

from attn_spec.torch._arrays import from_numpy as from_numpy
from attn_spec.torch._arrays import to_numpy as to_numpy
from attn_spec.torch._backend import TorchBackend as TorchBackend
from attn_spec.torch._kernels import AttentionInputs as AttentionInputs
from attn_spec.torch._kernels import Kernels as Kernels
from attn_spec.torch._partials import PartialOperators as PartialOperators
from attn_spec.torch._partials import Partials as Partials
from attn_spec.torch._public import Operators as Operators
from attn_spec.torch._remembered import Launches as Launches
