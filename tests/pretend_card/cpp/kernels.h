// What runs for an operator of the dispatch key CUDA: the CPU's kernel on tensors that share the card's memory.
//
// Pretends: mixed devices are refused as CUDA refuses them (a 0-dim tensor of the host is a number); operators that read
// their result's size on the host wait; results lie in the card's memory with the CPU's strides.
// Does not: memory that a kernel needs while it runs, what a kernel cannot (shared memory, alignment, "no kernel image").
#pragma once
#include "graphs.h"

namespace card {

using Names = std::unordered_set<std::string>;
const Names WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
                     "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
                     "aten::repeat_interleave", "aten::bincount", "aten::_linalg_check_errors"};
const Names INDEXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"};
const Names GATHERS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"};
const Names OVERWRITES = {"aten::copy_", "aten::zero_", "aten::fill_"};  // their first argument is not read
const Names SCATTERS = {"aten::index_copy", "aten::index_copy_", "aten::scatter", "aten::scatter_",
                        "aten::_index_put_impl_", "aten::index_add_", "aten::index_fill_", "aten::scatter_add_"};

using Storages = std::unordered_map<c10::StorageImpl*, c10::Storage>;

// A tensor of the host on the card's bytes; tensors that share a storage share one here too.
inline at::Tensor on_host(const at::Tensor& t, Storages& storages) {
  auto* impl = t.unsafeGetTensorImpl();
  auto* s = storage_of(t);
  auto found = storages.find(s);
  if (found == storages.end()) {
    c10::DataPtr same_bytes(s->mutable_data(), Device(DeviceType::CPU));
    c10::Storage made(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), s->nbytes(),
                                                            std::move(same_bytes), c10::GetCPUAllocator(), true));
    found = storages.emplace(s, made).first;
  }
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                    c10::DispatchKeySet(c10::DispatchKey::CPU), impl->dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  if (impl->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}

inline at::Tensor view_on_card(const c10::Storage& storage, const at::Tensor& like) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                    like.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return r;
}

