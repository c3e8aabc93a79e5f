// Reading dataset.json, writing shards and the files beside them.
#include "dataset.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "check.h"
#include "json.h"

namespace bam {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

constexpr const char* kPartialName = ".partial";

[[noreturn]] void fail_system(const std::string& path, const char* doing) {
    throw Error(kExitFailure, path + ": cannot " + doing + ": " + std::strerror(errno));
}

// ---- dataset.json
// -----------------------------------------------------------------------------------------------------

// One value of dataset.json with its full key for messages.
struct Field {
    const std::string& file;
    std::string key;
    const ordered_json* value;

    [[noreturn]] void refuse(const std::string& expected) const {
        throw Error(kExitData,
                    file + ": " + key + " is " + (value ? value->dump() : "missing") + ", expected " + expected);
    }
    Field at(const std::string& name) const {
        if (!value || !value->is_object()) refuse("an object");
        const auto it = value->find(name);
        return {file, key.empty() ? name : key + "." + name, it == value->end() ? nullptr : &*it};
    }
    std::string text() const {
        if (!value || !value->is_string()) refuse("a string");
        return *value;
    }
    int64_t count() const {
        if (!value || !value->is_number_integer() ||
            (value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX) || value->get<int64_t>() < 0) {
            refuse("a whole number, not negative");
        }
        return *value;
    }
};

DatasetPart read_part(const Field& f) {
    DatasetPart p;
    if (!f.value) return p;
    p.tokens = f.at("tokens").count();
    p.documents = f.at("documents").count();
    p.text_bytes = f.at("text_bytes").count();
    const Field files = f.at("files");
    if (!files.value || !files.value->is_array()) files.refuse("a list");
    int64_t sum = 0;
    for (size_t i = 0; i < files.value->size(); i++) {
        const Field entry{f.file, files.key + "[" + std::to_string(i) + "]", &(*files.value)[i]};
        p.files.push_back({entry.at("name").text(), entry.at("tokens").count()});
        sum += p.files.back().tokens;
    }
    if (sum != p.tokens) f.at("tokens").refuse(std::to_string(sum) + ", the sum over its files");
    return p;
}

ordered_json to_json(const DatasetPart& p) {
    ordered_json j = {{"tokens", p.tokens}, {"documents", p.documents}, {"text_bytes", p.text_bytes}};
    j["files"] = ordered_json::array();
    for (const auto& f : p.files) j["files"].push_back({{"name", f.name}, {"tokens", f.tokens}});
    return j;
}

std::string hex(uint64_t x) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
    return text;
}

ordered_json to_json(const DatasetInfo& d) {
    ordered_json j = {{"format", "bam-dataset"}, {"version", 1}};
    if (!d.source.empty()) j["source"] = d.source;
    j["tokenizer"] = {
        {"file", d.tokenizer_file}, {"kind", d.tokenizer_kind}, {"fingerprint", hex(d.tokenizer_fingerprint)}};
    j["vocab_size"] = d.vocab_size;
    j["separator"] = nullptr;
    if (d.separator_id >= 0)
        j["separator"] = {{"id", d.separator_id}, {"position", d.separator_at_end ? "end" : "start"}};
    j["train"] = to_json(d.train);
    if (!d.val.files.empty()) j["val"] = to_json(d.val);
    return j;
}

// ---- files
// ------------------------------------------------------------------------------------------------------------

class OutputFile {
public:
    explicit OutputFile(const std::string& path) : path_(path) {
        fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd_ < 0) fail_system(path, "create");
    }
    ~OutputFile() {
        if (fd_ >= 0) ::close(fd_);
    }
    OutputFile(const OutputFile&) = delete;

    void write(const void* data, size_t bytes) {
        const char* p = static_cast<const char*>(data);
        while (bytes > 0) {
            const ssize_t n = ::write(fd_, p, bytes);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) fail_system(path_, "write");
            p += n;
            bytes -= size_t(n);
        }
    }
    void rewind() {
        if (::lseek(fd_, 0, SEEK_SET) < 0) fail_system(path_, "seek");
    }
    void close() {
        if (::fsync(fd_) != 0) fail_system(path_, "flush");
        const int fd = fd_;
        fd_ = -1;
        if (::close(fd) != 0) fail_system(path_, "close");
    }

private:
    std::string path_;
    int fd_ = -1;
};

void write_whole(const std::string& path, const std::string& content) {
    OutputFile f(path);
    f.write(content.data(), content.size());
    f.close();
}

void sync_directory(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    ::fsync(fd);
    ::close(fd);
}

// The shards of one part, cut at shard_tokens.
class PartWriter {
public:
    PartWriter(std::string directory, std::string name, int width, int64_t shard_tokens)
        : directory_(std::move(directory)), name_(std::move(name)), width_(width), shard_tokens_(shard_tokens) {}

    void put(int id) {
        if (!file_) open();
        if (width_ == 2) {
            const uint16_t x = uint16_t(id);
            buffer_.append(reinterpret_cast<const char*>(&x), 2);
        } else {
            buffer_.append(reinterpret_cast<const char*>(&id), 4);
        }
        part.tokens++;
        if (buffer_.size() >= (1 << 20)) flush();
        if (++part.files.back().tokens == shard_tokens_) close();
    }

