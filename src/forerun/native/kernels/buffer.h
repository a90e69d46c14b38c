// Large memory in huge pages where the system has them. A pass reads every weight once: with pages
// of 4 KiB a good part of its time goes into looking them up (half of it in virtual machines, which
// look up twice).
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace forerun {

class HugeBuffer {
  public:
    HugeBuffer() = default;

    explicit HugeBuffer(size_t num_bytes) : num_bytes_((num_bytes + kPage - 1) / kPage * kPage) {
        if (num_bytes_ == 0) return;
        data_ = std::aligned_alloc(kPage, num_bytes_);
        if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
        madvise(data_, num_bytes_, MADV_HUGEPAGE);  // a wish: without it all works, slower
#endif
        std::memset(data_, 0, num_bytes_);
    }

    HugeBuffer(const HugeBuffer&) = delete;
    HugeBuffer& operator=(const HugeBuffer&) = delete;
    ~HugeBuffer() { std::free(data_); }

    char* data() const { return static_cast<char*>(data_); }
    size_t size() const { return num_bytes_; }

  private:
    static constexpr size_t kPage = size_t(2) << 20;

    void* data_ = nullptr;
    size_t num_bytes_ = 0;
};

}  // namespace forerun
