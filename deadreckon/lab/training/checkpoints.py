"""Checkpoints: safetensors files of whole tensors, written in the background, by one process or the ranks of a mesh.

    model.safetensors        weights; of several files, model-00001-of-00004.safetensors and so on, and their index
    optimizer.safetensors    the state of the optimizer and of the data's generator; likewise

So `from_pretrained` loads a checkpoint, and any number of ranks can resume from it, whatever number has written it.

Saving. Tensors are divided among files, and files among ranks. Every rank sends its shard of a tensor to the rank that
writes it, which stages the whole on the CPU: of N bytes on R ranks, a rank sends and stages about N / R. Then training
goes on, while a thread of each rank writes its files. The first rank waits until all files are there, and renames the
folder into its place (`files.py`). If any rank is killed before that, the previous checkpoint is still there.

Loading. Every rank reads its own slices, through `torch.distributed.checkpoint` and its reader of safetensors, which
parses JSON headers. Nothing is unpickled. (The default storage of `torch.distributed.checkpoint` is not used: it has a
pickled index, and pieces of tensors that other tools cannot read.)
"""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Shard

import deadreckon as dr
from deadreckon.lab.files import begin, beside, complete, to_disk, write_text
from deadreckon.lab.training.ranks import Ranks

SMALLEST = 1 << 26  # bytes that a rank writes a file of its own for
LARGEST = 50 * 10**9  # bytes of a file, unless a tensor has more
INDEX = "model.safetensors.index.json"
POLL = 0.02  # seconds between looks for the files of other ranks
GRACE = 2.0  # seconds that these have where training has failed: perhaps they were interrupted alike, and still write


