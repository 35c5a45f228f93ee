#include "instructions.h"

#if defined(INFLIGHT_AVX512_EXTENSIONS)
#include <cpuid.h>
#endif
#if defined(INFLIGHT_AVX512_EXTENSIONS) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {
namespace {

#if defined(INFLIGHT_AVX512_EXTENSIONS)
// Tile registers are large, so Linux saves them only for processes that have asked for it.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

bool is_amd() {
    uint32_t a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
}

int64_t find_instructions() {
    uint32_t a, b, c, d, a1, b1, c1, d1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return 0;
    int64_t found = 0;
    // Intel's dot products of pairs take longer than widening and two multiply-adds.
    if ((a1 >> 5 & 1) && is_amd()) found |= kAvx512Bf16;
    if (c >> 11 & 1) found |= kAvx512Vnni;
    const bool has_bf16 = d >> 22 & 1, has_tiles = d >> 24 & 1, has_int8 = d >> 25 & 1;
    if (has_tiles && (has_bf16 || has_int8) && may_use_tiles())
        found |= (has_bf16 ? kAmxBf16 : 0) | (has_int8 ? kAmxInt8 : 0);
    return found;
}
#else
int64_t find_instructions() { return 0; }
#endif

}  // namespace

int64_t instructions() {
    static const int64_t found = find_instructions();
    return found;
}

}  // namespace inflight

extern "C" int64_t inflight_instructions() { return inflight::instructions(); }
