// The device "cuda:0" as torch's C++ asks for it: the device guard, and the hooks by which a CPU build finds CUDA.
//
// Pretends: one card, its streams, events and waits. Does not: a second card, peers, processes.
#pragma once
#include "allocator.h"
#include "generators.h"

namespace card {

struct CardEvent {
  int64_t stream = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return CARD; }
  Device getDevice() const override { return CARD; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static Stream stream(int64_t id) { return Stream(Stream::UNSAFE, CARD, id); }
  Stream getStream(Device) const override { return stream(current_stream_); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(streams_made_++); }
  Stream getNewStream(Device, int) const override { return stream(streams_made_++); }
  Stream exchangeStream(Stream s) const override { return stream(std::exchange(current_stream_, s.id())); }
  bool queryStream(const Stream&) const override { return true; }
  bool isStreamCapturing(const Stream&) const override { return capturing(); }
  void synchronizeStream(const Stream&) const override { wait("stream.synchronize"); }
  void synchronizeDevice(DeviceIndex) const override { wait("device.synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new CardEvent();
    ((CardEvent*)*event)->stream = s.id();
  }
  void block(void* event, const Stream& s) const override {
    Locked guard(lock_);
    join(s.id(), ((CardEvent*)event)->stream);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (CardEvent*)event; }
  void synchronizeEvent(void*) const override { wait("event.synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return CARD; }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator_; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator_; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    if (std::exchange(next_is_default_, false)) return default_generator();
    return at::make_generator<CardGenerator>(at::detail::createCPUGenerator());
  }
  void deviceSynchronize(DeviceIndex) const override { wait("device.synchronize"); }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(Hooks)

// torch looks for the hooks under their interface's name.
struct RegisterAtLoad {
  RegisterAtLoad() {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs a) { return std::unique_ptr<at::CUDAHooksInterface>(new Hooks(a)); });
    c10::SetAllocator(DeviceType::CUDA, &allocator_);
  }
} register_at_load_;

}  // namespace card
