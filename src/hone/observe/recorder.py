"""Sample recorder and reader: samples/<stage>/step-000012.jsonl.gz, one line per group.

Written aside and then renamed, so a file is whole or absent. The lines hold columns (one list per field over the
group's samples) because that is several times cheaper to write than an object per sample, and token ids and logprobs
as base64 of their little-endian bytes, which is exact and fifty times cheaper than decimal numbers. Advantages and
mismatch of single tokens are float16, two bytes a token, and only there where they are known. `read_samples` gives the
samples one by one. Nothing in a run reads them back.

The caller's thread makes the text, the background thread compresses and writes it: two threads that both run Python
would take the interpreter from each other at every tensor operation, which costs the loop more than the text does.
"""

from __future__ import annotations

import binascii
import contextlib
import gzip
import json
import os
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.errors import RunFolderError
from hone.observe.background import Background
from hone.observe.thumbnails import Thumbnails
from hone.runtime.files import set_aside, sync, write_whole
from hone.types import Group, Sample, TokenIds, Turn, WithArrays, read_only, version_spans

NUM_CHECKED = 32
"""Newest files that are read when a run is resumed, to see whether they are whole."""
PIECE_BYTES = 8 << 20
"""Of the text of a step's groups: more is kept and compressed group by group. As one text, a step of millions of tokens
would take its size again, and giving that back would halt the process's other threads."""
GZIP = 16 + zlib.MAX_WBITS
"""What zlib calls a gzip file."""
NOT_WHOLE = (OSError, EOFError, zlib.error, ValueError)
"""What reading a torn or damaged file of samples raises."""
FULL_MARK = "full.json"
"""Beside the stages' folders once the size limit was reached: where recording stopped."""


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """What an update knows of one sample's tokens besides the sampler's logprobs; NaN where it is not known."""

    advantages_T: NDArray[np.float32] | None = None
    """None where every token has the sample's advantage."""
    mismatch_T: NDArray[np.float32] | None = None
    """The sampler's logprob minus the trainer's, before the update. None where the trainer's were not computed."""
    entropy_T: NDArray[np.float32] | None = None
    """Entropy of the policy before the update, nats. None where it was not computed."""


FiguresOf = Callable[[Sequence[int]], Sequence[TokenFigures]]
"""Figures of all samples of the groups at these places, in order."""


