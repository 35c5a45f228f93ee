#include "instructions.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(INFLIGHT_AVX512_EXTENSIONS) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {
namespace {

struct Names {
    char text[64] = "";

    void add(const char* name) { std::strncat(text, name, sizeof(text) - std::strlen(text) - 1); }
};

#if defined(INFLIGHT_AVX512_EXTENSIONS)
// The shapes of all tile registers: 16 rows of 64 bytes.
struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

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

void find_instructions(Names& names) {
    uint32_t a, b, c, d, a1, b1, c1, d1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return;
    // Intel's dot products of pairs take longer than widening and two multiply-adds.
    if ((a1 >> 5 & 1) && is_amd()) names.add("avx512_bf16 ");
    if (c >> 11 & 1) names.add("vnni ");
    const bool has_bf16 = d >> 22 & 1, has_tiles = d >> 24 & 1, has_int8 = d >> 25 & 1;
    if (!has_tiles || !(has_bf16 || has_int8) || !may_use_tiles()) return;
    if (has_bf16) names.add("amx_bf16 ");
    if (has_int8) names.add("amx_int8 ");
}
#elif defined(__x86_64__)
void find_instructions(Names& names) {
    uint32_t a, b, c, d;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1)) names.add("vnni ");
}
#else
void find_instructions(Names&) {}
#endif

}  // namespace

#if defined(INFLIGHT_AVX512_EXTENSIONS)
__attribute__((target("amx-tile"))) void enter_tiles() {
    alignas(64) static const TileShapes shapes;
    _tile_loadconfig(&shapes);
}

__attribute__((target("amx-tile"))) void leave_tiles() { _tile_release(); }
#endif

}  // namespace inflight

// Return the names of the instructions that this process may use. The first call asks the system for the permission to
// use AMX.
extern "C" const char* inflight_instructions() {
    static const inflight::Names names = [] {
        inflight::Names found;
        inflight::find_instructions(found);
        return found;
    }();
    return names.text;
}
