// Text <-> token ids. One interface for every kind: bytes, words (bam make-corpus), SentencePiece, byte-level BPE. A
// tokenizer is a file (or the directory that holds it); its kind is read from it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace bam {

class Tokenizer {
public:
    virtual ~Tokenizer() = default;
    virtual std::string kind() const = 0;  // "byte", "word", ...
    virtual int vocab_size() const = 0;
    // Ids of the text alone: no BOS, no EOS. Invalid UTF-8 is encoded as the kind can (bytes: as it is).
    virtual std::vector<int> encode(std::string_view text) const = 0;
    // Text of the ids; special tokens (separators) give nothing, ids outside the vocabulary U+FFFD. Bytes of one
    // character may be split over ids.
    virtual std::string decode(const std::vector<int>& ids) const = 0;
    // Bytes of the longest prefix of text after which encoding may start anew without changing any id; 0: none known.
    // Long documents are encoded piece by piece with it.
    virtual size_t cut(std::string_view text) const {
        (void)text;
        return 0;
    }
    virtual int separator_id() const = 0;  // end-of-document (or start) token, -1 if it has none
    virtual bool separator_at_end() const = 0;
    virtual std::string serialize() const = 0;  // the tokenizer file's bytes, the same for equal tokenizers
    virtual std::string file_name() const { return "tokenizer.json"; }  // what load_tokenizer looks for in a directory
    uint64_t fingerprint() const;  // xxh64 of serialize(): models and data sets remember it
};

// 256 bytes, then id 256, which ends a document.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

// path: a tokenizer file, a directory with one (tokenizer.json), or a built-in name ("byte").
// Errors: Error(kExitData) naming the path and what was expected there.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

}  // namespace bam
