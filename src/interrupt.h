// SIGINT, SIGTERM and SIGUSR1 ask a long command to save and stop; a second SIGINT or SIGTERM ends it at once.
#pragma once

namespace bam {

void catch_interrupts();
int interrupted();  // the signal's number, 0 if none came

}  // namespace bam
