#include "structures.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <type_traits>

namespace inflight {
namespace {

template <class T>
constexpr const char* kType = std::is_pointer_v<T> ? "pointer" : std::is_floating_point_v<T> ? "float" : "int64";

// Text in memory of its own. Not a string or stream: where a process has loaded another C++ library before, their code
// may be that library's.
class Text {
public:
    template <class... Values>
    void add(const char* format, Values... values) {
        const int added = std::snprintf(text_ + length_, sizeof(text_) - length_, format, values...);
        length_ = std::min(sizeof(text_), length_ + added);
    }
    const char* get() const { return length_ < sizeof(text_) ? text_ : nullptr; }

private:
    char text_[1 << 14] = "";
    size_t length_ = 0;
};

#define INFLIGHT_QUOTED(name) " " #name
#define INFLIGHT_DESCRIBED(type, name) text.add(" " #name ":%s:%zu:%zu", kType<type>, offsetof(Structure, name), sizeof(type));
#define INFLIGHT_DESCRIBE(name, list)                          \
    {                                                          \
        using Structure = name;                                \
        text.add("structure " #name " %zu", sizeof(Structure)); \
        list(INFLIGHT_DESCRIBED) text.add("\n");               \
    }

Text describe() {
    Text text;
    text.add("numbers Activation" INFLIGHT_ACTIVATIONS(INFLIGHT_QUOTED) "\n");
    text.add("numbers Scores" INFLIGHT_SCORES(INFLIGHT_QUOTED) "\n");
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
    static const inflight::Text text = inflight::describe();
    return text.get();
}
