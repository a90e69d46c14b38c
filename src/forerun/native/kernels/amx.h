// Products of bf16 and int8 by the matrix instructions of AMX, where the processor and the system have them.
//
// 16 words of 16 outputs are a tile as the instructions read it, in the panels as they are. That of bf16 adds in
// another order than AVX512-BF16: a process multiplies all its rows of bf16 in the one way or all in the other.
// The rows of a tile do not mix, so that a row's sums are the same with any rows beside it.
#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__linux__)
#define FORERUN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun {

#if !defined(FORERUN_AMX)
inline void release_tiles() {}
#else
constexpr int kTileSide = 16;  // most rows of a tile, and words of a row

// Asks the system, once per process, for the registers of tiles.
inline bool may_use_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool is_granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return is_granted;
}

// What this thread's tiles are configured for; 0 for nothing.
inline thread_local uint32_t tile_shape = 0;

// Tiles 0 to 3 are sums of `num_rows` rows, 4 is words of their activations, 5 and 6 are words of weights.
inline void shape_tiles(int num_rows, int num_words) {
    const uint32_t shape = uint32_t(num_rows << 8 | num_words);
    if (shape == tile_shape) return;
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 0, 64, 64};
        uint8_t rows[16] = {};
    } config;
    config.row_bytes[4] = uint16_t(4 * num_words);
    for (int tile = 0; tile < 7; ++tile) config.rows[tile] = uint8_t(tile < 5 ? num_rows : num_words);
    asm volatile("" : : "r"(&config) : "memory");  // not all compilers know that all of it is read
    _tile_loadconfig(&config);
    tile_shape = shape;
}

// At the end of a thread's work: other libraries have their own configurations.
inline void release_tiles() {
    if (tile_shape) _tile_release();
    tile_shape = 0;
}

// sums[row][64] of the rows for which the tiles are shaped, `stride` bytes apart, over words of a panel that
// are `num_steps` tiles; int32 of int8. `fetch(step)` is called beside each.
template <class T, class Fetch>
void multiply_tiles(const T* x, size_t stride, const void* weights, int num_steps, void* sums, bool is_first,
                    Fetch&& fetch) {
    constexpr size_t kPitch = 64 * sizeof(float);  // of a word of the panel, and of a row of sums
    constexpr bool kFloats = sizeof(T) == 2;
    const char *rows = reinterpret_cast<const char*>(x), *words = static_cast<const char*>(weights);
    char* to = static_cast<char*>(sums);
    asm volatile("" : : : "memory");  // not all compilers know that tiles are loaded from what was stored
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, to, kPitch);
        _tile_loadd(1, to + 64, kPitch);
        _tile_loadd(2, to + 128, kPitch);
        _tile_loadd(3, to + 192, kPitch);
    }
    for (int step = 0; step < num_steps; ++step, rows += 64, words += kTileSide * kPitch) {
        fetch(step);
        _tile_loadd(4, rows, stride);
        _tile_loadd(5, words, kPitch);
        _tile_loadd(6, words + 64, kPitch);
        if constexpr (kFloats) {
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
        } else {
            _tile_dpbssd(0, 4, 5);
            _tile_dpbssd(1, 4, 6);
        }
        _tile_loadd(5, words + 128, kPitch);
        _tile_loadd(6, words + 192, kPitch);
        if constexpr (kFloats) {
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
        } else {
            _tile_dpbssd(2, 4, 5);
            _tile_dpbssd(3, 4, 6);
        }
    }
    _tile_stored(0, to, kPitch);
    _tile_stored(1, to + 64, kPitch);
    _tile_stored(2, to + 128, kPitch);
    _tile_stored(3, to + 192, kPitch);
}
#endif

}  // namespace forerun
