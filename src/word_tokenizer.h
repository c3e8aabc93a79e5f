// Words as tokens, for small models: kind "word", a file whose "words" are the tokens in the order of their ids.
//
// Text is cut into words (runs of letters and of bytes >= 0x80) and single characters (digits, punctuation, space).
//  - A word stands for itself and the space before it; the first word of a text or line has none. So "There" is one id
//    wherever it stands, and sentences encoded one by one and concatenated are the encoding of the text they make.
//  - Spaces before anything else, and more than the one, are tokens of their own: " 54321" is a space and five digits.
//  - <join> before a word says that no space is there ("well-known" = well - <join> known).
//  - A word or character outside the vocabulary is <unk>, which behaves as a word. Without <unk>,
//    decode(encode(text)) == text.
//  - <end> ends a document; text never encodes to it.
#pragma once
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tokenizer.h"

namespace bam {

constexpr int kWordEnd = 0, kWordUnknown = 1, kWordJoin = 2;  // ids of <end>, <unk>, <join>
constexpr int kWordSpecials = 3;

// words: what follows the three special tokens; each a word or one character as above, none twice.
// Errors: Error(kExitData), beginning with origin, naming the entry, its text, and what was expected.
std::unique_ptr<Tokenizer> make_word_tokenizer(const std::vector<std::string>& words, const std::string& origin);

// From a tokenizer file's object, of format, version and kind already known to be right.
std::unique_ptr<Tokenizer> parse_word_tokenizer(const nlohmann::json& j, const std::string& origin);

}  // namespace bam
