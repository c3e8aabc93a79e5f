#!/usr/bin/env bash
# What only a real GPU can show, as one table, meant to take under five minutes: every op against the double-precision reference, the goldens, whole
# trainings against the CPU's, compute-sanitizer, speed. What the machine lacks is "not available", and the rest goes on.
#
#   make CUDA=on build/release-on/bam build/release-on/bam_tests && scripts/gpu_check.sh [BUILD]
#
# BUILD: where bam and bam_tests are (build/release-on). Environment: BENCH (lines of options for `bam bench train`), SANITIZE (test filter for
# compute-sanitizer), LOGS (a directory to keep the output of every check in). Exit code 1 when a check failed.
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release-on}
bam=$PWD/$build/bam tests=$PWD/$build/bam_tests
for program in "$bam" "$tests"; do
    [ -x "$program" ] || { echo "gpu_check.sh: $program is missing: make CUDA=on $build/bam $build/bam_tests" >&2; exit 2; }
done
logs=${LOGS:-$(mktemp -d)} failed=0
mkdir -p "$logs"
export BAM=$bam

row() { printf '%-46s %-14s %7s  %s\n' "$1" "$2" "$3" "$4"; }

# check NAME SECONDS DETAIL COMMAND...: DETAIL is a sed program that picks what to show from the output.
check() {
    local name=$1 limit=$2 detail=$3 begin=$SECONDS log="$logs/${1// /_}.log"
    shift 3
    if ! command -v "$1" >/dev/null; then row "$name" "not available" 0 "$1 is not installed"; return; fi
    timeout "$limit" "$@" >"$log" 2>&1
    local code=$? result=ok
    if [ $code -eq 124 ]; then result="over $limit s"; elif [ $code -ne 0 ]; then result="FAILED ($code)"; fi
    [ $code -eq 0 ] || failed=1
    local shown
    shown=$(sed -nE "$detail" "$log" | paste -sd ' ')
    [ $code -eq 0 ] || shown=${shown:-$(tail -n 1 "$log")}
    row "$name" "$result" $((SECONDS - begin)) "$shown"
}

counts='s/^\[  (PASSED|SKIPPED|FAILED)  \] ([0-9]+) tests?.*/\2 \1/p'
sanitized=${SANITIZE:-'Machine/Ops.*/cuda*:-*AttentionFp32*:*AttentionWithLargeScores*:*PriorTables*'}
speeds=${BENCH:-"--model l12 --tokens 65536
--model l12 --tokens 65536 --pe bam_ssmax
--model l12 --tokens 65536 --pe rope
--model l12 --tokens 65536 --seq-len 2048
--model l24 --tokens 32768
--model nano --tokens 65536 --seq-len 256"}

row check result seconds ""
check gpu 20 p nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
check info 60 's/^(gpu|compute capability|built for|driver|cuBLASLt) +(.*)/\1 \2;/p' "$bam" info --device cuda
[ $failed -eq 0 ] || { echo "no usable GPU; logs in $logs" >&2; exit 1; }
check ops 120 "$counts" "$tests" --gtest_filter='Machine/Ops.*/cuda*'
check "goldens and gradients" 120 "$counts" env BAM_TEST_DEVICE=cuda "$tests" \
    --gtest_filter='*GoldenTest.Product*:*GoldenTest.Score*:ProductGradients*:Invariance*:Session*'
check trainings 120 "$counts" "$tests" --gtest_filter='CudaTrain.*'
for tool in memcheck racecheck synccheck initcheck; do
    check "$tool" 40 's/^=+ (ERROR|RACECHECK) SUMMARY: /\1 /p' compute-sanitizer --tool $tool --error-exitcode 1 "$tests" --gtest_filter="$sanitized"
done
while read -r options; do
    # shellcheck disable=SC2086  # options are words
    check "bench ${options//--/}" 40 '1d; 2p' "$bam" bench train --device cuda $options
done <<<"$speeds"
echo "logs: $logs"
exit $failed
