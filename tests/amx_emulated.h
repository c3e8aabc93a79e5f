// AMX on machines that have none: its instructions raise SIGILL there, and a handler does what they would have done
// (Intel's manual, volume 2), so tests run the machine code that machines with AMX run.
#pragma once

namespace bam::test {

// From now on, in all threads. Tiles used without a configuration or in shapes that do not fit end the process with a
// line that says so. Nothing changes for machines that have AMX. Only on x86-64 with Linux.
void emulate_amx();

}  // namespace bam::test
