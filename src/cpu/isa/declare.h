// What the files of this folder define for one instruction set; table.cpp collects them.
#pragma once
#include "cpu/kernels.h"

namespace bam::BAM_ISA {

void to_bf16(uint16_t* y, const float* x, int64_t n);
void to_fp32(float* y, const uint16_t* x, int64_t n);
void round_to_bf16(float* y, const float* x, int64_t n);
void transpose16(uint16_t* y, const uint16_t* x, int64_t rows, int64_t columns, int64_t y_stride, int64_t x_stride,
                 bool far);
void pack_kn(uint16_t* y, const void* x, bool low, int64_t rows, int64_t stride, int columns, bool far);
void pack_nk(uint16_t* y, const float* x, int64_t rows, int64_t stride, int columns, bool far);
void add(float* y, const float* x, int64_t n);
double sum_squares(const float* x, int64_t n);
void exp(float* y, const float* x, int64_t n);
void norm_forward(void* y, bool low, float* rstd, float* x_out, const float* x_in, const void* delta, bool delta_low,
                  const float* w, int64_t rows, int64_t C, float eps);
void norm_backward(const NormBackwardArgs& a);
void rope(void* x, bool low, const float* table, int heads, int D, bool half, bool inverse);
void swiglu_forward(void* y, bool low, const void* gate_up, int64_t rows, int64_t F);
void swiglu_backward(void* dgate_up, bool low, const void* dy, const void* gate_up, int64_t rows, int64_t F);
float cross_entropy(void* dlogits, bool low, float* logits, int64_t V, int32_t target, float scale);
void update(const UpdateArgs& a);
void tile_norms(float* norms, const void* k, bool low, int64_t keys, int64_t stride, int D);
void tile_ranges(float* max, float* min, const float* x, int64_t n);
int64_t attention_forward_scratch(const AttentionCall& c, int64_t queries);
void attention_forward(const AttentionCall& c, const AttentionTask& t);
int64_t attention_backward_scratch(const AttentionCall& c, int64_t queries);
void attention_backward(const AttentionCall& c, const AttentionTask& t);

}  // namespace bam::BAM_ISA
