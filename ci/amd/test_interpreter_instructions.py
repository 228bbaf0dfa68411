"""Single instructions, assembled for each GPU, against what AMD's instruction set guides say of them, computed here by numpy or by hand.

Guides: https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/instruction-set-architectures/ (CDNA2, CDNA3, CDNA4).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_code import TARGETS, assembled
from interpreter import Device

Play = Callable[[str], Device]
Words = np.ndarray
LANES = np.arange(64, dtype=np.uint32)

FRAME = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32_e32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
  global_load_dword v2, v1, s[4:5]
  global_load_dword v3, v1, s[4:5] offset:256
  global_load_dword v4, v1, s[4:5] offset:512
  v_mov_b32_e32 v5, 0x55555555
  v_mov_b32_e32 v6, 0x66666666
  s_waitcnt vmcnt(0)
{body}
  global_store_dword v1, v5, s[6:7]
  global_store_dword v1, v6, s[6:7] offset:256
"""


def floats(words: Words) -> np.ndarray:
    return words.view(np.float32)


def words(values: np.ndarray) -> Words:
    return values.astype(np.float32).view(np.uint32)


def signed(values: Words) -> np.ndarray:
    return values.view(np.int32).astype(np.int64)


def wide(low: Words, high: Words) -> np.ndarray:
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def halves(values: np.ndarray) -> tuple[Words, Words]:
    values = values.astype(np.uint64)
    return values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)


def on(mask: int, new: Words, old: int) -> Words:
    """New where a bit of the mask is set."""
    return np.where(np.array([mask >> lane & 1 for lane in range(64)], bool), new, np.uint32(old)).astype(np.uint32)


def scalar(value: int) -> Words:
    return np.full(64, value & 0xFFFFFFFF, np.uint32)


def perm(a: Words, b: Words, selectors: bytes) -> Words:
    data = np.concatenate((b[:, None].view(np.uint8).reshape(64, 4), a[:, None].view(np.uint8).reshape(64, 4)), axis=1)
    columns = []
    for selector in selectors:
        if selector >= 0x0D:
            columns.append(np.full(64, 0xFF, np.uint8))
        elif selector == 0x0C:
            columns.append(np.zeros(64, np.uint8))
        elif selector >= 8:
            columns.append(np.where(data[:, 2 * (selector - 8) + 1] >> 7, 0xFF, 0).astype(np.uint8))
        else:
            columns.append(data[:, selector])
    return np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint32).ravel()


Expected = Callable[[Words, Words, Words], Words | tuple[Words, Words]]