    void close() {
        if (!file_) return;
        flush();
        file_->rewind();
        write_header(part.files.back().tokens);
        file_->close();
        file_.reset();
    }

    DatasetPart part;
    bool in_document = false;

private:
    void open() {
        char number[16];
        std::snprintf(number, sizeof number, "_%05d", int(part.files.size()));
        part.files.push_back({name_ + number + ".bin", 0});
        file_ = std::make_unique<OutputFile>(directory_ + "/" + part.files.back().name);
        write_header(0);
    }
    void write_header(int64_t tokens) {
        int32_t header[256] = {width_ == 2 ? kShardMagic16 : kShardMagic32,
                               width_ == 2 ? kShardVersion16 : kShardVersion32, int32_t(tokens)};
        static_assert(sizeof header == kShardHeaderBytes);
        file_->write(header, sizeof header);
    }
    void flush() {
        file_->write(buffer_.data(), buffer_.size());
        buffer_.clear();
    }

    std::string directory_, name_;
    int width_;
    int64_t shard_tokens_;
    std::unique_ptr<OutputFile> file_;
    std::string buffer_;
};

// Names that a data set written here may hold: the only ones that replacing it deletes.
bool is_dataset_name(const std::string& name) {
    if (name == "dataset.json" || name == "tokenizer.json" || name == "tokenizer.model") return true;
    const size_t digits = name.rfind("train_", 0) == 0 ? 6 : name.rfind("val_", 0) == 0 ? 4 : 0;
    return digits > 0 && name.size() > digits + 4 && name.substr(name.size() - 4) == ".bin" &&
           name.find_first_not_of("0123456789", digits) == name.size() - 4;
}

std::vector<std::string> names_in(const std::string& directory) {
    std::error_code error;
    std::vector<std::string> names;
    for (const auto& e : fs::directory_iterator(directory, error)) names.push_back(e.path().filename().string());
    if (error) throw Error(kExitFailure, directory + ": cannot list: " + error.message());
    std::sort(names.begin(), names.end());
    return names;
}

}  // namespace

DatasetInfo read_dataset(const std::string& directory) {
    const std::string file = (fs::path(directory) / "dataset.json").string();
    const ordered_json j = read_json_file(file, kExitData);
    const Field top{file, "", &j};
    if (!j.is_object()) throw Error(kExitData, file + ": " + j.type_name() + ", expected an object");
    if (top.at("format").text() != "bam-dataset") top.at("format").refuse("\"bam-dataset\"");
    if (top.at("version").count() != 1) top.at("version").refuse("1");

    DatasetInfo d;
    d.directory = directory;
    if (top.at("source").value) d.source = top.at("source").text();
    const Field tokenizer = top.at("tokenizer");
    d.tokenizer_file = tokenizer.at("file").text();
    d.tokenizer_kind = tokenizer.at("kind").text();
    const std::string fingerprint = tokenizer.at("fingerprint").text();
    if (fingerprint.size() != 16 || fingerprint.find_first_not_of("0123456789abcdef") != std::string::npos) {
        tokenizer.at("fingerprint").refuse("16 hexadecimal digits");
    }
    d.tokenizer_fingerprint = std::stoull(fingerprint, nullptr, 16);
    const int64_t vocab_size = top.at("vocab_size").count();
    if (vocab_size < 1 || vocab_size > INT32_MAX) top.at("vocab_size").refuse("1 to 2147483647");
    d.vocab_size = int(vocab_size);
    const Field separator = top.at("separator");
    if (separator.value && !separator.value->is_null()) {
        const int64_t id = separator.at("id").count();
        if (id >= vocab_size) separator.at("id").refuse("an id below vocab_size " + std::to_string(vocab_size));
        d.separator_id = int(id);
        const std::string position = separator.at("position").text();
        if (position != "end" && position != "start") separator.at("position").refuse("\"end\" or \"start\"");
        d.separator_at_end = position == "end";
    }
    if (!top.at("train").value) top.at("train").refuse("an object");
    d.train = read_part(top.at("train"));
    d.val = read_part(top.at("val"));
    return d;
}

std::optional<DatasetInfo> dataset_of_shard(const std::string& shard_path) {
    const fs::path path(shard_path);
    const std::string directory = path.has_parent_path() ? path.parent_path().string() : ".";
    std::error_code ignored;
    if (!fs::is_regular_file(fs::path(directory) / "dataset.json", ignored)) return std::nullopt;
    DatasetInfo d = read_dataset(directory);
    for (const DatasetPart* p : {&d.train, &d.val}) {
        for (const auto& f : p->files) {
            if (f.name == path.filename().string()) return d;
        }
    }
    return std::nullopt;
}

// ---- DatasetWriter
// ----------------------------------------------------------------------------------------------------

