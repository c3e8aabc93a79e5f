#include "json.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace bam {

namespace {

constexpr int kMaxDepth = 64;  // printing a value recurses

// nlohmann's parser keeps the last of two equal keys; this callback sees each key and refuses the second.
template <class Json>
class DuplicateGuard {
public:
    DuplicateGuard(const std::string& origin, ExitCode code) : origin_(origin), code_(code) {}

    bool operator()(int depth, typename Json::parse_event_t event, Json& parsed) {
        if (depth > kMaxDepth)
            throw Error(code_, origin_ + ": nested deeper than " + std::to_string(kMaxDepth) + " levels");
        if (event == Json::parse_event_t::object_start) objects_.emplace_back();
        if (event == Json::parse_event_t::object_end) objects_.pop_back();
        if (event == Json::parse_event_t::key) {
            Object& o = objects_.back();
            o.current = parsed.template get<std::string>();
            if (!o.keys.insert(o.current).second) throw Error(code_, origin_ + ": " + path() + ": given twice");
        }
        return true;
    }

private:
    struct Object {
        std::set<std::string> keys;
        std::string current;
    };
    std::string path() const {
        std::string p;
        for (const Object& o : objects_) p += (p.empty() ? "" : ".") + o.current;
        return p;
    }
    std::vector<Object> objects_;
    std::string origin_;
    ExitCode code_;
};

std::string line_and_column(const std::string& text, size_t byte) {
    const size_t end = std::min(text.size(), byte ? byte - 1 : 0);  // nlohmann counts bytes from 1
    size_t line = 1, column = 1;
    for (size_t i = 0; i < end; i++) {
        column++;
        if (text[i] == '\n') line++, column = 1;
    }
    return "line " + std::to_string(line) + ", column " + std::to_string(column);
}

// "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ..." -> "syntax error ..."
std::string reason_of(const std::exception& e) {
    const std::string what = e.what();
    const size_t where = what.find(": ");
    return where == std::string::npos ? what : what.substr(where + 2);
}

}  // namespace

template <class Json>
Json parse_json(const std::string& text, const std::string& origin, ExitCode code) {
    try {
        auto guard = std::make_shared<DuplicateGuard<Json>>(origin, code);
        return Json::parse(text, [guard](int d, typename Json::parse_event_t e, Json& j) { return (*guard)(d, e, j); });
    } catch (const typename Json::parse_error& e) {
        throw Error(code, origin + ": " + line_and_column(text, e.byte) + ": not JSON: " + reason_of(e));
    } catch (const typename Json::exception& e) {  // a number that no double can hold
        throw Error(code, origin + ": not JSON: " + e.what());
    }
}

template nlohmann::json parse_json<nlohmann::json>(const std::string&, const std::string&, ExitCode);
template nlohmann::ordered_json parse_json<nlohmann::ordered_json>(const std::string&, const std::string&, ExitCode);

std::string read_text_file(const std::string& path, ExitCode code) {
    const auto fail = [&]() -> Error { return Error(code, path + ": " + std::strerror(errno)); };
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw fail();
    std::string text;
    char buffer[1 << 16];
    ssize_t n;
    while ((n = ::read(fd, buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
    const Error error = fail();
    ::close(fd);
    if (n < 0) throw error;
    return text;
}

nlohmann::ordered_json read_json_file(const std::string& path, ExitCode code) {
    return parse_json<nlohmann::ordered_json>(read_text_file(path, code), path, code);
}

}  // namespace bam
