"""What a backend needs for numpy data in the dtypes of the contracts."""

from attn_spec._arrays import bfloat16 as bfloat16
from attn_spec._arrays import dtype_name as dtype_name
from attn_spec._arrays import from_float32 as from_float32
from attn_spec._arrays import to_float32 as to_float32
