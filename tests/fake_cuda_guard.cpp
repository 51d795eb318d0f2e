// A CUDA that computes nothing: enough of it that autograd, page-locked memory and DDP take fake CUDA tensors on a torch
// built without CUDA. See tests/fake_cuda_steps.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>);
}

namespace at {
namespace {

struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 8; }
  int getNumGPUs() const override { return 8; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return device; }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return device; }
  bool isPinnedPtr(const void*) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace
} // namespace at
