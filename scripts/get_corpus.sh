#!/usr/bin/env bash
# Real English to train on: takes dictionaries, books and manuals from Debian packages, keeps the prose (scripts/clean_text.py) and
# shards it with the byte tokenizer.
#
#   scripts/get_corpus.sh [OUT_DIR]      default data/text
#
# Makes OUT_DIR/{train,val}_*.bin, dataset.json, tokenizer.json, and OUT_DIR.jsonl, the text itself (a document a line) for other
# tokenizers. About 70 MB are downloaded, 42 MB of text come out. Needs apt, python3, gzip, and bam (build/bam, or $BAM); no root.
# A second run does nothing.
set -euo pipefail

out=${1:-data/text}
here=$(cd "$(dirname "$0")" && pwd)
bam=${BAM:-$here/../build/bam}
packages=(bible-kjv-text cfi-en fortunes fortunes-min dict-devil dict-foldoc dict-gcide dict-jargon
          postgresql-doc-15 postgresql-doc-16 postgresql-doc-17 sqlite3-doc perl-doc git-doc apache2-doc libreoffice-help-en-us
          exim4-doc-html postfix-doc manpages manpages-dev
          debian-policy debian-faq debian-reference-en developers-reference maint-guide harden-doc aptitude-doc-en)

fail() { echo "get_corpus.sh: $*" >&2; exit 1; }

if [ -e "$out/dataset.json" ]; then
    echo "$out: already there"
    exit 0
fi
[ -x "$bam" ] || fail "$bam is missing; run make first"

work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT

# Downloads what the package lists know of; with the lists as they are, else with fresh ones in a folder of our own.
apt_options=()
download() {
    local known
    known=$(apt-cache "${apt_options[@]}" --no-all-versions show "${packages[@]}" 2>/dev/null | sed -n 's/^Package: //p' | sort -u)
    [ "$(wc -w <<<"$known")" -ge 15 ] || return 1
    # shellcheck disable=SC2086
    (cd "$work/debs" && apt-get "${apt_options[@]}" -qq download $known) >"$work/log" 2>&1
}

get_text() {
    local tool deb name
    for tool in apt-get dpkg-deb python3 gzip; do
        command -v $tool >/dev/null || fail "$tool is missing; it takes a Debian or Ubuntu system, and python3 (scripts/install_deps.sh corpus)"
    done
    work=$(mktemp -d)
    mkdir -p "$work/debs" "$work/packages" "$work/apt/lists/partial" "$work/apt/cache/archives/partial"
    echo "downloading ${#packages[@]} packages of text"
    if ! download; then
        apt_options=(-o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root)
        apt-get "${apt_options[@]}" -qq update >"$work/log" 2>&1 && download ||
            fail "apt-get cannot download the packages: $(grep -m 1 -E '^[EW]: ' "$work/log" || echo 'fewer than 15 of them are known')"
    fi
    for deb in "$work"/debs/*.deb; do
        name=$(basename "$deb")
        dpkg-deb -x "$deb" "$work/packages/${name%%_*}"
    done
    echo "cleaning the text (a minute)"
    python3 "$here/clean_text.py" "$work/packages" "$work/text.jsonl"
    [ "$(stat -c %s "$work/text.jsonl")" -ge 20000000 ] || fail "less than 20 MB of text came out"
    mv "$work/text.jsonl" "$out.jsonl.tmp"
    mv "$out.jsonl.tmp" "$out.jsonl"
}

mkdir -p "$(dirname "$out")"
[ -e "$out.jsonl" ] || get_text
"$bam" tokenize --tokenizer byte --out "$out" --val-fraction 0.03 "$out.jsonl"