def divide(stem: str, sizes: Mapping[str, int], ranks: int = 1, largest: int = LARGEST) -> dict[str, list[str]]:
    """Divides tensors, by their sizes in bytes, among files; returns names by file. Rank i mod R writes file i."""
    most = min(largest, max(SMALLEST, -(-sum(sizes.values()) // ranks)))
    files, room = [list[str]()], most
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    return {f"{stem}-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def index_of(files: Mapping[str, Iterable[str]], sizes: Mapping[str, int]) -> str:
    """The index that `from_pretrained` reads for weights in several files."""
    places = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}, indent=2) + "\n"


def staged(x: Tensor, rank: int, ranks: Ranks) -> Tensor | None:
    """Copies the whole tensor x to one rank's CPU; None on the others. If x is sharded, all ranks must call this."""
    x = x.detach()
    if isinstance(x, DTensor):
        assert x.placements == (Shard(0),), f"not sharded as `dr.parallelize` does it: {x.placements}"
        mine, group = x.to_local(), x.device_mesh.get_group()
        shard = mine.new_zeros(-(-x.shape[0] // ranks.size), *x.shape[1:])  # the last ones may have fewer rows
        shard[: mine.shape[0]] = mine
        parts = [torch.empty_like(shard) for _ in range(ranks.size)] if ranks.rank == rank else None
        dist.gather(shard, parts, dist.get_global_rank(group, rank), group)
        return None if parts is None else torch.cat(parts)[: x.shape[0]].cpu()
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format) if ranks.rank == rank else None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` would save, sharded if the model is; tied weights once."""
    kept = model.state_dict()
    return {name: x for name, x in [*model.named_parameters(), *model.named_buffers()] if name in kept}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the meta device."""
    known = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in known.items()
        if isinstance(found, TensorStorageMetadata)
    }


def read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Loads a checkpoint into tensors, sharded ones too, by their names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # ranks need not agree
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


class Writer:
    """Writes checkpoints in a background thread. Leaving its context waits for them and raises their errors.

    Args:
        ranks: the ranks that write together; all must call `save` alike.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.pool = ThreadPoolExecutor(1, "checkpoints")
        self.pending: dict[Path, Future[None]] = {}
        self.until = math.inf  # when to give up: if training has failed, other ranks may never write their files

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.until = time.monotonic() + GRACE
        self.pool.shutdown()
        if error is None:
            self.wait()

    def save(self, folder: Path, groups: Mapping[str, Mapping[str, Tensor]], describe: Callable[[Path], None]) -> None:
        """Stages tensors, grouped by the stem of their files, and starts writing them, to replace the folder.

        `describe` writes the checkpoint's other files, on the first rank, before this returns.
        """
        self.wait(folder)
        if self.ranks.first:
            describe(begin(folder))
        self.ranks.same(None)  # others wait until that is done
        files, mine = list[str](), dict[str, dict[str, Tensor]]()
        for stem, tensors in groups.items():
            sizes = {name: x.nbytes for name, x in tensors.items()}
            divided = divide(stem, sizes, self.ranks.size)
            if self.ranks.first and stem == "model" and len(divided) > 1:
                (beside(folder)[0] / INDEX).write_text(index_of(divided, sizes))
            for i, (file, names) in enumerate(divided.items()):
                copies = {name: staged(tensors[name], i % self.ranks.size, self.ranks) for name in names}
                if i % self.ranks.size == self.ranks.rank:
                    mine[file] = {name: x for name, x in copies.items() if x is not None}
            files += divided
        self.pending[folder] = self.pool.submit(self._write, folder, mine, files)

    def wait(self, folder: Path | None = None) -> None:
        """Waits until everything, or what was saved in this folder, is on disk."""
        for place in list(self.pending) if folder is None else [folder]:
            if place in self.pending:
                self.pending.pop(place).result()

    def _write(self, folder: Path, mine: dict[str, dict[str, Tensor]], files: list[str]) -> None:
        new, _ = beside(folder)
        for name, tensors in mine.items():
            write_file(tensors, new / name, sync=not self.ranks.first)  # what `complete` does on the first rank
        if self.ranks.first:
            self._await([new / name for name in files])
            complete(folder)

    def _await(self, paths: list[Path]) -> None:
        """Waits until all of these files are complete, including those that other ranks write."""
        began = time.monotonic()
        while absent := [path for path in paths if not path.exists()]:
            if time.monotonic() > min(self.until, began + self.ranks.timeout):
                raise TimeoutError(
                    f"out: expected {absent[0]} of another rank within {self.ranks.timeout:.0f} s, got none; "
                    "is it a folder that all ranks see?"
                )
            time.sleep(POLL)


def write_file(tensors: dict[str, Tensor], path: Path, sync: bool = True) -> None:
    """Writes a safetensors file atomically."""
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"format": "pt"})
    if sync:
        to_disk(part)
    part.rename(path)


def export(source: Path, folder: Path, largest: int) -> list[str]:
    """Exports the model of a checkpoint for `from_pretrained`, with weights files of at most `largest` bytes.

    Returns their names. Holds one file in memory at a time. Of the files in the folder, old weights are removed, after
    everything else is written; others stay.
    """
    with torch.device("meta"):
        names = weights_of(dr.DeadReckonForCausalLM(dr.DeadReckonConfig.from_pretrained(source)))
    blank = tensors_in(source)
    sizes = {name: blank[name].nbytes for name in names}
    files = divide("model", sizes, largest=largest)
    folder.mkdir(parents=True, exist_ok=True)
    before = {folder / INDEX, *folder.glob("model*.safetensors")}
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in (INDEX, "progress.json", "score.json"):
            shutil.copyfile(path, folder / path.name)
    for file, held in files.items():
        tensors = {name: torch.empty_like(blank[name], device="cpu") for name in held}
        read(source, tensors)
        write_file(tensors, folder / file)
    if len(files) > 1:
        write_text(folder / INDEX, index_of(files, sizes))
    for path in before - {folder / name for name in (*files, *[INDEX] * (len(files) > 1))}:
        path.unlink(missing_ok=True)
    return list(files)
