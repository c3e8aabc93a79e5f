#!/usr/bin/env bash
# The paper's comparison, end to end and resumable: token shards -> ten variants -> passkey, NIAH, perplexity, choice -> report. Start it again after
# any interruption: what is finished is skipped.
#
#   scripts/reproduce_paper.sh SHARDS_DIR OUT_DIR
#
# SHARDS_DIR: FineWeb sample-10BT tokenized with the Mistral-7B v0.3 tokenizer (train_*.bin, tokenizer.model or tokenizer.json).
# Environment: CONFIG (configs/paper-l12.json), PE (all), SEEDS (1), DEVICE (auto), LENGTHS (512 ... 524288), SETS (more key=value for the config),
# NIAH (variants; default: all that can be done, "none": leave it out), NIAH_LENGTHS (1024 ... 32768), SAMPLES (each suite's own), ESSAYS (a text file: the niah tasks that need one),
# CHOICE (JSONL files of ARC, HellaSwag or MMLU items from scripts/prepare_choice.py; none: the suite is left out).
set -euo pipefail
if [ $# -ne 2 ]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
bam=${BAM:-$root/build/bam}
shards=$1 out=$2
config=${CONFIG:-$root/configs/paper-l12.json}
lengths=${LENGTHS:-512,1024,2048,4096,8192,16384,32768,65536,131072,262144,524288}
niah_lengths=${NIAH_LENGTHS:-1024,2048,4096,8192,16384,32768}
device=${DEVICE:-auto}
[ -x "$bam" ] || { echo "reproduce_paper.sh: $bam is missing, run make first" >&2; exit 2; }
compgen -G "$shards/train_*.bin" >/dev/null || { echo "reproduce_paper.sh: $shards holds no train_*.bin" >&2; exit 3; }

sets=(--set "data.train=[\"$shards/train_*.bin\"]" --set "data.tokenizer=$shards")
if compgen -G "$shards/val_*.bin" >/dev/null; then
    sets+=(--set "data.val=[\"$shards/val_*.bin\"]" --set data.val_tokens=0 --set data.val_gap=0)
fi
for s in ${SETS:-}; do sets+=(--set "$s"); done

"$bam" compare "$config" --pe "${PE:-all}" --seeds "${SEEDS:-1}" --device "$device" --out "$out" "${sets[@]}" \
    --set 'eval.suites=["passkey","perplexity"]' --set "eval.lengths=[$lengths]"

common=(--device "$device" ${SAMPLES:+--samples "$SAMPLES"})
for run in "$out"/runs/*/; do
    if [ "${NIAH:-}" != none ]; then
        "$bam" eval "$run" --suite niah ${NIAH:+--variant "$NIAH"} --lengths "$niah_lengths" "${common[@]}" ${ESSAYS:+--haystack "$ESSAYS"}
    fi
    if [ -n "${CHOICE:-}" ]; then
        # shellcheck disable=SC2086  # a list of files
        "$bam" eval "$run" --suite choice "${common[@]}" --items $CHOICE
    fi
done
"$bam" report "$out"
