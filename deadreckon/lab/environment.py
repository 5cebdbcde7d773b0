"""Provenance of a run (device, versions, command, commit); checks of devices and saved models; quiet transformers."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

import deadreckon as dr
from deadreckon.lab.arguments import command

PACKAGES = ("torch", "transformers", "safetensors", "triton", "numpy")


def check_device(name: str) -> None:
    """Raises ValueError if the device is not available."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: expected one that is here, got {name!r} ({str(error).splitlines()[0]})") from error


def check_model(folder: Path, ours: bool = True) -> None:
    """Raises ValueError unless a folder holds a saved model: from_pretrained would look for it elsewhere.

    Args:
        ours: whether it must be one of deadreckon's: from_pretrained would randomly initialise what others lack.
    """
    if not (folder / "config.json").exists():
        raise ValueError(
            f"model: expected a folder with config.json, as save_pretrained writes it, got {str(folder)!r}"
        )
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"model: expected JSON in {str(folder / 'config.json')!r}, got something else") from error
    if ours and kind != dr.DeadReckonConfig.model_type:
        raise ValueError(
            f"model: expected one of deadreckon's, got {kind} in {str(folder)!r}: `deadreckon convert` makes it one"
        )
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith("optimizer"):  # which only training reads
            continue
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"model: expected safetensors in {str(path)!r}, whole, got {error}") from error


def fingerprint(folder: Path) -> str:
    """A hash of a model's configuration, tokenizer and weights."""
    digest = hashlib.sha256()
    weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    for path in [folder / "config.json", folder / "tokenizer.json", *weights]:
        if path.exists() and not path.name.startswith("optimizer"):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()[:16]


def describe_environment(device: str) -> dict[str, Any]:
    """Provenance: date, command, device, threads, versions and commit of this process."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device}, {processor()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"deadreckon": dr.__version__}
        | {name: version for name in PACKAGES if (version := version_of(name))},
        "commit": commit(),
    }


def version_of(package: str) -> str | None:
    """The version of an installed package, else None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The git commit of this package's source, with a plus if the source is modified; None outside a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        # An installed copy may lie inside an unrelated repository.
        tracked = git("ls-files", "--error-unmatch", "__init__.py")
        head = git("rev-parse", "HEAD") if tracked else ""
        changed = head and git("status", "--porcelain", "--", str(here.parent))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head + ("+" if changed else "") or None


def processor() -> str:
    """This machine's architecture and CPU model."""
    description = Path("/proc/cpuinfo")
    lines = description.read_text().splitlines() if description.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return " ".join([platform.machine(), *names[:1]])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
