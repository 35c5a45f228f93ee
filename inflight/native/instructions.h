// Instructions that some processors have beyond those the compiler may use everywhere.
//
// Functions that need them are compiled for them alone (`target`), and called only where this says so.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__GNUC__) && __GNUC__ >= 11
#define INFLIGHT_AVX512_EXTENSIONS 1
#endif

namespace inflight {

// One bit each, numbered as in native/library.py.
constexpr int64_t kAvx512Bf16 = 1;
constexpr int64_t kAmxBf16 = 2;
constexpr int64_t kAvx512Vnni = 4;
constexpr int64_t kAmxInt8 = 8;

// Return the bits of what this process may use. The first call asks the system for the permission to use AMX.
int64_t instructions();

}  // namespace inflight
