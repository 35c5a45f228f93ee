// Instructions that some processors have beyond those the compiler may use everywhere.
//
// Functions that need them are compiled for them alone (`target`), and called only where this says so.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__GNUC__) && __GNUC__ >= 11
#define INFLIGHT_AVX512_EXTENSIONS 1
#endif

namespace inflight {

#if defined(INFLIGHT_AVX512_EXTENSIONS)
// Make all tile registers of AMX 16 rows of 64 bytes, and release them.
void enter_tiles();
void leave_tiles();
#endif

}  // namespace inflight
