#!/usr/bin/env python3
"""Converts the public files of ARC, HellaSwag and MMLU to the item files of `bam eval --suite choice --items FILE`.

  prepare_choice.py arc       ARC-Easy-Test.jsonl | test-00000-of-00001.parquet   > arc_easy.jsonl
  prepare_choice.py hellaswag hellaswag_val.jsonl | validation-*.parquet          > hellaswag.jsonl
  prepare_choice.py mmlu      data/test/*_test.csv | */test-*.parquet             > mmlu.jsonl

Reads JSONL, JSON lists, CSV and (with the pyarrow package) parquet; writes JSONL on stdout or to --out. MMLU's CSV files have no
heading: question, four choices, letter; the subject is the file's name without _test, _val or _dev.
"""
import argparse
import csv
import json
import os
import re
import sys


def fail(line):
    sys.exit(f"prepare_choice: {line}")


def read_parquet(path):
    try:
        import pyarrow.parquet
    except ImportError:
        fail(f"{path}: parquet needs the pyarrow package (pip install pyarrow)")
    return pyarrow.parquet.read_table(path).to_pylist()


def read_json(path):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as e:
        fail(f"{path}: {e}")


def read_mmlu_csv(path):
    subject = re.sub(r"_(test|val|dev)$", "", os.path.splitext(os.path.basename(path))[0])
    with open(path, encoding="utf-8", newline="") as f:
        for number, row in enumerate(csv.reader(f), 1):
            if len(row) != 6 or row[5] not in "ABCD":
                fail(f"{path} row {number}: {row!r}, expected question, four choices and a letter")
            yield {"question": row[0], "subject": subject, "choices": row[1:5], "answer": "ABCD".index(row[5])}


def read(path, task):
    if path.endswith(".parquet"):
        return read_parquet(path)
    if path.endswith(".csv"):
        return read_mmlu_csv(path) if task == "mmlu" else fail(f"{path}: only MMLU comes as CSV")
    return read_json(path)


def arc(row):
    question = row["question"]
    if isinstance(question, dict):  # as AI2 published it
        choices = question["choices"]
        row = {"id": row.get("id"), "question": question["stem"], "answerKey": row["answerKey"],
               "choices": {"text": [c["text"] for c in choices], "label": [c["label"] for c in choices]}}
    return {k: row[k] for k in ("id", "question", "choices", "answerKey")}


def hellaswag(row):
    if str(row["label"]) == "":
        fail(f"item {row.get('ind')}: no label; the test split has none, expected the validation split")
    item = {k: row.get(k, "") for k in ("ind", "activity_label", "ctx_a", "ctx_b", "ctx")}
    return {**item, "endings": list(row["endings"]), "label": str(row["label"])}


def mmlu(row):
    return {"question": row["question"], "subject": row.get("subject", ""), "choices": list(row["choices"]),
            "answer": int(row["answer"])}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=["arc", "hellaswag", "mmlu"])
    p.add_argument("files", nargs="+")
    p.add_argument("--out", help="file to write (default: stdout)")
    a = p.parse_args()
    convert = {"arc": arc, "hellaswag": hellaswag, "mmlu": mmlu}[a.task]
    lines = []
    for path in a.files:
        if not os.path.exists(path):
            fail(f"{path}: no such file")
        for number, row in enumerate(read(path, a.task), 1):
            try:
                lines.append(json.dumps(convert(row), ensure_ascii=False) + "\n")
            except (KeyError, TypeError, ValueError) as e:
                fail(f"{path} item {number}: {type(e).__name__} {e}, expected an item of {a.task}")
    out = open(a.out, "w", encoding="utf-8") if a.out else sys.stdout
    out.writelines(lines)
    if a.out:
        out.close()
        print(f"{len(lines)} items -> {a.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