class Recorder:
    """Writes samples up to `max_bytes`; then stops with one warning, also in a resumed run."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        step_tokens: int | None = None,
        background: Background,
        warn: Callable[[str], None],
        last_step: Mapping[str, int],
        expected_files: int = 0,
    ) -> None:
        """
        Args:
            step_tokens: response tokens recorded by one call, at most; one group in any case. None: all.
            last_step: stage -> step that the run resumes after. Files beyond it are removed, all if it is empty.
            expected_files: fewer cause a warning. Files that are not whole are set aside.
        """
        self._folder, self._max_bytes, self._background, self._warn = folder, max_bytes, background, warn
        self._step_tokens = step_tokens
        self._thumbnails = Thumbnails(folder)
        self._sizes: dict[Path, int] = {}
        self._unsynced: set[Path] = set()
        self._full = max_bytes == 0
        kept: list[Path] = []
        for path in sorted(folder.glob("*/step-*.jsonl.gz*")):
            if path.suffix == ".gz" and _step_of(path) <= _limit(last_step, path.parent.name):
                kept.append(path)
            else:
                path.unlink()
        newest = set(kept[-NUM_CHECKED:])
        for path in kept:
            size = path.stat().st_size
            if size == 0 or (path in newest and not is_whole(path)):
                warn(set_aside(folder.parent, path, "is not whole"))
            else:
                self._sizes[path] = size
        if len(self._sizes) < expected_files:
            gone = expected_files - len(self._sizes)
            warn(f"{folder}: {gone} of {expected_files} files with samples of earlier steps are lost")
        self._restore_full_mark(last_step)
        self._fresh = set(self._sizes)
        """Files of an earlier process: the first record for one replaces it, later ones add to it."""

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.copy().values())

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    def sync(self) -> None:
        """Have every file on the disk. For the background thread."""
        written, self._unsynced = self._unsynced, set()
        with contextlib.suppress(OSError):  # samples that are lost are named when the run is resumed
            for path in (*written, *{path.parent for path in written}):
                sync(path)

    def record(
        self,
        stage: str,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None,
        figures: FiguresOf | None = None,
    ) -> None:
        """Queue samples of groups; may be called several times for one step."""
        if self._full:
            return
        each = [None] * len(groups) if advantages is None else advantages
        num_tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
        chosen: Sequence[int] = range(len(groups))
        if self._step_tokens is not None and num_tokens > self._step_tokens:
            count = max(1, len(groups) * self._step_tokens // num_tokens)
            chosen = [place * len(groups) // count for place in range(count)]
        known = iter(() if figures is None else figures(chosen))
        lines = deque(
            _encode(groups[place], each[place], list(islice(known, len(groups[place].samples)))) for place in chosen
        )
        if sum(map(len, lines)) < PIECE_BYTES:
            lines = deque([b"".join(lines)])
        self._background.submit(lambda: self._write(stage, step, lines), bulk=True)
        if pictures := self._thumbnails.wanted(groups[place] for place in chosen):
            self._background.submit(lambda: self._thumbnails.write(pictures), bulk=True)

    def _write(self, stage: str, step: int, lines: deque[bytes]) -> None:
        """Uses up the lines: each is freed once it is written."""
        if self._full:
            return
        path = samples_file(self._folder, stage, step)
        room = self._max_bytes - self.total_bytes + self._sizes.get(path, 0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(".gz.tmp")
            with aside.open("wb") as file:
                is_continued = path in self._sizes and path not in self._fresh
                size = file.write(path.read_bytes()) if is_continued else 0
                packer = zlib.compressobj(1, wbits=GZIP)
                while lines and size <= room:
                    size += file.write(packer.compress(lines.popleft()))
                size += file.write(packer.flush())
            if size > room:
                aside.unlink()
                limit = f"observe.samples_max_mib ({self._max_bytes / 2**20:g} MiB)"
                self._stop(stage, step, f"samples/ has reached {limit}")
                return
            aside.replace(path)
        except OSError as error:  # a full disk costs the record, not the run
            self._stop(stage, step, f"samples/ cannot be written ({error.strerror})")
            return
        self._fresh.discard(path)
        self._unsynced.add(path)
        self._sizes[path] = size

    def _stop(self, stage: str, step: int, reason: str) -> None:
        self._full = True
        self._warn(f"{reason}: samples are not recorded from {stage} step {step} on")
        with contextlib.suppress(OSError):  # the disk may be what failed; then a resumed run finds out again
            write_whole(self._folder / FULL_MARK, json.dumps({"stage": stage, "step": step}))

    def _restore_full_mark(self, last_step: Mapping[str, int]) -> None:
        mark = self._folder / FULL_MARK
        if not mark.exists():
            return
        try:
            where = json.loads(mark.read_text())
        except ValueError:
            self._warn(set_aside(self._folder.parent, mark, "is torn"))
            return
        if where["step"] <= _limit(last_step, where["stage"]):
            self._full = True
        else:
            mark.unlink()


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSample(WithArrays):
    """One sample as recorded: `types.Sample` with its prompt, its verdicts and its advantage."""

    stage: str
    step: int
    prompt_id: str
    prompt: str
    prompt_token_ids: TokenIds
    answer: Any
    sample: Sample
    scores: Mapping[str, float | None]
    """Reward component -> score; None with a data or infrastructure fault."""
    faults: Mapping[str, str]
    """Reward component -> "infra: detail", for the components that had one."""
    reward: float | None
    advantage: float | None
    """Mean over the sample's tokens; None where the group was not trained on."""
    figures: TokenFigures = TokenFigures()
    """Of its tokens, rounded to 11 bits."""
    pictures: tuple[str, ...] = ()
    """Digests of the prompt's pictures, in their order; see `thumbnails.py`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", read_only(self.prompt_token_ids, np.int32))


GroupRewards = Sequence[float | None]
"""Of the samples of a recorded group; None where one has none."""


def read_samples(
    run_folder: Path,
    step: int,
    stage: str = "rl",
    *,
    chosen: Callable[[Sequence[GroupRewards]], Sequence[int]] | None = None,
) -> list[RecordedSample]:
    """The samples recorded at one step, in the order they were trained on; empty when none were.

    Everything comes back as it was recorded, to the bit.

    Args:
        chosen: places of the groups to read, in their order, by the rewards of all; None: all groups.
    Raises:
        RunFolderError: the file is not whole.
    """
    path = samples_file(run_folder / "samples", stage, step)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            groups = [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []
    except NOT_WHOLE as error:
        raise RunFolderError(f"{path}: is not whole ({error}). Restore it, or move it away.") from error
    places = range(len(groups))
    if chosen is not None:
        places = chosen([group["rewards"] or (None,) * len(group["index"]) for group in groups])
    return [sample for place in places for sample in decode_group(groups[place], stage, step)]


def recorded_steps(run_folder: Path) -> dict[str, list[int]]:
    """Stage -> the steps that samples were recorded at, ascending."""
    steps: dict[str, list[int]] = {}
    for stage in sorted((run_folder / "samples").glob("*/")):
        if found := [int(match[1]) for name in os.listdir(stage) if (match := _NAME.fullmatch(name))]:
            steps[stage.name] = sorted(found)
    return steps


_NAME = re.compile(r"step-(\d+)\.jsonl\.gz")


def samples_file(samples_folder: Path, stage: str, step: int) -> Path:
    return samples_folder / stage / f"step-{step:06d}.jsonl.gz"


def is_whole(path: Path) -> bool:
    """Whether a file with samples can be read to its end."""
    try:
        with gzip.open(path) as file:
            while file.read(1 << 20):
                pass
    except NOT_WHOLE:
        return False
    return True


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _limit(last_step: Mapping[str, int], stage: str) -> int:
    """A stage without lines of its own in metrics.jsonl (eval, say) counts the steps of the stage it serves."""
    return last_step.get(stage, max(last_step.values(), default=-1))


def _encode(group: Group, advantages: Sequence[float] | None, figures: Sequence[TokenFigures]) -> bytes:
    samples, prompt = group.samples, group.prompt
    columns: dict[str, Any] = {
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "prompt_token_ids": _base64(prompt.token_ids),
        "answer": prompt.answer,
        "index": [s.index for s in samples],
        "response": [s.text for s in samples],
        "token_ids": [_base64(s.token_ids) for s in samples],
        "sampler_logprobs": [_base64(s.sampler_logprobs) for s in samples],
        "versions": [s.versions[0].version if len(s.versions) == 1 else s.token_versions() for s in samples],
        "finish_reason": [s.finish_reason for s in samples],
        "rewards": group.rewards,
        "advantages": advantages,
        "scores": {name: [score.value for score in scores] for name, scores in group.scores.items()},
    }
    for name, values in (
        ("token_advantages", [f.advantages_T for f in figures]),
        ("token_mismatch", [f.mismatch_T for f in figures]),
        ("token_entropy", [f.entropy_T for f in figures]),
    ):
        if any(value_T is not None for value_T in values):
            columns[name] = [
                None if value_T is None else _base64(value_T.clip(-_MOST, _MOST).astype(np.float16))
                for value_T in values
            ]
    if prompt.pictures:
        columns["pictures"] = [picture.digest for picture in prompt.pictures]
    if any(s.loss_mask is not None for s in samples):
        columns["loss_mask"] = [None if s.loss_mask is None else s.loss_mask.tolist() for s in samples]
    if any(s.turns for s in samples):
        columns["turns"] = [[(t.start, t.end, t.reward, t.metrics) for t in s.turns] for s in samples]
        columns["sample_faults"] = [s.fault for s in samples]
    if any(score.fault for scores in group.scores.values() for score in scores):
        columns["faults"] = {
            name: {index: f"{score.fault}: {score.detail}" for index, score in enumerate(scores) if score.fault}
            for name, scores in group.scores.items()
        }
    return f"{_JSON.encode(columns)}\n".encode()


_JSON = json.JSONEncoder(separators=(",", ":"), default=str)
_IS_LITTLE_ENDIAN = sys.byteorder == "little"


def _base64(array: NDArray[Any]) -> str:
    little_endian = array if _IS_LITTLE_ENDIAN else array.byteswap()
    return binascii.b2a_base64(little_endian.tobytes(), newline=False).decode("ascii")


_MOST = float(np.finfo(np.float16).max)


def _array(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(binascii.a2b_base64(text), dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def num_tokens(group: Mapping[str, Any], i: int) -> int:
    """Tokens of the response at place `i` of a group, as its line has it."""
    text = group["token_ids"][i]
    return (len(text) * 3 // 4 - text.count("=", -2)) // 4


def decode_group(line: Mapping[str, Any], stage: str, step: int) -> list[RecordedSample]:
    """The samples of a group, as its line has them."""

    def at(name: str, position: int) -> Any:
        column = line.get(name)
        return column[position] if column else None

    def figure(name: str, position: int) -> NDArray[np.float32] | None:
        packed = at(name, position)
        return None if packed is None else _array(packed, "<f2").astype(np.float32)

    samples = []
    for i, packed_ids in enumerate(line["token_ids"]):
        token_ids = _array(packed_ids, "<i4")
        versions, mask = line["versions"][i], at("loss_mask", i)
        sample = Sample(
            prompt_id=line["prompt_id"],
            index=line["index"][i],
            token_ids=token_ids,
            sampler_logprobs=_array(line["sampler_logprobs"][i], "<f4"),
            versions=version_spans(versions if isinstance(versions, list) else [versions] * len(token_ids)),
            finish_reason=line["finish_reason"][i],
            text=line["response"][i],
            loss_mask=None if mask is None else np.array(mask, np.bool_),
            turns=tuple(Turn(*turn) for turn in at("turns", i) or ()),
            fault=at("sample_faults", i) or "",
        )
        faults = {name: by_index[str(i)] for name, by_index in line.get("faults", {}).items() if str(i) in by_index}
        samples.append(
            RecordedSample(
                stage=stage,
                step=step,
                prompt_id=line["prompt_id"],
                prompt=line["prompt"],
                prompt_token_ids=_array(line["prompt_token_ids"], "<i4"),
                answer=line["answer"],
                sample=sample,
                scores={name: values[i] for name, values in line["scores"].items()},
                faults=faults,
                reward=at("rewards", i),
                advantage=at("advantages", i),
                figures=TokenFigures(*(figure(f"token_{name}", i) for name in ("advantages", "mismatch", "entropy"))),
                pictures=tuple(line.get("pictures", ())),
            )
        )
    return samples
