// Rows of joint attention between where text and image lie and where the kernels want them. Source: docs/contracts/sm90-v1.md, section 5.
#pragma once

#include "attn/cuda/interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where the rows of text go that `mask` (uint8 [batch, text]) keeps, in order: `slots` [batch, text], -1 for a dropped row; `rows` [batch,
// text], the row of each slot, -1 past the last one. `kept` (uint8 [batch, first + image]) is 1 for those slots and from `first` on.
typedef struct {
  const uint8_t* mask;
  int64_t batch, text, first, image;
  int32_t* slots;
  int32_t* rows;
  uint8_t* kept;
} attn_cuda_joint_places;

// Halves of `columns` columns, a multiple of 8: text [batch, heads, text, columns] and image [batch, heads, image, columns], whose strides
// are multiples of 8 but for that of the columns, which is 1; joined [batch, heads, first + image, columns], contiguous. All addresses are
// multiples of 16.
typedef struct {
  attn_cuda_array text, image, joined;
  int64_t batch, heads, text_rows, image_rows, first, columns;
  const int32_t* slots;
  const int32_t* rows;
} attn_cuda_joint_rows;

int attn_cuda_find_joint_places(int device, void* stream, const attn_cuda_joint_places* places);
// text and image into joined; +0 in slots without a row.
int attn_cuda_join_rows(int device, void* stream, const attn_cuda_joint_rows* rows);
// joined into text and image; +0 in rows without a slot.
int attn_cuda_part_rows(int device, void* stream, const attn_cuda_joint_rows* rows);

#ifdef __cplusplus
}
#endif
