// The passkey task (DESIGN §8): five digits stated once in filler text of any length, asked for at the end.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "eval/suite.h"
#include "tokenizer.h"

namespace bam {

enum class KeyPosition : uint8_t { equidistant, random, beginning, end };

struct PasskeyOptions {
    std::vector<int64_t> lengths;      // prompt tokens; "landmark": characters of filler
    int samples = 0;                   // a length; 0: 20, "landmark" 50
    uint64_t seed = 42;
    KeyPosition position = KeyPosition::equidistant;
    std::function<bool(int)> allowed;  // which keys may be asked for; empty: all
};

// The sentences as tokens, each encoded alone.
struct PasskeyText {
    explicit PasskeyText(const Tokenizer& tokenizer);
    std::vector<int> statement(int key) const;
    std::vector<int> answer(int key) const;
    int64_t fixed() const;                    // tokens of a prompt without fillers, for key 99999
    int64_t fillers(int64_t length) const;    // Errors: Error(kExitUsage) when length is below fixed()
    std::vector<int> prompt(int key, int64_t fillers, int64_t before) const;  // `before` fillers stand before the statement

    const Tokenizer& tokenizer;
    std::vector<int> intro, filler, question;
};

// The landmark-attention variant: the whole prompt as text, `before` of `garbage` characters before the statement.
std::string landmark_prompt(int key, int64_t garbage, int64_t before);
// The first run of decimal digits, or "".
std::string first_integer(const std::string& text);

KeyPosition parse_key_position(const std::string& name);

// variant "paper" or "landmark". Errors: Error(kExitUsage) for an unknown variant or a length that cannot hold the prompt.
Suite make_passkey(const std::string& variant, const PasskeyOptions& o, const Tokenizer& tokenizer);

}  // namespace bam
