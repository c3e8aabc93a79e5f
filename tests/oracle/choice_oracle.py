"""Expected numbers of tests/choice_test.cpp: lm-evaluation-harness's own prompts, encoding of pairs and metrics over the item files in
tests/data, with a toy model of bytes that the test has as well. Run: python choice_oracle.py ITEMS_DIR > choice_expected.json
Made with lm-eval 0.4.9 and datasets from PyPI."""
import json
import math
import os
import sys

import transformers

transformers.AutoModelForVision2Seq = getattr(transformers, "AutoModelForVision2Seq", None) or object
import lm_eval  # noqa: E402
import lm_eval.tasks
import yaml
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask


class Toy(TemplateLM):
    """Logit of byte v behind bytes ... a, b: ((v * 31 + b * 17 + a * 7) mod 101) / 10."""

    eot_token_id = 256

    def tok_encode(self, string, **kwargs):
        return list(string.encode())

    def _loglikelihood_tokens(self, requests, **kwargs):
        answers = []
        for _, context, continuation in requests:
            ids = context + continuation
            total = 0.0
            for i in range(len(context), len(ids)):
                a, b = (ids[i - 2] if i > 1 else 0), ids[i - 1]
                logits = [((v * 31 + b * 17 + a * 7) % 101) / 10 for v in range(257)]
                total += logits[ids[i]] - math.log(sum(math.exp(x) for x in logits))
            answers.append((total, False))
        return answers

    def loglikelihood_rolling(self, requests, **kwargs):
        raise NotImplementedError

    def generate_until(self, requests, **kwargs):
        raise NotImplementedError


def task_of(yaml_path, items, name):
    config = lm_eval.utils.load_yaml_config(yaml_path, mode="full")
    for key in ("dataset_kwargs", "tag", "task_alias", "training_split", "validation_split", "fewshot_split", "fewshot_config",
                "dataset_name"):
        config.pop(key, None)
    config.update(task=name, dataset_path="json", test_split="train", dataset_kwargs={"data_files": {"train": items}})
    return ConfigurableTask(config=config)


def main():
    items = sys.argv[1]
    tasks = os.path.dirname(lm_eval.tasks.__file__)
    wanted = {
        "arc": (f"{tasks}/arc/arc_easy.yaml", "choice_arc.jsonl"),
        "hellaswag": (f"{tasks}/hellaswag/hellaswag.yaml", "choice_hellaswag.jsonl"),
        "mmlu": (f"{tasks}/mmlu/default/mmlu_abstract_algebra.yaml", "choice_mmlu.jsonl"),
        "mmlu_cloze": (f"{tasks}/mmlu/continuation/mmlu_abstract_algebra.yaml", "choice_mmlu.jsonl"),
    }
    expected = {}
    for name, (path, file) in wanted.items():
        task = task_of(path, os.path.join(items, file), name)
        task.set_config("num_fewshot", 0)
        result = lm_eval.evaluate(Toy(), {name: task}, bootstrap_iters=100, log_samples=True)
        metrics = result["results"][name]
        print(name, metrics, file=sys.stderr)
        expected[name] = {k.split(",")[0]: v for k, v in metrics.items() if k.startswith("acc")}
        expected[name]["first_prompt"] = result["samples"][name][0]["arguments"][0][0]
        samples = sorted(result["samples"][name], key=lambda s: s["doc_id"])
        expected[name]["logprobs"] = [[round(r[0][0], 9) for r in s["resps"]] for s in samples]
    json.dump(expected, sys.stdout)
    print()


main()