struct DatasetWriter::State {
    DatasetInfo info;
    std::string tokenizer_bytes;
    std::string partial;
    bool made_directory = false;
    int lock = -1;
    std::optional<PartWriter> parts[2];  // train, val

    // Also when the constructor of DatasetWriter throws: nothing half-written stays.
    ~State() {
        std::error_code ignored;
        if (lock >= 0 && !partial.empty()) {
            fs::remove_all(partial, ignored);
            if (made_directory) fs::remove(info.directory, ignored);  // only if empty
        }
        if (lock >= 0) ::close(lock);
    }

    void open_directory(bool force) {
        const std::string& dir = info.directory;
        std::error_code error;
        made_directory = fs::create_directories(dir, error);
        if (error) throw Error(kExitFailure, dir + ": cannot create the directory: " + error.message());
        const int fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) fail_system(dir, "open");
        if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
            ::close(fd);
            throw Error(kExitFailure, dir + ": another process is writing a data set there");
        }
        lock = fd;
        for (const std::string& name : names_in(dir)) {
            if (name == kPartialName) continue;  // left by a process that was killed
            if (!is_dataset_name(name)) {
                throw Error(kExitUsage,
                            dir + ": holds " + name + ", expected an empty directory or a data set for --out");
            }
            if (!force) throw Error(kExitUsage, dir + ": already holds a data set (" + name + "); --force replaces it");
        }
        partial = (fs::path(dir) / kPartialName).string();
        fs::remove_all(partial, error);
        if (!fs::create_directory(partial, error)) {
            throw Error(kExitFailure, partial + ": cannot create the directory: " + error.message());
        }
    }

    PartWriter& part(Split s) { return *parts[s == Split::val]; }

    // The old files go first, dataset.json leading, the new ones come next, dataset.json last: whatever happens, a
    // dataset.json stands only beside its own shards.
    void move_into_place() {
        const fs::path dir(info.directory);
        std::error_code error;
        fs::remove(dir / "dataset.json", error);
        for (const std::string& name : names_in(info.directory)) {
            if (is_dataset_name(name)) fs::remove(dir / name, error);
        }
        std::vector<std::string> names = names_in(partial);
        std::stable_partition(names.begin(), names.end(), [](const std::string& n) { return n != "dataset.json"; });
        for (const std::string& name : names) {
            fs::rename(fs::path(partial) / name, dir / name, error);
            if (error)
                throw Error(kExitFailure, (dir / name).string() + ": cannot rename into place: " + error.message());
        }
        sync_directory(info.directory);
    }
};

DatasetWriter::DatasetWriter(const std::string& directory, const Tokenizer& tokenizer, bool force, int64_t shard_tokens)
    : state_(std::make_unique<State>()) {
    DatasetInfo& d = state_->info;
    d.directory = directory;
    d.tokenizer_file = tokenizer.file_name();
    d.tokenizer_kind = tokenizer.kind();
    d.tokenizer_fingerprint = tokenizer.fingerprint();
    d.vocab_size = tokenizer.vocab_size();
    d.separator_id = tokenizer.separator_id();
    d.separator_at_end = tokenizer.separator_at_end();
    state_->tokenizer_bytes = tokenizer.serialize();
    if (shard_tokens < 1)
        throw Error(kExitUsage, "shard size is " + std::to_string(shard_tokens) + " tokens, expected at least 1");
    state_->open_directory(force);
    const int width = d.vocab_size <= 65536 ? 2 : 4;
    state_->parts[0].emplace(state_->partial, "train", width, shard_tokens);
    state_->parts[1].emplace(state_->partial, "val", width, shard_tokens);
}

DatasetWriter::~DatasetWriter() = default;

void DatasetWriter::add(Split part, const std::vector<int>& ids, int64_t text_bytes) {
    if (ids.empty()) return;
    PartWriter& w = state_->part(part);
    if (!w.in_document && state_->info.separator_id >= 0 && !state_->info.separator_at_end)
        w.put(state_->info.separator_id);
    w.in_document = true;
    for (int id : ids) w.put(id);
    w.part.text_bytes += text_bytes;
}

void DatasetWriter::end_document(Split part) {
    PartWriter& w = state_->part(part);
    if (!w.in_document) return;
    if (state_->info.separator_id >= 0 && state_->info.separator_at_end) w.put(state_->info.separator_id);
    w.in_document = false;
    w.part.documents++;
}

DatasetInfo DatasetWriter::finish(const std::string& source) {
    DatasetInfo& d = state_->info;
    d.source = source;
    for (auto& w : state_->parts) w->close();
    d.train = state_->part(Split::train).part;
    d.val = state_->part(Split::val).part;
    if (d.train.tokens + d.val.tokens == 0)
        throw Error(kExitData, d.directory + ": no text in the inputs, nothing to write");
    write_whole(state_->partial + "/" + d.tokenizer_file, state_->tokenizer_bytes);
    write_whole(state_->partial + "/dataset.json", to_json(d).dump(2) + "\n");
    state_->move_into_place();
    state_->made_directory = false;
    const DatasetInfo done = d;
    state_.reset();
    return done;
}

}  // namespace bam
