// Making, resizing and copying tensors of the card.
//
// Pretends: copies between host and card that wait, or are late where the host's side is pinned and non_blocking.
// Does not: managed memory, copies between cards, record_stream.
#pragma once
#include "kernels.h"

namespace card {

inline at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                      std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator_, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return empty_on_card(size, stride, at::dtype_or_default(dtype));
}

inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* t = self.unsafeGetTensorImpl();
  t->set_sizes_contiguous(size);
  auto* s = storage_of(self);
  size_t bytes = (t->numel() + t->storage_offset()) * t->itemsize();
  if (bytes > s->nbytes()) {
    auto grown = allocator_.allocate(bytes);
    if (s->nbytes()) memcpy(grown.get(), s->data(), s->nbytes());
    s->set_data_ptr_noswap(std::move(grown));
    s->set_nbytes(bytes);
  }
  if (format) t->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                               at::IntArrayRef stride) {
  auto* t = self.unsafeGetTensorImpl();
  t->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    t->set_sizes_contiguous(size);
    t->set_storage_offset(offset);
  } else {
    t->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}
inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return set_storage(self, source, 0, {n}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, allocator_.allocate(0), &allocator_, true);
  return set_storage(self, s, 0, {0}, {1});
}

inline void clock_copy(double bytes) {
  clock_.host += rates_.launch;
  clock_.device = std::max(clock_.device, clock_.host) + bytes / rates_.pcie + 2e-6;
}

inline void copy_to_card(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool late = non_blocking && source.is_contiguous() && is_pinned(source.const_data_ptr());
  if (capturing()) {
    if (!late) forbid("a copy from pageable memory of the host");
    save_before_write(self);
  }
  if (!capturing()) {
    must_be_behind(storage_of(self)->mutable_data(), "a copy to the card");
    kernels_of_[current_stream_]++;
    note_written(storage_of(self)->mutable_data());
  }
  counts_.to_card++;
  counts_.to_card_late += late;
  Storages storages;
  auto host = on_host(self, storages);
  at::native::copy_(host, source.expand_as(self), false);
  clock_copy(extent(self));
  if (!late) wait(non_blocking ? "copy to the card from pageable memory" : "copy to the card");
}

inline void copy_to_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool late = non_blocking && is_pinned(self.const_data_ptr());
  if (capturing()) forbid("a copy to the host");
  must_be_behind(storage_of(source)->mutable_data(), "a copy to the host");
  counts_.to_host++;
  counts_.to_host_late += late;
  clock_copy(extent(self));
  Storages storages;
  auto host = on_host(source, storages).expand_as(self);
  if (!late) wait("copy to the host");
  if (!late || !copies_are_late_ || !self.is_contiguous()) {
    at::native::copy_(self, host, false);
    return;
  }
  auto now = host.to(self.scalar_type()).contiguous();
  auto* bytes = (const char*)now.const_data_ptr();
  late_.push_back({self.mutable_data_ptr(), std::vector<char>(bytes, bytes + now.nbytes()), current_stream_});
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Locked guard(lock_);
  if (self.numel() == 0) return self;
  bool to = self.device().type() == DeviceType::CUDA, from = source.device().type() == DeviceType::CUDA;
  if (to && from) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    Stack stack{self, source, non_blocking};
    kernel(op, {}, &stack);
  } else if (to) {
    copy_to_card(self, source, non_blocking);
  } else {
    copy_to_host(self, source, non_blocking);
  }
  return self;
}

inline void record_stream(at::Tensor&, c10::Stream) {}

}  // namespace card
