// scaled_dot_product_attention: which kernel CUDA takes, and the two fused ones by the CPU's.
//
// Pretends: the rules of torch's sdp_utils.cpp that matter for a decoder: flash needs 16 bits, no mask, a card from
// capability 8.0 on; the memory-efficient one needs as many key heads as query heads, and 16 bits before 8.0 means
// float16; else the plain operators. Layouts of the results are CUDA's. Does not: cuDNN's kernel (off by default below
// capability 9.0), head sizes and dropout that single cards refuse, Philox seeds of dropout.
#pragma once
#include "common.h"

namespace card {

int capability_ = 89;  // 10 * major + minor

enum Sdpa { MATH = 0, FLASH = 1, EFFICIENT = 2 };

inline int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool gqa) {
  if (q.dim() != 4) return MATH;
  auto dtype = q.scalar_type();
  bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  bool heads = q.size(1) == k.size(1) && k.size(1) == v.size(1);
  bool rows = q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1;
  bool flash = capability_ >= 80 && half && !mask && rows && (heads || gqa) && q.size(-1) == v.size(-1) && q.size(-1) <= 256;
  if (flash && at::globalContext().userEnabledFlashSDP()) return FLASH;
  bool known = dtype == at::kFloat || dtype == at::kHalf || (dtype == at::kBFloat16 && capability_ >= 80);
  int64_t multiple = half ? 8 : 4;
  bool aligned = q.size(-1) % multiple == 0 && v.size(-1) % multiple == 0;
  if (known && heads && rows && aligned && at::globalContext().userEnabledMemEfficientSDP()) return EFFICIENT;
  return MATH;
}

struct SetChoice {
  SetChoice() {
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(reinterpret_cast<decltype(&choose_attention)>(&choose_attention));
  }
} set_choice_;

using Bias = std::optional<at::Tensor>;

inline at::Tensor as_cuda_lays_it(const at::Tensor& t) { return t.transpose(1, 2).contiguous().transpose(1, 2); }

// Keys and values of fewer heads are repeated for the query heads, and their gradients summed, as flash does inside.
inline at::Tensor repeated(const at::Tensor& t, int64_t heads) {
  return t.size(1) == heads ? t : t.repeat_interleave(heads / t.size(1), 1);
}
inline at::Tensor summed(const at::Tensor& t, int64_t heads) {
  if (t.size(1) == heads) return t;
  return t.unflatten(1, {heads, t.size(1) / heads}).sum(2);
}

inline void run_efficient(Stack* s) {  // query key value bias compute_log_sumexp dropout causal scale
  auto a = torch::jit::last(*s, 8).vec();
  torch::jit::drop(*s, 8);
  Bias bias = a[3].isNone() ? Bias() : Bias(a[3].toTensor());
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[5].toDouble(), a[6].toBool(), bias, a[7].toOptional<double>());
  torch::jit::push(*s, as_cuda_lays_it(out), lse.transpose(1, 2).contiguous().transpose(1, 2).contiguous());
  torch::jit::push(*s, at::zeros({}, at::kLong), at::zeros({}, at::kLong));
}

inline void run_efficient_backward(Stack* s) {
  // grad query key value bias out lse seed offset dropout grad_input_mask causal scale
  auto a = torch::jit::last(*s, 13).vec();
  torch::jit::drop(*s, 13);
  auto grad = a[0].toTensor();
  if (!grad.defined()) {
    for (int i = 0; i < 4; i++) s->emplace_back(at::Tensor());
    return;
  }
  Bias bias = a[4].isTensor() && a[4].toTensor().defined() ? Bias(a[4].toTensor()) : Bias();
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, a[1].toTensor(), a[2].toTensor(), a[3].toTensor(), a[5].toTensor(), a[6].toTensor(), a[9].toDouble(),
      a[11].toBool(), bias, a[12].toOptional<double>());
  torch::jit::push(*s, q, k, v, at::Tensor());
}

inline void run_flash(Stack* s) {  // query key value dropout causal return_debug_mask scale
  auto a = torch::jit::last(*s, 7).vec();
  torch::jit::drop(*s, 7);
  auto q = a[0].toTensor(), k = a[1].toTensor(), v = a[2].toTensor();
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, repeated(k, q.size(1)), repeated(v, q.size(1)),
                                                                    a[3].toDouble(), a[4].toBool(), std::nullopt,
                                                                    a[6].toOptional<double>());
  torch::jit::push(*s, as_cuda_lays_it(out), lse, at::Tensor(), at::Tensor(), q.size(2), k.size(2));
  torch::jit::push(*s, at::zeros({2}, at::kLong), at::zeros({}, at::kLong), at::empty({0}, q.options()));
}

inline void run_flash_backward(Stack* s) {
  // grad query key value out lse cum_q cum_k max_q max_k dropout causal seed offset scale
  auto a = torch::jit::last(*s, 15).vec();
  torch::jit::drop(*s, 15);
  auto q = a[1].toTensor(), k = a[2].toTensor(), v = a[3].toTensor();
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      a[0].toTensor(), q, repeated(k, q.size(1)), repeated(v, q.size(1)), a[4].toTensor(), a[5].toTensor(),
      a[10].toDouble(), a[11].toBool(), std::nullopt, a[14].toOptional<double>());
  torch::jit::push(*s, dq, summed(dk, k.size(1)), summed(dv, k.size(1)));
}

}  // namespace card
