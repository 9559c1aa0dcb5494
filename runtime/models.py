"""From what a user calls a model to the folder of its checkpoint. No torch."""

from collections.abc import Callable
from pathlib import Path

from seqmoe.profiles.errors import CheckpointError, UsageError

DEMO_FOLDER = Path(__file__).resolve().parent.parent / "examples" / "demo_model" / "checkpoint"
KNOWN = ("demo", "demo-xl")

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)


def resolve_model(name: str | Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The checkpoint's folder of `demo`, `demo-xl` (written on first use, with `progress`) or a folder on disk.

    A known name wins over a folder of that name; write ./demo for the folder. Raises UsageError for anything else.
    """
    text = str(name)
    if text == "demo":
        if not (DEMO_FOLDER / "config.json").is_file():
            raise CheckpointError(
                f"the demo model is not at {DEMO_FOLDER}: it comes with the source repository, not with the installed package"
            )
        return DEMO_FOLDER
    if text == "demo-xl":
        from seqmoe.runtime.demo_xl import ensure_demo_xl

        return ensure_demo_xl(resolve_model("demo"), cache_dir=cache_dir, progress=progress)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UsageError(f"model {text!r} is a file; give the folder that holds config.json and the safetensors files")
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        raise UsageError(
            f"model {text!r}: no such folder, and hub names are not read yet; download it with "
            f"`hf download {text} --local-dir DIR` and give that folder"
        )
    raise UsageError(f"model {text!r}: no such folder; known names are {', '.join(KNOWN)}")


def model_id(name: str | Path) -> str:
    """What a profile calls the model: a known name, also for that model's folder, or the folder's own name (never a path)."""
    if str(name) in KNOWN:
        return str(name)
    from seqmoe.runtime.demo_xl import default_cache_dir

    folder = Path(name).expanduser().resolve()
    if folder == DEMO_FOLDER:
        return "demo"
    made = folder.parent == default_cache_dir().resolve() and folder.name.startswith("demo-xl-")
    return "demo-xl" if made else folder.name
