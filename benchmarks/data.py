"""Time and peak memory until a run has its first prompt, from large data files.

    python benchmarks/data.py --rows 1000000 10000000 --baseline e5086a7

Makes JSONL files of short rows and a byte-level tokenizer of 4,096 tokens, and loads them in processes of their own:
with an empty cache (first start) and again (second start). `before` is the same with the source of another commit,
whose prompts must be equal. Above `--most-before` rows it is left out: it held every prompt in memory. Seconds (and
those of CPU time, for machines that do other work too) are those of `load_prompts` and the first prompt, without
imports; GiB are the largest resident set of the process.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

PROMPTS = 1000
"""Compared between the two."""
WORDS = ["apples", "buys", "each", "farmer", "gives", "how", "if", "left", "many", "pears", "sells", "then"]


def make_rows(path: Path, count: int) -> None:
    """Rows of 130 bytes or so, no two alike."""
    rng = random.Random(count)
    with path.open("w") as file:
        for number in range(count):
            question = " ".join(rng.choices(WORDS, k=16))
            file.write(json.dumps({"prompt": f"{number}: {question}?", "answer": str(rng.randrange(10**6))}) + "\n")


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = (" ".join([str(rng.randrange(10**6)), *rng.choices(WORDS, k=14)]) for _ in range(20_000))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=["<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)


def start(folder: Path, name: str) -> None:
    """The child process: one start, and what it took as JSON."""
    import hone
    from hone.config.run import DataSection, ModelSection
    from hone.data.chat import load_tokenizer
    from hone.data.prompts import load_prompts

    tokenizer = load_tokenizer(ModelSection(tokenizer=str(folder / "tokenizer")), folder)
    imported_gib = peak_gib()
    started, computed = time.perf_counter(), time.process_time()
    stream = load_prompts(DataSection(train=name, answer_column="answer"), tokenizer, folder, seed=0)
    next(stream.starting_at(0))
    seconds, cpu, peak = time.perf_counter() - started, time.process_time() - computed, peak_gib()
    middle = len(stream) + len(stream) // 2  # of the second epoch
    hashed = hashlib.sha256()
    for prompt in itertools.islice(stream.starting_at(middle), PROMPTS):
        hashed.update(repr((prompt.id, prompt.index, prompt.text, prompt.token_ids.tolist(), prompt.answer)).encode())
    found = {"s": seconds, "cpu": cpu, "gib": peak, "imports": imported_gib}
    print(json.dumps(found | {"prompts": hashed.hexdigest(), "hone": hone.__file__}))


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def started(folder: Path, name: str, *, source: Path | None = None) -> dict:
    """What a start in another process took; `source` replaces the code of this checkout."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    command = [sys.executable, __file__, "--child", str(folder), name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if source is not None and not found["hone"].startswith(str(source)):
        raise RuntimeError(f"measured {found['hone']} instead of {source}")
    return found


def source_of(commit: str, folder: Path) -> Path:
    """`src` of another commit."""
    root = Path(__file__).parent.parent
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=root, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder / commit, filter="data")
    return folder / commit / "src"


def line(rows: int, what: str, found: dict, before: dict | None) -> None:
    ratio = f"{before['s'] / found['s']:6.2f} x {before['gib'] / found['gib']:6.2f} x" if before else ""
    print(
        f"{rows:>12,}  {what:<14} {found['s']:8.1f} s {found['cpu']:8.1f} s {found['gib']:7.2f} GiB  {ratio}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--baseline", default="e5086a7", help="commit to compare with")
    parser.add_argument("--most-before", type=int, default=1_000_000, help="rows that it is given at most")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        start(Path(args.child[0]), args.child[1])
        return
    print(
        f"{'rows':>12}  {'start':<14} {'time':>10} {'CPU time':>10} {'memory':>11}  times faster, smaller than before"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_tokenizer(folder / "tokenizer")
        source = source_of(args.baseline, folder)
        for rows in args.rows:
            name = f"{rows}.jsonl"
            make_rows(folder / name, rows)
            before = started(folder, name, source=source) if rows <= args.most_before else None
            if before is not None:
                line(rows, "before", before, None)
            first, second = started(folder, name), started(folder, name)
            line(rows, "first start", first, before)
            line(rows, "second start", second, before)
            if len({found["prompts"] for found in (before, first, second) if found is not None}) > 1:
                raise SystemExit("the prompts differ")
            megabytes = [(folder / name).stat().st_size / 1e6]
            megabytes.append(sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file()) / 1e6)
            print(
                f"{'':>12}  file {megabytes[0]:,.0f} MB, cache {megabytes[1]:,.0f} MB; equal prompts; "
                f"{second['imports']:.2f} GiB are imports and tokenizer"
            )
            for path in (folder / "cache").rglob("*.*"):
                path.unlink()
            (folder / name).unlink()


if __name__ == "__main__":
    main()