CASES: dict[str, tuple[str, Expected]] = {
    "add_wraps": ("v_add_u32_e32 v5, v2, v3", lambda a, b, c: a + b),
    "mul_hi_signed": ("v_mul_hi_i32 v5, v2, v3", lambda a, b, c: (signed(a) * signed(b) >> 32).astype(np.uint32)),
    "mul_24": ("v_mul_u32_u24_e32 v5, v2, v3", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "shift_is_masked": ("v_lshlrev_b32_e32 v5, v2, v3", lambda a, b, c: b << (a & 31)),
    "field_signed": ("v_bfe_i32 v5, v2, 5, 7", lambda a, b, c: (signed(a << 20) >> 25).astype(np.uint32)),
    "field_insert": ("v_bfi_b32 v5, v2, v3, v4", lambda a, b, c: (a & b) | (~a & c)),
    "align": ("v_alignbit_b32 v5, v2, v3, 12", lambda a, b, c: (wide(b, a) >> np.uint64(12)).astype(np.uint32)),
    "permute_bytes": (
        "s_mov_b32 s8, 0x0c080706\n v_perm_b32 v5, v2, v3, s8\n s_mov_b32 s8, 0x0d0b0100\n v_perm_b32 v6, v2, v3, s8",
        lambda a, b, c: (perm(a, b, b"\x06\x07\x08\x0c"), perm(a, b, b"\x00\x01\x0b\x0d")),
    ),
    "carry": (
        "v_add_co_u32_e32 v5, vcc, v2, v3\n v_addc_co_u32_e32 v6, vcc, v3, v4, vcc",
        lambda a, b, c: halves(wide(a, b) + wide(b, c)),
    ),
    "borrow": (
        "v_sub_co_u32_e32 v5, vcc, v2, v3\n v_subb_co_u32_e32 v6, vcc, v3, v4, vcc",
        lambda a, b, c: halves(wide(a, b) - wide(b, c)),
    ),
    "mad_64": (
        "v_mad_u64_u32 v[6:7], s[8:9], v2, v3, v[2:3]\n v_mov_b32_e32 v5, v6\n v_mov_b32_e32 v6, v7",
        lambda a, b, c: halves(wide(a, a * 0) * b + wide(a, b)),
    ),
    "mad_64_carry_mask": (
        "v_mad_u64_u32 v[6:7], s[8:9], v2, v2, v[2:3]\n v_mov_b32_e32 v5, s8\n v_mov_b32_e32 v6, s9",
        lambda a, b, c: tuple(scalar(half) for half in _mask(wide(a, a * 0) * a + wide(a, b) < wide(a, b))),
    ),
    "shift_64": (
        "v_ashrrev_i64 v[6:7], 9, v[2:3]\n v_mov_b32_e32 v5, v6\n v_mov_b32_e32 v6, v7",
        lambda a, b, c: halves(wide(a, b).view(np.int64) >> 9),
    ),
    "inline_float_is_bits": ("v_or_b32_e32 v5, 1.0, v2", lambda a, b, c: a | 0x3F800000),
    "sign_modifiers": (
        "v_add_f32_e64 v5, -v2, |v3|\n v_mul_f32_e64 v6, -|v2|, v3",
        lambda a, b, c: (words(abs(floats(b)) - floats(a)), words(-abs(floats(a)) * floats(b))),
    ),
    "output_modifiers": (
        "v_add_f32_e64 v5, v2, v3 clamp\n v_mul_f32_e64 v6, v2, v3 mul:2",
        lambda a, b, c: (words(np.clip(floats(a) + floats(b), 0, 1)), words(floats(a) * floats(b) * 2)),
    ),
    "fma_is_one_rounding": (
        "v_fma_f32 v5, v2, v3, v4",
        lambda a, b, c: words((floats(a).astype(np.longdouble) * floats(b) + floats(c)).astype(np.float32)),
    ),
    "max_prefers_numbers": (
        "v_mov_b32_e32 v7, 0x7fc00000\n v_max_f32_e32 v5, v7, v2\n v_min_f32_e32 v6, v2, v7",
        lambda a, b, c: (a, a),
    ),
    "max_of_zeros": (
        "v_mov_b32_e32 v7, 0\n v_bfrev_b32_e32 v8, 1\n v_max_f32_e32 v5, v8, v7\n v_min_f32_e32 v6, v7, v8",
        lambda a, b, c: (scalar(0), scalar(0x80000000)),
    ),
    "signalling_nan_wins": (
        "v_mov_b32_e32 v7, 0x7f800001\n v_max_f32_e32 v5, v7, v2",
        lambda a, b, c: (scalar(0x7FC00001), scalar(0x66666666)),
    ),
    "round_to_even": (
        "v_rndne_f32_e32 v5, 0.5\n v_mov_b32_e32 v7, 0x3fc00000\n v_rndne_f32_e32 v6, v7",
        lambda a, b, c: (scalar(0), scalar(0x40000000)),
    ),
    "convert_saturates": (
        "v_mov_b32_e32 v7, 0x7f800000\n v_cvt_i32_f32_e32 v5, v7\n v_mov_b32_e32 v7, 0x7fc00000\n v_cvt_u32_f32_e32 v6, v7",
        lambda a, b, c: (scalar(0x7FFFFFFF), scalar(0)),
    ),
    "convert_negative": (
        "v_mov_b32_e32 v7, 0xbfc00000\n v_cvt_u32_f32_e32 v5, v7\n v_cvt_i32_f32_e32 v6, v7",
        lambda a, b, c: (scalar(0), scalar(-1)),
    ),
    "half": (
        "v_cvt_f16_f32_e32 v5, v2\n v_cvt_f32_f16_e32 v6, v5",
        lambda a, b, c: (
            floats(a).astype(np.float16).view(np.uint16).astype(np.uint32),
            words(floats(a).astype(np.float16)),
        ),
    ),
    "half_adds": (
        "v_cvt_f16_f32_e32 v7, v2\n v_cvt_f16_f32_e32 v8, v3\n v_add_f16_e32 v5, v7, v8",
        lambda a, b, c: (
            (floats(a).astype(np.float16) + floats(b).astype(np.float16)).view(np.uint16).astype(np.uint32),
            scalar(0x66666666),
        ),
    ),
    "double": (
        "v_cvt_f64_f32_e32 v[6:7], v2\n v_cvt_f64_f32_e32 v[8:9], v3\n"
        " v_fma_f64 v[6:7], v[6:7], v[8:9], 1.0\n v_cvt_f32_f64_e32 v5, v[6:7]\n v_mov_b32_e32 v6, v7",
        lambda a, b, c: _double(a, b),
    ),
    "subnormals_stay": (
        "v_mov_b32_e32 v7, 0x00400000\n v_mul_f32_e32 v5, 0.5, v7",
        lambda a, b, c: (scalar(0x00200000), scalar(0x66666666)),
    ),
    "classes": (
        "v_mov_b32_e32 v7, 0x00000001\n s_movk_i32 s10, 0x80\n"
        " v_cmp_class_f32_e64 s[8:9], v7, s10\n v_mov_b32_e32 v5, s8\n v_mov_b32_e32 v7, 0x7f800001\n"
        " v_cmp_class_f32_e64 s[8:9], v7, 2\n v_mov_b32_e32 v6, s8",
        lambda a, b, c: (scalar(-1), scalar(0)),
    ),
    "unordered": (
        "v_mov_b32_e32 v7, 0x7fc00000\n v_cmp_nlt_f32_e32 vcc, v7, v2\n"
        " v_mov_b32_e32 v5, vcc_lo\n v_cmp_lg_f32_e32 vcc, v7, v2\n v_mov_b32_e32 v6, vcc_lo",
        lambda a, b, c: (scalar(-1), scalar(0)),
    ),
    "compare_writes_only_enabled": (
        "s_mov_b64 s[10:11], exec\n s_mov_b64 exec, 0xff\n v_cmp_eq_u32_e32 vcc, v2, v2\n"
        " s_mov_b64 exec, s[10:11]\n v_mov_b32_e32 v5, vcc_lo\n v_mov_b32_e32 v6, vcc_hi",
        lambda a, b, c: (scalar(0xFF), scalar(0)),
    ),
    "exec_masks_writes": (
        "s_mov_b64 s[10:11], exec\n s_mov_b32 exec_lo, 0x0f0f\n s_mov_b32 exec_hi, 0\n"
        " v_mov_b32_e32 v5, v2\n v_lshl_add_u32 v6, v2, 1, v3\n s_mov_b64 exec, s[10:11]",
        lambda a, b, c: (on(0x0F0F, a, 0x55555555), on(0x0F0F, 2 * a + b, 0x66666666)),
    ),
    "select": (
        "v_cmp_gt_i32_e64 s[8:9], v2, v3\n v_cndmask_b32_e64 v5, v2, v3, s[8:9]",
        lambda a, b, c: np.where(signed(a) > signed(b), b, a),
    ),
    "packed": (
        "v_pk_mul_f32 v[6:7], v[2:3], v[2:3] op_sel:[0,1] op_sel_hi:[0,0] neg_lo:[0,1]\n v_mov_b32_e32 v5, v6\n v_mov_b32_e32 v6, v7",
        lambda a, b, c: (words(floats(a) * -floats(b)), words(floats(a) * floats(a))),
    ),
    "packed_fma_scalar": (
        "s_mov_b32 s8, 2.0\n s_mov_b32 s9, -1.0\n v_pk_fma_f32 v[6:7], v[2:3], s[8:9], v[2:3]\n"
        " v_mov_b32_e32 v5, v6\n v_mov_b32_e32 v6, v7",
        lambda a, b, c: (words(3 * floats(a).astype(np.float64)), scalar(0)),
    ),
    "packed_integers": (
        "v_pk_mul_lo_u16 v5, v2, v3 op_sel:[0,1] op_sel_hi:[1,0]\n v_pk_ashrrev_i16 v6, 3, v2 op_sel_hi:[0,1]",
        lambda a, b, c: (
            (a & 0xFFFF) * (b >> 16) & 0xFFFF | (a >> 16) * (b & 0xFFFF) << 16,
            (signed(a << 16) >> 19 & 0xFFFF | (signed(a) >> 19) << 16 & 0xFFFF0000).astype(np.uint32),
        ),
    ),
    "parts": (
        "v_add_u32_sdwa v5, sext(v2), v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_2\n"
        " v_mov_b32_sdwa v6, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3",
        lambda a, b, c: (((signed(a) >> 16) + (b >> 16 & 0xFF)).astype(np.uint32), 0x66660066 | a >> 24 << 8),
    ),
    "quads": (
        "v_mov_b32_dpp v5, v2 quad_perm:[3,0,1,1] row_mask:0xf bank_mask:0xf",
        lambda a, b, c: a[(LANES & ~np.uint32(3)) + np.array([3, 0, 1, 1])[LANES & 3]],
    ),
    "row_shift": (
        "v_mov_b32_dpp v5, v2 row_shr:3 row_mask:0xf bank_mask:0xf\n"
        " v_mov_b32_dpp v6, v2 row_shl:5 row_mask:0xf bank_mask:0xf bound_ctrl:0",
        lambda a, b, c: (
            np.where(LANES % 16 >= 3, a[(LANES - 3) % 64], np.uint32(0x55555555)),
            np.where(LANES % 16 < 11, a[(LANES + 5) % 64], np.uint32(0)),
        ),
    ),
    "row_masks": (
        "v_add_u32_dpp v5, v2, v3 row_ror:4 row_mask:0xa bank_mask:0x3",
        lambda a, b, c: np.where(
            (LANES // 16 % 2 == 1) & (LANES % 16 < 8), a[(LANES & 48) | ((LANES - 4) & 15)] + b, np.uint32(0x55555555)
        ),
    ),
    "broadcasts": (
        "v_mov_b32_dpp v5, v2 row_bcast:15 row_mask:0xa bank_mask:0xf\n v_mov_b32_dpp v6, v2 row_half_mirror row_mask:0xf bank_mask:0xf",
        lambda a, b, c: (np.where(LANES // 16 % 2 == 1, a[((LANES & 48) - 1) % 64], np.uint32(0x55555555)), a[LANES ^ 7]),
    ),
    "first_lane": (
        "s_mov_b64 s[10:11], exec\n s_mov_b64 exec, 0x70\n v_readfirstlane_b32 s8, v2\n"
        " s_mov_b64 exec, s[10:11]\n v_mov_b32_e32 v5, s8\n v_readlane_b32 s9, v3, 63\n v_mov_b32_e32 v6, s9",
        lambda a, b, c: (scalar(int(a[4])), scalar(int(b[63]))),
    ),
    "write_lane": ("v_writelane_b32 v5, 17, 33", lambda a, b, c: (on(1 << 33, scalar(17), 0x55555555), scalar(0x66666666))),
    "lane_number": ("v_mbcnt_lo_u32_b32 v5, -1, 0\n v_mbcnt_hi_u32_b32 v5, -1, v5", lambda a, b, c: LANES),
    "bpermute": (
        "v_xor_b32_e32 v7, 0x84, v1\n ds_bpermute_b32 v5, v7, v2\n s_mov_b64 s[10:11], exec\n"
        " s_mov_b64 exec, 0xff\n ds_bpermute_b32 v6, v7, v2 offset:128\n s_mov_b64 exec, s[10:11]",
        lambda a, b, c: (
            a[LANES ^ 33],
            on(0xFF, np.where((LANES ^ 33) < 8, a, np.where(((LANES ^ 33) + 32) % 64 < 8, a[((LANES ^ 33) + 32) % 64], 0)), 0x66666666),
        ),
    ),
    "permute": ("v_mul_u32_u24_e32 v7, 20, v0\n ds_permute_b32 v5, v7, v2", lambda a, b, c: a[LANES * 13 % 64]),
    "swizzle": (
        'ds_swizzle_b32 v5, v2 offset:swizzle(BITMASK_PERM,"01pip")\n ds_swizzle_b32 v6, v2 offset:swizzle(QUAD_PERM,2,2,0,1)',
        lambda a, b, c: (
            a[(LANES & 32) | ((LANES & 0b00111) | 0b01000) ^ 0b00010],
            a[(LANES & ~np.uint32(3)) + np.array([2, 2, 0, 1])[LANES & 3]],
        ),
    ),
    "lds": (
        "v_lshlrev_b32_e32 v7, 3, v0\n ds_write2_b32 v7, v2, v3 offset1:1\n s_waitcnt lgkmcnt(0)\n v_xor_b32_e32 v7, 0x1f8, v7\n"
        " ds_read_u16 v5, v7 offset:2\n ds_read_i8 v6, v7 offset:7",
        lambda a, b, c: (a[LANES ^ 63] >> 16, (signed(b[LANES ^ 63]) >> 24).astype(np.uint32)),
    ),
    "lds_strides": (
        "ds_write_b32 v1, v2\n ds_write_b32 v1, v3 offset:256\n v_xor_b32_e32 v7, 4, v1\n"
        " ds_read2st64_b32 v[6:7], v7 offset1:1\n v_mov_b32_e32 v5, v6\n v_mov_b32_e32 v6, v7",
        lambda a, b, c: (a[LANES ^ 1], b[LANES ^ 1]),
    ),
    "buffer_to_lds": (
        "s_mov_b32 s8, s4\n s_mov_b32 s9, s5\n s_movk_i32 s10, 0x84\n s_mov_b32 s11, 0x27000\n s_movk_i32 m0, 0x100\n"
        " buffer_load_dword v1, s[8:11], 0 offen lds\n s_waitcnt vmcnt(0)\n ds_read_b32 v5, v1 offset:0x100\n s_waitcnt lgkmcnt(0)",
        lambda a, b, c: (np.where(LANES < 33, a, 0), scalar(0x66666666)),
    ),
    "compare_exec": (
        "v_cmpx_le_u32_e64 exec, 32, v0\n v_mov_b32_e32 v5, v2\n s_mov_b64 exec, -1",
        lambda a, b, c: (on(0xFFFFFFFF << 32, a, 0x55555555), scalar(0x66666666)),
    ),
    "compare_exec_and_vcc": (
        "v_cmpx_gt_u32_e32 vcc, 9, v0\n v_mov_b32_e32 v5, v2\n s_mov_b64 exec, -1\n v_mov_b32_e32 v6, vcc_lo",
        lambda a, b, c: (on(0x1FF, a, 0x55555555), scalar(0x1FF)),
    ),
    "buffer_range": (
        "s_mov_b32 s8, s4\n s_mov_b32 s9, s5\n s_movk_i32 s10, 0x84\n s_mov_b32 s11, 0x27000\n buffer_load_dword v5, v1, s[8:11], 0 offen\n"
        " buffer_load_ubyte v6, v1, s[8:11], 4 offen offset:3",
        lambda a, b, c: (np.where(LANES < 33, a, np.uint32(0)), np.where(LANES < 32, _next_byte(a), np.uint32(0))),
    ),
    "short_stores": (
        "v_lshlrev_b32_e32 v7, 1, v0\n global_store_short_d16_hi v7, v2, s[4:5]\n s_waitcnt vmcnt(0)\n global_load_sshort v5, v7, s[4:5]\n"
        " global_load_short_d16_hi v6, v7, s[4:5]",
        lambda a, b, c: ((signed(a) >> 16).astype(np.uint32), (a & 0xFFFF0000) | 0x6666),
    ),
}

SCALAR_CASES = {
    "add_overflow": ("s_mov_b32 s8, 0x7fffffff\n s_add_i32 s8, s8, 1\n s_cselect_b32 s9, 7, 9", 0x80000000, 7),
    "subtract_borrow": ("s_mov_b32 s8, 3\n s_sub_u32 s8, s8, 5\n s_subb_u32 s9, 10, 0", 0xFFFFFFFE, 9),
    "mul_hi": ("s_mov_b32 s8, 0x80000000\n s_mul_hi_i32 s9, s8, s8\n s_mul_hi_u32 s8, s8, 6", 3, 0x40000000),
    "field": ("s_mov_b32 s8, 0xdeadbeef\n s_bfe_i32 s9, s8, 0x80004\n s_bfe_u32 s8, s8, 0x8000c", 0xDB, 0xFFFFFFEE),
    "shift_64": ("s_mov_b32 s8, 0x80000001\n s_mov_b32 s9, 0x80000000\n s_ashr_i64 s[8:9], s[8:9], 33", 0xC0000000, 0xFFFFFFFF),
    "move_keeps_sign": ("s_movk_i32 s8, 0x8001\n s_mov_b32 s9, 5\n s_addk_i32 s9, 0xfffe", 0xFFFF8001, 3),
    "literal_of_64_bits": ("s_mov_b64 s[8:9], 0x87654321", 0x87654321, 0),
    "inline_of_64_bits": ("s_mov_b64 s[8:9], -2", 0xFFFFFFFE, 0xFFFFFFFF),
    "find": ("s_mov_b32 s10, 0x00f00000\n s_ff1_i32_b32 s8, s10\n s_flbit_i32_b32 s9, s10", 20, 8),
    "count": ("s_mov_b32 s8, -1\n s_mov_b32 s9, 0xff\n s_bcnt1_i32_b64 s8, s[8:9]\n s_cselect_b32 s9, 1, 0", 40, 1),
    "save_exec": ("s_mov_b64 s[12:13], 0xf0\n s_andn2_saveexec_b64 s[10:11], s[12:13]\n"
    " s_mov_b32 s8, exec_lo\n s_mov_b32 s9, s11\n s_mov_b64 exec, s[10:11]", 0, 0xFFFFFFFF),
    "loop": ("s_mov_b32 s8, 0\n s_mov_b32 s9, 10\nagain:\n s_add_u32 s8, s8, s9\n"
    " s_sub_u32 s9, s9, 1\n s_cmp_lg_u32 s9, 0\n s_cbranch_scc1 again", 55, 0),
    "call": ("s_getpc_b64 s[10:11]\nhere:\n s_add_u32 s10, s10, routine-here\n"
    " s_addc_u32 s11, s11, 0\n s_swappc_b64 s[12:13], s[10:11]\n s_mov_b32 s9, 2\n"
             " s_branch done\nroutine:\n s_mov_b32 s8, 1\n s_setpc_b64 s[12:13]\ndone:", 1, 2),
}  # fmt: skip

GFX950 = {
    "truth_table": ("v_bitop3_b32 v5, v2, v3, v4 bitop3:0x6c", lambda a, b, c: (_truth(0x6C, a, b, c), scalar(0x66666666))),
    "to_bfloat16": ("v_cvt_pk_bf16_f32 v5, v2, v3", lambda a, b, c: (_bfloat16(a) | _bfloat16(b) << 16, scalar(0x66666666))),
    "swap_rows": (
        "v_mov_b32_e32 v5, v2\n v_mov_b32_e32 v6, v3\n v_permlane16_swap_b32_e32 v5, v6",
        lambda a, b, c: (np.where(LANES & 16, b[LANES ^ 16], a), np.where(LANES & 16, b, a[LANES ^ 16])),
    ),
    "swap_halves": (
        "v_mov_b32_e32 v5, v2\n v_mov_b32_e32 v6, v3\n v_permlane32_swap_b32_e32 v5, v6",
        lambda a, b, c: (np.where(LANES & 32, b[LANES ^ 32], a), np.where(LANES & 32, b, a[LANES ^ 32])),
    ),
}


GFX90A = {
    "mad_flushes": ("v_mov_b32_e32 v7, 0x00400000\n v_mad_f32 v5, v7, 1.0, v7", lambda a, b, c: (scalar(0), scalar(0x66666666))),
    "mad_rounds_twice": ("v_mad_f32 v5, v2, v3, v4", lambda a, b, c: (words(floats(a) * floats(b) + floats(c)), scalar(0x66666666))),
}

ONLY = {"gfx90a": GFX90A, "gfx950": GFX950}
"""Instructions that one GPU alone has."""


def _mask(flags: np.ndarray) -> tuple[int, int]:
    value = sum(int(flag) << lane for lane, flag in enumerate(flags))
    return value & 0xFFFFFFFF, value >> 32


def _double(a: Words, b: Words) -> tuple[Words, Words]:
    exact = floats(a).astype(np.longdouble) * floats(b) + 1
    return words(exact.astype(np.float64)), halves(exact.astype(np.float64).view(np.uint64))[1]


def _truth(table: int, a: Words, b: Words, c: Words) -> Words:
    found = np.zeros(64, np.uint32)
    for bit in range(32):
        place = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        found |= (np.uint32(table) >> place & 1) << np.uint32(bit)
    return found


def _bfloat16(a: Words) -> Words:
    return (a + 0x7FFF + (a >> 16 & 1)) >> 16


def _next_byte(a: Words) -> Words:
    return np.concatenate((a[1:], a[:1])) >> 24


def inputs() -> np.ndarray:
    """Three rows of finite binary32 values of both signs, none of them subnormal, in 64 lanes."""
    generator = np.random.default_rng(5)
    return (generator.standard_normal((3, 64)) * 2.0 ** generator.integers(-12, 12, (3, 64))).astype(np.float32).view(np.uint32)


@pytest.fixture(scope="module", params=TARGETS)
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    target = request.param
    bodies = {name: FRAME.format(body=body) for name, (body, _) in (CASES | ONLY.get(target, {})).items()}
    moved = "\n v_mov_b32_e32 v5, s8\n v_mov_b32_e32 v6, s9"
    bodies |= {f"scalar_{name}": FRAME.format(body=body + moved) for name, (body, *_) in SCALAR_CASES.items()}
    return target, assembled(bodies, target, tmp_path_factory.mktemp("instructions") / "kernels.co")


def ran(device: Device, image: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    read, written = inputs(), np.zeros((2, 64), np.uint32)
    for array in (read, written):
        device.register(array.ctypes.data, array.nbytes)
    device.module(image).launch(name, [1], [64], [ctypes.c_void_p(read.ctypes.data), ctypes.c_void_p(written.ctypes.data)])
    device.forget_registered()
    return written[0], written[1]


def test_vector_instructions(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    device = play(target)
    for name, (_, expected) in (CASES | ONLY.get(target, {})).items():
        found, law = ran(device, image, name), expected(*inputs())
        law = law if isinstance(law, tuple) else (law, scalar(0x66666666))
        for one, other in zip(found, law, strict=True):
            np.testing.assert_array_equal(one, np.asarray(other).astype(np.uint32), err_msg=name)


def test_scalar_instructions(play: Play, code: tuple[str, bytes]) -> None:
    target, image = code
    for name, (_, *expected) in SCALAR_CASES.items():
        found = ran(play(target), image, f"scalar_{name}")
        assert [int(row[0]) for row in found] == expected, name


def test_registers_start_poisoned(play: Play, tmp_path: Path) -> None:
    image = assembled({"unset": FRAME.format(body="v_mov_b32_e32 v5, v40\n v_mov_b32_e32 v6, s40")}, "gfx942", tmp_path / "unset.co")
    found = ran(play("gfx942"), image, "unset")
    assert np.isnan(floats(np.stack(found))).all()