inline at::Tensor empty_on_card(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator_, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

// One call of one operator, from the card's arguments to the card's results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack),
        base_(stack->size() - schema_.arguments().size()) {
    full_ = schema_.overload_name().empty() ? name_ : name_ + "." + schema_.overload_name();
    indexed_ = INDEXED.count(name_);
    for (auto& r : schema_.returns()) view_ |= r.alias_info() && !r.alias_info()->isWrite();
    for (auto& a : schema_.arguments()) writes_ |= a.alias_info() && a.alias_info()->isWrite();
  }

  void run() {
    take_arguments();
    if (!pairs_.empty()) refuse_mixed_devices();
    if (capturing() && writes_)
      for (auto& p : pairs_) save_before_write(p.card);
    if (!view_ && !capturing()) keep_order();
    wait_if_it_waits();
    special_ = special_of(full_, *stack_, base_);
    if (special_ == NONE && !view_) must_have_a_kernel();
    double flops = count_flops();
    Stack kept;
    if (capturing() && !view_) kept.assign(stack_->begin() + base_, stack_->end());
    run_on_host(op_, special_, stack_);
    give_results();
    follow_resizing();
    if (view_) {
      counts_.views++;
      return;
    }
    charge(full_, count_launches(), count_bytes(), flops, half_);
    if (!capturing()) return;
    std::vector<const void*> reads, writes;
    for (auto& p : pairs_) {
      if (p.card.numel()) reads.push_back(p.bytes);
      if (p.card.numel() && p.written) writes.push_back(p.bytes);
    }
    capture_->graph->launches += count_launches();
    capture_->graph->steps.push_back({op_, special_, std::move(kept), std::move(reads), std::move(writes),
                                     std::move(results_)});
  }

 private:
  struct Pair {
    at::Tensor card, host;
    void* bytes;
    bool written;
  };

  at::Tensor argument(int i) const { return (*stack_)[base_ + i].toTensor(); }

  at::Tensor swap(const at::Tensor& t, bool index, bool written) {
    if (!t.defined()) return t;
    if (t.device().type() != DeviceType::CUDA) {
      hosts_.push_back(t);
      return t;
    }
    auto r = on_host(t, storages_);
    pairs_.push_back({t, r, storage_of(r)->mutable_data(), written});
    (only_written_ ? made_ : read_) += extent(t);
    half_ |= t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
    masks_ += index && indexed_ && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
    return r;
  }

  void take_arguments() {
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      IValue& v = (*stack_)[base_ + i];
      bool out = schema_.arguments()[i].is_out();
      outs_ |= out;
      only_written_ = out || (i == 0 && OVERWRITES.count(name_));
      auto* alias = schema_.arguments()[i].alias_info();
      bool written = alias && alias->isWrite();
      if (v.isTensor()) {
        v = swap(v.toTensor(), false, written);
      } else if (v.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& t : v.toTensorVector()) out.push_back(swap(t, false, written));
        lists_++;
        if (lists_ == 1)
          for (const at::Tensor& t : out) first_list_.push_back(t.numel());
        v = out;
      } else if (v.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> out;
        for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
          out.push_back(t && t->defined() ? std::optional<at::Tensor>(swap(*t, true, false)) : std::optional<at::Tensor>());
        v = out;
      } else if (v.isDevice() && v.toDevice().type() == DeviceType::CUDA) {
        v = Device(DeviceType::CPU);
      } else if (v.isGenerator()) {
        auto g = v.toGenerator();
        TORCH_CHECK(g.device().type() == DeviceType::CUDA, "Expected a 'cuda' device type for generator but found '",
                    g.device().type(), "'");
        v = inner_of(g);
      } else if (v.isNone() && schema_.arguments()[i].name() == "generator") {
        v = inner_of(default_generator());
      }
    }
  }

  void refuse_mixed_devices() {
    for (auto& h : hosts_) {
      if (h.dim() == 0 || (h.numel() == 0 && name_ == "aten::cat") || h.device().type() == DeviceType::Meta) continue;
      if (indexed_) {
        wait("index by a tensor of the host (" + name_ + ")");
        continue;
      }
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
                  full_, " with a tensor of the host of ", h.sizes(), ")");
    }
  }

  void wait_if_it_waits() {
    if (WAITS.count(name_)) return wait(full_.substr(6));
    if (!masks_) return;
    if (name_ != "aten::index" && masks_ == 1) {  // x[mask] = one value is a masked_fill
      const IValue& value = (*stack_)[base_ + 2];
      if (value.isTensor() && value.toTensor().numel() == 1) return;
    }
    wait(full_.substr(6) + " by a mask");
  }

  void keep_order() {
    kernels_of_[current_stream_]++;
    for (auto& p : pairs_) must_be_behind(p.bytes, full_);
    for (auto& p : pairs_)
      if (p.written) note_written(p.bytes);
  }

  void must_have_a_kernel() const {
    using Key = c10::DispatchKey;
    for (auto key : {Key::CPU, Key::CompositeExplicitAutograd, Key::CompositeExplicitAutogradNonFunctional,
                     Key::CompositeImplicitAutograd})
      if (op_.hasKernelForDispatchKey(key)) return;
    TORCH_CHECK(false, "pretend card: no kernel of the CPU can stand for ", full_);
  }

  double count_flops() const {
    auto product = [&](int a, int b) {
      auto x = argument(a), y = argument(b);
      return 2.0 * x.numel() * y.size(-1);
    };
    if (name_ == "aten::mm" || name_ == "aten::bmm") return product(0, 1);
    if (name_ == "aten::addmm" || name_ == "aten::baddbmm") return product(1, 2);
    if (special_ == EFFICIENT_FORWARD || special_ == FLASH_FORWARD) return 4.0 * argument(0).numel() * argument(1).size(-2);
    if (special_ == EFFICIENT_BACK || special_ == FLASH_BACK) return 10.0 * argument(1).numel() * argument(2).size(-2);
    return 0;
  }

  int64_t count_launches() const {
    bool list = name_.rfind("aten::_foreach_", 0) == 0 || name_.rfind("aten::_fused_adam", 0) == 0 ||
                name_ == "aten::_amp_foreach_non_finite_check_and_unscale_";
    if (!list) return 1;
    return std::max<int64_t>(1, foreach_launches(first_list_, lists_ + (writes_ ? 0 : 1)));
  }

  double count_bytes() const {
    if (GATHERS.count(name_)) return 2 * made_;
    if (SCATTERS.count(name_)) {
      double bytes = 0;
      for (size_t i = 1; i < pairs_.size(); i++) bytes += 2 * extent(pairs_[i].card);
      return std::max(bytes, 1.0);
    }
    bool in_place = writes_ && !outs_ && !OVERWRITES.count(name_) && !pairs_.empty();
    return read_ + made_ + (in_place ? extent(pairs_[0].card) : 0);
  }

  at::Tensor back(const at::Tensor& r) {
    if (!r.defined()) return r;
    for (auto& p : pairs_)
      if (p.host.unsafeGetTensorImpl() == r.unsafeGetTensorImpl()) {
        results_.emplace_back(nullptr, 0);
        return p.card;
      }
    for (auto& [card, host] : storages_)
      if (host.unsafeGetStorageImpl() == storage_of(r)) {
        results_.emplace_back(nullptr, 0);
        for (auto& p : pairs_)
          if (storage_of(p.card) == card) return view_on_card(p.card.storage(), r);
      }
    for (auto& h : hosts_)
      if (h.unsafeGetTensorImpl() == r.unsafeGetTensorImpl()) return r;
    auto out = empty_on_card(r.sizes(), r.strides(), r.scalar_type());
    size_t size = at::detail::computeStorageNbytes(r.sizes(), r.strides(), r.element_size());
    if (size) memcpy(out.mutable_data_ptr(), r.const_data_ptr(), size);
    results_.emplace_back(out.mutable_data_ptr(), size);
    if (size && !capturing()) note_written(out.mutable_data_ptr());
    made_ += extent(out);
    return out;
  }

  void give_results() {
    size_t first = stack_->size() - schema_.returns().size();
    for (size_t i = first; i < stack_->size(); i++) {
      IValue& v = (*stack_)[i];
      if (v.isTensor()) {
        v = back(v.toTensor());
      } else if (v.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& t : v.toTensorVector()) out.push_back(back(t));
        v = out;
      }
    }
  }

  // out= that grew, and in-place changes of shape.
  void follow_resizing() {
    for (auto& p : pairs_) {
      auto *host = p.host.unsafeGetTensorImpl(), *card = p.card.unsafeGetTensorImpl();
      if (storage_of(p.host)->mutable_data() != p.bytes && p.host.numel()) {
        size_t size = storage_of(p.host)->nbytes();
        auto grown = allocator_.allocate(size);
        memcpy(grown.get(), storage_of(p.host)->data(), size);
        storage_of(p.card)->set_data_ptr_noswap(std::move(grown));
        storage_of(p.card)->set_nbytes(size);
        if (capturing()) capture_->failed_by = "an output that grew inside a capture";
      }
      if (host->sizes() != card->sizes() || host->strides() != card->strides())
        card->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  std::string full_;
  Stack* stack_;
  size_t base_;
  bool indexed_ = false, view_ = false, writes_ = false, half_ = false, outs_ = false, only_written_ = false;
  int masks_ = 0, special_ = NONE, lists_ = 0;
  double read_ = 0, made_ = 0;
  Storages storages_;
  std::vector<Pair> pairs_;
  std::vector<at::Tensor> hosts_;
  std::vector<int64_t> first_list_;
  std::vector<std::pair<void*, size_t>> results_;
};

inline void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Locked guard(lock_);
  Call(op, stack).run();
}

// An operator of aten that comes here has no CUDA kernel in torch, nor is it made of others; other libraries' operators
// (bitsandbytes) run by their CPU kernels.
inline void unknown(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  bool of_aten = op.schema().name().rfind("aten::", 0) == 0;
  TORCH_CHECK_NOT_IMPLEMENTED(!of_aten, "Could not run '", op.schema().name(),
                              "' with arguments from the 'CUDA' backend. (pretend card: torch has no CUDA kernel of it)");
  kernel(op, keys, stack);
}

}  // namespace card
