#include "interrupt.h"

#include <csignal>
#include <initializer_list>

namespace bam {

static volatile std::sig_atomic_t received = 0;

extern "C" void bam_on_signal(int signal) {
    received = signal;
    if (signal != SIGUSR1) std::signal(signal, SIG_DFL);
}

void catch_interrupts() {
    received = 0;
    for (int s : {SIGINT, SIGTERM, SIGUSR1}) std::signal(s, bam_on_signal);
    std::signal(SIGXFSZ, SIG_IGN);  // a full file system or file-size limit is an error code of write()
}

int interrupted() { return received; }

}  // namespace bam
