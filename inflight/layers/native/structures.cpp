#include "structures.h"

#include <cstddef>
#include <string>
#include <type_traits>

namespace inflight {
namespace {

template <class T>
constexpr const char* kType = std::is_pointer_v<T> ? "pointer" : std::is_floating_point_v<T> ? "float" : "int64";

#define INFLIGHT_QUOTED(name) " " #name
#define INFLIGHT_DESCRIBED(type, name)                                                        \
    text += std::string(" " #name ":") + kType<type> + ":" + std::to_string(offsetof(Structure, name)) + ":" + \
            std::to_string(sizeof(type));
#define INFLIGHT_DESCRIBE(name, list)                                    \
    {                                                                    \
        using Structure = name;                                          \
        text += "structure " #name " " + std::to_string(sizeof(Structure)); \
        list(INFLIGHT_DESCRIBED) text += '\n';                            \
    }

// Without streams: where a process has loaded another C++ library before, these may be unusable.
std::string describe() {
    std::string text = "numbers Activation" INFLIGHT_ACTIVATIONS(INFLIGHT_QUOTED) "\n"
                       "numbers Scores" INFLIGHT_SCORES(INFLIGHT_QUOTED) "\n";
    INFLIGHT_DESCRIBE(Matrix, INFLIGHT_MATRIX)
    INFLIGHT_DESCRIBE(Linear, INFLIGHT_LINEAR)
    INFLIGHT_DESCRIBE(Experts, INFLIGHT_EXPERTS)
    INFLIGHT_DESCRIBE(Heads, INFLIGHT_HEADS)
    INFLIGHT_DESCRIBE(Step, INFLIGHT_STEP)
    INFLIGHT_DESCRIBE(DecoderLayer, INFLIGHT_DECODER_LAYER)
    return text;
}

}  // namespace
}  // namespace inflight

// One line for each list: "numbers NAME NAME_OF_0 NAME_OF_1 ..." or "structure NAME SIZE FIELD:TYPE:OFFSET:SIZE ...".
extern "C" const char* inflight_structures() {
    static const std::string text = inflight::describe();
    return text.c_str();
}
