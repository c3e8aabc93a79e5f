// Plain structs <-> JSON objects from one list of fields: a function template `fields(io, x)` names every key once and
// runs with a FieldReader (checks type and range, refuses unknown keys) or a FieldWriter (every key, in order). Only
// .cpp files that read or write JSON include this.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace bam {

// Where values came from, for messages: a file, and what --set replaced in it.
struct JsonSource {
    std::string file;
    ExitCode code = kExitUsage;
    std::vector<std::pair<std::string, std::string>> sets = {};  // path, text

    // "--set train.steps=abc" or "run.json: train.steps"
    std::string describe(const std::string& path) const {
        for (auto s = sets.rbegin(); s != sets.rend(); ++s)
            if (path == s->first || path.starts_with(s->first + ".") || path.starts_with(s->first + "["))
                return "--set " + s->first + "=" + s->second + (path == s->first ? "" : ": " + path);
        return file + ": " + path;
    }
    [[noreturn]] void fail(const std::string& path, const std::string& what) const {
        throw Error(code, describe(path) + ": " + what);
    }
};

struct RealRange {
    double low = -std::numeric_limits<double>::max(), high = std::numeric_limits<double>::max();
    bool low_open = false, high_open = false;
    bool holds(double x) const { return (low_open ? x > low : x >= low) && (high_open ? x < high : x <= high); }
    std::string text() const;  // "a number >= 0 and < 1"
};

// One name of an enumeration.
template <class T>
using Names = std::vector<std::pair<std::string, T>>;

class FieldReader {
public:
    using Json = nlohmann::ordered_json;
    static constexpr bool reading = true;

    FieldReader(const JsonSource& source, const std::string& path, const Json& object);

    template <class T>
    void integer(const char* key, T& value, int64_t low, int64_t high) {
        if (const Json* j = find(key)) value = T(to_integer(key, *j, low, high));
    }
    void unsigned64(const char* key, uint64_t& value);
    void real(const char* key, double& value, const RealRange& range);
    void real_or_null(const char* key, double& value, const RealRange& range, double null_value);
    void reals(const char* key, std::vector<double*> values, const RealRange& range);  // exactly so many
    void flag(const char* key, bool& value);
    void text(const char* key, std::string& value);                 // not empty
    void text_or_null(const char* key, std::string& value);         // null: empty
    void texts(const char* key, std::vector<std::string>& values);  // a list, one string, or null
    void integers(const char* key, std::vector<int64_t>& values, int64_t low, int64_t high);
    // A number, [first, last], or (if `word` is given) that word.
    void numbers_or_word(const char* key, std::vector<double>& values, bool& is_word, const char* word);
    template <class T>
    void choice(const char* key, T& value, const Names<T>& names) {
        const Json* j = find(key);
        if (!j) return;
        for (const auto& [name, v] : names)
            if (j->is_string() && j->template get<std::string>() == name) return void(value = v);
        std::vector<std::string> list;
        for (const auto& n : names) list.push_back(n.first);
        refuse_choice(key, *j, list);
    }
    template <class T>
    void choice_or_null(const char* key, T& value, const Names<T>& names, T null_value) {
        const Json* j = find(key);
        if (!j || j->is_null())
            value = null_value;
        else
            choice(key, value, names);
    }
    void choices(const char* key, std::vector<std::string>& values, const std::vector<std::string>& names);
    template <class F>
    void section(const char* key, F&& f) {
        const Json* j = find(key);
        static const Json empty = Json::object();
        FieldReader io(source_, at(key), j ? *j : empty);
        f(io);
        io.finish();
    }
    template <class F>
    void section_or_null(const char* key, bool& present, F&& f) {
        const Json* j = find(key);
        present = j && !j->is_null();
        if (present) section(key, f);
    }

    bool has(const char* key) { return find(key) != nullptr; }
    std::string at(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }
    [[noreturn]] void fail(const std::string& key, const std::string& what) const { source_.fail(at(key), what); }
    void finish() const;  // refuses keys that nothing asked for

private:
    const Json* find(const char* key);
    int64_t to_integer(const std::string& key, const Json& j, int64_t low, int64_t high) const;
    double to_real(const std::string& key, const Json& j, const RealRange& range) const;
    [[noreturn]] void refuse(const std::string& key, const Json& j, const std::string& expected) const;
    [[noreturn]] void refuse_choice(const std::string& key, const Json& j, const std::vector<std::string>& names) const;

    const JsonSource& source_;
    std::string path_;
    const Json& object_;
    std::vector<std::string> known_;
};

class FieldWriter {
public:
    using Json = nlohmann::ordered_json;
    static constexpr bool reading = false;

    explicit FieldWriter(Json& object) : object_(object) { object_ = Json::object(); }

    template <class T>
    void integer(const char* key, T& value, int64_t, int64_t) {
        object_[key] = value;
    }
    void unsigned64(const char* key, uint64_t& value) { object_[key] = value; }
    void real(const char* key, double& value, const RealRange&) { object_[key] = value; }
    void real_or_null(const char* key, double& value, const RealRange& range, double) {
        object_[key] = range.holds(value) ? Json(value) : Json();
    }
    void reals(const char* key, std::vector<double*> values, const RealRange&) {
        Json& list = object_[key] = Json::array();
        for (const double* v : values) list.push_back(*v);
    }
    void flag(const char* key, bool& value) { object_[key] = value; }
    void text(const char* key, std::string& value) { object_[key] = value; }
    void text_or_null(const char* key, std::string& value) { object_[key] = value.empty() ? Json() : Json(value); }
    void texts(const char* key, std::vector<std::string>& values) { object_[key] = values; }
    void integers(const char* key, std::vector<int64_t>& values, int64_t, int64_t) { object_[key] = values; }
    void numbers_or_word(const char* key, std::vector<double>& values, bool& is_word, const char* word) {
        object_[key] = is_word ? Json(word) : values.size() == 1 ? Json(values[0]) : Json(values);
    }
    template <class T>
    void choice(const char* key, T& value, const Names<T>& names) {
        for (const auto& [name, v] : names)
            if (v == value) object_[key] = name;
    }
    template <class T>
    void choice_or_null(const char* key, T& value, const Names<T>& names, T) {
        choice(key, value, names);
    }
    void choices(const char* key, std::vector<std::string>& values, const std::vector<std::string>&) {
        object_[key] = values;
    }
    template <class F>
    void section(const char* key, F&& f) {
        FieldWriter io(object_[key]);
        f(io);
    }
    template <class F>
    void section_or_null(const char* key, bool& present, F&& f) {
        if (present)
            section(key, f);
        else
            object_[key] = nullptr;
    }

private:
    Json& object_;
};

}  // namespace bam
