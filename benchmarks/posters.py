"""Posters per second and core: the poster reward with each of its parts, against how it is usually done.

    OMP_NUM_THREADS=1 python benchmarks/posters.py [--rounds 5]

Posters of the task generator, half of them Chinese, each a little wrong; processor time of one thread, best of several
rounds, interleaved. Baselines are habits of the field that cost time without a model: `difflib` on the raw JSON text
for accuracy, and drawing the ground truth anew for every sample. A PNG file is made only for a judge by endpoint, or a
report.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import random
import time
from collections.abc import Callable
from typing import Any

from hone_poster import PosterSettings
from hone_poster.lint import lint
from hone_poster.parse import MAX_LAYERS, Poster, read_ground_truth, read_solution
from hone_poster.render import render
from hone_poster.scoring import (
    Gold,
    layer_texts,
    measure,
    score_accuracy,
    score_posters,
    score_structure,
    text_similarity,
    texts_of,
)
from hone_poster.tasks import make_task

GROUP = 8


def workload(num_tasks: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Ground truths, and a group of responses to each with boxes moved and letters changed."""
    chance = random.Random(0)
    made = []
    for number in range(num_tasks):
        truth = make_task(0, number, script=("latin", "cjk")[number % 2]).poster
        made.append((truth, [spoiled(truth, chance) for _ in range(GROUP)]))
    return made


def spoiled(truth: dict[str, Any], chance: random.Random) -> str:
    layers = []
    for layer in truth["layers"]:
        moved = layer | {"x": layer["x"] + chance.randint(-20, 20), "y": layer["y"] + chance.randint(-20, 20)}
        if "text" in layer:
            moved["text"] = layer["text"].replace(chance.choice(layer["text"]), "x")
        layers.append(moved)
    return json.dumps({"layers": layers}, ensure_ascii=False)


def cases(num_tasks: int) -> dict[str, Callable[[], int]]:
    """Name -> a function that works through posters and returns how many."""
    work = workload(num_tasks)
    whole, bare = PosterSettings(), PosterSettings(visual="none")
    settings = whole
    golds = [Gold.of(read_ground_truth(truth), settings) for truth, _ in work]
    pairs = [(gold, response) for gold, (_, group) in zip(golds, work, strict=True) for response in group]
    posters = [(gold, read_solution(response, gold.poster)) for gold, response in pairs]
    drawn = [(gold, poster, render(poster, settings.picture_px)) for gold, poster in posters]

    def reward(judge: Any) -> int:
        for truth, group in work:
            asyncio.run(score_posters(group, truth, judge))
        return len(pairs)

    def each(function: Callable[..., object], items: list[Any]) -> int:
        for item in items:
            function(*item)
        return len(items)

    def structure(gold: Gold, poster: Poster) -> None:
        score_structure(poster, gold.poster, text_similarity(layer_texts(poster, settings), gold.layer_texts))

    def difflib_on_json() -> int:
        for truth, group in work:
            for response in group:
                difflib.SequenceMatcher(None, response, json.dumps(truth, ensure_ascii=False)).ratio()
        return len(pairs)

    large = json.dumps({"layers": work[0][0]["layers"][1:2] * MAX_LAYERS})
    return {
        "the whole reward, heuristic_v1": lambda: reward(whole),
        "the whole reward, without a judge of looks": lambda: reward(bare),
        "parse": lambda: each(lambda gold, response: read_solution(response, gold.poster), pairs),
        "structure": lambda: each(structure, posters),
        "render at 512 px": lambda: each(lambda _, poster: render(poster, settings.picture_px), posters),
        "text accuracy": lambda: each(lambda g, p, r: score_accuracy(texts_of(p, r), g.texts), drawn),
        "lint": lambda: each(lambda g, p, r: lint(p, r, g.rendering), drawn),
        "PNG file (only for a judge or a report)": lambda: each(lambda _, __, r: r.png(), drawn),
        f"a poster of {MAX_LAYERS} layers": lambda: each(measure, [(large, golds[0], settings)]),
        "baseline: difflib on the JSON text": difflib_on_json,
        "baseline: the ground truth drawn per sample": lambda: each(
            lambda gold, _: Gold.of(gold.poster, settings), pairs
        ),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tasks", type=int, default=16)
    given = options.parse_args()
    table = cases(given.tasks)
    best = dict.fromkeys(table, float("inf"))
    for _ in range(given.rounds):
        for name, work in table.items():
            start = time.process_time()
            done = work()
            best[name] = min(best[name], (time.process_time() - start) / done)
    whole = best["the whole reward, heuristic_v1"]
    print("| what | ms per poster | posters/s/core | share of the whole |\n|---|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {1e3 * seconds:.3f} | {1 / seconds:,.0f} | {seconds / whole:.2f} |")


if __name__ == "__main__":
    main()
