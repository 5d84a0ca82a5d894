// Random numbers of the card.
//
// Pretends: generators of the device cuda, a default one that operators without a generator draw from, states that can
// be read and set. Does not: Philox's numbers and offsets; the numbers are the CPU's Mersenne twister.
#pragma once
#include "common.h"

namespace card {

struct CardGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit CardGenerator(at::Generator g)
      : c10::GeneratorImpl(CARD, c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  CardGenerator* clone_impl() const override { return new CardGenerator(inner.clone()); }
};

inline at::Generator& default_generator() {
  static at::Generator g = at::make_generator<CardGenerator>(at::detail::createCPUGenerator(67280421310721ull));
  return g;
}

bool next_is_default_ = false;  // set by Python once: the next torch.Generator is the default one

inline at::Generator inner_of(const at::Generator& g) {
  return static_cast<CardGenerator*>(g.unsafeGetGeneratorImpl())->inner;
}

}  // namespace card
