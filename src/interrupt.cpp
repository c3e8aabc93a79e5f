#include "interrupt.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <initializer_list>

namespace bam {

static volatile std::sig_atomic_t received = 0;

extern "C" void bam_on_signal(int signal) { received = signal; }

void catch_interrupts(bool restart) {
    received = 0;
    for (int s : {SIGINT, SIGTERM, SIGUSR1}) {
        struct sigaction a {};
        a.sa_handler = bam_on_signal;
        a.sa_flags = (restart ? SA_RESTART : 0) | (s == SIGUSR1 ? 0 : int(SA_RESETHAND));
        sigaction(s, &a, nullptr);
    }
    std::signal(SIGXFSZ, SIG_IGN);  // a full file system or file-size limit is an error code of write()
}

bool has_parent() { return std::getenv(kParentVariable) != nullptr; }

void follow_parent() {
    const char* parent = std::getenv(kParentVariable);
    if (!parent) return;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != std::atol(parent)) raise(SIGTERM);  // it died before
}

int interrupted() { return received; }

}  // namespace bam
