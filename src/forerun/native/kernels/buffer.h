// Large memory in huge pages where the system has them. A pass reads every weight once: with pages
// of 4 KiB a good part of its time goes into looking them up (half of it in virtual machines, which
// look up twice).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace forerun {

// All zeros. Where the system has huge pages it hands them out zeroed when they are first touched:
// that takes longer than filling them, and the threads that fill them share it.
class HugeBuffer {
  public:
    explicit HugeBuffer(size_t num_bytes) : num_bytes_((num_bytes + kPage - 1) / kPage * kPage) {
        if (num_bytes_ == 0) return;
#if defined(__linux__)
        taken_ = mmap(nullptr, num_bytes_ + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (taken_ == MAP_FAILED) throw std::bad_alloc();
        data_ = reinterpret_cast<char*>((uintptr_t(taken_) + kPage - 1) / kPage * kPage);
        madvise(data_, num_bytes_, MADV_HUGEPAGE);  // advice: without huge pages it is slower
#else
        data_ = static_cast<char*>(std::aligned_alloc(kPage, num_bytes_));
        if (data_ == nullptr) throw std::bad_alloc();
        std::memset(data_, 0, num_bytes_);
#endif
    }

    HugeBuffer(const HugeBuffer&) = delete;
    HugeBuffer& operator=(const HugeBuffer&) = delete;

    ~HugeBuffer() {
#if defined(__linux__)
        if (taken_ != nullptr) munmap(taken_, num_bytes_ + kPage);
#else
        std::free(data_);
#endif
    }

    char* data() const { return data_; }
    size_t size() const { return num_bytes_; }

  private:
    static constexpr size_t kPage = size_t(2) << 20;

    void* taken_ = nullptr;  // what `data_` is the aligned part of
    char* data_ = nullptr;
    size_t num_bytes_ = 0;
};

}  // namespace forerun
