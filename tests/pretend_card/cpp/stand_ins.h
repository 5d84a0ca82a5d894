// Operators that CUDA has and a CPU has not, or has with another dtype: computed by others of the CPU.
//
// Pretends: products with out_dtype, softmax from 16 bits into float32, native_dropout, the fused attentions, the backward
// pass of the fused RMSNorm over one dimension.
// Does not: the order of CUDA's sums, TF32, sums kept in 16 bits.
#pragma once
#include "attention.h"
#include "generators.h"

namespace card {

enum Special {
  NONE, PRODUCT_DTYPE, ADD_PRODUCT_DTYPE, ADD_PRODUCT_DTYPE_OUT, SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACK, LOG_SOFTMAX_BACK,
  EFFICIENT_FORWARD, EFFICIENT_BACK, FLASH_FORWARD, FLASH_BACK, DROPOUT, RMS_NORM_BACK
};

const std::map<std::string, int> SPECIAL = {
    {"aten::bmm.dtype", PRODUCT_DTYPE},
    {"aten::mm.dtype", PRODUCT_DTYPE},
    {"aten::addmm.dtype", ADD_PRODUCT_DTYPE},
    {"aten::baddbmm.dtype", ADD_PRODUCT_DTYPE},
    {"aten::addmm.dtype_out", ADD_PRODUCT_DTYPE_OUT},
    {"aten::baddbmm.dtype_out", ADD_PRODUCT_DTYPE_OUT},
    {"aten::_softmax", SOFTMAX},
    {"aten::_log_softmax", LOG_SOFTMAX},
    {"aten::_softmax_backward_data", SOFTMAX_BACK},
    {"aten::_log_softmax_backward_data", LOG_SOFTMAX_BACK},
    {"aten::_scaled_dot_product_efficient_attention", EFFICIENT_FORWARD},
    {"aten::_scaled_dot_product_efficient_attention_backward", EFFICIENT_BACK},
    {"aten::_scaled_dot_product_flash_attention", FLASH_FORWARD},
    {"aten::_scaled_dot_product_flash_attention_backward", FLASH_BACK},
    {"aten::native_dropout", DROPOUT},
    {"aten::_fused_rms_norm_backward", RMS_NORM_BACK},
};

inline bool is_efficient(int special) { return special == EFFICIENT_FORWARD || special == EFFICIENT_BACK; }
inline bool is_flash(int special) { return special == FLASH_FORWARD || special == FLASH_BACK; }

// Which of the above this call is; softmax only where the dtype changes on the way, which a CPU refuses.
inline int special_of(const std::string& name, const Stack& stack, size_t base) {
  auto found = SPECIAL.find(name);
  if (found == SPECIAL.end()) return NONE;
  int kind = found->second;
  if ((kind == SOFTMAX || kind == LOG_SOFTMAX) && !stack[base + 2].toBool()) return NONE;
  if (kind == SOFTMAX_BACK || kind == LOG_SOFTMAX_BACK)
    return stack[base].toTensor().scalar_type() == stack[base + 3].toScalarType() ? NONE : kind;
  return kind;
}

inline void run_special(int special, Stack* s) {
  auto arguments = [&](size_t n) {
    auto a = torch::jit::last(*s, n).vec();
    torch::jit::drop(*s, n);
    return a;
  };
  switch (special) {
    case PRODUCT_DTYPE: {
      auto a = arguments(3);
      auto dtype = a[2].toScalarType();
      s->emplace_back(at::matmul(a[0].toTensor().to(dtype), a[1].toTensor().to(dtype)));
      return;
    }
    case ADD_PRODUCT_DTYPE:
    case ADD_PRODUCT_DTYPE_OUT: {
      bool out = special == ADD_PRODUCT_DTYPE_OUT;
      auto a = arguments(out ? 7 : 6);  // self one other dtype beta alpha (out)
      auto dtype = a[3].toScalarType();
      auto product = at::matmul(a[1].toTensor().to(dtype), a[2].toTensor().to(dtype));
      auto made = a[0].toTensor().to(dtype).mul(a[4].toScalar()).add_(product, a[5].toScalar());
      s->emplace_back(out ? a[6].toTensor().copy_(made) : made);
      return;
    }
    case SOFTMAX:
    case LOG_SOFTMAX: {
      auto a = arguments(3);
      auto x = a[0].toTensor().to(at::kFloat);
      s->emplace_back(special == SOFTMAX ? at::_softmax(x, a[1].toInt(), false) : at::_log_softmax(x, a[1].toInt(), false));
      return;
    }
    case SOFTMAX_BACK:
    case LOG_SOFTMAX_BACK: {
      auto a = arguments(4);
      auto g = a[0].toTensor(), out = a[1].toTensor();
      auto made = special == SOFTMAX_BACK ? at::_softmax_backward_data(g, out, a[2].toInt(), g.scalar_type())
                                          : at::_log_softmax_backward_data(g, out, a[2].toInt(), g.scalar_type());
      s->emplace_back(made.to(a[3].toScalarType()));
      return;
    }
    case DROPOUT: {
      auto a = arguments(3);
      auto x = a[0].toTensor();
      double p = a[1].toDouble();
      bool train = a[2].toOptional<bool>().value_or(true);
      auto kept = at::ones_like(x, at::kBool);
      if (train && p > 0) kept.bernoulli_(1 - p, inner_of(default_generator()));
      torch::jit::push(*s, train && p > 0 ? x * kept * (1 / (1 - p)) : x.clone(), kept);
      return;
    }
    case RMS_NORM_BACK: {
      auto a = arguments(6);  // gradient input normalized_shape rstd weight output_mask
      auto g = a[0].toTensor().to(at::kFloat), x = a[1].toTensor(), rstd = a[3].toTensor().to(at::kFloat);
      auto weight = a[4].toOptional<at::Tensor>();
      auto hat = x.to(at::kFloat) * rstd;
      at::Tensor of_weight;
      if (weight && weight->defined() && a[5].toBoolList()[1])
        of_weight = (g * hat).reshape({-1, weight->numel()}).sum(0).view(weight->sizes()).to(weight->scalar_type());
      if (weight && weight->defined()) g = g * weight->to(at::kFloat);
      auto of_input = (rstd * (g - hat * (g * hat).mean(-1, true))).to(x.scalar_type());
      torch::jit::push(*s, of_input, of_weight);
      return;
    }
    case EFFICIENT_FORWARD: return run_efficient(s);
    case EFFICIENT_BACK: return run_efficient_backward(s);
    case FLASH_FORWARD: return run_flash(s);
    case FLASH_BACK: return run_flash_backward(s);
  }
}

inline void run_on_host(const c10::OperatorHandle& op, int special, Stack* stack) {
  if (special != NONE) return run_special(special, stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace card
