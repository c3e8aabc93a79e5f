// SIGINT, SIGTERM and SIGUSR1 ask a long command to save and stop; a second SIGINT or SIGTERM ends it at once.
#pragma once

namespace bam {

// restart: system calls go on after a signal; else they return EINTR, so that a waiting loop wakes up.
void catch_interrupts(bool restart = true);
// A child that another bam starts with this variable set to its own process id is told to save and stop when that one dies.
constexpr const char* kParentVariable = "BAM_PARENT";
void follow_parent();
bool has_parent();  // whether this process is such a child

int interrupted();  // the signal's number, 0 if none came

}  // namespace bam
