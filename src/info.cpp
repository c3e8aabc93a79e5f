#include "info.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "device.h"

#ifndef BAM_BUILD
#define BAM_BUILD "unknown"
#endif

namespace bam {

int print_info(const std::string& device, bool json) {
    auto backend = open_device(device, 0);
    nlohmann::ordered_json j = {{"device", backend->name()},
                                {"memory", human_bytes(double(backend->total_memory()))},
                                {"default dtype", name_of(choose_dtype("auto", *backend))},
                                {"usable threads", usable_threads()},
                                {"build", BAM_BUILD},
                                {"compiler", __VERSION__}};
    for (const auto& [key, value] : backend->describe()) j[key] = value;
    if (json) {
        std::printf("%s\n", j.dump(2).c_str());
        return 0;
    }
    for (const auto& [key, value] : j.items())
        std::printf("%-18s %s\n", key.c_str(), value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
    return 0;
}

}  // namespace bam
