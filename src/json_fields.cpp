#include "json_fields.h"

#include <algorithm>

#include "config.h"

namespace bam {

namespace {

std::string join(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& w : words) text += (text.empty() ? "" : ", ") + w;
    return text;
}

// A value as the user wrote it, cut where it is long.
std::string shown(const nlohmann::ordered_json& j) {
    std::string text = j.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

std::string shown(double x) {
    const bool integral = x == std::floor(x) && std::fabs(x) < 0x1p53;
    return integral ? std::to_string(int64_t(x)) : nlohmann::ordered_json(x).dump();
}

}  // namespace

std::string RealRange::text() const {
    const double limit = std::numeric_limits<double>::max();
    std::string t = "a number";
    if (low > -limit) t += (low_open ? " > " : " >= ") + shown(low);
    if (high < limit) t += std::string(low > -limit ? " and" : "") + (high_open ? " < " : " <= ") + shown(high);
    return t;
}

FieldReader::FieldReader(const JsonSource& source, const std::string& path, const Json& object)
    : source_(source), path_(path), object_(object) {
    if (!object.is_object())
        source.fail(path.empty() ? "top level" : path, shown(object) + ", expected an object {...}");
}

const FieldReader::Json* FieldReader::find(const char* key) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.push_back(key);
    const auto it = object_.find(key);
    return it == object_.end() ? nullptr : &*it;
}

void FieldReader::finish() const {
    for (const auto& [key, value] : object_.items())
        if (std::find(known_.begin(), known_.end(), key) == known_.end())
            fail(key, "unknown key; did you mean " + at(nearest(key, known_)) + "?");
}

void FieldReader::refuse(const std::string& key, const Json& j, const std::string& expected) const {
    fail(key, shown(j) + ", expected " + expected);
}

void FieldReader::refuse_choice(const std::string& key, const Json& j, const std::vector<std::string>& names) const {
    refuse(key, j, (names.size() == 1 ? "" : "one of ") + join(names));
}

// 1e4 and 512.0 are integers too; beyond 2^53 a double no longer says which.
int64_t FieldReader::to_integer(const std::string& key, const Json& j, int64_t low, int64_t high) const {
    std::string expected = "an integer";
    if (low > std::numeric_limits<int64_t>::min()) expected += " >= " + std::to_string(low);
    if (high < int64_t(1) << 53) expected += " and <= " + std::to_string(high);
    int64_t value = 0;
    if (j.is_number_unsigned()) {
        const uint64_t u = j.get<uint64_t>();
        if (u > uint64_t(std::numeric_limits<int64_t>::max())) refuse(key, j, expected);
        value = int64_t(u);
    } else if (j.is_number_integer()) {
        value = j.get<int64_t>();
    } else if (j.is_number_float() && std::fabs(j.get<double>()) <= 0x1p53 &&
               j.get<double>() == std::floor(j.get<double>())) {
        value = int64_t(j.get<double>());
    } else {
        refuse(key, j, expected);
    }
    if (value < low || value > high) refuse(key, j, expected);
    return value;
}

double FieldReader::to_real(const std::string& key, const Json& j, const RealRange& range) const {
    if (!j.is_number() || !std::isfinite(j.get<double>()) || !range.holds(j.get<double>()))
        refuse(key, j, range.text());
    return j.get<double>();
}

void FieldReader::unsigned64(const char* key, uint64_t& value) {
    const Json* j = find(key);
    if (!j) return;
    value = j->is_number_unsigned() ? j->get<uint64_t>()
                                    : uint64_t(to_integer(key, *j, 0, std::numeric_limits<int64_t>::max()));
}

void FieldReader::real(const char* key, double& value, const RealRange& range) {
    if (const Json* j = find(key)) value = to_real(key, *j, range);
}

void FieldReader::real_or_null(const char* key, double& value, const RealRange& range, double null_value) {
    const Json* j = find(key);
    if (j && j->is_null())
        value = null_value;
    else if (j)
        value = to_real(key, *j, range);
}

void FieldReader::reals(const char* key, std::vector<double*> values, const RealRange& range) {
    const Json* j = find(key);
    if (!j) return;
    if (!j->is_array() || j->size() != values.size())
        refuse(key, *j, "a list of " + std::to_string(values.size()) + " numbers");
    for (size_t i = 0; i < values.size(); i++)
        *values[i] = to_real(key + ("[" + std::to_string(i) + "]"), (*j)[i], range);
}

void FieldReader::flag(const char* key, bool& value) {
    const Json* j = find(key);
    if (!j) return;
    if (!j->is_boolean()) refuse(key, *j, "true or false");
    value = j->get<bool>();
}

// `--set run.name=7` means the text: what --set gave is taken as it was written where a string is wanted.
void FieldReader::text(const char* key, std::string& value) {
    const Json* j = find(key);
    if (!j) return;
    std::string given;
    if (j->is_string())
        given = j->get<std::string>();
    else if (j->is_primitive())
        for (const auto& [path, text] : source_.sets)
            if (path == at(key)) given = text;
    if (given.empty()) refuse(key, *j, "a string that is not empty");
    value = given;
}

void FieldReader::text_or_null(const char* key, std::string& value) {
    const Json* j = find(key);
    if (!j) return;
    if (j->is_null() || *j == "")
        value.clear();
    else
        text(key, value);
}

void FieldReader::texts(const char* key, std::vector<std::string>& values) {
    const Json* j = find(key);
    if (!j) return;
    const Json list = j->is_null() ? Json::array() : j->is_array() ? *j : Json::array({*j});
    values.clear();
    for (const Json& item : list) {
        if (!item.is_string() || item == "") refuse(key, *j, "a list of strings");
        values.push_back(item.get<std::string>());
    }
}

void FieldReader::integers(const char* key, std::vector<int64_t>& values, int64_t low, int64_t high) {
    const Json* j = find(key);
    if (!j) return;
    if (!j->is_array()) refuse(key, *j, "a list of integers");
    values.clear();
    for (size_t i = 0; i < j->size(); i++)
        values.push_back(to_integer(key + ("[" + std::to_string(i) + "]"), (*j)[i], low, high));
}

void FieldReader::numbers_or_word(const char* key, std::vector<double>& values, bool& is_word, const char* word) {
    const Json* j = find(key);
    if (!j) return;
    is_word = word && *j == word;
    if (is_word) {
        values = {0};
    } else if (j->is_number()) {
        values = {to_real(key, *j, {})};
    } else if (j->is_array() && j->size() == 2) {
        values = {0, 0};
        reals(key, {&values[0], &values[1]}, {});
    } else {
        refuse(key, *j, std::string("a number, [first, last]") + (word ? std::string(" or \"") + word + "\"" : ""));
    }
}

void FieldReader::choices(const char* key, std::vector<std::string>& values, const std::vector<std::string>& names) {
    std::vector<std::string> given = values;
    texts(key, given);
    for (const std::string& g : given)
        if (std::find(names.begin(), names.end(), g) == names.end()) refuse_choice(key, Json(g), names);
    values = given;
}

}  // namespace bam
