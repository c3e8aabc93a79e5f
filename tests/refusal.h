// What bad input is told.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "check.h"

namespace bam::test {

// The line of the Error that act throws, checked to be one line with this exit code; "accepted" if it throws none.
inline std::string refusal(const std::function<void()>& act, ExitCode code = kExitData) {
    try {
        act();
    } catch (const Error& e) {
        EXPECT_EQ(e.code, code) << e.what();
        EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
        return e.what();
    }
    return "accepted";
}

}  // namespace bam::test
